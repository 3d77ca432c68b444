"""Functions of Ray that are replaced, where Ray has no hook."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

_MARK = "__raycollect__"

_hooking = threading.RLock()  # a finalizer may do the same


def hook(owner: Any, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a function of Ray by a wrapper, once per process.

    A caller that has imported the function by its name bypasses the wrapper.

    Args:
        owner: The module or class that has the function.
        name: The function's name.
        wrapper: Makes the wrapper of the function; called the first time only.

    Raises:
        AttributeError: This Ray has no such function.
    """
    with _hooking:
        function = getattr(owner, name)
        if not hasattr(function, _MARK):
            wrapped = functools.wraps(function)(wrapper(function))
            setattr(wrapped, _MARK, True)
            setattr(owner, name, wrapped)
