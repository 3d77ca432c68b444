"""One operand: a tensor, or a list, tuple or dict of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Structure:
    """How an operand is made of tensors.

    Attributes:
        kind: ``"tensor"``, ``"list"``, ``"tuple"`` or ``"dict"``.
        names: The keys of a dict, in order; empty for the others.
    """

    kind: str = "tensor"
    names: tuple[str | int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}{list(self.names)}" if self.names else self.kind

    def build(self, tensors: Sequence[Any]) -> Any:
        """Puts tensors together in this structure."""
        if self.kind == "tensor":
            return tensors[0]
        if self.kind == "dict":
            return dict(zip(self.names, tensors, strict=True))
        return list(tensors) if self.kind == "list" else tuple(tensors)


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
            string or integer keys) that holds tensors only.
        """
        if is_tensor(value):
            return Container(Structure(), (value,), value)
        if type(value) in (list, tuple) and value and all(map(is_tensor, value)):
            return Container(Structure(type(value).__name__), tuple(value), value)
        if isinstance(value, Mapping) and value and all(map(is_tensor, value.values())):
            names = tuple(value)
            if all(type(name) in (str, int) for name in names):
                return Container(Structure("dict", names), tuple(value.values()), value)
        return None

    @staticmethod
    def build(structure: Structure, tensors: Sequence[Any]) -> Container:
        """Puts new tensors together."""
        return Container(structure, tuple(tensors), structure.build(tensors))
