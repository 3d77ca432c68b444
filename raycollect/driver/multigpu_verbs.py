"""The driver's verbs for participants with several GPUs each: a ref stands for a list with a tensor of each GPU.

Groups, refs, batches and `async_op` work as in `driver.verbs`. The group's backend is ``"nccl"``. The tensors of a rank
have one shape and dtype and are on different GPUs, and all ranks have equally many. Otherwise the call is refused on
all ranks, and no tensor was touched. All verbs raise what `allreduce_multigpu_refs` raises.

A list is written when the kernels have ended, so a failure before that leaves it as it was. Memory for what is combined
is taken on the group's GPU (`raycollect.engine.gpu_operands`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raycollect.core.model import GroupLike, OpKind, ReduceOp
from raycollect.driver.call import Call

__all__ = [
    "allgather_multigpu_refs",
    "allreduce_multigpu_refs",
    "broadcast_multigpu_refs",
    "reduce_multigpu_refs",
    "reducescatter_multigpu_refs",
    "send_multigpu_ref",
]


def allreduce_multigpu_refs(
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    inplace: bool = True,
    snapshot: bool = False,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduces the tensors of all GPUs of all ranks elementwise and gives every GPU the result.

    Args:
        tensor_refs: One ref per rank, each to a list with a tensor of each of its GPUs.
        group_name: A group of backend ``"nccl"``; ``"default"`` is derived from the refs where it was not declared.
        op: See `allreduce_refs`. AVG is over all GPUs of all ranks.
        inplace: True: the tensors themselves hold the result afterwards. False: lists of new ones do.
        snapshot: See `allreduce_refs`; here it takes no more memory.
        async_op: True: returns a `Work` at once.
        timeout_s: How long ranks wait for each other, in seconds; by default as the group was declared, or 60.

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
) -> Any:
    """Reduces the tensors of all GPUs of all ranks into one of one rank; the others stay as they are.

    Args:
        tensor_refs: See `allreduce_multigpu_refs`.
        dst_rank: The rank that gets the result.
        dst_tensor: Into which tensor of its list, by its place there.
        group_name: See `allreduce_multigpu_refs`.
        op: See there.
        snapshot: See there.
        async_op: True: returns a `Work` at once.
        timeout_s: How long ranks wait for each other, in seconds; by default as the group was declared, or 60.

    Returns:
        The ref of that rank's list; or a `Work` of it.
    """
    lists = {"dst_tensor": dst_tensor}
    call = Call(OpKind.REDUCE, group_name, timeout_s, op=op, lists=lists, tensor_refs=tensor_refs)
    return call.run(root=dst_rank, async_op=async_op, snapshot=snapshot)


def broadcast_multigpu_refs(
    tensor_refs: Sequence[Any],
    src_rank: int = 0,
    src_tensor: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Overwrites the tensors of all GPUs of all ranks with one of one rank.

    Args:
        tensor_refs: See `allreduce_multigpu_refs`.
        src_rank: The rank that gives.
        src_tensor: Which tensor of its list, by its place there.
        group_name: See `allreduce_multigpu_refs`.
        async_op: True: returns a `Work` at once.
        timeout_s: How long ranks wait for each other, in seconds; by default as the group was declared, or 60.

    Returns:
        The given refs in rank order; or a `Work` of them.
    """
    lists = {"src_tensor": src_tensor}
    call = Call(OpKind.BROADCAST, group_name, timeout_s, lists=lists, tensor_refs=tensor_refs)
    return call.run(root=src_rank, async_op=async_op)


def allgather_multigpu_refs(
    tensor_list_refs: Sequence[Any] | None,
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Gives each GPU of each rank the tensors of all GPUs of all ranks.

    Args:
        tensor_list_refs: One ref per rank to be overwritten, to a list with a list for each GPU, in the order of the
            rank's other list: as many tensors on that GPU as there are ranks times GPUs per rank, in the order of
            ranks, and of the GPUs of a rank. None: such lists are made.
        tensor_refs: What each GPU gives: one ref per rank, each to a list with a tensor of each of its GPUs.
        group_name: See `allreduce_multigpu_refs`.
        async_op: True: returns a `Work` at once.
        timeout_s: How long ranks wait for each other, in seconds; by default as the group was declared, or 60.

    Returns:
        The refs of the outputs in rank order; or a `Work` of them.
    """
    refs = {"tensor_refs": tensor_refs, "tensor_list_refs": tensor_list_refs}
    return Call(OpKind.ALLGATHER, group_name, timeout_s, lists={}, **refs).run(async_op=async_op)


def reducescatter_multigpu_refs(
    tensor_refs: Sequence[Any] | None,
    tensor_list_refs: Sequence[Any],
    group_name: GroupLike = "default",
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Reduces lists of tensors elementwise over all GPUs of all ranks, and gives each GPU its item of the result.

    Args:
        tensor_refs: One ref per rank to be overwritten, to a list with a tensor of each of its GPUs: GPU `g` of `d` on
            rank `r` gets item ``r * d + g``. None: such lists are made.
        tensor_list_refs: One ref per rank, to a list with a list for each GPU, in the same order: one tensor on that
            GPU for each GPU of each rank. They stay as they are.
        group_name: See `allreduce_multigpu_refs`.
        op: See there.
        async_op: True: returns a `Work` at once.
        timeout_s: How long ranks wait for each other, in seconds; by default as the group was declared, or 60.

    Returns:
        The refs of the outputs in rank order; or a `Work` of them.
    """
    refs = {"tensor_refs": tensor_refs, "tensor_list_refs": tensor_list_refs}
    return Call(OpKind.REDUCESCATTER, group_name, timeout_s, op=op, lists={}, **refs).run(async_op=async_op)


def send_multigpu_ref(
    src_tensor_ref: Any,
    dst_tensor_ref: Any,
    src_gpu_index: int = 0,
    dst_gpu_index: int = 0,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Sends the tensor of one GPU of a participant to that of one GPU of another; this one call does both halves.

    Args:
        src_tensor_ref: A list with a tensor of each of the participant's GPUs, or one tensor.
        dst_tensor_ref: The same on another participant; its tensor on that GPU is overwritten, and has the same shape
            and dtype.
        src_gpu_index: The number of the GPU, in the process of the one that sends.
        dst_gpu_index: The number of the GPU, in the process of the other one.
        group_name: A group that holds both; ``"default"`` is derived where it was not declared.
        async_op: True: returns a `Work` at once.
        timeout_s: How long the two wait for each other, in seconds; by default as the group was declared, or 60.

    Returns:
        The destination's ref; or a `Work` of it.
    """
    lists = {"src_tensor": src_gpu_index, "dst_tensor": dst_gpu_index}
    call = Call(OpKind.SEND, group_name, timeout_s, lists=lists, refs=[src_tensor_ref, dst_tensor_ref])
    return call.send(async_op=async_op)
