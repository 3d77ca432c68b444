"""A fault in what a thread calls: the next call there raises, once, and has to be told of in the log."""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

WAIT_S = 20.0
BOOM = "TypeError: injected on"


def helper_threads(before: Collection[threading.Thread] = ()) -> list[threading.Thread]:
    """The calls of `threads.call_in_helper` under way, but for those that were before the test."""
    return [one for one in threading.enumerate() if one.name == "raycollect-helper" and one not in before]


class Failing:
    """A fault in what a thread calls: the next call there raises, once.

    Attributes:
        error: What it raises.
        consumed: Whether it was raised.
        records: What the log said of it.
        told: Set with the first of these.
    """

    def __init__(self, thread: str) -> None:
        self.error = TypeError(f"injected on {thread or 'any thread'}")
        self.consumed = threading.Event()
        self.records: list[logging.LogRecord] = []
        self.told = threading.Event()
        self.thread = thread

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def reach(*args: Any, **kwargs: Any) -> Any:
            if not self.consumed.is_set() and threading.current_thread().name.startswith(self.thread):
                self.consumed.set()
                raise self.error
            return call(*args, **kwargs)

        return reach

    def filter(self, record: logging.LogRecord) -> bool:
        """Hears the log."""
        if record.exc_info is not None and record.exc_info[1] is self.error:
            self.records.append(record)
            self.told.set()
        return True


@contextmanager
def fail_at(holder: Any, name: str, *, thread: str = "", wait_s: float = WAIT_S) -> Iterator[Failing]:
    """Makes the next call of ``holder.name`` raise, if a thread makes it whose name begins with `thread`.

    At the end of the block the fault has to be consumed, and told of in the log: once, with its traceback.

    Args:
        holder: An object, a class or a module.
        name: What it calls.
        thread: How the names of the threads begin in which the call raises.
        wait_s: How long to wait for both.
    """
    failing, log = Failing(thread), logging.getLogger("raycollect")
    original, own = getattr(holder, name), name in vars(holder)
    log.addFilter(failing)
    setattr(holder, name, failing.wrap(original))
    try:
        yield failing
        assert failing.consumed.wait(wait_s), f"nothing has come to {name} on a thread {thread!r}"
        assert failing.told.wait(wait_s), "nobody was told of it"
    finally:
        setattr(holder, name, original) if own else delattr(holder, name)
        log.removeFilter(failing)
    (record,) = failing.records
    assert record.levelno == logging.ERROR
    assert str(record.threadName).startswith(thread)


def put_failing(actor_self: Any, where: str, name: str, thread: str) -> None:
    """Does in this actor what `fail_at` does, until `end_failing`; `where` is a class, as ``"module:Class"``."""
    module, _, holder = where.partition(":")
    made = fail_at(getattr(import_module(module), holder), name, thread=thread)
    sys._raycollect_failing = made, made.__enter__()  # type: ignore[attr-defined]


def end_failing(actor_self: Any) -> str:
    """Checks that the fault was consumed, and told of once; gives the name of the thread."""
    made, failing = vars(sys).pop("_raycollect_failing")
    made.__exit__(None, None, None)
    return str(failing.records[0].threadName)
