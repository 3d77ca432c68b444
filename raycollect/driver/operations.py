"""The driver's operations: one call runs a collective on all ranks, over ObjectRefs.

All of them may be called by the driver, or by an actor or task that drives participants other than itself; from any
thread. Without ``async_op`` a call returns when the collective is done on every rank. In a ``with batch():`` block
(`raycollect.batch`) it returns at once, and is sent with the block's other calls when the block ends.

In a declared group, the order of a list does not matter: each ref belongs to its actor's rank. In a derived group, the
ranks are the positions in the list of tensors. A ref stands for a tensor, or for a list, tuple or dict of tensors. A
*tensor list* is one ref to a list or tuple with one such value per rank, whose sizes may differ, or to one contiguous
tensor, which is cut into equal pieces. In a list of outputs, an actor handle allocates the output on that actor; None
in place of the list allocates all outputs. An output of an earlier call of the same batch (`raycollect.Pending`) is
allowed wherever a ref is. Type checkers see refs, also in a batch, where results are `Pending`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

from ray import ObjectRef

from raycollect.core.model import GroupLike, OpKind, ReduceOp, name_of
from raycollect.driver import own_tensors
from raycollect.driver.call import run, task_wait
from raycollect.driver.controller import Controller
from raycollect.driver.own_tensors import OwnSource
from raycollect.driver.work import Work
from raycollect.errors import UnknownGroupError, refusal, wrong_argument
from raycollect.errors.text import a_type
from raycollect.member import operations as imperative
from raycollect.member.init import get_group_handle
from raycollect.member.work import MemberWork


# fmt: off
@overload
def allreduce_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., snapshot: bool = ..., async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def allreduce_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., snapshot: bool = ..., async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def allreduce_refs(
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    inplace: bool = True,
    snapshot: bool = False,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Reduces tensors elementwise over all ranks and gives every rank the result.

    Args:
        tensor_refs: One ref per rank, each to an array (or a list, tuple or dict of arrays) of one shape and dtype. In
            a declared group, each ref belongs to its actor's rank; otherwise the position is the rank.
        group_name: A declared group; ``"default"`` is derived from the refs where it was not declared.
        op: SUM, PRODUCT, MIN, MAX (not of complex numbers), AVG (not of integers), or BAND, BOR, BXOR (of integers and
            bool). SUM of bool is a logical or, PRODUCT a logical and.
        inplace: True: the tensors themselves hold the result afterwards. False: new tensors do.
        snapshot: True, in place: no tensor is overwritten before all ranks have the result. Afterwards either all hold
            it, or, if the collective fails, all are unchanged (`Work.retry`). It takes as much memory again, and a
            message to the driver and back. Not in batches and captured steps.
        async_op: True: returns a `Work` at once.
        timeout_s: The limit of the whole call, in seconds. By default only the wait of ranks for each other is limited,
            to the group's time limit, or 60 s.

    Returns:
        The result refs in rank order: the given ones in place, new ones otherwise; or a `Work` of them.

    Raises:
        RefusedError: Nothing ran and no tensor was touched; the leaf says why, the violations say where.
        GroupError: No such group, or it is broken.
        FaultError: A participant died or came too late, or the plan could not be sent.
    """
    options: dict[str, Any] = {"op": op, "inplace": inplace, "snapshot": snapshot, "async_op": async_op}
    return run(OpKind.ALLREDUCE, group_name, timeout_s, **options, tensor_refs=tensor_refs)


# fmt: off
@overload
def reduce_refs(tensor_refs: Sequence[Any], dst_rank: int = ..., group_name: GroupLike = ..., op: ReduceOp | str = ...,
    *, inplace: bool = ..., snapshot: bool = ..., async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> ObjectRef[Any]: ...
@overload
def reduce_refs(tensor_refs: Sequence[Any], dst_rank: int = ..., group_name: GroupLike = ..., op: ReduceOp | str = ...,
    *, inplace: bool = ..., snapshot: bool = ..., async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def reduce_refs(
    tensor_refs: Sequence[Any],
    dst_rank: int = 0,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    inplace: bool = True,
    snapshot: bool = False,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> ObjectRef[Any] | Work:
    """Reduces tensors elementwise over all ranks and gives one rank the result; the other tensors stay unchanged.

    The tensor of `dst_rank` holds the result, or with ``inplace=False`` a new one does. See `allreduce_refs` for the
    other arguments and errors. Returns the ref of the result; or a `Work` of it.
    """
    options: dict[str, Any] = {"op": op, "inplace": inplace, "snapshot": snapshot, "async_op": async_op}
    return run(OpKind.REDUCE, group_name, timeout_s, root=dst_rank, **options, tensor_refs=tensor_refs)


# fmt: off
@overload
def broadcast_refs(tensor_refs: Sequence[Any], src_rank: int = ..., group_name: GroupLike = ..., *, source: Any = ...,
    async_op: Literal[False] = ..., timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def broadcast_refs(tensor_refs: Sequence[Any], src_rank: int = ..., group_name: GroupLike = ..., *, source: Any = ...,
    async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def broadcast_refs(
    tensor_refs: Sequence[Any],
    src_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    source: Any = None,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Overwrites every rank's tensor with that of `src_rank`.

    `tensor_refs` are one per rank, all of one shape and dtype. With `source`, which is a tensor (or a list, tuple or
    dict of them) of this process, or a ref of `ray.put` or of a task to one, all tensors are overwritten with that:
    `src_rank` takes it in, and sends it to the others as in a scatter. See `allreduce_refs` for the other arguments and
    errors. Returns the given refs in rank order; or a `Work` of them.
    """
    if source is not None:
        wait = task_wait(OpKind.BROADCAST.value, group_name, timeout_s)
        if not own_tensors.is_own(source, wait):
            expected = "a tensor of this process, or a ref of ray.put or of a task to one; others are given by src_rank"
            raise refusal("broadcast", name_of(group_name), (wrong_argument("source", a_type(source), expected),))
        own = OwnSource(OpKind.BROADCAST, group_name, timeout_s, tensor_refs, wait=wait)
        return own.start(source, src_rank, async_op=async_op)
    return run(OpKind.BROADCAST, group_name, timeout_s, root=src_rank, async_op=async_op, tensor_refs=tensor_refs)


# fmt: off
@overload
def allgather_refs(tensor_list_refs: Sequence[Any] | None, tensor_refs: Sequence[Any], group_name: GroupLike = ..., *,
    async_op: Literal[False] = ..., timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def allgather_refs(tensor_list_refs: Sequence[Any] | None, tensor_refs: Sequence[Any], group_name: GroupLike = ..., *,
    async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def allgather_refs(
    tensor_list_refs: Sequence[Any] | None,
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Gives every rank the tensors of all ranks.

    `tensor_refs` are one per rank, of one dtype; sizes may differ. `tensor_list_refs` are one tensor list per rank, to
    be overwritten; None allocates them. See `allreduce_refs` for the other arguments and errors. Returns the refs of
    the outputs in rank order; or a `Work` of them.
    """
    lists: dict[str, Any] = {"tensor_refs": tensor_refs, "tensor_list_refs": tensor_list_refs}
    return run(OpKind.ALLGATHER, group_name, timeout_s, async_op=async_op, **lists)


# fmt: off
@overload
def reducescatter_refs(tensor_refs: Sequence[Any] | None, tensor_list_refs: Sequence[Any], group_name: GroupLike = ...,
    op: ReduceOp | str = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def reducescatter_refs(tensor_refs: Sequence[Any] | None, tensor_list_refs: Sequence[Any], group_name: GroupLike = ...,
    op: ReduceOp | str = ..., *, async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def reducescatter_refs(
    tensor_refs: Sequence[Any] | None,
    tensor_list_refs: Sequence[Any],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Reduces the pieces for each rank over all ranks and gives them to that rank.

    `tensor_list_refs` are one tensor list per rank: its pieces for each rank. Pieces for one rank are of one size.
    `tensor_refs` are one per rank, to be overwritten by the rank's reduced piece; None allocates them. See
    `allreduce_refs` for the other arguments and errors. Returns the refs of the outputs in rank order; or a `Work` of
    them.
    """
    lists: dict[str, Any] = {"tensor_refs": tensor_refs, "tensor_list_refs": tensor_list_refs}
    return run(OpKind.REDUCESCATTER, group_name, timeout_s, op=op, async_op=async_op, **lists)


# fmt: off
@overload
def gather_refs(tensor_list_ref: Any, tensor_refs: Sequence[Any], dst_rank: int = ..., group_name: GroupLike = ..., *,
    async_op: Literal[False] = ..., timeout_s: float | None = ...) -> ObjectRef[Any]: ...
@overload
def gather_refs(tensor_list_ref: Any, tensor_refs: Sequence[Any], dst_rank: int = ..., group_name: GroupLike = ..., *,
    async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def gather_refs(
    tensor_list_ref: Any,
    tensor_refs: Sequence[Any],
    dst_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> ObjectRef[Any] | Work:
    """Gives `dst_rank` the tensors of all ranks.

    `tensor_refs` are one per rank, of one dtype; sizes may differ. `tensor_list_ref` is a tensor list of `dst_rank`, to
    be overwritten; None allocates it. See `allreduce_refs` for the other arguments and errors. Returns the ref of the
    list; or a `Work` of it.
    """
    refs = {"tensor_refs": tensor_refs, "tensor_list_ref": tensor_list_ref}
    return run(OpKind.GATHER, group_name, timeout_s, root=dst_rank, async_op=async_op, **refs)


# fmt: off
@overload
def scatter_refs(tensor_refs: Sequence[Any] | None, tensor_list_ref: Any, src_rank: int = ...,
    group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def scatter_refs(tensor_refs: Sequence[Any] | None, tensor_list_ref: Any, src_rank: int = ...,
    group_name: GroupLike = ..., *, async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def scatter_refs(
    tensor_refs: Sequence[Any] | None,
    tensor_list_ref: Any,
    src_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Gives each rank its piece of the tensor list of `src_rank`.

    `tensor_list_ref` is that list; sizes may differ. It may also be a tensor list of this process, or a ref of
    `ray.put` or of a task to one, which `src_rank` takes in. `tensor_refs` are one per rank, to be overwritten; in a
    declared group, None allocates them. See `allreduce_refs` for the other arguments and errors. Returns the refs of
    the outputs in rank order; or a `Work` of them.
    """
    wait = task_wait(OpKind.SCATTER.value, group_name, timeout_s)
    if own_tensors.is_own(tensor_list_ref, wait):
        own = OwnSource(OpKind.SCATTER, group_name, timeout_s, tensor_refs, wait=wait)
        return own.start(tensor_list_ref, src_rank, async_op=async_op)
    refs = {"tensor_refs": tensor_refs, "tensor_list_ref": tensor_list_ref}
    return run(OpKind.SCATTER, group_name, timeout_s, root=src_rank, async_op=async_op, wait=wait, **refs)


# fmt: off
@overload
def alltoall_refs(tensor_list_out_refs: Sequence[Any] | None, tensor_list_in_refs: Sequence[Any],
    group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def alltoall_refs(tensor_list_out_refs: Sequence[Any] | None, tensor_list_in_refs: Sequence[Any],
    group_name: GroupLike = ..., *, async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def alltoall_refs(
    tensor_list_out_refs: Sequence[Any] | None,
    tensor_list_in_refs: Sequence[Any],
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Gives each rank a piece of every rank: piece j of rank i's input becomes piece i of rank j's output.

    `tensor_list_in_refs` are one tensor list per rank, all of one dtype; sizes may differ. `tensor_list_out_refs` are
    one per rank, to be overwritten, which may be the rank's input if sizes allow; None allocates them. See
    `allreduce_refs` for the other arguments and errors. Returns the refs of the outputs in rank order; or a `Work` of
    them.
    """
    lists: dict[str, Any] = {"tensor_list_in_refs": tensor_list_in_refs, "tensor_list_out_refs": tensor_list_out_refs}
    return run(OpKind.ALLTOALL, group_name, timeout_s, async_op=async_op, **lists)


# fmt: off
@overload
def scan_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., async_op: Literal[False] = ..., timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def scan_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def scan_refs(
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    inplace: bool = True,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Gives every rank the reduction of the tensors of ranks 0 to its own, as MPI_Scan.

    See `allreduce_refs` for the arguments, the result and errors.
    """
    options: dict[str, Any] = {"op": op, "inplace": inplace, "async_op": async_op}
    return run(OpKind.SCAN, group_name, timeout_s, **options, tensor_refs=tensor_refs)


# fmt: off
@overload
def exscan_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., async_op: Literal[False] = ..., timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def exscan_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
# fmt: on
def exscan_refs(
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    inplace: bool = True,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Gives every rank the reduction of the tensors of the ranks before it, as MPI_Exscan.

    The result of rank 0, which MPI leaves undefined, is its input. See `allreduce_refs` for the arguments, the result
    and errors.
    """
    options: dict[str, Any] = {"op": op, "inplace": inplace, "async_op": async_op}
    return run(OpKind.EXSCAN, group_name, timeout_s, **options, tensor_refs=tensor_refs)


# fmt: off
@overload
def send_ref(src_tensor_ref: Any, dst_tensor_ref: Any, group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> ObjectRef[Any]: ...
@overload
def send_ref(src_tensor_ref: Any, dst_tensor_ref: Any, group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> Work: ...
# fmt: on
def send_ref(
    src_tensor_ref: Any,
    dst_tensor_ref: Any,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> ObjectRef[Any] | Work:
    """Sends a tensor from the participant that holds it to another one; one call is both send and receive.

    `dst_tensor_ref` is the tensor to overwrite, of the same shape and dtype; or an actor handle, to allocate it there.
    Both actors have to be in the group. See `allreduce_refs` for the other arguments and errors. Returns the
    destination's ref; or a `Work` of it.
    """
    refs = [src_tensor_ref, dst_tensor_ref]
    return run(OpKind.SEND, group_name, timeout_s, async_op=async_op, refs=refs)


# fmt: off
@overload
def recv_ref(dst_tensor_ref: Any, src_tensor_ref: Any, group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> ObjectRef[Any]: ...
@overload
def recv_ref(dst_tensor_ref: Any, src_tensor_ref: Any, group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> Work: ...
# fmt: on
def recv_ref(
    dst_tensor_ref: Any,
    src_tensor_ref: Any,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> ObjectRef[Any] | Work:
    """`send_ref` with its first two arguments exchanged: one call is both send and receive."""
    refs = [src_tensor_ref, dst_tensor_ref]
    return run(OpKind.SEND, group_name, timeout_s, async_op=async_op, refs=refs)


# fmt: off
@overload
def barrier(group_name: GroupLike = ..., *, async_op: Literal[False] = ..., timeout_s: float | None = ...) -> None: ...
@overload
def barrier(group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> Work | MemberWork: ...
# fmt: on
def barrier(
    group_name: GroupLike = "default", *, async_op: bool = False, timeout_s: float | None = None
) -> Work | MemberWork | None:
    """Synchronizes all ranks of a group: on the driver, each rank has ended its earlier methods and collectives.

    Inside a member, with the mixin or without, it is an imperative call, which every member makes. Arguments and errors
    are as in `allreduce_refs`. Returns None; or a `Work` (inside a member: a `MemberWork`).
    """
    try:
        if Controller.is_rank_of(group_name):
            return run(OpKind.BARRIER, group_name, timeout_s, async_op=async_op)
        get_group_handle(group_name)
    except UnknownGroupError:
        return run(OpKind.BARRIER, group_name, timeout_s, async_op=async_op)
    call: Callable[..., MemberWork | None] = imperative.barrier  # its overloads take no bool that is not known
    return call(group_name, async_op=async_op, timeout_s=timeout_s)
