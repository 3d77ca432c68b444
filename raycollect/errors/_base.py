"""The base class of all errors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

_Error = TypeVar("_Error", bound="RaycollectError")


@dataclass(eq=False)
class RaycollectError(RuntimeError):
    """Base of all errors of this package; a RuntimeError, as what `ray.util.collective` raises."""

    cure: ClassVar[str] = ""  # what to do about it; empty where only the detail can tell

    def __str__(self) -> str:
        text, advice = self._text(), self._advice()
        return f"{text}\nWhat to do: {advice}." if advice else text

    def _text(self) -> str:
        return getattr(self, "detail", "") or summary(type(self))

    def _advice(self) -> str:
        return self.cure

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})


def kept(error: _Error) -> _Error:
    """An error prepared for keeping: without tracebacks, whose frames would keep all their objects alive.

    It also loses its `__context__`, which may be the user's.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = one.__context__ = None
        one = one.__cause__
    return error


def anew(error: _Error) -> _Error:
    """A copy of a kept error, to be raised: the frames that a traceback adds may hold the keeper."""
    found = copy.copy(error)
    found.__cause__ = error.__cause__
    return found


def summary(cls: type) -> str:
    """The default text of an error: the first line of its class's docstring."""
    return (cls.__doc__ or cls.__name__).split("\n", 1)[0].rstrip(".")


def culprit(rank: int, actor: str) -> str:
    """Who is at fault, behind what is: ``", rank 1 (Trainer 7f3a)"``; empty for nobody."""
    return (f", rank {rank}" if rank >= 0 else "") + (f" ({actor})" if actor else "")


def _rebuild(cls: type[RaycollectError], values: dict[str, Any]) -> RaycollectError:
    return cls(**values)
