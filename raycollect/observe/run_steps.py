"""At which step each plan, or run of a captured step, of this process is now.

Every thread has one slot. What runs there writes its step to it by one assignment; whoever asks makes the words.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from raycollect.core import kernel_progress

# Steps before the kernels. In the last one a rank waits for others; in the others it has not come to them yet.
BEGINS = "begins"
BEHIND_METHODS = "waits for the methods before it"
FOR_AN_OPERAND = "waits for an operand's method"
IN_CHECK = "in the consistency check"

MOST_CALLS = 6
"""How many calls of a bundle are named."""


class Action(Protocol):
    """One of the actions of a captured step."""

    step: int  # the place of its first call among all calls of the step
    is_method: bool  # whether it calls a method of the user

    def words(self) -> str:
        """The action, for a person."""


class RunStep:
    """Where the run of one thread is. That thread writes it; others only read it."""

    __slots__ = ("__weakref__", "action", "at", "kernels", "number")

    def __init__(self) -> None:
        # The number of the plan or run, set after what else belongs to it; 0: none runs here
        self.number: int = 0
        self.action: Action | None = None  # what a captured step does now; None: it is a plan
        # Words, or what makes them from the place of the first call and whether calls are named
        self.at: str | Callable[[int, bool], str] = ""
        self.kernels: kernel_progress.KernelProgress = kernel_progress.here()  # how far its kernels are

    def words(self) -> str:
        """Where it is, for a person; any thread may call it."""
        action, at = self.action, self.at
        told = "" if action is None else action.words()
        if action is not None and action.is_method:
            return told
        place = at if isinstance(at, str) else at(0 if action is None else action.step, action is None)
        return ", ".join(filter(None, (told, place))) or BEGINS


_local: threading.local = threading.local()
_all: weakref.WeakValueDictionary[int, RunStep] = weakref.WeakValueDictionary()  # by thread, as long as that lives


def here() -> RunStep:
    """The slot of this thread."""
    try:
        step: RunStep = _local.step
    except AttributeError:
        step = _local.step = _all[threading.get_ident()] = RunStep()
    return step


def steps() -> dict[int, str]:
    """Number of each plan or run that is under way in this process -> its step in words."""
    found: dict[int, str] = {}
    living = [one() for one in _all.valuerefs()]  # a loop over the values would fail if a thread began meanwhile
    for step in filter(None, living):
        number = step.number
        if number:
            words = step.words()
            if step.number == number:  # else it has gone on meanwhile
                found[number] = words
    return found


def calls(numbers: Sequence[int]) -> str:
    """Calls in words: ``"calls 0, 1, 2"``."""
    some = sorted(numbers)[:MOST_CALLS]
    more = f" and {len(numbers) - len(some)} more" if len(numbers) > len(some) else ""
    return f"call{'s' * (len(numbers) > 1)} {', '.join(map(str, some))}{more}"
