"""A system whose threads run where they are put: tests of who waits on which core, on any machine."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Hashable
from types import ModuleType

import pytest

import raycollect.core.cpu_affinity


class Cores:
    """Cores, and who is on them.

    Attributes:
        mask: Where those may go whom nobody has restricted.
        masks: Where the others may go.
        at: Where each is, counted from 0.
        moves: What masks were set, in order.
        who: Who is running; None: the thread that asks.
        refuses: Whether no mask can be set.
    """

    def __init__(self, mask: set[int]) -> None:
        self.mask = mask
        self.masks: dict[Hashable, set[int]] = {}
        self.at: dict[Hashable, int] = {}
        self.moves: list[set[int]] = []
        self.who: Hashable = None
        self.refuses = False

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Cores:
        """Takes the place of the real system, also for modules that have imported `current_core`."""
        for module in (raycollect.core.cpu_affinity, *modules):
            monkeypatch.setattr(module, "current_core", self.current)
        monkeypatch.setattr(os, "sched_getaffinity", self.get_mask)
        monkeypatch.setattr(os, "sched_setaffinity", self.set_mask)
        return self

    def current(self) -> int:
        return self.at[self._me] + 1

    def get_mask(self, pid: int) -> set[int]:
        assert pid == 0
        return set(self.masks.get(self._me, self.mask))

    def set_mask(self, pid: int, mask: set[int]) -> None:
        assert pid == 0
        if self.refuses:
            raise OSError(errno.EINVAL, "these cores are gone")
        self.moves.append(set(mask))
        self.masks[self._me] = set(mask)
        if self.at[self._me] not in mask:
            self.at[self._me] = min(mask)

    @property
    def _me(self) -> Hashable:
        return threading.get_ident() if self.who is None else self.who
