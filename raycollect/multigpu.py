"""`ray.util.collective`'s verbs for processes with several GPUs: a rank gives a tensor of each of its GPUs.

Theory. The rank's tensors are combined on one of its GPUs, that of the group (GPU 0, or the option ``device``): copied
there one after the other and folded in the order of the list. Then one collective of the group runs there, over the
ranks; then the result is copied to the other GPUs. With `d` GPUs per rank and `n` bytes per tensor, `d - 1` times `n`
bytes go to that GPU and come from it again (for `allgather_multigpu` and `reducescatter_multigpu`, as often as there
are ranks times `d`), and between ranks no more than with one GPU each; the folded tensors need memory there, and as
much again while they are made. AVG is over the tensors of all GPUs of all ranks.

What holds for all: the group's backend is ``"nccl"``; a rank's tensors are of one shape and dtype, each on another GPU;
all ranks give as many. Where something of that is not so, all ranks are refused at the door, and no tensor was touched.
A verb returns when all is done on all its GPUs, as those of `imperative` do, which say what else they raise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from typing import Any, NoReturn

from raycollect.backends import across, arrays, folds
from raycollect.backends.arrays import DeviceArray
from raycollect.backends.device_arrays import device_id
from raycollect.errors import KernelError, Violation, refusal
from raycollect.member_call import MemberCall
from raycollect.members import get_group_handle
from raycollect.model import OpKind, ReduceOp

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

_BACKEND = "nccl"


def allreduce_multigpu(tensor_list: list[Any], group_name: str = "default", op: ReduceOp | str = ReduceOp.SUM) -> None:
    """Reduces the tensors of all GPUs of all ranks elementwise; afterwards all hold the result, in place.

    Args:
        tensor_list: One of each GPU of this rank.
        group_name: The group.
        op: See `imperative.allreduce`.

    Raises:
        UnsupportedError: There is no GPU, the group's backend is another one, or cupy can't fold tensors of that dtype.
        RefusedError: The ranks disagree, or the tensors of one don't fit together; raised on all.
    """
    call = _Call(OpKind.ALLREDUCE, group_name, op=op)
    mine = call.one_of_each_gpu("tensor_list", tensor_list, is_written=True)
    total = call.fold([[one] for one in mine])
    call.make([("tensor_list", {_count(mine): one for one in total})])
    call.give([(total, [one]) for one in mine])


def reduce_multigpu(
    tensor_list: list[Any],
    dst_rank: int = 0,
    dst_tensor: int = 0,
    group_name: str = "default",
    op: ReduceOp | str = ReduceOp.SUM,
) -> None:
    """Reduces the tensors of all GPUs of all ranks into one of one rank; the others stay as they are.

    Args:
        tensor_list: One of each GPU of this rank.
        dst_rank: Who gets the result.
        dst_tensor: Into which of its list; all ranks name the same.
        group_name: See `allreduce_multigpu`, also for what follows and for what it raises.
        op: See there.
    """
    call = _Call(OpKind.REDUCE, group_name, op=op, root=dst_rank)
    mine = call.one_of_each_gpu("tensor_list", tensor_list, is_written=call.is_root)
    call.chosen("dst_tensor", dst_tensor, mine)
    total = call.fold([[one] for one in mine])
    call.make([("tensor_list", {f"{_count(mine)}, to {dst_tensor}": one for one in total})])
    call.give([(total, [mine[dst_tensor]])] if call.is_root else [])


def broadcast_multigpu(
    tensor_list: list[Any], src_rank: int = 0, src_tensor: int = 0, group_name: str = "default"
) -> None:
    """Overwrites the tensors of all GPUs of all ranks with one of one rank.

    Args:
        tensor_list: One of each GPU of this rank.
        src_rank: Who gives.
        src_tensor: Which of its list; all ranks name the same.
        group_name: See `allreduce_multigpu`, also for what it raises.
    """
    call = _Call(OpKind.BROADCAST, group_name, root=src_rank)
    mine = call.one_of_each_gpu("tensor_list", tensor_list, is_written=True)
    source = call.chosen("src_tensor", src_tensor, mine) if call.is_root else []
    carried = call.bring(source) if call.is_root else call.place(list(filter(call.is_home, mine)) or mine[:1])
    call.make([("tensor_list", {f"{_count(mine)}, from {src_tensor}": one for one in carried})])
    call.give([(carried, [one]) for one in mine if one not in source])


def allgather_multigpu(
    output_tensor_lists: list[list[Any]], input_tensor_list: list[Any], group_name: str = "default"
) -> None:
    """Gives each GPU of each rank the tensors of all GPUs of all ranks.

    Args:
        output_tensor_lists: For each GPU a list with as many tensors on it as there are ranks times GPUs per rank, in
            the order of ranks, and of the GPUs of a rank.
        input_tensor_list: What each GPU gives, in the same order of the GPUs.
        group_name: See `allreduce_multigpu`, also for what it raises.
    """
    call = _Call(OpKind.ALLGATHER, group_name)
    given = call.one_of_each_gpu("input_tensor_list", input_tensor_list)
    taken = call.many_of_each_gpu("output_tensor_lists", output_tensor_lists, given, is_written=True)
    carried = call.bring(given)
    whole = call.place(next((row for row in taken if call.is_home(row[0])), [*taken[0]] if taken else []))
    call.make([("input_tensor_list", _by_gpu(carried)), ("output_tensor_lists", _by_rank(whole, len(given)))])
    call.give([(whole, one) for one in taken])


def reducescatter_multigpu(
    output_tensor_list: list[Any],
    input_tensor_lists: list[list[Any]],
    group_name: str = "default",
    op: ReduceOp | str = ReduceOp.SUM,
) -> None:
    """Reduces lists of tensors elementwise over all GPUs of all ranks, and gives each GPU its item of the result.

    Args:
        output_tensor_list: Where the item of each GPU goes: GPU `g` of `d` on rank `r` gets item ``r * d + g``.
        input_tensor_lists: For each GPU, in the same order, a list with one tensor on it for each GPU of each rank;
            they stay as they are.
        group_name: See `allreduce_multigpu`, also for what follows and for what it raises.
        op: See there.
    """
    call = _Call(OpKind.REDUCESCATTER, group_name, op=op)
    taken = call.one_of_each_gpu("output_tensor_list", output_tensor_list, is_written=True)
    given = call.many_of_each_gpu("input_tensor_lists", input_tensor_lists, taken)
    totals = call.fold(given)
    items = call.place(taken)
    call.make([("input_tensor_lists", _by_rank(totals, len(taken))), ("output_tensor_list", _by_gpu(items))])
    call.give([([item], [one]) for item, one in zip(items, taken, strict=True)])


def send_multigpu(
    tensor: Any, dst_rank: int, dst_gpu_index: int, group_name: str = "default", n_elements: int = 0
) -> None:
    """Sends a tensor of one of this rank's GPUs to one of another's, which receives it.

    Args:
        tensor: What to send.
        dst_rank: To whom.
        dst_gpu_index: The number of the GPU, in the process of that rank, on which that has its tensor.
        group_name: See `allreduce_multigpu`, also for what it raises.
        n_elements: How many elements to send, from the first one on; 0: all.
    """
    call = _Call(OpKind.SEND, group_name, root=_own_rank("send", group_name), peer=dst_rank)
    given = call.single(tensor, n_elements, dst_gpu_index, is_written=False)
    carried = call.bring(given)
    call.make([("tensor", {_way(given, dst_gpu_index, is_sender=True): one for one in carried})])


def recv_multigpu(
    tensor: Any, src_rank: int, src_gpu_index: int, group_name: str = "default", n_elements: int = 0
) -> None:
    """Overwrites a tensor of one of this rank's GPUs with what another rank sends.

    Args:
        tensor: Where it goes.
        src_rank: From whom.
        src_gpu_index: The number of the GPU, in the process of that rank, from which that sends.
        group_name: See `allreduce_multigpu`, also for what it raises.
        n_elements: How many elements to receive, from the first one on; 0: all.
    """
    call = _Call(OpKind.SEND, group_name, root=src_rank, peer=_own_rank("recv", group_name))
    taken = call.single(tensor, n_elements, src_gpu_index, is_written=True)
    carried = call.place(taken)
    call.make([("tensor", {_way(taken, src_gpu_index, is_sender=False): one for one in carried})])
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
    """One call of a verb. What is wrong with it is noted, and told at the door; until there, nothing is written."""

    def __init__(self, kind: OpKind, group_name: str, *, op: Any = None, root: Any = -1, peer: Any = -1) -> None:
        _need_gpu(kind.value, group_name)
        super().__init__(kind, group_name, op=op, root=root, peer=peer)
        if self._seat.backend != _BACKEND:
            self._violate("unsupported", "backend", self._seat.backend, f"{_BACKEND}, for several GPUs per process")
        self.world_size = self._seat.world_size
        self._home: int = dict(self._seat.spec.options).get("device", 0)
        self._has_begun = False  # to copy to the GPU of the group

    # ------------------------------------------------------------------------------------------ what was given

    def one_of_each_gpu(self, name: str, tensors: Any, *, is_written: bool = False) -> list[DeviceArray]:
        """The tensors of a list, one of each GPU; nothing where it is no such list."""
        found = self._tensors(name, tensors)
        devices = [one.device for one in found]
        if len(set(devices)) < len(devices):
            return self._wrong("argument", f"devices of {name}", ", ".join(devices), "each tensor on another GPU")
        return self._alike(name, found, is_written=is_written)

    def many_of_each_gpu(
        self, name: str, lists: Any, like: Sequence[DeviceArray], *, is_written: bool = False
    ) -> list[list[DeviceArray]]:
        """The tensors of lists, one for each GPU of `like`, with a tensor for each GPU of each rank in each."""
        count = len(like)
        if not isinstance(lists, list | tuple) or len(lists) != count:
            found = f"{len(lists)} lists" if isinstance(lists, list | tuple) else f"a {type(lists).__name__}"
            return self._wrong("argument", name, found, f"{count} lists, one for each GPU") if count else []
        rows = [self._tensors(f"{name}[{at}]", one) for at, one in enumerate(lists)]
        for at, (row, own) in enumerate(zip(rows, like, strict=True)):
            if row and len(row) != self.world_size * count:
                expected = f"{self.world_size * count}, one for each of {count} GPUs of {self.world_size} ranks"
                return self._wrong("argument", f"{name}[{at}]", f"{len(row)} tensors", expected)
            devices = {one.device for one in row} - {own.device}
            if devices:
                return self._wrong("argument", f"devices of {name}[{at}]", ", ".join(sorted(devices)), own.device)
            self._alike(f"{name}[{at}]", [own, *row], is_written=is_written)
            if is_written:
                self._apart(f"{name}[{at}]", row)
        return [] if self._violations else rows

    def single(self, tensor: Any, n_elements: Any, gpu_index: Any, *, is_written: bool) -> list[DeviceArray]:
        """The one tensor of a send or a receive, or its first elements; nothing where it can't be had."""
        gpus = _gpus()
        if type(gpu_index) is not int or not 0 <= gpu_index < gpus:
            self._violate("argument", "gpu index", repr(gpu_index), f"one of 0 to {gpus - 1}")
        found = self._alike("tensor", self._tensors("tensor", [tensor]), is_written=is_written)
        if not found or n_elements == 0:
            return found
        (array,) = found
        if type(n_elements) is not int or not 0 < n_elements <= array.size:
            return self._wrong("argument", "n_elements", repr(n_elements), f"0, or at most {array.size}")
        if not array.shadow.flags.c_contiguous:
            return self._wrong("argument", "tensor", "one with gaps", "a contiguous one, where n_elements is given")
        return [DeviceArray(array.tensor.reshape(-1)[:n_elements])]

    def chosen(self, name: str, index: Any, among: Sequence[DeviceArray]) -> Sequence[DeviceArray]:
        """The one tensor of that index; nothing where there is none."""
        if type(index) is int and 0 <= index < len(among):
            return among[index : index + 1]
        return self._wrong("argument", name, repr(index), f"one of 0 to {len(among) - 1}") if among else []

    def _tensors(self, name: str, tensors: Any) -> list[DeviceArray]:
        if not isinstance(tensors, list | tuple) or not tensors:
            found = "an empty list" if isinstance(tensors, list | tuple) else f"a {type(tensors).__name__}"
            return self._wrong("argument", name, found, "a list of tensors, one of each GPU")
        views = [arrays.view(one) for one in tensors]
        for one, view in zip(tensors, views, strict=True):
            if view is None:
                return self._wrong("not_tensor", name, f"a {type(one).__name__}", "tensors on GPUs")
            if not isinstance(view, DeviceArray) or not view.device.startswith("cuda:"):
                return self._wrong("unsupported", f"device of {name}", "cpu", "tensors on GPUs")
        return [view for view in views if isinstance(view, DeviceArray)]

    def _alike(self, name: str, found: list[DeviceArray], *, is_written: bool) -> list[DeviceArray]:
        for field, look in _ALIKE.items():
            values = list(dict.fromkeys(map(look, found)))
            if len(values) > 1:
                return self._wrong("mismatch", f"{field} of {name}", ", ".join(values), "the same of all")
        if is_written and any(map(arrays.overlaps_itself, found)):
            return self._wrong("alias", name, "overlapping itself (broadcast strides)", "one element per address")
        return found

    def _apart(self, name: str, written: Sequence[DeviceArray]) -> None:
        rows = sorted(written, key=arrays.byte_range)
        if any(arrays.overlap(one, other) for one, other in pairwise(rows)):
            self._violate("alias", name, "tensors that overlap", "separate memory")

    def _wrong(self, kind: str, name: str, found: str, expected: str) -> list[Any]:
        self._violate(kind, name, found, expected)
        return []

    # ------------------------------------------------------------------------------------------ what is done

    def is_home(self, array: DeviceArray) -> bool:
        """Whether a tensor is on the GPU of the group."""
        return array.device == f"cuda:{self._home}"

    def fold(self, lists: Sequence[Sequence[DeviceArray]]) -> Sequence[DeviceArray]:
        """The tensors of all GPUs reduced, on the GPU of the group: as many as each has."""
        if self._violations or not lists or self._op is None:
            return []
        if len(lists) == 1:
            return self.bring(lists[0])
        dtype, op = lists[0][0].dtype, self._op
        reason = folds.refusal_reason(op, dtype.name)
        if reason is None and dtype in arrays.NARROW:
            reason = f"{op.name} of {dtype.name}: cupy has no such type, and so can't fold the tensors of several GPUs"
        if reason is not None:
            return self._wrong("unsupported", "reduce op", reason, "another reduce op or dtype")
        return self._prepared(lambda: across.folded(lists, op, self._home))

    def bring(self, tensors: Sequence[DeviceArray]) -> Sequence[DeviceArray]:
        """Tensors to be read on the GPU of the group: those that are there, and copies of the others."""
        return self._there(tensors, lambda away: across.brought(away, self._home))

    def place(self, tensors: Sequence[DeviceArray]) -> Sequence[DeviceArray]:
        """Tensors to be written on the GPU of the group: those that are there, and new ones for the others."""
        return self._there(tensors, lambda away: across.room(away[0], self._home, len(away)))

    def _there(
        self, tensors: Sequence[DeviceArray], make: Callable[[Sequence[DeviceArray]], Sequence[DeviceArray]]
    ) -> Sequence[DeviceArray]:
        away = [one for one in tensors if not self.is_home(one)]
        if self._violations or not away:
            return tensors
        made = iter(self._prepared(lambda: make(away)))
        return [] if self._violations else [one if self.is_home(one) else next(made) for one in tensors]

    def make(self, values: Sequence[tuple[str, Any]]) -> None:
        """Makes the call of the group.

        Raises:
            RaycollectError: See `imperative.allreduce`.
        """
        plain = [] if self._violations else [(name, _tensors_of(value)) for name, value in values]
        try:
            self.run(plain, async_op=False, timeout_s=None)
        except BaseException:
            if self._has_begun:
                with suppress(Exception):  # a device that has failed: the call tells why
                    across.ended([self._home])  # what was copied there uses memory that is let go of now
            raise

    def give(self, results: Sequence[tuple[Sequence[Any], Sequence[DeviceArray]]]) -> None:
        """Copies results to where they belong and waits for it: (tensors on the GPU of the group, tensors on one GPU).

        Raises:
            KernelError: They could not be copied. The others have theirs.
        """
        moved = [(made, there) for made, there in results if made[0] is not there[0]]
        try:
            for made, there in moved:
                across.spread(made, there)
            across.ended([device_id(there[0].device) for _, there in moved])
        except Exception as exc:
            detail = f"the result is on GPU {self._home}, and could not be copied from there: {exc}"
            seat = self._seat
            raise KernelError(op=self._kind.value, group_name=seat.name, rank=seat.rank, detail=detail) from exc

    def _prepared(self, make: Callable[[], Sequence[DeviceArray]]) -> Sequence[DeviceArray]:
        """What is made on the GPU of the group; nothing where there is no memory, which the door is told."""
        self._has_begun = True
        try:
            return make()
        except MemoryError as exc:
            expected = f"memory on GPU {self._home} to combine the tensors in"
            return self._wrong("allocation", "memory", str(exc), expected)


_ALIKE: dict[str, Callable[[DeviceArray], str]] = {
    "shape": lambda array: str(list(array.shape)),
    "dtype": lambda array: array.dtype.name,
}
"""What is the same of all tensors of a rank."""

# ---------------------------------------------------------------------------------------------- what the ranks compare
# The names of what is given tell how many GPUs a rank has, and what else has to be the same on all. The door compares
# them with the structure.


def _count(tensors: Sequence[DeviceArray]) -> str:
    return f"tensor of {len(tensors)} GPUs"


def _by_gpu(tensors: Sequence[DeviceArray]) -> dict[str, DeviceArray]:
    return {f"GPU {at}": one for at, one in enumerate(tensors)}


def _by_rank(tensors: Sequence[DeviceArray], count: int) -> list[dict[str, DeviceArray]]:
    return [_by_gpu(tensors[at : at + count]) for at in range(0, len(tensors), count)] if count else []


def _way(tensors: Sequence[DeviceArray], index: Any, *, is_sender: bool) -> str:
    own = device_id(tensors[0].device) if tensors else -1
    source, target = (own, index) if is_sender else (index, own)
    return f"from GPU {source} to GPU {target}"


def _tensors_of(value: Any) -> Any:
    """The tensors of what `Container` takes apart."""
    if isinstance(value, dict):
        return {name: _tensors_of(one) for name, one in value.items()}
    return [_tensors_of(one) for one in value] if isinstance(value, list) else value.tensor


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


def _need_gpu(verb: str, group_name: str) -> None:
    if _gpus() <= 0:
        expected = f"a GPU. For tensors in memory call {verb}(tensor, ...), without _multigpu"
        _refuse(f"{verb}_multigpu", group_name, _NO_GPU, expected)


def _own_rank(verb: str, group_name: str) -> int:
    _need_gpu(verb, group_name)
    return get_group_handle(group_name).rank


def _refuse(op: str, group_name: str, found: str, expected: str) -> NoReturn:
    violation = Violation(kind="unsupported", rank=-1, field="gpu", found=found, expected=expected)
    raise refusal(op, group_name, (violation,))
