"""Memory that other ranks may still use after a failed launch, held until all of them have left the launch."""

from __future__ import annotations

from typing import Any

from raycollect.backends.shm.meeting import Meeting
from raycollect.core.model import Launch

# Lent objects, the words of the ranks that may still use them, and the meeting that has these words
_Loan = tuple[Any, dict[int, int], Meeting]
_Loans = dict[int, _Loan]  # By their ids: each is added and removed atomically

abandoned: _Loans = {}
"""Loans of closed communicators of this process."""


class Loans:
    """The loans of one communicator; used by one thread at a time."""

    def __init__(self) -> None:
        self.lent: _Loans = {}

    def add(self, lent: Any, meeting: Meeting, launch: Launch) -> None:
        """Holds memory that the other ranks of a launch may use."""
        loan = lent, meeting.closing(launch), meeting
        self.lent[id(loan)] = loan

    def release_unused(self) -> None:
        """Releases memory that no rank uses any more, also that of closed communicators."""
        for loans in (self.lent, abandoned):
            for key, (_, words, meeting) in tuple(loans.items()):
                if not meeting.owing(words):
                    loans.pop(key, None)

    def abandon(self) -> None:
        """Hands the loans to the other communicators of this process, which release them."""
        abandoned.update(self.lent)
        self.lent.clear()
        self.release_unused()
