"""The members' operations: each member calls its part of a collective itself, as with `ray.util.collective`.

They work inside an actor or task, with or without the mixin; with ``rendezvous=`` in any process. The driver declares
the group, or every member calls `init_collective_group`. All members of a collective must call it. Before any data
moves they agree on op, reduce op, root, dtypes and shapes: a mismatch raises on all of them, leaves all tensors as they
are, and the group stays usable. A call that failed is withdrawn: a late rank's call meets the others' next one.

A tensor is a numpy array, a torch tensor, anything with DLPack or the array interface; or a list, tuple or dict of
them, which counts as one. Instead of a list with one tensor per rank, one contiguous tensor may be given that the
number of ranks divides.

An operation returns None, or a `MemberWork` with ``async_op=True``.
"""

from __future__ import annotations

from typing import Any, Literal, overload

from raycollect.core.model import GroupLike, OpKind, ReduceOp
from raycollect.member.call import ME, MemberCall
from raycollect.member.work import MemberWork


# fmt: off
@overload
def allreduce(tensor: Any, group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> None: ...
@overload
def allreduce(tensor: Any, group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def allreduce(
    tensor: Any,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Reduces a tensor elementwise over all ranks; afterwards all hold the result, in place.

    Args:
        tensor: This rank's; of one shape and dtype on all.
        group_name: The group.
        op: SUM, PRODUCT, MIN, MAX, AVG (of floats), BAND, BOR, BXOR (of integers and bool).
        async_op: True: returns a `MemberWork` at once, and the call runs on a communication thread.
        timeout_s: How long to wait for the others, in seconds; by default what the group was made with.

    Raises:
        RefusedError: The ranks disagree, or one of them can't; raised on all. No tensor was touched.
        CollectiveTimeoutError: A rank did not come.
        ParticipantDiedError, GroupBrokenError: A rank died, now or before.
        UnknownGroupError: This process is no member.
    """
    call = MemberCall.of(OpKind.ALLREDUCE, group_name, op=op)
    return call.run([("tensor", tensor)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def reduce(tensor: Any, dst_rank: int = ..., group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    async_op: Literal[False] = ..., timeout_s: float | None = ...) -> None: ...
@overload
def reduce(tensor: Any, dst_rank: int = ..., group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    async_op: Literal[True], timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def reduce(
    tensor: Any,
    dst_rank: int = 0,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Reduces a tensor elementwise over all ranks into that of one rank; the others' stay as they are.

    See `allreduce`.
    """
    call = MemberCall.of(OpKind.REDUCE, group_name, op=op, root=dst_rank)
    return call.run([("tensor", tensor)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def broadcast(tensor: Any, src_rank: int = ..., group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> None: ...
@overload
def broadcast(tensor: Any, src_rank: int = ..., group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def broadcast(
    tensor: Any,
    src_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Overwrites every rank's tensor with that of one rank. See `allreduce`."""
    call = MemberCall.of(OpKind.BROADCAST, group_name, root=src_rank)
    return call.run([("tensor", tensor)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def allgather(tensor_list: Any, tensor: Any, group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> None: ...
@overload
def allgather(tensor_list: Any, tensor: Any, group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def allgather(
    tensor_list: Any,
    tensor: Any,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Gives every rank the tensors of all ranks, whose sizes may differ.

    `tensor` is what this rank gives, and `tensor_list` where they go, by rank; of the shapes that the ranks give. What
    is not said here is as in `allreduce`, errors too.
    """
    call = MemberCall.of(OpKind.ALLGATHER, group_name)
    return call.run([("tensor", tensor), ("tensor_list", tensor_list)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def reducescatter(tensor: Any, tensor_list: Any, group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    async_op: Literal[False] = ..., timeout_s: float | None = ...) -> None: ...
@overload
def reducescatter(tensor: Any, tensor_list: Any, group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    async_op: Literal[True], timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def reducescatter(
    tensor: Any,
    tensor_list: Any,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Reduces lists of tensors elementwise over all ranks, and gives each rank its item of the result.

    `tensor_list` has one tensor for each rank, which stay as they are; `tensor` is where this rank's item of the result
    goes. What is not said here is as in `allreduce`, errors too.
    """
    call = MemberCall.of(OpKind.REDUCESCATTER, group_name, op=op)
    return call.run([("tensor_list", tensor_list), ("tensor", tensor)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def gather(tensor_list: Any, tensor: Any, dst_rank: int = ..., group_name: GroupLike = ..., *,
    async_op: Literal[False] = ..., timeout_s: float | None = ...) -> None: ...
@overload
def gather(tensor_list: Any, tensor: Any, dst_rank: int = ..., group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def gather(
    tensor_list: Any,
    tensor: Any,
    dst_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Gives one rank the tensors of all ranks, whose sizes may differ.

    `tensor` is what this rank gives; `dst_rank` gets them. `tensor_list` is there where they go, by rank; it is not
    looked at elsewhere. What is not said here is as in `allreduce`, errors too.
    """
    call = MemberCall.of(OpKind.GATHER, group_name, root=dst_rank)
    values = [("tensor", tensor), *([("tensor_list", tensor_list)] if call.is_root else [])]
    return call.run(values, async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def scatter(tensor: Any, tensor_list: Any = ..., src_rank: int = ..., group_name: GroupLike = ..., *,
    async_op: Literal[False] = ..., timeout_s: float | None = ...) -> None: ...
@overload
def scatter(tensor: Any, tensor_list: Any = ..., src_rank: int = ..., group_name: GroupLike = ..., *,
    async_op: Literal[True], timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def scatter(
    tensor: Any,
    tensor_list: Any = None,
    src_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Gives each rank its item of one rank's list, whose sizes may differ.

    `src_rank` gives them: `tensor_list` is one tensor for each rank there, and not looked at elsewhere. `tensor` is
    where this rank's item goes. What is not said here is as in `allreduce`, errors too.
    """
    call = MemberCall.of(OpKind.SCATTER, group_name, root=src_rank)
    values = [*([("tensor_list", tensor_list)] if call.is_root else []), ("tensor", tensor)]
    return call.run(values, async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def alltoall(tensor_list_out: Any, tensor_list_in: Any, group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> None: ...
@overload
def alltoall(tensor_list_out: Any, tensor_list_in: Any, group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def alltoall(
    tensor_list_out: Any,
    tensor_list_in: Any,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Gives each rank its item of every rank's list; sizes may differ from pair to pair.

    `tensor_list_in` is what this rank gives to each, and `tensor_list_out` where what each rank gives to this one goes,
    by rank. What is not said here is as in `allreduce`, errors too.
    """
    call = MemberCall.of(OpKind.ALLTOALL, group_name)
    values = [("tensor_list_in", tensor_list_in), ("tensor_list_out", tensor_list_out)]
    return call.run(values, async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def scan(tensor: Any, group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> None: ...
@overload
def scan(tensor: Any, group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def scan(
    tensor: Any,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Gives every rank the reduction of the tensors of ranks 0 to its own, in place, as MPI_Scan. See `allreduce`."""
    call = MemberCall.of(OpKind.SCAN, group_name, op=op)
    return call.run([("tensor", tensor)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def exscan(tensor: Any, group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> None: ...
@overload
def exscan(tensor: Any, group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def exscan(
    tensor: Any,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Gives every rank the reduction of the tensors of the ranks before it, in place, as MPI_Exscan.

    Rank 0's tensor, which MPI leaves undefined, stays as it is. See `allreduce`.
    """
    call = MemberCall.of(OpKind.EXSCAN, group_name, op=op)
    return call.run([("tensor", tensor)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def send(tensor: Any, dst_rank: int, group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> None: ...
@overload
def send(tensor: Any, dst_rank: int, group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def send(
    tensor: Any,
    dst_rank: int,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Sends a tensor to one rank, which receives it. See `allreduce`."""
    call = MemberCall.of(OpKind.SEND, group_name, root=ME, peer=dst_rank)
    return call.run([("tensor", tensor)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def recv(tensor: Any, src_rank: int, group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> None: ...
@overload
def recv(tensor: Any, src_rank: int, group_name: GroupLike = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def recv(
    tensor: Any,
    src_rank: int,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Overwrites a tensor with what one rank sends, of the same shape and dtype. See `allreduce`."""
    call = MemberCall.of(OpKind.SEND, group_name, root=src_rank, peer=ME)
    return call.run([("tensor", tensor)], async_op=async_op, timeout_s=timeout_s)


# fmt: off
@overload
def barrier(group_name: GroupLike = ..., *, async_op: Literal[False] = ..., timeout_s: float | None = ...) -> None: ...
@overload
def barrier(group_name: GroupLike = ..., *, async_op: Literal[True], timeout_s: float | None = ...) -> MemberWork: ...
# fmt: on
def barrier(
    group_name: GroupLike = "default", *, async_op: bool = False, timeout_s: float | None = None
) -> MemberWork | None:
    """Waits until all ranks have called it. See `allreduce`."""
    return MemberCall.of(OpKind.BARRIER, group_name).run([], async_op=async_op, timeout_s=timeout_s)
