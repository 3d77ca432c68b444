"""Checks whether torch modules still have the tensors of a state dict; inside the actor.

`state_dict()` returns a new dict of aliases. If a module gets other parameters afterwards, as by
`load_state_dict(assign=True)`, the dict still refers to the old memory.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import ModuleType
from typing import Any

DEEPEST, MOST = 3, 10_000
"""How many attributes, lists and dicts may lie between an actor and a module, and how many objects are searched."""

_Where = tuple[int, tuple[int, ...], Any]


class ModuleTensors:
    """The tensors that are parameters or buffers of an actor's modules.

    Args:
        actor: The actor.
        tensors: The tensors.
    """

    def __init__(self, actor: Any, tensors: Sequence[Any]) -> None:
        self._owners: dict[int, tuple[weakref.ref[Any], str, str]] = {}  # by index: the module, the kind and the name
        torch = sys.modules.get("torch")
        if torch is None or not any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return
        owners: dict[_Where, tuple[weakref.ref[Any], str, str]] = {}
        for module in _modules(torch, actor):
            for kind in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, kind).items():
                    if (where := _where(tensor)) is not None:
                        owners.setdefault(where, (weakref.ref(module), kind, name))
        for at, tensor in enumerate(tensors):
            if (where := _where(tensor)) in owners and where is not None:
                self._owners[at] = owners[where]

    def replaced(self, tensors: Sequence[Any]) -> list[int]:
        """Returns the indices of tensors that their modules have replaced."""
        now = {at: getattr(module(), kind, {}).get(name) for at, (module, kind, name) in self._owners.items()}
        return [at for at, tensor in now.items() if tensor is not tensors[at] and _where(tensor) != _where(tensors[at])]


def _where(tensor: Any) -> _Where | None:
    """Returns the address, shape and dtype of a torch tensor; None if it has no memory."""
    local = getattr(tensor, "_local_tensor", tensor)
    address = local.data_ptr() if hasattr(local, "data_ptr") and getattr(local, "is_meta", True) is False else 0
    return (address, local.shape, local.dtype) if address else None


def _modules(torch: Any, actor: Any) -> Iterator[Any]:
    """Yields the modules of an actor, and all their submodules."""
    level, seen = [actor], set[int]()
    for _ in range(DEEPEST + 1):
        following: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) >= MOST:
                continue
            seen.add(id(value))
            if isinstance(value, torch.nn.Module):
                yield from value.modules()
            elif isinstance(value, Mapping):
                following += islice(value.values(), MOST)
            elif isinstance(value, (list, tuple)):
                following += value[:MOST]
            elif not isinstance(value, (type, ModuleType)):
                following += getattr(value, "__dict__", {}).values()
        level = following
