"""The members' operations: each member calls its part of a collective itself, as with `ray.util.collective`.

They work inside an actor or task, with or without the mixin, and with ``rendezvous=`` in any process. The driver
declares the group, or every member calls `init_collective_group`. All members of a collective must call it. Before any
data moves, the ranks agree on operation, reduce op, root, dtypes and shapes: a mismatch raises on all ranks, no tensor
is changed, and the group stays usable. A failed call is withdrawn: a late rank's call then matches the next call of the
others.

A tensor is a numpy array, a torch tensor, any object with DLPack or the array interface, or a list, tuple or dict of
these, which counts as one. A list with one tensor per rank may also be one contiguous tensor whose size the number of
ranks divides.

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
    """Reduces a tensor elementwise over all ranks, in place; all ranks get the result.

    Args:
        tensor: This rank's tensor; shape and dtype are the same on all ranks.
        group_name: The group.
        op: SUM, PRODUCT, MIN, MAX, AVG (of floats), BAND, BOR, BXOR (of integers and bool).
        async_op: True: returns a `MemberWork` at once, and the call runs on a communication thread.
        timeout_s: How long to wait for the other ranks, in seconds; None: the timeout of the group.

    Raises:
        RefusedError: Arguments differ between ranks, or are invalid on one. Raised on all ranks; no tensor was changed.
        CollectiveTimeoutError: A rank did not make the call in time.
        ParticipantDiedError, GroupBrokenError: A rank has died, during the call or before.
        UnknownGroupError: This process is not a member of the group.
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
    """Reduces a tensor elementwise over all ranks into the tensor of `dst_rank`; the other tensors stay unchanged.

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
    """Overwrites the tensors of all ranks with the tensor of `src_rank`. See `allreduce`."""
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
    """Gathers the tensors of all ranks on every rank; sizes may differ between ranks.

    `tensor` is this rank's input. `tensor_list` has the outputs by rank, each of the shape of that rank's input. See
    `allreduce` for the other arguments and errors.
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
    """Reduces lists of tensors elementwise over all ranks, and scatters the results.

    `tensor_list` has one input for each rank, and stays unchanged; `tensor` is the output: this rank's item of the
    result. See `allreduce` for the other arguments and errors.
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
    """Gathers the tensors of all ranks on `dst_rank`; sizes may differ between ranks.

    `tensor` is this rank's input. On `dst_rank`, `tensor_list` has the outputs by rank; the other ranks ignore it. See
    `allreduce` for the other arguments and errors.
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
    """Scatters a list of tensors from `src_rank` to all ranks; sizes may differ between ranks.

    On `src_rank`, `tensor_list` has one input for each rank; the other ranks ignore it. `tensor` is the output. See
    `allreduce` for the other arguments and errors.
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
    """Sends one tensor to every rank and receives one from every rank; sizes may differ between pairs.

    `tensor_list_in` has the inputs by destination rank, `tensor_list_out` the outputs by source rank. See `allreduce`
    for the other arguments and errors.
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
) -> MemberWork | None:
    """Computes an inclusive prefix reduction over ranks, in place, as MPI_Scan. See `allreduce`."""
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
) -> MemberWork | None:
    """Computes an exclusive prefix reduction over ranks, in place, as MPI_Exscan.

    The tensor of rank 0, which MPI leaves undefined, stays unchanged. See `allreduce`.
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
    """Sends a tensor to `dst_rank`, which calls `recv`. See `allreduce`."""
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
    """Receives a tensor of the same shape and dtype from `src_rank`, in place. See `allreduce`."""
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
