"""What each run of a captured step gives back: values and arguments, in the structure that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycollect.payload import unpack_value
from raycollect.pending import Argument
from raycollect.routine import Given

__all__ = ["Returned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A structure of lists, tuples and dicts, without its values.

    Attributes:
        shape: In it, for a value its place among those that participants give back; for an argument of the run what
            stands for it; a `Given` for what is the same in each run.
        echoed: The arguments in it, by name.
    """

    shape: Any
    echoed: Mapping[str, Argument]

    @classmethod
    def of(cls, values: Any, read: Callable[[Any, str], int | Argument | Given]) -> Returned:
        """Takes a structure apart.

        Args:
            values: What was given to `Capture.returns`.
            read: Puts something else in the place of what is no list, tuple or dict; it is told where that is.
        """
        shape = _shape_of(values, read, "the value")
        return cls(shape=shape, echoed=_echoed(shape))

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a run's arguments that come back, as they are now, by name."""
        return {name: arguments.get(name, one.default) for name, one in self.echoed.items()}

    def fill(self, values: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """The structure with what participants gave back, in order, and with arguments by their names."""
        return _filled(self.shape, values, given)


def _shape_of(value: Any, read: Callable[[Any, str], Any], where: str) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_shape_of(one, read, f"{where}[{at}]") for at, one in enumerate(value))
    if type(value) is dict:
        return {name: _shape_of(one, read, f"{where}[{name!r}]") for name, one in value.items()}
    return read(value, where)


def _echoed(shape: Any) -> dict[str, Argument]:
    """The arguments in a structure, by name."""
    if type(shape) is Argument:
        return {shape.name: shape}
    inner = shape.values() if type(shape) is dict else shape if type(shape) in (list, tuple) else ()
    return {name: one for part in inner for name, one in _echoed(part).items()}


def _filled(shape: Any, values: Sequence[Any], given: Mapping[str, Any]) -> Any:
    if type(shape) is int:
        return values[shape]
    if type(shape) is Given:
        return unpack_value(shape.packed)
    if type(shape) is Argument:
        return given[shape.name]
    if type(shape) is dict:
        return {name: _filled(one, values, given) for name, one in shape.items()}
    return type(shape)(_filled(one, values, given) for one in shape)
