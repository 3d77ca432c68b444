"""The base class of all errors."""

from __future__ import annotations

import copy
import copyreg
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform  # Python has it from 3.11 on
else:

    def dataclass_transform(**_: bool) -> Any:
        return lambda cls: cls


_Error = TypeVar("_Error", bound="RaycollectError")


@dataclass_transform(eq_default=False, kw_only_default=True)
@dataclass(eq=False)
class RaycollectError(RuntimeError):
    """Base of all errors of this package; a RuntimeError, like the errors of `ray.util.collective`.

    Subclasses are dataclasses, hashed by identity; their fields are given by keyword.
    """

    cure: ClassVar[str] = ""  # what to do; empty if the detail tells it
    _message: ClassVar[str] = ""  # formatted with `self`; if empty, the message is `detail` or the summary

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__annotations__:  # else the base class's methods serve
            dataclass(eq=False, kw_only=True)(cls)

    def __str__(self) -> str:
        text, advice = self._text(), self._advice()
        return f"{text}\nWhat to do: {advice}." if advice else text

    def _text(self) -> str:
        where, default = self._where(), summary(type(self))
        text = self._message.format(self=self) or getattr(self, "detail", "")
        if not where:
            return text or default
        return f"{where}: {text or default[:1].lower() + default[1:]}"

    def _where(self) -> str:
        """Returns the beginning of the message, before a colon: the operation, the group, the rank and the actor."""
        return ""

    def _advice(self) -> str:
        return self.cure

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return copyreg.__newobj__, (type(self),), values  # type: ignore[attr-defined] # since Python 2.3; see PEP 307


def strip_traceback(error: _Error) -> _Error:
    """Prepares an error for storing.

    Removes the tracebacks, whose frames keep all their objects alive, and the `__context__`, which may belong to the
    user.
    """
    current: BaseException | None = error
    while current is not None:
        current.__traceback__ = current.__context__ = None
        current = current.__cause__
    return error


def copy_error(error: _Error) -> _Error:
    """Copies a stored error, to be raised. Raising the stored error itself adds frames that may hold its owner."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied


def summary(cls: type) -> str:
    """Returns the default text of an error: the first line of its class's docstring."""
    return (cls.__doc__ or cls.__name__).split("\n", 1)[0].rstrip(".")


def culprit(rank: int, actor: str) -> str:
    """Returns the rank and actor at fault as a suffix, ``", rank 1 (Trainer 7f3a)"``; empty if neither is known."""
    return (f", rank {rank}" if rank >= 0 else "") + (f" ({actor})" if actor else "")
