"""Memory that other ranks may still use after a failed launch, kept until all of them have left the launch."""

from __future__ import annotations

from typing import Any

from raycollect.backends.shm.meeting import Meeting
from raycollect.core.model import Launch

# Lent objects, the words of the ranks that may still use them, and where these stand
_Loan = tuple[Any, dict[int, int], Meeting]
_Loans = dict[int, _Loan]  # By their ids: so that each is put in and taken out by itself, whatever other threads do

forsaken: _Loans = {}
"""What closed communicators of this process had lent."""


class Loans:
    """What one communicator has lent; used by one thread at a time."""

    def __init__(self) -> None:
        self.lent: _Loans = {}

    def add(self, lent: Any, meeting: Meeting, launch: Launch) -> None:
        """Keeps what the other ranks of a launch may use."""
        loan = lent, meeting.closing(launch), meeting
        self.lent[id(loan)] = loan

    def recall(self) -> None:
        """Releases what nobody uses any more, also of closed communicators."""
        for loans in (self.lent, forsaken):
            for key, (_, words, meeting) in tuple(loans.items()):
                if not meeting.owing(words):
                    loans.pop(key, None)

    def forsake(self) -> None:
        """Leaves it to the other communicators of this process to release."""
        forsaken.update(self.lent)
        self.lent.clear()
        self.recall()
