"""Differentiable collectives of members, for torch tensors, with the names of torch.distributed.nn.

Each collective returns new tensors. Its backward pass is another collective: all ranks have to run the backward pass
over the same graph. The gradients are those of the sum of all ranks' losses. They can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from raycollect.core.model import GroupLike, ReduceOp
from raycollect.errors import refusal, wrong_argument
from raycollect.member import operations
from raycollect.member.init import get_group_handle

torch: Any = import_module("torch")

_LINEAR = (ReduceOp.SUM, ReduceOp.AVG)


def all_reduce(tensor: Any, op: ReduceOp | str = ReduceOp.SUM, group_name: GroupLike = "default") -> Any:
    """Reduces a tensor elementwise over all ranks; returns a new one on each.

    Args:
        tensor: This rank's torch tensor, of one shape and dtype on all.
        op: SUM or AVG; other reduce ops have no gradient here.
        group_name: The group.

    Raises:
        InvalidArgumentError: Another reduce op.
        RaycollectError: As `raycollect.allreduce`; also raised by the backward pass.
    """
    return _AllReduce.apply(tensor, _linear("all_reduce", op), group_name)


def all_gather(tensor: Any, group_name: GroupLike = "default") -> tuple[Any, ...]:
    """Gives every rank the tensors of all ranks, of one shape, by rank. See `all_reduce`."""
    return tuple(_AllGather.apply(tensor, group_name))


def reduce_scatter(tensors: Sequence[Any], op: ReduceOp | str = ReduceOp.SUM, group_name: GroupLike = "default") -> Any:
    """Reduces lists of tensors, one for each rank, over all ranks; returns this rank's item. See `all_reduce`."""
    return _ReduceScatter.apply(_linear("reduce_scatter", op), group_name, *tensors)


def all_to_all(
    tensors: Sequence[Any], group_name: GroupLike = "default", *, like: Sequence[Any] | None = None
) -> tuple[Any, ...]:
    """Sends item `r` of each rank's list to rank `r`; returns the received tensors, by rank.

    `like` are tensors with the shapes of the received tensors; by default `tensors`. See `all_reduce`.
    """
    shapes = tuple(tensor.shape for tensor in (tensors if like is None else like))
    return tuple(_AllToAll.apply(group_name, shapes, *tensors))


def _linear(name: str, op: Any) -> ReduceOp:
    try:
        reduce_op = ReduceOp.coerce(op)
    except ValueError:
        reduce_op = None
    if reduce_op not in _LINEAR:
        raise refusal(name, "", (wrong_argument("op", repr(op), "SUM or AVG, which can be differentiated"),))
    return reduce_op


def _dense(tensor: Any) -> Any:
    return tensor.detach().contiguous()


class _AllReduce(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any, op: ReduceOp, group_name: GroupLike) -> Any:
        ctx.op, ctx.group_name = op, group_name
        output = tensor.detach().clone(memory_format=torch.contiguous_format)
        operations.allreduce(output, group_name, op)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _AllReduce.apply(gradient, ctx.op, ctx.group_name), None, None


class _AllGather(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, tensor: Any, group_name: GroupLike) -> Any:
        ctx.group_name = group_name
        given = _dense(tensor)
        outputs = [torch.empty_like(given) for _ in range(get_group_handle(group_name).world_size)]
        operations.allgather(outputs, given, group_name)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _ReduceScatter.apply(ReduceOp.SUM, ctx.group_name, *gradients), None


class _ReduceScatter(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group_name: GroupLike, *tensors: Any) -> Any:
        ctx.op, ctx.group_name = op, group_name
        given = [_dense(tensor) for tensor in tensors]
        mine = get_group_handle(group_name).rank
        output = torch.empty_like(given[mine] if mine < len(given) else given[0])
        operations.reducescatter(output, given, group_name, op)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        count = get_group_handle(ctx.group_name).world_size
        scaled = gradient / count if ctx.op is ReduceOp.AVG else gradient
        return None, None, *_AllGather.apply(scaled, ctx.group_name)


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, group_name: GroupLike, shapes: Sequence[Any], *tensors: Any) -> Any:
        ctx.group_name, ctx.shapes = group_name, tuple(tensor.shape for tensor in tensors)
        given = [_dense(tensor) for tensor in tensors]
        outputs = [given[0].new_empty(shape) for shape in shapes]
        operations.alltoall(outputs, given, group_name)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, *_AllToAll.apply(ctx.group_name, ctx.shapes, *gradients)
