"""One operand: a tensor, or lists, tuples and dicts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycollect.model import TENSOR, Structure
from raycollect.words import a_type

DEEPEST = 32
"""How often lists, tuples and dicts may be nested: what messages can carry, and where one that holds itself ends."""


@dataclass(frozen=True, slots=True)
class Container:
    """What the store keeps under one key.

    Attributes:
        structure: How the value is made.
        tensors: Its tensors, in order.
        value: The very object that the method returned.
        memo: What programs found about these tensors; forgotten with them.
    """

    structure: Structure
    tensors: tuple[Any, ...]
    value: Any
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(value: Any, is_tensor: Callable[[Any], bool]) -> Container | None:
        """Takes a value apart.

        Args:
            value: What a method returned.
            is_tensor: Tells a tensor.

        Returns:
            None for what goes by value: anything that is neither a tensor nor a non-empty list, tuple or dict (with
            string or integer keys) that holds tensors, or such lists, tuples and dicts of tensors, only; and what is
            nested more than `DEEPEST` times.
        """
        if is_tensor(value):
            return Container(TENSOR, (value,), value)
        tensors: list[Any] = []
        structure = _take_apart(value, is_tensor, tensors, 0)
        return None if structure is None else Container(structure, tuple(tensors), value)

    @staticmethod
    def build(structure: Structure, tensors: Sequence[Any]) -> Container:
        """Puts new tensors together."""
        return Container(structure, tuple(tensors), structure.build(tensors))


def _take_apart(value: Any, is_tensor: Callable[[Any], bool], tensors: list[Any], depth: int) -> Structure | None:
    """Appends the tensors of a value, in order; None where it holds anything else, nothing, or too much in itself."""
    if is_tensor(value):
        tensors.append(value)
        return TENSOR
    names: tuple[Any, ...] = ()
    if type(value) in (list, tuple):
        kind, children = type(value).__name__, value
    elif isinstance(value, Mapping):
        kind, names, children = "dict", tuple(value), tuple(value.values())
    else:
        return None
    if not children or depth == DEEPEST or not all(map(_can_travel, names)):
        return None
    items = []
    for child in children:
        item = _take_apart(child, is_tensor, tensors, depth + 1)
        if item is None:
            return None
        items.append(item)
    return Structure(kind, names, tuple(items))


def obstacle(value: Any, is_tensor: Callable[[Any], bool]) -> str:
    """What first keeps a value from being kept, where `Container.of` gives None: ``['layers'][2] is a NoneType``."""
    return _obstacle(value, is_tensor, "")


def _obstacle(value: Any, is_tensor: Callable[[Any], bool], path: str, depth: int = 0) -> str:
    here = path or "it"
    if type(value) not in (list, tuple) and not isinstance(value, Mapping):
        return f"{here} is {a_type(value)}"
    if not value:
        return f"{here} is empty"
    if depth == DEEPEST:
        return f"{here} is nested more than {DEEPEST} deep"
    is_named = isinstance(value, Mapping)
    for name, child in value.items() if is_named else enumerate(value):
        if is_named and not _can_travel(name):
            return f"{here} has the key {name!r}, and keys are strings or integers"
        if not is_tensor(child) and (found := _obstacle(child, is_tensor, f"{path}[{name!r}]", depth + 1)):
            return found
    return ""


def _can_travel(name: Any) -> bool:
    """Whether messages can carry the key of a dict."""
    if type(name) is int:
        return -(1 << 63) <= name < 1 << 64
    if type(name) is not str:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True
