"""`ray.util.collective`'s operations for processes with several GPUs: a rank gives a tensor of each of its GPUs.

Before the agreement, the call combines the rank's tensors on the GPU of the group (GPU 0, or the option ``device``).
Then one collective of the group runs there, over the ranks; then the result is copied to the other GPUs. A tensor on
that GPU is used in place. Ranks send each other no more than with one GPU each; the folded tensors take memory there,
and as much again while they are made. AVG is over the tensors of all GPUs of all ranks.

The group's backend is ``"nccl"``; a rank's tensors have one shape and dtype, each on another GPU; all ranks give as
many. If not, the agreement refuses all ranks, and no tensor was touched. An operation returns when all its GPUs have
finished. For the other errors that it raises see `allreduce`.
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
from raycollect.core.model import TENSOR, GroupLike, OpKind, ReduceOp, Structure, TensorInfo, name_of
from raycollect.errors import KernelError, Violation, refusal
from raycollect.errors.text import a_type, shown, too_large
from raycollect.member import gpu_lists
from raycollect.member.call import ME, MemberCall
from raycollect.member.init import get_group_handle


def allreduce_multigpu(
    tensor_list: list[Any], group_name: GroupLike = "default", op: ReduceOp | str = ReduceOp.SUM
) -> None:
    """Reduces the tensors of all GPUs of all ranks elementwise; afterwards all hold the result, in place.

    Args:
        tensor_list: One of each GPU of this rank.
        group_name: The group.
        op: See `allreduce`.

    Raises:
        UnsupportedError: There is no GPU, the group's backend is another one, or cupy can't fold tensors of that dtype.
        RefusedError: The ranks disagree, or the tensors of one don't fit together; raised on all.
    """
    call = _Call(OpKind.ALLREDUCE, group_name, op=op)
    mine = call.one_of_each_gpu("tensor_list", tensor_list, is_written=True)
    total = call.fold([[one] for one in mine])
    call.make(("tensor_list", gpu_lists.whole(len(mine)), total))
    call.give([(total, [one]) for one in mine])


def reduce_multigpu(
    tensor_list: list[Any],
    dst_rank: int = 0,
    dst_tensor: int = 0,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
) -> None:
    """Reduces the tensors of all GPUs of all ranks into one of one rank; the others stay as they are.

    As `allreduce_multigpu`, but `dst_rank` alone gets the result, in the tensor at place `dst_tensor` of its list; all
    ranks name the same.
    """
    call = _Call(OpKind.REDUCE, group_name, op=op, root=dst_rank)
    mine = call.one_of_each_gpu("tensor_list", tensor_list, is_written=call.is_root)
    call.chosen("dst_tensor", dst_tensor, mine)
    total = call.fold([[one] for one in mine])
    call.make(("tensor_list", gpu_lists.whole(len(mine), f", to {dst_tensor}"), total))
    call.give([(total, [mine[dst_tensor]])] if call.is_root else [])


def broadcast_multigpu(
    tensor_list: list[Any], src_rank: int = 0, src_tensor: int = 0, group_name: GroupLike = "default"
) -> None:
    """Overwrites the tensors of all GPUs of all ranks with one of one rank.

    As `allreduce_multigpu`; `src_rank` gives the tensor at place `src_tensor` of its list; all ranks name the same.
    """
    call = _Call(OpKind.BROADCAST, group_name, root=src_rank)
    mine = call.one_of_each_gpu("tensor_list", tensor_list, is_written=True)
    source = call.chosen("src_tensor", src_tensor, mine) if call.is_root else []
    carried = call.bring(source) if call.is_root else call.place(list(filter(call.is_home, mine)) or mine[:1])
    call.make(("tensor_list", gpu_lists.whole(len(mine), f", from {src_tensor}"), carried))
    call.give([(carried, [one]) for one in mine if one not in source])


def allgather_multigpu(
    output_tensor_lists: list[list[Any]], input_tensor_list: list[Any], group_name: GroupLike = "default"
) -> None:
    """Gives each GPU of each rank the tensors of all GPUs of all ranks.

    `output_tensor_lists` has for each GPU a list with as many tensors on it as there are ranks times GPUs per rank, in
    the order of ranks, and of the GPUs of a rank. `input_tensor_list` is what each GPU gives, in the same order of the
    GPUs. What is not said here is as in `allreduce_multigpu`, errors too.
    """
    call = _Call(OpKind.ALLGATHER, group_name)
    given = call.one_of_each_gpu("input_tensor_list", input_tensor_list)
    taken = call.many_of_each_gpu("output_tensor_lists", output_tensor_lists, given, is_written=True)
    carried = call.bring(given)
    whole = call.place(next((row for row in taken if call.is_home(row[0])), [*taken[0]] if taken else []))
    each, every = gpu_lists.by_gpu(len(given)), gpu_lists.by_rank(call.world_size, len(given))
    call.make(("input_tensor_list", each, carried), ("output_tensor_lists", every, whole))
    call.give([(whole, one) for one in taken])


def reducescatter_multigpu(
    output_tensor_list: list[Any],
    input_tensor_lists: list[list[Any]],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
) -> None:
    """Reduces lists of tensors elementwise over all GPUs of all ranks, and gives each GPU its item of the result.

    `output_tensor_list` is where the item of each GPU goes: GPU `g` of `d` on rank `r` gets item ``r * d + g``.
    `input_tensor_lists` has for each GPU, in the same order, a list with one tensor on it for each GPU of each rank;
    they stay as they are. What is not said here is as in `allreduce_multigpu`, errors too.
    """
    call = _Call(OpKind.REDUCESCATTER, group_name, op=op)
    taken = call.one_of_each_gpu("output_tensor_list", output_tensor_list, is_written=True)
    given = call.many_of_each_gpu("input_tensor_lists", input_tensor_lists, taken)
    totals = call.fold(given)
    items = call.place(taken)
    each, every = gpu_lists.by_gpu(len(taken)), gpu_lists.by_rank(call.world_size, len(taken))
    call.make(("input_tensor_lists", every, totals), ("output_tensor_list", each, items))
    call.give([([item], [one]) for item, one in zip(items, taken, strict=True)])


def send_multigpu(
    tensor: Any, dst_rank: int, dst_gpu_index: int, group_name: GroupLike = "default", n_elements: int = 0
) -> None:
    """Sends a tensor of one of this rank's GPUs to one of another's, which receives it.

    Args:
        tensor: What to send.
        dst_rank: To whom.
        dst_gpu_index: The number of the GPU, in the process of that rank, on which that has its tensor.
        group_name: See `allreduce_multigpu`, also for what it raises.
        n_elements: How many elements to send, from the first one on; 0: all.
    """
    call = _Call(OpKind.SEND, group_name, root=ME, peer=dst_rank)
    given = call.single(tensor, n_elements, dst_gpu_index, is_written=False)
    carried = call.bring(given)
    call.make(("tensor", _way(given, dst_gpu_index, is_sender=True), carried))


def recv_multigpu(
    tensor: Any, src_rank: int, src_gpu_index: int, group_name: GroupLike = "default", n_elements: int = 0
) -> None:
    """Overwrites a tensor of one of this rank's GPUs with what another rank sends.

    As `send_multigpu`: `src_rank` sends, from the GPU of number `src_gpu_index` in its process, the first `n_elements`.
    """
    call = _Call(OpKind.SEND, group_name, root=src_rank, peer=ME)
    taken = call.single(tensor, n_elements, src_gpu_index, is_written=True)
    carried = call.place(taken)
    call.make(("tensor", _way(taken, src_gpu_index, is_sender=False), carried))
    call.give([(carried, taken)] if taken else [])


def synchronize(gpu_id: int) -> None:
    """Waits until a GPU has done all that it was given.

    Raises:
        UnsupportedError: There is no GPU.
    """
    if _gpus() <= 0:
        _refuse("synchronize", "", _NO_GPU, "a process that sees an NVIDIA GPU, and cupy or torch with CUDA")
    try:
        import_module("cupy").cuda.Device(gpu_id).synchronize()
    except ImportError:
        import_module("torch").cuda.synchronize(gpu_id)


# ---------------------------------------------------------------------------------------------- one call


class _Call(MemberCall):
    """One call of an operation. Faults are collected for the agreement; before that, nothing is written."""

    def __init__(self, kind: OpKind, group_name: GroupLike, *, op: Any = None, root: Any = -1, peer: Any = -1) -> None:
        _need_gpu(OpKind.RECV.value if peer is ME else kind.value, group_name)
        super().__init__(get_group_handle(group_name), kind, op, root, peer)
        if self._process_group.backend != gpu_lists.BACKEND:
            expected = f"{gpu_lists.BACKEND}, for several GPUs per process"
            self._violate("unsupported", "backend", self._process_group.backend, expected)
        self.world_size = self._process_group.world_size
        self._home: int = dict(self._process_group.spec.options).get("device", 0)
        self._has_begun = False  # to copy to the GPU of the group

    # ------------------------------------------------------------------------------------------ what was given

    def one_of_each_gpu(self, name: str, tensors: Any, *, is_written: bool = False) -> list[DeviceArray]:
        """The tensors of a list, one of each GPU; empty if it is no such list."""
        found = self._tensors(name, tensors)
        return self._if_right(name, found, gpu_lists.row_fault(name, _infos(found)), is_written=is_written)

    def many_of_each_gpu(
        self, name: str, lists: Any, like: Sequence[DeviceArray], *, is_written: bool = False
    ) -> list[list[DeviceArray]]:
        """The tensors of lists, one list for each GPU of `like`, one tensor in it for each GPU of each rank."""
        if not isinstance(lists, list | tuple):
            return self._wrong("argument", name, a_type(lists), f"{len(like)} lists, one for each GPU")
        rows = [self._tensors(f"{name}[{at}]", one) for at, one in enumerate(lists)]
        if self._violations:
            return []
        fault = gpu_lists.lists_fault(name, [_infos(row) for row in rows], _infos(like), self.world_size)
        if fault is not None:
            return self._wrong(*fault)
        for at, row in enumerate(rows):
            self._if_right(f"{name}[{at}]", row, None, is_written=is_written)
            if is_written:
                self._apart(f"{name}[{at}]", row)
        return [] if self._violations else rows

    def single(self, tensor: Any, n_elements: Any, gpu_index: Any, *, is_written: bool) -> list[DeviceArray]:
        """The one tensor of a send or a receive, or its first elements; empty if there is a fault."""
        gpus = _gpus()
        if type(gpu_index) is not int or not 0 <= gpu_index < gpus:
            self._violate("argument", "gpu index", repr(gpu_index), f"one of 0 to {gpus - 1}")
        found = self._if_right("tensor", self._tensors("tensor", [tensor]), None, is_written=is_written)
        if not found or n_elements == 0:
            return found
        (array,) = found
        if type(n_elements) is not int or not 0 < n_elements <= array.size:
            return self._wrong("argument", "n_elements", shown(n_elements), f"0, or at most {array.size}")
        if not array.shadow.flags.c_contiguous:
            return self._wrong("argument", "tensor", "one with gaps", "a contiguous one, where n_elements is given")
        return [DeviceArray(array.tensor.reshape(-1)[:n_elements], array.is_read_only)]

    def chosen(self, name: str, index: Any, among: Sequence[DeviceArray]) -> Sequence[DeviceArray]:
        """The one tensor of that index; empty if there is none."""
        if type(index) is int and 0 <= index < len(among):
            return among[index : index + 1]
        return self._wrong("argument", name, shown(index), f"one of 0 to {len(among) - 1}") if among else []

    def _tensors(self, name: str, tensors: Any) -> list[DeviceArray]:
        if not isinstance(tensors, list | tuple) or not tensors:
            found = "an empty list" if isinstance(tensors, list | tuple) else a_type(tensors)
            return self._wrong("argument", name, found, "a list of tensors, one of each GPU")
        views = [arrays.view(one) for one in tensors]
        for one, view in zip(tensors, views, strict=True):
            if view is None:
                return self._wrong("not_tensor", name, arrays.told(one), "tensors on GPUs")
        fault = gpu_lists.off_gpu_fault(name, [arrays.info(view) for view in views if view is not None])
        return self._wrong(*fault) if fault else [view for view in views if isinstance(view, DeviceArray)]

    def _if_right(
        self, name: str, found: list[DeviceArray], fault: gpu_lists.Fault | None, *, is_written: bool
    ) -> list[DeviceArray]:
        if fault is not None:
            return self._wrong(*fault)
        if is_written and any(map(arrays.overlaps_itself, found)):
            return self._wrong("alias", name, "overlapping itself (broadcast strides)", "one element per address")
        return found

    def _apart(self, name: str, written: Sequence[DeviceArray]) -> None:
        rows = sorted(written, key=arrays.byte_range)
        if any(arrays.overlap(one, other) for one, other in pairwise(rows)):
            self._violate("alias", name, "made of tensors that overlap", "separate memory")

    def _wrong(self, kind: str, name: str, found: str, expected: str) -> list[Any]:
        self._violate(kind, name, found, expected)
        return []

    # ------------------------------------------------------------------------------------------ what is done

    def is_home(self, array: DeviceArray) -> bool:
        """Whether a tensor is on the GPU of the group."""
        return array.device == f"cuda:{self._home}"

    def fold(self, lists: Sequence[Sequence[DeviceArray]]) -> Sequence[DeviceArray]:
        """Reduces the tensors of all GPUs, on the GPU of the group, to as many as each has."""
        if self._violations or not lists or self._op is None:
            return []
        if len(lists) == 1:
            return self.bring(lists[0])
        op = self._op
        reason = across.objection(op, lists[0][0].dtype, len(lists))
        if reason is not None:
            return self._wrong("unsupported", "reduce op", reason, "another reduce op or dtype")
        return self._prepared(lambda: across.folded(lists, op, self._home))

    def bring(self, tensors: Sequence[DeviceArray]) -> Sequence[DeviceArray]:
        """Tensors to read on the GPU of the group: those that are there, and copies of the others."""
        return self._there(tensors, lambda away: across.brought(away, self._home))

    def place(self, tensors: Sequence[DeviceArray]) -> Sequence[DeviceArray]:
        """Tensors to write on the GPU of the group: those that are there, and new ones for the others."""
        return self._there(tensors, lambda away: across.room(away[0], self._home, len(away)))

    def _there(
        self, tensors: Sequence[DeviceArray], make: Callable[[Sequence[DeviceArray]], Sequence[DeviceArray]]
    ) -> Sequence[DeviceArray]:
        away = [one for one in tensors if not self.is_home(one)]
        if self._violations or not away:
            return tensors
        made = iter(self._prepared(lambda: make(away)))
        return [] if self._violations else [one if self.is_home(one) else next(made) for one in tensors]

    def make(self, *values: tuple[str, Structure, Sequence[DeviceArray]]) -> None:
        """Makes the group's call of (name, structure, tensors): what this rank gives, then what it takes into.

        The structure tells the agreement how many GPUs a rank has, and what else has to be the same on all ranks.
        """
        plain = [] if self._violations else values
        built = [(name, structure.build([one.tensor for one in tensors])) for name, structure, tensors in plain]
        try:
            self.run(built, async_op=False, timeout_s=None)
        except BaseException:
            if self._has_begun:
                with suppress(Exception):  # a device that has failed: the call tells why
                    across.ended([self._home])  # what was copied there uses memory that is let go of now
            raise

    def give(self, results: Sequence[tuple[Sequence[Any], Sequence[DeviceArray]]]) -> None:
        """Copies (tensors on the GPU of the group, tensors on one GPU) back and waits; KernelError: it failed."""
        moved = [(made, there) for made, there in results if made[0] is not there[0]]
        try:
            for made, there in moved:
                across.spread(made, there)
            across.ended([device_id(there[0].device) for _, there in moved])
        except Exception as exc:
            detail = f"the result is on GPU {self._home}, and could not be copied from there: {exc}"
            process_group = self._process_group
            raise KernelError(
                op=self._kind.value, group_name=process_group.name, rank=process_group.rank, detail=detail
            ) from exc

    def _prepared(self, make: Callable[[], Sequence[DeviceArray]]) -> Sequence[DeviceArray]:
        self._has_begun = True
        try:
            return make()
        except MemoryError as exc:
            expected = f"memory on GPU {self._home} to combine the tensors in"
            return self._wrong("allocation", "staging", too_large(exc), expected)


def _infos(tensors: Sequence[DeviceArray]) -> list[TensorInfo]:
    return list(map(arrays.info, tensors))


def _way(tensors: Sequence[DeviceArray], index: Any, *, is_sender: bool) -> Structure:
    own = device_id(tensors[0].device) if tensors else -1
    source, target = (own, index) if is_sender else (index, own)
    return Structure("dict", (f"from GPU {source} to GPU {target}",), (TENSOR,))


# ---------------------------------------------------------------------------------------------- GPUs

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


def _need_gpu(operation: str, group_name: Any) -> None:
    if _gpus() <= 0:
        expected = f"a GPU. For tensors in memory call {operation}(tensor, ...), without _multigpu"
        _refuse(f"{operation}_multigpu", str(name_of(group_name)), _NO_GPU, expected)


def _refuse(op: str, group_name: str, found: str, expected: str) -> NoReturn:
    violation = Violation(kind="unsupported", field="gpu", found=found, expected=expected)
    raise refusal(op, group_name, (violation,))
