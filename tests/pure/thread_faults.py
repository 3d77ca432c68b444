"""What tests of a fault in a thread share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

WAIT_S = 20.0
BOOM = "TypeError: injected on"


def fault_in(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Notes which threads a test is about, by the names of the table in ARCHITECTURE.md."""

    def note(test: Callable[..., Any]) -> Callable[..., Any]:
        vars(test)["faulty_threads"] = names
        return test

    return note


def helper_threads(before: Collection[threading.Thread] = ()) -> list[threading.Thread]:
    """The calls of `threads.call_in_helper` under way, but for those that were before the test."""
    return [one for one in threading.enumerate() if one.name == "raycollect-helper" and one not in before]


def threads_tested(*modules: ModuleType) -> set[str]:
    """The threads that the tests of these modules are about."""
    return {name for one in modules for test in vars(one).values() for name in getattr(test, "faulty_threads", ())}
