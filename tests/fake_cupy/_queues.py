"""Streams as the machine sees them: what is enqueued, and what comes before what."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ._machine import Machine
    from ._memory import Block


class Work:
    """What can be enqueued.

    Attributes:
        name: What it is, for violations.
        blocks: The allocations that it touches.
    """

    def __init__(
        self, name: str, run: Callable[[], None] | None, blocks: Sequence[Block] = (), keep: Any = None
    ) -> None:
        self.name = name
        self.blocks = blocks
        self._run = run
        self._keep = keep  # owners of foreign memory, which has to be there until the work has run

    def issue(self, item: Item) -> None:
        """Is told, under the lock, that an item of it is about to be enqueued."""

    def start(self, machine: Machine, item: Item) -> bool:
        """Runs it; False: somebody else will call `Machine.finish`."""
        if self._run is None:
            return True
        dead = [block for block in self.blocks if block.dead]
        if dead:
            machine.violate(f"{self.name} on {item.queue} touches {dead[0]}, which was freed")
            return True
        try:
            with np.errstate(all="ignore"):
                self._run()
        except Exception as exc:
            machine.violate(f"{self.name} on {item.queue} raised {exc!r}")
        return True


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a queue: all that was enqueued so far; `clock` tells what comes before it, elsewhere too."""

    queue: Queue
    number: int
    clock: dict[Queue, int]

    @property
    def passed(self) -> bool:
        return self.queue.finished >= self.number


@dataclass(slots=True)
class Item:
    """Work in a queue."""

    queue: Queue
    work: Work
    number: int
    after: list[Mark]
    state: Any = None


class Queue:
    """A stream, as the machine sees it.

    Attributes:
        clock: By queue, the number up to which its items come before whatever is enqueued here next.
        dying: Memory that is gone once a number has passed here, and what else has to pass first.
    """

    def __init__(self, device: int, handle: int, *, blocking: bool) -> None:
        self.device = device
        self.handle = handle
        self.blocking = blocking
        self.items: deque[Item] = deque()
        self.issued = 0
        self.finished = 0
        self.clock: dict[Queue, int] = {}
        self.dying: list[tuple[int, list[Mark], Block]] = []
        self.busy = False
        self.held = False
        self.destroyed = False
        self.priority = 0.0

    def __repr__(self) -> str:
        return f"stream {self.handle:#x} of device {self.device}"

    @property
    def ready(self) -> bool:
        """Tells whether its next item could be run now."""
        if self.busy or self.held or not self.items:
            return False
        return all(mark.passed for mark in self.items[0].after)

    def mark(self) -> Mark:
        return Mark(self, self.issued, {**self.clock, self: self.issued})

    def fences(self, other: Queue) -> bool:
        """Tells whether the two wait for each other, as the legacy default stream and a blocking one do."""
        return (
            self is not other
            and self.device == other.device
            and self.blocking
            and other.blocking
            and 0 in (self.handle, other.handle)
        )


def merge(clock: dict[Queue, int], other: dict[Queue, int]) -> None:
    """Adds to a clock what another one knows."""
    for queue, number in other.items():
        if clock.get(queue, 0) < number:
            clock[queue] = number
