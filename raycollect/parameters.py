"""The arguments that a captured step declares, and those of one run as they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raycollect.channel.protocol import MAX_FRAME_NBYTES
from raycollect.errors import CaptureError, Violation, refusal
from raycollect.payload import pack_value, pack_values
from raycollect.pending import Argument

__all__ = ["MISSING", "Parameters", "packed", "wrong"]

ARGUMENTS_NBYTES = MAX_FRAME_NBYTES - 1024
"""The longest arguments of a run, in bytes as `payload` packs them: a frame of the channel, less what is around it."""

RESERVED = ("async_op", "fence", "timeout_s")
"""The parameters of `Capture.run` itself."""

MISSING = object()
"""In the place of what was not given, where None is a value."""

_IN_RUN = (
    "a plain value or an array, alone or in lists, tuples and dicts: hand over others by an ordinary method before the "
    "run"
)


class Parameters:
    """What each run of a captured step is given by name."""

    def __init__(self) -> None:
        self._declared: dict[str, Argument] = {}
        self._names: tuple[tuple[str, ...], ...] = ()  # of what each participant is given, by position
        self._blank: tuple[bytes, ...] = ()  # what a run has that is given nothing

    def declare(self, name: str, default: Any) -> Argument:
        """Adds one; `MISSING`: it has no default.

        Raises:
            InvalidArgumentError: The name or the default can't be used.
        """
        found = ""
        if not isinstance(name, str) or not name.isidentifier():
            found, expected = repr(name), "a name such as 'rate'"
        elif name in RESERVED:
            found, expected = repr(name), f"not one of run's own: {', '.join(RESERVED)}"
        elif name in self._declared:
            found, expected = f"{name!r} again", "declared once"
        if found:
            raise refusal("argument", "", (wrong("name", found, expected),))
        if default is not MISSING:
            packed(default, "default", "argument")
        made = Argument(self, name, default=default, has_default=default is not MISSING)
        self._declared[name] = made
        return made

    def own(self, value: Argument) -> Argument:
        """What stands for an argument, if it is one of these.

        Raises:
            CaptureError: It is not.
        """
        if value.owner is not self:
            raise CaptureError(detail=f"{value!r} is of another one: call step.argument() in this block")
        return value

    def place(self, names: Sequence[tuple[str, ...]]) -> None:
        """Says which of them each participant is given, by position and in order."""
        self._names = tuple(names)
        self._blank = (b"",) * len(self._names)

    def pack(self, given: Mapping[str, Any]) -> tuple[bytes, ...]:
        """The arguments of a run as each participant gets them, by position.

        Raises:
            InvalidArgumentError: One is missing, unknown, too long or of a type that does not travel.
        """
        declared = self._declared
        if not given and not declared:
            return self._blank
        known = ", ".join(declared) or "no arguments: the step declares none"
        found = [wrong(name, "given", f"one of {known}") for name in given if name not in declared]
        values = {name: given.get(name, one.default) for name, one in declared.items()}
        found += [wrong(name, "missing", "a value") for name, value in values.items() if value is MISSING]
        if found:
            raise refusal("run", "", tuple(found))
        written: dict[tuple[str, ...], bytes] = {}
        for mine in self._names:
            if mine not in written:
                written[mine] = _pack(mine, values)
        return tuple(written[mine] for mine in self._names)


def _pack(names: tuple[str, ...], values: Mapping[str, Any]) -> bytes:
    """The arguments of one participant."""
    try:
        written = pack_values([values[name] for name in names])
    except TypeError:
        for name in names:
            packed(values[name], name, "run")
        raise
    if len(written) > ARGUMENTS_NBYTES:
        sizes = ", ".join(f"{name} {len(pack_value(values[name]))}" for name in names)
        expected = f"at most {ARGUMENTS_NBYTES}: hand over what is long by an ordinary method before the run"
        raise refusal("run", "", (wrong("arguments", f"{len(written)} bytes ({sizes})", expected),))
    return written


def packed(value: Any, where: str, op: str, expected: str = _IN_RUN) -> bytes:
    """A value as it travels.

    Args:
        value: The value.
        where: What to call it.
        op: Who was given it.
        expected: What to give instead of one that does not travel.

    Raises:
        InvalidArgumentError: It can't.
    """
    try:
        return pack_value(value)
    except TypeError as exc:
        raise refusal(op, "", (wrong(where, str(exc), expected),)) from None


def wrong(field: str, found: str, expected: str) -> Violation:
    """What is wrong with one argument, of whatever it is that was called."""
    return Violation(kind="argument", rank=-1, field=field, found=found, expected=expected)
