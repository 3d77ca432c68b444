"""The values of a run of a captured step: the arguments that it is given, and the structure that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.driver.pending import Argument
from raycollect.engine.step_program import Given
from raycollect.engine.value_codec import pack_value, pack_values, unpack_value
from raycollect.errors import CaptureError, refusal, wrong_argument
from raycollect.errors.text import listed

ARGUMENTS_NBYTES = MAX_FRAME_NBYTES - 1024  # the most for a run's packed arguments, which fit into a frame

RESERVED = ("async_op", "timeout_s")  # `Capture.run`'s own parameters

MISSING = object()  # a missing argument, as None is a value

_IN_RUN = (
    "a plain value or an array, alone or in lists, tuples and dicts: pass anything else by an ordinary method before "
    "the run"
)


class Parameters:
    """The arguments of a captured step, which each run is given by name."""

    def __init__(self) -> None:
        self._declared: dict[str, Argument] = {}
        self._mark = object()  # marks its arguments; a reference to self would be a cycle
        self._names: tuple[tuple[str, ...], ...] = ()  # of each participant's arguments, by position
        self._blank: tuple[bytes, ...] = ()  # the arguments of a run without any

    def declare(self, name: str, default: Any) -> Argument:
        """Adds one; `MISSING`: it has no default."""
        actual = ""
        if not isinstance(name, str) or not name.isidentifier():
            actual, expected = repr(name), "a name such as 'rate'"
        elif name in RESERVED:
            actual, expected = repr(name), f"not one of run's own: {', '.join(RESERVED)}"
        elif name in self._declared:
            actual, expected = f"{name!r} again", "declared once"
        if actual:
            raise refusal("argument", "", (wrong_argument("name", actual, expected),))
        if default is not MISSING:
            packed(default, "default", "argument")
        argument = Argument(self._mark, name, default=default)
        self._declared[name] = argument
        return argument

    def own(self, value: Argument) -> Argument:
        """Returns an argument if it is one of these, and raises CaptureError otherwise."""
        if value.owner is not self._mark:
            raise CaptureError(detail=f"{value!r} belongs to another captured step: call step.argument() in this block")
        return value

    def place(self, names: Sequence[tuple[str, ...]]) -> None:
        """Sets which arguments each participant is given, by position and in order."""
        self._names = tuple(names)
        self._blank = (b"",) * len(self._names)

    def pack(self, given: Mapping[str, Any]) -> tuple[bytes, ...]:
        """The arguments of a run as each participant gets them, by position."""
        declared = self._declared
        if not given and not declared:
            return self._blank
        expected = f"one of {listed(declared)}" if declared else "no arguments: the step declares none"
        violations = [wrong_argument(name, "given", expected) for name in given if name not in declared]
        values = {name: given.get(name, argument.default) for name, argument in declared.items()}
        violations += [wrong_argument(name, "missing", "a value") for name, value in values.items() if value is MISSING]
        if violations:
            raise refusal("run", "", tuple(violations))
        return self._packed(values)

    def _packed(self, values: Mapping[str, Any]) -> tuple[bytes, ...]:
        written: dict[tuple[str, ...], bytes] = {}
        for mine in self._names:
            if mine not in written:
                written[mine] = _pack(mine, values)
        return tuple(written[mine] for mine in self._names)


def _pack(names: tuple[str, ...], values: Mapping[str, Any]) -> bytes:
    try:
        written = pack_values([values[name] for name in names])
    except TypeError:
        for name in names:
            packed(values[name], name, "run")
        raise
    if len(written) > ARGUMENTS_NBYTES:
        sizes = listed(f"{name} {len(pack_value(values[name]))}" for name in names)
        expected = f"at most {ARGUMENTS_NBYTES}: pass what is longer by an ordinary method before the run"
        raise refusal(
            "run", "", (wrong_argument("length of the arguments", f"{len(written)} bytes ({sizes})", expected),)
        )
    return written


def packed(value: Any, where: str, op: str, expected: str = _IN_RUN) -> bytes:
    """Encodes a value; `where` and `op` name it in the InvalidArgumentError of one that can't be sent."""
    try:
        return pack_value(value)
    except TypeError as exc:
        raise refusal(op, "", (wrong_argument(where, str(exc), expected),)) from None


@dataclass(frozen=True, slots=True)
class Fixed:
    """A value that no participant returns; `read` gives it for each run."""

    read: Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedValues:
    """A structure of lists, tuples and dicts without its values.

    Attributes:
        shape: The structure; a value is its place among those that participants return, an `Argument` one of the run, a
            `Given` one that is the same in each run, or `Fixed`.
        echoed: The arguments in it, by name.
    """

    shape: Any
    echoed: Mapping[str, Argument]

    @classmethod
    def of(cls, values: Any, read: Callable[[Any, str], int | Argument | Given]) -> ReturnedValues:
        """Takes a structure apart; `read` replaces each leaf, given the leaf and its place in words."""
        shape = structured(values, read)
        return cls(shape=shape, echoed=_echoed(shape))

    def given(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the arguments that a run returns, by name."""
        return {name: arguments.get(name, argument.default) for name, argument in self.echoed.items()}

    def fill(self, values: Sequence[Any], given: Mapping[str, Any]) -> Any:
        """The structure with the returned values, in order, and the arguments, by name."""
        return _filled(self.shape, values, given)


def structured(value: Any, read: Callable[[Any, str], Any], where: str = "the value") -> Any:
    """Replaces the leaves of lists, tuples and dicts by `read(leaf, its place in words)`."""
    if _is_row(value):
        return _row(type(value), [structured(item, read, f"{where}[{at}]") for at, item in enumerate(value)])
    if type(value) is dict:
        return {name: structured(item, read, f"{where}[{name!r}]") for name, item in value.items()}
    return read(value, where)


def _echoed(shape: Any) -> dict[str, Argument]:
    if type(shape) is Argument:
        return {shape.name: shape}
    inner = shape.values() if type(shape) is dict else shape if _is_row(shape) else ()
    return {name: argument for part in inner for name, argument in _echoed(part).items()}


def _filled(shape: Any, values: Sequence[Any], given: Mapping[str, Any]) -> Any:
    if type(shape) is int:
        return values[shape]
    if type(shape) is Given:
        return unpack_value(shape.packed)
    if type(shape) is Argument:
        return given[shape.name]
    if type(shape) is dict:
        return {name: _filled(item, values, given) for name, item in shape.items()}
    if type(shape) is Fixed:
        return shape.read()
    return _row(type(shape), [_filled(item, values, given) for item in shape])


def _is_row(value: Any) -> bool:
    """Whether it is a list, a tuple or a named tuple."""
    kind = type(value)
    return kind is list or kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def _row(kind: Any, items: list[Any]) -> Any:
    return items if kind is list else tuple(items) if kind is tuple else kind(*items)
