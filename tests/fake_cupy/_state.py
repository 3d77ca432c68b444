"""Which fake is installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ._errors import CUDARuntimeError, Status
from ._machine import Machine

_installed: list[Machine] = []
_Function = TypeVar("_Function", bound=Callable[..., Any])


def current() -> Machine:
    """Gives the machine of the fake that is installed.

    Raises:
        CUDARuntimeError: There is none any more.
    """
    if not _installed:
        raise CUDARuntimeError(Status.UNLOADING)
    return _installed[-1]


def check_free() -> None:
    assert not _installed, "a fake of cupy is installed already"


def install(machine: Machine) -> None:
    _installed.append(machine)


def remove() -> None:
    _installed.clear()


def counted(function: _Function) -> _Function:
    """Counts the calls of a function by its name."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        current().counts[function.__name__] += 1
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]
