"""The current step of each plan, or run of a captured step, of this process.

Every thread has one slot. The run writes its step to the slot by one assignment; readers format the text.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from raycollect.core import kernel_progress

# Steps before the kernels. In the last step a rank waits for others.
BEGINS = "begins"
BEHIND_METHODS = "waits for the methods before it"
FOR_AN_OPERAND = "waits for an operand's method"
IN_CHECK = "in the consistency check"
# The step after the kernels, or after a failure
ENDS = "ends"

MOST_CALLS = 6
"""How many calls of a bundle are listed."""


class Action(Protocol):
    """One of the actions of a captured step."""

    step: int  # the index of its first call among all calls of the step
    is_method: bool  # whether it calls a method of the user

    def words(self) -> str:
        """Returns the action as text."""


class RunStep:
    """The progress of the run of one thread. That thread writes it; others only read it."""

    __slots__ = ("__weakref__", "action", "at", "kernels", "number")

    def __init__(self) -> None:
        # The number of the plan or run, set after the other fields; 0: none runs here
        self.number: int = 0
        self.action: Action | None = None  # the current action of a captured step; None: it is a plan
        # The text, or a function that makes it from the index of the first call and whether calls are listed
        self.at: str | Callable[[int, bool], str] = ""
        self.kernels: kernel_progress.KernelProgress = kernel_progress.here()  # the progress of its kernels

    def words(self) -> str:
        """Returns the progress as text; any thread may call it."""
        action, at = self.action, self.at
        action_words = "" if action is None else action.words()
        if action is not None and action.is_method:
            return action_words
        place = at if isinstance(at, str) else at(0 if action is None else action.step, action is None)
        return ", ".join(filter(None, (action_words, place))) or BEGINS


_local: threading.local = threading.local()
_all: weakref.WeakValueDictionary[int, RunStep] = weakref.WeakValueDictionary()  # by thread, while it lives


def here() -> RunStep:
    """Returns the slot of this thread."""
    try:
        step: RunStep = _local.step
    except AttributeError:
        step = _local.step = _all[threading.get_ident()] = RunStep()
    return step


def steps() -> dict[int, str]:
    """Returns the number of each plan or run of this process -> its step as text."""
    running: dict[int, str] = {}
    living = [ref() for ref in _all.valuerefs()]  # a loop over the values would fail if a thread began meanwhile
    for step in filter(None, living):
        number = step.number
        if number:
            words = step.words()
            if step.number == number:  # else the run has ended meanwhile
                running[number] = words
    return running


def calls(numbers: Sequence[int]) -> str:
    """Returns calls as text: ``"calls 0, 1, 2"``."""
    some = sorted(numbers)[:MOST_CALLS]
    more = f" and {len(numbers) - len(some)} more" if len(numbers) > len(some) else ""
    return f"call{'s' * (len(numbers) > 1)} {', '.join(map(str, some))}{more}"
