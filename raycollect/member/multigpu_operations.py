"""The operations of `ray.util.collective` for processes with several GPUs: one tensor per GPU of each rank.

Before the agreement, the call combines the rank's tensors on the GPU of the group (GPU 0, or the option ``device``).
Then one collective over the ranks runs on that GPU, and the result is copied to the other GPUs. A tensor on the GPU of
the group is used in place. Traffic between ranks is that of one GPU per rank. The reduced tensors take memory on the
GPU of the group, and twice as much during the reduction. AVG is over the tensors of all GPUs of all ranks.

The backend of the group is ``"nccl"``. The tensors of a rank have the same shape and dtype, and each is on another GPU;
all ranks pass the same number. Otherwise the agreement refuses the call on all ranks, and no tensor is changed. An
operation returns when all its GPUs have finished. See `allreduce` for the other errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from typing import Any, NoReturn

from raycollect.backends import across, arrays
from raycollect.backends.arrays import DeviceArray
from raycollect.backends.device_arrays import device_id
from raycollect.core.model import TENSOR, GroupLike, OpKind, ReduceOp, Structure, name_of
from raycollect.errors import KernelError, Violation, refusal
from raycollect.errors.text import a_type, listed, shown, too_large
from raycollect.member.call import ME, MemberCall
from raycollect.member.init import get_group_handle

_BACKEND = "nccl"
"""The backend whose groups may have several GPUs per process."""

_Tensors = Sequence[DeviceArray]
_Given = tuple[str, Structure, _Tensors]
"""An operand on the GPU of the group: its name, its structure, which shows a rank's GPUs, and its tensors."""


def allreduce_multigpu(
    tensor_list: list[Any], group_name: GroupLike = "default", op: ReduceOp | str = ReduceOp.SUM
) -> None:
    """Reduces the tensors of all GPUs of all ranks elementwise, in place; all GPUs get the result.

    Args:
        tensor_list: One tensor per GPU of this rank.
        group_name: The group.
        op: See `allreduce`.

    Raises:
        UnsupportedError: There is no GPU, the group has another backend, or cupy can't reduce tensors of that dtype.
        RefusedError: Arguments differ between ranks, or the tensors of one don't fit together. Raised on all ranks.
    """
    call = _MultiGpuCall(OpKind.ALLREDUCE, group_name, op=op)

    def prepare() -> _Prepared:
        mine = call.row("tensor_list", tensor_list, is_written=True)
        total = call.fold([[tensor] for tensor in mine])
        return [("tensor_list", _whole(len(mine)), total)], [(total, [tensor]) for tensor in mine]

    call.make(prepare)


def reduce_multigpu(
    tensor_list: list[Any],
    dst_rank: int = 0,
    dst_tensor: int = 0,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
) -> None:
    """Reduces the tensors of all GPUs of all ranks into one tensor; the other tensors stay unchanged.

    The result is in ``tensor_list[dst_tensor]`` of `dst_rank`; `dst_tensor` is the same on all ranks. See
    `allreduce_multigpu` for the other arguments and errors.
    """
    call = _MultiGpuCall(OpKind.REDUCE, group_name, op=op, root=dst_rank)

    def prepare() -> _Prepared:
        mine = call.row("tensor_list", tensor_list, is_written=call.is_root)
        chosen = call.chosen("dst_tensor", dst_tensor, mine)
        total = call.fold([[tensor] for tensor in mine])
        return [("tensor_list", _whole(len(mine), f", to {dst_tensor}"), total)], [(total, chosen)] * call.is_root

    call.make(prepare)


def broadcast_multigpu(
    tensor_list: list[Any], src_rank: int = 0, src_tensor: int = 0, group_name: GroupLike = "default"
) -> None:
    """Overwrites the tensors of all GPUs of all ranks with ``tensor_list[src_tensor]`` of `src_rank`.

    `src_tensor` is the same on all ranks. See `allreduce_multigpu` for the other arguments and errors.
    """
    call = _MultiGpuCall(OpKind.BROADCAST, group_name, root=src_rank)

    def prepare() -> _Prepared:
        mine = call.row("tensor_list", tensor_list, is_written=True)
        source = call.chosen("src_tensor", src_tensor, mine) if call.is_root else []
        carried = call.bring(source) if call.is_root else call.place(list(filter(call.is_home, mine)) or mine[:1])
        results = [(carried, [tensor]) for tensor in mine if tensor not in source]
        return [("tensor_list", _whole(len(mine), f", from {src_tensor}"), carried)], results

    call.make(prepare)


def allgather_multigpu(
    output_tensor_lists: list[list[Any]], input_tensor_list: list[Any], group_name: GroupLike = "default"
) -> None:
    """Gathers the tensors of all GPUs of all ranks on every GPU.

    `input_tensor_list` has one input per GPU. `output_tensor_lists` has, in the same order of the GPUs, one list per
    GPU: one output for each GPU of each rank, by rank and then by GPU. See `allreduce_multigpu` for the errors.
    """
    call = _MultiGpuCall(OpKind.ALLGATHER, group_name)

    def prepare() -> _Prepared:
        given = call.row("input_tensor_list", input_tensor_list)
        taken = call.rows("output_tensor_lists", output_tensor_lists, given, is_written=True)
        carried = call.bring(given)
        gathered = call.place(next((row for row in taken if call.is_home(row[0])), taken[0]))
        each = _by_gpu(len(given))
        every = Structure("list", (), (each,) * call.world_size)
        values = [("input_tensor_list", each, carried), ("output_tensor_lists", every, gathered)]
        return values, [(gathered, row) for row in taken]

    call.make(prepare)


def reducescatter_multigpu(
    output_tensor_list: list[Any],
    input_tensor_lists: list[list[Any]],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
) -> None:
    """Reduces lists of tensors elementwise over all GPUs of all ranks, and scatters the results over the GPUs.

    `output_tensor_list` has one output per GPU: GPU `g` of `d` on rank `r` gets item ``r * d + g``.
    `input_tensor_lists` has, in the same order of the GPUs, one list per GPU: one input for each GPU of each rank; they
    stay unchanged. See `allreduce_multigpu` for the other arguments and errors.
    """
    call = _MultiGpuCall(OpKind.REDUCESCATTER, group_name, op=op)

    def prepare() -> _Prepared:
        taken = call.row("output_tensor_list", output_tensor_list, is_written=True)
        totals = call.fold(call.rows("input_tensor_lists", input_tensor_lists, taken))
        items = call.place(taken)
        each = _by_gpu(len(taken))
        every = Structure("list", (), (each,) * call.world_size)
        values = [("input_tensor_lists", every, totals), ("output_tensor_list", each, items)]
        return values, [([item], [tensor]) for item, tensor in zip(items, taken, strict=True)]

    call.make(prepare)


def send_multigpu(
    tensor: Any, dst_rank: int, dst_gpu_index: int, group_name: GroupLike = "default", n_elements: int = 0
) -> None:
    """Sends a tensor on a GPU of this rank to a GPU of `dst_rank`, which calls `recv_multigpu`.

    Args:
        tensor: The tensor.
        dst_rank: The destination.
        dst_gpu_index: The index of the receiving GPU in the process of `dst_rank`.
        group_name: See `allreduce_multigpu`, also for the errors.
        n_elements: Send only the first `n_elements` elements; 0: all.
    """
    call = _MultiGpuCall(OpKind.SEND, group_name, root=ME, peer=dst_rank)

    def prepare() -> _Prepared:
        given = call.single(tensor, n_elements, dst_gpu_index, is_written=False)
        return [("tensor", _between(device_id(given[0].device), dst_gpu_index), call.bring(given))], []

    call.make(prepare)


def recv_multigpu(
    tensor: Any, src_rank: int, src_gpu_index: int, group_name: GroupLike = "default", n_elements: int = 0
) -> None:
    """Receives a tensor on a GPU of this rank, in place.

    `src_gpu_index` is the index of the sending GPU in the process of `src_rank`. See `send_multigpu`.
    """
    call = _MultiGpuCall(OpKind.SEND, group_name, root=src_rank, peer=ME)

    def prepare() -> _Prepared:
        taken = call.single(tensor, n_elements, src_gpu_index, is_written=True)
        carried = call.place(taken)
        return [("tensor", _between(src_gpu_index, device_id(taken[0].device)), carried)], [(carried, taken)]

    call.make(prepare)


def synchronize(gpu_id: int) -> None:
    """Waits until a GPU has finished its queued work.

    Raises:
        UnsupportedError: There is no GPU.
    """
    if _gpus() <= 0:
        _refuse("synchronize", "", "a process that sees an NVIDIA GPU, and cupy or torch with CUDA")
    try:
        import_module("cupy").cuda.Device(gpu_id).synchronize()
    except ImportError:
        import_module("torch").cuda.synchronize(gpu_id)


# ---------------------------------------------------------------------------------------------- one call


class _FaultError(Exception):
    """Ends the preparation of a call; its arguments are those of a `Violation`."""


class _MultiGpuCall(MemberCall):
    """One call of an operation. The agreement reports faults; before it, no tensor is written."""

    def __init__(self, kind: OpKind, group_name: GroupLike, *, op: Any = None, root: Any = -1, peer: Any = -1) -> None:
        operation = OpKind.RECV.value if peer is ME else kind.value
        if _gpus() <= 0:
            expected = f"a GPU. For tensors in memory call {operation}(tensor, ...), without _multigpu"
            _refuse(f"{operation}_multigpu", str(name_of(group_name)), expected)
        super().__init__(get_group_handle(group_name), kind, op, root, peer)
        if self._process_group.backend != _BACKEND:
            expected = f"{_BACKEND}, for several GPUs per process"
            self._violate("unsupported", "backend", self._process_group.backend, expected)
        self.world_size = self._process_group.world_size
        self._home: int = dict(self._process_group.spec.options).get("device", 0)
        self._has_begun = False  # to copy to the GPU of the group

    def make(self, prepare: Callable[[], _Prepared]) -> None:
        """Runs the group's call on the operands of `prepare`, and copies its results back.

        Raises:
            KernelError: The results could not be copied.
        """
        values: Sequence[_Given] = ()
        results: Sequence[tuple[_Tensors, _Tensors]] = ()
        if not self._violations:
            try:
                values, results = prepare()
            except _FaultError as exc:
                self._violate(*exc.args)
        built = [(name, form.build([tensor.tensor for tensor in tensors])) for name, form, tensors in values]
        try:
            self.run(built, async_op=False, timeout_s=None)
        except BaseException:
            if self._has_begun:
                with suppress(Exception):  # a failed device: the call raises the cause
                    across.ended([self._home])  # pending copies use memory that is released now
            raise
        self._give(results)

    def _give(self, results: Sequence[tuple[_Tensors, _Tensors]]) -> None:
        moved = [(result, there) for result, there in results if result[0] is not there[0]]
        try:
            for result, there in moved:
                across.spread(result, there)
            across.ended([device_id(there[0].device) for _, there in moved])
        except Exception as exc:
            detail = f"the result is on GPU {self._home}, and could not be copied from there: {exc}"
            group = self._process_group
            raise KernelError(op=self._kind.value, group_name=group.name, rank=group.rank, detail=detail) from exc

    # ------------------------------------------------------------------------------------------ arguments

    def row(self, name: str, tensors: Any, *, is_written: bool = False) -> _Tensors:
        """The tensors of a list, one per GPU."""
        row = self._tensors(name, tensors, is_written=is_written)
        devices = [tensor.device for tensor in row]
        if len(set(devices)) < len(devices):
            raise _FaultError("argument", f"placement of {name}", listed(devices), "each tensor on another GPU")
        _check_alike(name, row)
        return row

    def rows(self, name: str, lists: Any, like: _Tensors, *, is_written: bool = False) -> Sequence[_Tensors]:
        """The tensors of lists: one list for each GPU of `like`, with one tensor for each GPU of each rank."""
        count = len(like)
        if not isinstance(lists, list | tuple) or len(lists) != count:
            actual = f"{len(lists)} lists" if isinstance(lists, list | tuple) else a_type(lists)
            raise _FaultError("argument", name, actual, f"{count} lists, one for each GPU")
        rows = [self._tensors(f"{name}[{at}]", row, is_written=is_written) for at, row in enumerate(lists)]
        for at, (row, own) in enumerate(zip(rows, like, strict=True)):
            row_name = f"{name}[{at}]"
            if len(row) != self.world_size * count:
                expected = f"{self.world_size * count}, one for each of {count} GPUs of {self.world_size} ranks"
                raise _FaultError("argument", row_name, f"{len(row)} tensors", expected)
            if devices := {tensor.device for tensor in row} - {own.device}:
                raise _FaultError("argument", f"placement of {row_name}", listed(sorted(devices)), own.device)
            _check_alike(row_name, [own, *row])
            if is_written and any(arrays.overlap(*two) for two in pairwise(sorted(row, key=arrays.byte_range))):
                raise _FaultError("alias", row_name, "made of tensors that overlap", "separate memory")
        return rows

    def single(self, tensor: Any, n_elements: Any, gpu_index: Any, *, is_written: bool) -> _Tensors:
        """The tensor of a send or a receive, or its first elements."""
        gpus = _gpus()
        if type(gpu_index) is not int or not 0 <= gpu_index < gpus:
            raise _FaultError("argument", "gpu index", repr(gpu_index), f"one of 0 to {gpus - 1}")
        (array,) = row = self._tensors("tensor", [tensor], is_written=is_written)
        if n_elements == 0:
            return row
        if type(n_elements) is not int or not 0 < n_elements <= array.size:
            raise _FaultError("argument", "n_elements", shown(n_elements), f"0, or at most {array.size}")
        if not array.shadow.flags.c_contiguous:
            raise _FaultError("argument", "tensor", "one with gaps", "a contiguous one, where n_elements is given")
        return [DeviceArray(array.tensor.reshape(-1)[:n_elements], array.is_read_only)]

    def chosen(self, name: str, index: Any, among: _Tensors) -> _Tensors:
        """The tensor of that index."""
        if type(index) is not int or not 0 <= index < len(among):
            raise _FaultError("argument", name, shown(index), f"one of 0 to {len(among) - 1}")
        return among[index : index + 1]

    def _tensors(self, name: str, tensors: Any, *, is_written: bool) -> _Tensors:
        if not isinstance(tensors, list | tuple) or not tensors:
            actual = "an empty list" if isinstance(tensors, list | tuple) else a_type(tensors)
            raise _FaultError("argument", name, actual, "a list of tensors, one of each GPU")
        views = []
        for tensor in tensors:
            view = arrays.view(tensor)
            if view is None:
                raise _FaultError("not_tensor", name, arrays.describe_value(tensor), "tensors on GPUs")
            if not isinstance(view, DeviceArray) or not view.device.startswith("cuda:"):
                device = arrays.info(view).device
                raise _FaultError("unsupported", f"device of {name}", device, "tensors on GPUs")
            if is_written and arrays.overlaps_itself(view):
                expected = "one element per address"
                raise _FaultError("alias", name, "overlapping itself (broadcast strides)", expected)
            views.append(view)
        return views

    # ------------------------------------------------------------------------------------------ the GPU of the group

    def is_home(self, array: DeviceArray) -> bool:
        """Whether a tensor is on the GPU of the group."""
        return array.device == f"cuda:{self._home}"

    def fold(self, lists: Sequence[_Tensors]) -> _Tensors:
        """Reduces the lists of all GPUs elementwise, on the GPU of the group."""
        op = self._op
        if len(lists) == 1 or op is None:
            return self.bring(lists[0])
        if reason := across.objection(op, lists[0][0].dtype, len(lists)):
            raise _FaultError("unsupported", "reduce op", reason, "another reduce op or dtype")
        return self._staged(lambda: across.folded(lists, op, self._home))

    def bring(self, tensors: _Tensors) -> _Tensors:
        """Tensors to read on the GPU of the group: its own tensors, and copies of the others."""
        return self._there(tensors, lambda away: across.brought(away, self._home))

    def place(self, tensors: _Tensors) -> _Tensors:
        """Tensors to write on the GPU of the group: its own tensors, and new ones for the others."""
        return self._there(tensors, lambda away: across.room(away[0], self._home, len(away)))

    def _there(self, tensors: _Tensors, make: Callable[[_Tensors], _Tensors]) -> _Tensors:
        away = [tensor for tensor in tensors if not self.is_home(tensor)]
        copies = iter(self._staged(lambda: make(away)) if away else ())
        return [tensor if self.is_home(tensor) else next(copies) for tensor in tensors]

    def _staged(self, make: Callable[[], _Tensors]) -> _Tensors:
        self._has_begun = True
        try:
            return make()
        except MemoryError as exc:
            expected = f"memory on GPU {self._home} to combine the tensors in"
            raise _FaultError("allocation", "staging", too_large(exc), expected) from None


_Prepared = tuple[Sequence[_Given], Sequence[tuple[_Tensors, _Tensors]]]
"""The operands of the group's call, and (tensors on the GPU of the group, tensors on one GPU) to copy after it."""


def _check_alike(name: str, tensors: _Tensors) -> None:
    infos = list(map(arrays.info, tensors))
    for field, values in (
        ("shape", [str(list(info.shape)) for info in infos]),
        ("dtype", [info.dtype for info in infos]),
    ):
        if len(set(values)) > 1:
            raise _FaultError("mismatch", f"{field} of {name}", listed(dict.fromkeys(values)), "the same for all")


def _whole(count: int, more: str = "") -> Structure:
    """One tensor for all of a rank's GPUs; `more` names other arguments that must be equal on all ranks."""
    return Structure("dict", (f"tensor of {count} GPUs{more}",), (TENSOR,))


def _by_gpu(count: int) -> Structure:
    return Structure("dict", tuple(f"GPU {at}" for at in range(count)), (TENSOR,) * count)


def _between(source: int, target: int) -> Structure:
    return Structure("dict", (f"from GPU {source} to GPU {target}",), (TENSOR,))


def _gpus() -> int:
    """The number of GPUs that this process sees, by cupy or torch."""
    with suppress(Exception):  # not installed, no driver, no device: various exceptions
        return int(import_module("cupy").cuda.runtime.getDeviceCount())
    try:
        return int(import_module("torch").cuda.device_count())
    except ImportError:
        return 0


def _refuse(op: str, group_name: str, expected: str) -> NoReturn:
    actual = "none: this process sees no GPU, or has neither cupy nor torch with CUDA"
    raise refusal(op, group_name, (Violation(kind="unsupported", field="gpu", found=actual, expected=expected),))
