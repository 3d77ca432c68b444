"""The launches of one program under way: which one is open, and how an abort reaches it.

A program begins its launches in ascending order; the first is that of the agreement. One is open at a time: it is ended
when the next one begins, or when the program ends, whatever happened.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raycollect.core.model import Kernel, Launch
from raycollect.core.protocols import Communicator, Exchange, Forsaking
from raycollect.engine.device_staging import Patience
from raycollect.errors import GroupBrokenError, PlanAbortedError
from raycollect.planner import Program

_Open = tuple[Communicator, Launch]


@dataclass(slots=True, eq=False)
class LaunchSequence:
    """The launches of one run of a program."""

    program: Program
    communicators: Callable[[str], Communicator]  # group id -> this participant's end of that group
    exchange: Exchange | None  # how the participants meet where they have no group in common
    seq: int  # the number of the first launch
    aborted: Callable[[], str | None]  # why the plan was aborted, or None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _number: int = 0  # of the latest launch, counted from the first
    opened: _Open | None = None  # the communicator and its launch; None: the controller carries the agreement
    _wakes: Callable[[int], None] | None = None  # of what is open

    def patience(self) -> Patience:
        """What ends a wait for a device."""
        return Patience(self.aborted, self.program.timeout_s)

    def begin(self) -> None:
        """Opens the launch of the agreement; raises GroupBrokenError where this participant has no such group."""
        agreement = self.program.agreement
        if agreement.group_id:
            communicator = self.communicators(agreement.group_id)
            with self._lock:
                self.opened, self._wakes = (communicator, self._launch()), communicator.abort
        elif self.exchange is None:
            raise GroupBrokenError(group_name="", detail="the participants have no group in common, and no controller")
        else:
            with self._lock:
                self._wakes = self.exchange.abort

    def meet(self, arrival: bytes) -> tuple[bytes, ...]:
        """Brings an arrival to the agreement, and waits for those of all.

        Raises:
            PlanAbortedError: The plan was aborted.
            CollectiveTimeoutError: Not all came in time.
        """
        self._check()
        if self.opened is not None:
            communicator, agreement = self.opened
            blobs = communicator.agree(agreement, arrival)
        else:
            assert self.exchange is not None  # `begin` has checked it
            blobs = self.exchange(self._launch(), arrival)
        return tuple(map(bytes, blobs))

    def again(self, kernel: Kernel | None, arrival: bytes, expected: tuple[bytes, ...]) -> tuple[bytes, ...] | None:
        """As `meet`, where all should bring what they did last time; the backend may prepare a kernel.

        Returns:
            None where they did; else what they brought.

        Raises:
            RefusedError: The kernel can't be prepared; nothing was brought.
        """
        opened = self.opened
        if opened is None or kernel is None:
            blobs = self.meet(arrival)
            return None if blobs == expected else blobs
        self._check()
        return meet_again(*opened, kernel, arrival, expected)

    def at(self, number: int, group_id: str, ranks: Sequence[int]) -> _Open:
        """Returns the communicator of a launch, after all have begun it.

        `number` is not below that of the open launch.

        Raises:
            PlanAbortedError: The plan was aborted.
            GroupBrokenError: This participant has no such group.
            CollectiveTimeoutError: Not all came in time.
        """
        if number == self._number and self.opened is not None:
            return self.opened
        communicator = self.communicators(group_id)
        program = self.program
        launch = Launch(seq=self.seq + number, ranks=tuple(ranks), timeout_s=program.timeout_s)
        # The others may be busy with all that comes before, each part of which has its own limit: whoever is late there
        # is found there, and the controller ends the plan for all.
        before = number + (len(program.everyone) or len(program.tasks))
        patient = replace(launch, timeout_s=program.timeout_s * (1 + before))
        self._close(ok=True)
        with self._lock:  # an abort comes either before, and is seen here, or after, and finds the launch
            self._check()
            self._number = number
            opened = self.opened = communicator, launch
            self._wakes = communicator.abort
        communicator.agree(patient, b"")
        return opened

    def commit(self) -> None:
        """Waits until the controller has heard that all have come so far.

        The controller alone decides: once it has told one of them to go on it tells all, and aborts none.

        Raises:
            PlanAbortedError: The plan was aborted; so it is for all.
            CollectiveTimeoutError: Not all came in time.
        """
        exchange, program = self.exchange, self.program
        assert exchange is not None  # whoever runs a program that commits has given it
        ranks = tuple(range(len(program.agreement.ranks)))
        patient = program.timeout_s * (2 + self._number)  # the others may be busy with what comes before
        with self._lock:
            self._check()
            wake, self._wakes = self._wakes, exchange.abort
        exchange(Launch(seq=self.seq, ranks=ranks, timeout_s=patient), b"")
        with self._lock:
            self._wakes = wake

    def forsake(self, kernels: Sequence[Kernel]) -> None:
        """Tells the backend that others may wait in kernels of the open launch that this rank will not end."""
        opened = self.opened
        if kernels and opened is not None and isinstance(opened[0], Forsaking):
            opened[0].forsake(opened[1], kernels)

    def end(self, *, ok: bool) -> tuple[int, ...]:
        """Ends the open launch.

        Returns:
            The places of those who are known to have run all of their programs; empty where others may have more to do.
        """
        ranks = self._close(ok=ok)
        return () if self._number else self.program.places_of(ranks)

    def abort(self) -> None:
        """Wakes this participant if it waits in a launch, once `aborted` says why; any thread may call it."""
        with self._lock:
            wake, seq = self._wakes, self.seq + self._number
        if wake is not None:
            wake(seq)

    def _launch(self) -> Launch:
        return Launch(seq=self.seq, ranks=self.program.agreement.ranks, timeout_s=self.program.timeout_s)

    def _close(self, *, ok: bool) -> tuple[int, ...]:
        with self._lock:
            opened, self.opened, self._wakes = self.opened, None, None
        return () if opened is None else opened[0].end(opened[1], ok)

    def _check(self) -> None:
        reason = self.aborted()
        if reason is not None:
            raise PlanAbortedError(detail=reason)


def meet_again(
    communicator: Communicator, launch: Launch, kernel: Kernel, arrival: bytes, expected: tuple[bytes, ...]
) -> tuple[bytes, ...] | None:
    """Prepares a kernel and meets the others, the short way where the backend has one (`protocols.Again`).

    Returns:
        None where all brought what is expected; else what they brought.

    Raises:
        RefusedError: The kernel can't be prepared; nothing was brought.
        PlanAbortedError, CollectiveTimeoutError: As `Communicator.agree`.
    """
    again: Any = getattr(communicator, "again", None)  # `isinstance` with a protocol takes longer
    if again is not None:
        found = again(launch, kernel, arrival, expected)
        return None if found is None else tuple(map(bytes, found))
    communicator.stage(launch, kernel)
    blobs = tuple(map(bytes, communicator.agree(launch, arrival)))
    return None if blobs == expected else blobs
