"""The tensors of a torch module for collectives: by name, or in a few pieces of memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

import raycollect as col


def tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a module, by name.

    This is `state_dict` with two differences that collectives need. It includes buffers that are not persistent, as a
    model uses them like other weights. A parameter with two names (tied weights) appears once: otherwise it would be
    written twice, which is refused as an alias.
    """
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def share(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Moves the parameters and buffers of a module into shared memory, one tensor for each dtype.

    The module's own tensors become views of these, so that a collective on the few works on all. Call it before the
    optimizer is made, and keep the result. To pickle such a module, or to return its `state_dict` by value, clone the
    tensors first: torch writes the whole memory of a view, once for each view.

    Returns:
        The tensors [elements], by the name of their dtype.
    """
    return share_tensors(tensors(module).values())


def share_gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gives the parameters of a module gradients of zero in shared memory, one tensor for each dtype; see `share`.

    A backward pass adds to them in place, if they are zeroed by `zero_grad(set_to_none=False)`.
    """
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return share_tensors(parameter.grad for parameter in parameters if parameter.grad is not None)


def share_tensors(those: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Moves tensors into one tensor for each dtype, in shared memory, and makes them views of it; see `share`."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in those:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    shared = {}
    for dtype, members in kinds.items():
        whole = col.empty(sum(member.numel() for member in members), dtype, library="torch")
        at = 0
        for member in members:
            place = whole[at : at + member.numel()].view(member.shape)
            place.copy_(member.detach())
            member.data = place
            at += member.numel()
        shared[str(dtype).removeprefix("torch.")] = whole
    return shared


def digest(those: Mapping[str, torch.Tensor]) -> str:
    """A hash of names, shapes, dtypes and bits: equal where tensors are equal to the last bit."""
    seen = hashlib.sha256()
    for name, tensor in those.items():
        bits = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        seen.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        seen.update(bits.numpy().data)
    return seen.hexdigest()
