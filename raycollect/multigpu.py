"""`ray.util.collective`'s verbs for processes with several GPUs, as far as one tensor per rank goes.

A rank has one tensor per call here, wherever that lives. A list of one is taken for it; of longer ones, and where there
is no GPU at all, the errors say what to do.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NoReturn

from raycollect import imperative
from raycollect.errors import Violation, refusal
from raycollect.model import ReduceOp

__all__ = [
    "allgather_multigpu",
    "allreduce_multigpu",
    "broadcast_multigpu",
    "recv_multigpu",
    "reduce_multigpu",
    "reducescatter_multigpu",
    "send_multigpu",
    "synchronize",
]


def allreduce_multigpu(tensor_list: list[Any], group_name: str = "default", op: ReduceOp | str = ReduceOp.SUM) -> None:
    """`imperative.allreduce` of a list of one GPU tensor.

    Raises:
        UnsupportedError: There is no GPU, or the list is longer; also of the other verbs here.
    """
    imperative.allreduce(_only("allreduce", group_name, tensor_list), group_name, op)


def reduce_multigpu(
    tensor_list: list[Any],
    dst_rank: int = 0,
    dst_tensor: int = 0,
    group_name: str = "default",
    op: ReduceOp | str = ReduceOp.SUM,
) -> None:
    """`imperative.reduce` of a list of one GPU tensor; `dst_tensor` is its index."""
    imperative.reduce(_only("reduce", group_name, tensor_list, dst_tensor), dst_rank, group_name, op)


def broadcast_multigpu(
    tensor_list: list[Any], src_rank: int = 0, src_tensor: int = 0, group_name: str = "default"
) -> None:
    """`imperative.broadcast` of a list of one GPU tensor; `src_tensor` is its index."""
    imperative.broadcast(_only("broadcast", group_name, tensor_list, src_tensor), src_rank, group_name)


def allgather_multigpu(
    output_tensor_lists: list[list[Any]], input_tensor_list: list[Any], group_name: str = "default"
) -> None:
    """`imperative.allgather` of a list of one GPU tensor into a list of one list."""
    tensor = _only("allgather", group_name, input_tensor_list)
    imperative.allgather(_only("allgather", group_name, output_tensor_lists), tensor, group_name)


def reducescatter_multigpu(
    output_tensor_list: list[Any],
    input_tensor_lists: list[list[Any]],
    group_name: str = "default",
    op: ReduceOp | str = ReduceOp.SUM,
) -> None:
    """`imperative.reducescatter` of a list of one list into a list of one GPU tensor."""
    tensor = _only("reducescatter", group_name, output_tensor_list)
    imperative.reducescatter(tensor, _only("reducescatter", group_name, input_tensor_lists), group_name, op)


def send_multigpu(
    tensor: Any, dst_rank: int, dst_gpu_index: int, group_name: str = "default", n_elements: int = 0
) -> None:
    """`imperative.send` of a GPU tensor, or of its first `n_elements`; the receiver's tensor says on which GPU."""
    _only("send", group_name, [tensor])
    imperative.send(_first(tensor, n_elements), dst_rank, group_name)


def recv_multigpu(
    tensor: Any, src_rank: int, src_gpu_index: int, group_name: str = "default", n_elements: int = 0
) -> None:
    """`imperative.recv` into a GPU tensor, or into its first `n_elements`."""
    _only("recv", group_name, [tensor])
    imperative.recv(_first(tensor, n_elements), src_rank, group_name)


def synchronize(gpu_id: int) -> None:
    """Waits until a GPU has done all that it was given.

    Raises:
        UnsupportedError: There is no GPU.
    """
    if _gpus() <= 0:
        _refuse("synchronize", "", "gpu", _NO_GPU, "a process that sees an NVIDIA GPU, and cupy or torch with CUDA")
    try:
        import_module("cupy").cuda.Device(gpu_id).synchronize()
    except ImportError:
        import_module("torch").cuda.synchronize(gpu_id)


_NO_GPU = "none: this process sees no GPU, or has neither cupy nor torch with CUDA"


def _gpus() -> int:
    """How many GPUs this process sees, by whichever library can tell."""
    try:
        return int(import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # noqa: BLE001 - not installed, no driver, no device: each in its own words
        pass
    try:
        return int(import_module("torch").cuda.device_count())
    except ImportError:
        return 0


def _only(verb: str, group_name: str, tensors: Any, index: int = 0) -> Any:
    """The one tensor of a list."""
    if _gpus() <= 0:
        expected = f"a GPU. For tensors in memory call {verb}(tensor, ...), without _multigpu"
        _refuse(f"{verb}_multigpu", group_name, "gpu", _NO_GPU, expected)
    if not isinstance(tensors, list) or len(tensors) != 1 or index != 0:
        found = f"{len(tensors)} tensors" if isinstance(tensors, list) else f"a {type(tensors).__name__}"
        expected = f"a list of one tensor: one process per GPU, each a rank; or {verb}(tensor, ...) for each in turn"
        _refuse(f"{verb}_multigpu", group_name, "tensors of this rank", found, expected)
    return tensors[0]


def _first(tensor: Any, n_elements: int) -> Any:
    return tensor.reshape(-1)[:n_elements] if n_elements > 0 else tensor


def _refuse(op: str, group_name: str, field: str, found: str, expected: str) -> NoReturn:
    violation = Violation(kind="unsupported", rank=-1, field=field, found=found, expected=expected)
    raise refusal(op, group_name, (violation,))
