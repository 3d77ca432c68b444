"""The root of the errors, and what all of them have."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(eq=False)
class RaycollectError(RuntimeError):
    """Base of all errors of this package; a RuntimeError, as what `ray.util.collective` raises."""

    def __str__(self) -> str:
        return summary(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), {f.name: getattr(self, f.name) for f in fields(self)})


def summary(cls: type) -> str:
    """What an error says that has nothing of its own to say: the first line of its class's docstring."""
    return (cls.__doc__ or cls.__name__).split("\n", 1)[0].rstrip(".")


def _rebuild(cls: type[RaycollectError], values: dict[str, Any]) -> RaycollectError:
    return cls(**values)
