"""Closes what a test has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def closing_all(make: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Gives a function that makes as `make` does; all that it has made is closed at the end, the last one first."""
    with ExitStack() as stack:

        def made(*args: Any, **how: Any) -> Any:
            one = make(*args, **how)
            stack.callback(one.close)
            return one

        yield made
