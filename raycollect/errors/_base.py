"""The base class of all errors."""

from __future__ import annotations

import copy
import copyreg
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

_Error = TypeVar("_Error", bound="RaycollectError")


@dataclass(eq=False)
class RaycollectError(RuntimeError):
    """Base of all errors of this package; a RuntimeError, as what `ray.util.collective` raises."""

    cure: ClassVar[str] = ""  # what to do about it; empty where only the detail can tell
    _message: ClassVar[str] = ""  # formatted with `self`; if empty, the message is `detail` or the summary

    def __str__(self) -> str:
        text, advice = self._text(), self._advice()
        return f"{text}\nWhat to do: {advice}." if advice else text

    def _text(self) -> str:
        return self._message.format(self=self) or getattr(self, "detail", "") or summary(type(self))

    def _advice(self) -> str:
        return self.cure

    def __reduce__(self) -> tuple[Any, ...]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return copyreg.__newobj__, (type(self),), values  # type: ignore[attr-defined] # since Python 2.3; see PEP 307


def kept(error: _Error) -> _Error:
    """Prepares an error for keeping.

    The error loses its tracebacks, whose frames keep all their objects alive, and its `__context__`, which may belong
    to the user.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = one.__context__ = None
        one = one.__cause__
    return error


def anew(error: _Error) -> _Error:
    """Copies a kept error, to be raised. Frames that a traceback adds to the kept error itself may hold its keeper."""
    found = copy.copy(error)
    found.__cause__ = error.__cause__
    return found


def summary(cls: type) -> str:
    """Returns the default text of an error: the first line of its class's docstring."""
    return (cls.__doc__ or cls.__name__).split("\n", 1)[0].rstrip(".")


def culprit(rank: int, actor: str) -> str:
    """Returns the rank and actor at fault as a suffix, ``", rank 1 (Trainer 7f3a)"``; empty if neither is known."""
    return (f", rank {rank}" if rank >= 0 else "") + (f" ({actor})" if actor else "")
