"""The driver's operations for participants with several GPUs each: a ref stands for a list with a tensor of each GPU.

Groups, refs, batches and `async_op` work as in `driver.operations`. The group's backend is ``"nccl"``. The tensors of a
rank have one shape and dtype and are on different GPUs, and all ranks have equally many. Otherwise the call is refused
on all ranks, and no tensor was touched. All operations raise what `allreduce_multigpu_refs` raises.

A list is written when the kernels have ended, so a failure before that leaves it as it was. Memory for what is combined
is taken on the group's GPU (`raycollect.engine.gpu_operands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from ray import ObjectRef

from raycollect.core.model import GroupLike, OpKind, ReduceOp
from raycollect.driver.call import Call
from raycollect.driver.work import Work


# fmt: off
@overload
def allreduce_multigpu_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., snapshot: bool = ..., async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def allreduce_multigpu_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., snapshot: bool = ..., async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
@overload
def allreduce_multigpu_refs(tensor_refs: Sequence[Any], group_name: GroupLike = ..., op: ReduceOp | str = ..., *,
    inplace: bool = ..., snapshot: bool = ..., async_op: bool,
    timeout_s: float | None = ...) -> Work | list[ObjectRef[Any]]: ...
# fmt: on
def allreduce_multigpu_refs(
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    inplace: bool = True,
    snapshot: bool = False,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Reduces the tensors of all GPUs of all ranks elementwise and gives every GPU the result.

    Args:
        tensor_refs: One ref per rank, each to a list with a tensor of each of its GPUs.
        group_name: A group of backend ``"nccl"``; ``"default"`` is derived from the refs where it was not declared.
        op: See `allreduce_refs`. AVG is over all GPUs of all ranks.
        inplace: True: the tensors themselves hold the result afterwards. False: lists of new ones do.
        snapshot: See `allreduce_refs`; here it takes no more memory.
        async_op: True: returns a `Work` at once.
        timeout_s: How long the whole call may take, in seconds: waits for methods, for tasks and for other ranks
            included. By default ranks wait for each other as long as the group was declared with, or 60 s.

    Returns:
        The refs of the lists in rank order: the given ones in place, new ones otherwise; or a `Work` of them.

    Raises:
        UnsupportedError: The group's backend is another one, or cupy can't fold tensors of that dtype.
        RefusedError: Nothing ran and no tensor was touched; the leaf says why, the violations say where.
        GroupError: No such group, or it is broken.
        FaultError: A participant died or came too late, or the plan could not be sent.
    """
    call = Call(OpKind.ALLREDUCE, group_name, timeout_s, op=op, lists={}, tensor_refs=tensor_refs)
    return call.run(async_op=async_op, inplace=inplace, snapshot=snapshot)


# fmt: off
@overload
def reduce_multigpu_refs(tensor_refs: Sequence[Any], dst_rank: int = ..., dst_tensor: int = ...,
    group_name: GroupLike = ..., op: ReduceOp | str = ..., *, snapshot: bool = ..., async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> ObjectRef[Any]: ...
@overload
def reduce_multigpu_refs(tensor_refs: Sequence[Any], dst_rank: int = ..., dst_tensor: int = ...,
    group_name: GroupLike = ..., op: ReduceOp | str = ..., *, snapshot: bool = ..., async_op: Literal[True],
    timeout_s: float | None = ...) -> Work: ...
@overload
def reduce_multigpu_refs(tensor_refs: Sequence[Any], dst_rank: int = ..., dst_tensor: int = ...,
    group_name: GroupLike = ..., op: ReduceOp | str = ..., *, snapshot: bool = ..., async_op: bool,
    timeout_s: float | None = ...) -> Work | ObjectRef[Any]: ...
# fmt: on
def reduce_multigpu_refs(
    tensor_refs: Sequence[Any],
    dst_rank: int = 0,
    dst_tensor: int = 0,
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    snapshot: bool = False,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> ObjectRef[Any] | Work:
    """Reduces the tensors of all GPUs of all ranks into one of one rank; the others stay as they are.

    As `allreduce_multigpu_refs`, but the result goes into the tensor of `dst_rank` at place `dst_tensor` of its list.
    Returns the ref of that list; or a `Work` of it.
    """
    lists = {"dst_tensor": dst_tensor}
    call = Call(OpKind.REDUCE, group_name, timeout_s, op=op, lists=lists, tensor_refs=tensor_refs)
    return call.run(root=dst_rank, async_op=async_op, snapshot=snapshot)


# fmt: off
@overload
def broadcast_multigpu_refs(tensor_refs: Sequence[Any], src_rank: int = ..., src_tensor: int = ...,
    group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def broadcast_multigpu_refs(tensor_refs: Sequence[Any], src_rank: int = ..., src_tensor: int = ...,
    group_name: GroupLike = ..., *, async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
@overload
def broadcast_multigpu_refs(tensor_refs: Sequence[Any], src_rank: int = ..., src_tensor: int = ...,
    group_name: GroupLike = ..., *, async_op: bool, timeout_s: float | None = ...) -> Work | list[ObjectRef[Any]]: ...
# fmt: on
def broadcast_multigpu_refs(
    tensor_refs: Sequence[Any],
    src_rank: int = 0,
    src_tensor: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Overwrites the tensors of all GPUs of all ranks with one of one rank.

    As `allreduce_multigpu_refs`, from the tensor of `src_rank` at place `src_tensor` of its list. Returns the given
    refs in rank order; or a `Work` of them.
    """
    lists = {"src_tensor": src_tensor}
    call = Call(OpKind.BROADCAST, group_name, timeout_s, lists=lists, tensor_refs=tensor_refs)
    return call.run(root=src_rank, async_op=async_op)


# fmt: off
@overload
def allgather_multigpu_refs(tensor_list_refs: Sequence[Any] | None, tensor_refs: Sequence[Any],
    group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def allgather_multigpu_refs(tensor_list_refs: Sequence[Any] | None, tensor_refs: Sequence[Any],
    group_name: GroupLike = ..., *, async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
@overload
def allgather_multigpu_refs(tensor_list_refs: Sequence[Any] | None, tensor_refs: Sequence[Any],
    group_name: GroupLike = ..., *, async_op: bool, timeout_s: float | None = ...) -> Work | list[ObjectRef[Any]]: ...
# fmt: on
def allgather_multigpu_refs(
    tensor_list_refs: Sequence[Any] | None,
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Gives each GPU of each rank the tensors of all GPUs of all ranks.

    `tensor_refs` are what each GPU gives: one ref per rank, each to a list with a tensor of each of its GPUs.
    `tensor_list_refs` are one ref per rank to be overwritten, to a list with a list for each GPU, in the order of the
    rank's other list: as many tensors on that GPU as there are ranks times GPUs per rank, in the order of ranks, and of
    the GPUs of a rank. None: such lists are made. What is not said here is as in `allreduce_multigpu_refs`, errors too.
    Returns the refs of the outputs in rank order; or a `Work` of them.
    """
    refs = {"tensor_refs": tensor_refs, "tensor_list_refs": tensor_list_refs}
    return Call(OpKind.ALLGATHER, group_name, timeout_s, lists={}, **refs).run(async_op=async_op)


# fmt: off
@overload
def reducescatter_multigpu_refs(tensor_refs: Sequence[Any] | None, tensor_list_refs: Sequence[Any],
    group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> list[ObjectRef[Any]]: ...
@overload
def reducescatter_multigpu_refs(tensor_refs: Sequence[Any] | None, tensor_list_refs: Sequence[Any],
    group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: Literal[True],
    timeout_s: float | None = ...) -> Work: ...
@overload
def reducescatter_multigpu_refs(tensor_refs: Sequence[Any] | None, tensor_list_refs: Sequence[Any],
    group_name: GroupLike = ..., op: ReduceOp | str = ..., *, async_op: bool,
    timeout_s: float | None = ...) -> Work | list[ObjectRef[Any]]: ...
# fmt: on
def reducescatter_multigpu_refs(
    tensor_refs: Sequence[Any] | None,
    tensor_list_refs: Sequence[Any],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> list[ObjectRef[Any]] | Work:
    """Reduces lists of tensors elementwise over all GPUs of all ranks, and gives each GPU its item of the result.

    `tensor_list_refs` are one ref per rank, to a list with a list for each GPU: one tensor on that GPU for each GPU of
    each rank. They stay as they are. `tensor_refs` are one ref per rank to be overwritten, to a list with a tensor of
    each of its GPUs, in the same order: GPU `g` of `d` on rank `r` gets item ``r * d + g``. None: such lists are made.
    What is not said here is as in `allreduce_multigpu_refs`, errors too. Returns the refs of the outputs in rank order;
    or a `Work` of them.
    """
    refs = {"tensor_refs": tensor_refs, "tensor_list_refs": tensor_list_refs}
    return Call(OpKind.REDUCESCATTER, group_name, timeout_s, op=op, lists={}, **refs).run(async_op=async_op)


# fmt: off
@overload
def send_multigpu_ref(src_tensor_ref: Any, dst_tensor_ref: Any, src_gpu_index: int = ..., dst_gpu_index: int = ...,
    group_name: GroupLike = ..., *, async_op: Literal[False] = ...,
    timeout_s: float | None = ...) -> ObjectRef[Any]: ...
@overload
def send_multigpu_ref(src_tensor_ref: Any, dst_tensor_ref: Any, src_gpu_index: int = ..., dst_gpu_index: int = ...,
    group_name: GroupLike = ..., *, async_op: Literal[True], timeout_s: float | None = ...) -> Work: ...
@overload
def send_multigpu_ref(src_tensor_ref: Any, dst_tensor_ref: Any, src_gpu_index: int = ..., dst_gpu_index: int = ...,
    group_name: GroupLike = ..., *, async_op: bool, timeout_s: float | None = ...) -> Work | ObjectRef[Any]: ...
# fmt: on
def send_multigpu_ref(
    src_tensor_ref: Any,
    dst_tensor_ref: Any,
    src_gpu_index: int = 0,
    dst_gpu_index: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> ObjectRef[Any] | Work:
    """Sends the tensor of one GPU of a participant to that of one GPU of another; this one call does both halves.

    Both refs are to a list with a tensor of each of the participant's GPUs, or to one tensor. `src_gpu_index` and
    `dst_gpu_index` are the numbers of the GPUs in their processes; the tensor there is overwritten, and has the same
    shape and dtype. What is not said here is as in `allreduce_multigpu_refs`, errors too. Returns the destination's
    ref; or a `Work` of it.
    """
    lists = {"src_tensor": src_gpu_index, "dst_tensor": dst_gpu_index}
    call = Call(OpKind.SEND, group_name, timeout_s, lists=lists, refs=[src_tensor_ref, dst_tensor_ref])
    return call.send(async_op=async_op)
