"""The view that one call of a member has of its communicator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raycollect.core.model import Kernel, Launch, OpKind
from raycollect.core.protocols import Communicator
from raycollect.errors import CollectiveTimeoutError, FaultError, PlanAbortedError, RaycollectError, RefusedError
from raycollect.group.coordinator_client import ActiveCall, CoordinatorClient


class CallCommunicator:
    """A backend's communicator, addressed by the group's ranks and limited to a call's time. Implements `Communicator`.

    Attributes:
        call: The call in progress; set before each call.
        meeting: Distinguishes its launches from those of other communicators in timelines.
    """

    def __init__(self, client: CoordinatorClient, communicator: Communicator) -> None:
        ranks = client.ranks
        self.rank: int = ranks[communicator.rank]
        self.world_size: int = communicator.world_size
        self.device: Any = getattr(communicator, "device", "")  # empty if the backend does not say
        self.meeting: str = client.epoch
        self.call: ActiveCall
        self._client = client
        self._communicator = communicator
        self._everyone = tuple(range(len(ranks)))  # of the communicator's own ranks
        self._is_whole = ranks == self._everyone
        self._kernels: dict[int, tuple[Kernel, Kernel]] = {}

    def agree(
        self, launch: Launch, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Exchanges arrivals, within the rest of the call's time."""
        mapped = kernel if self._is_whole or kernel is None else self._mapped(kernel)
        try:
            brought = self._communicator.agree(self._within_deadline(launch), arrival, mapped, expected)
        except RaycollectError as exc:
            self._translate(exc, launch)
            raise
        self._client.note_agreed(self.call)
        return brought

    def launch(self, launch: Launch, kernels: Sequence[Kernel]) -> None:
        """Runs kernels."""
        try:
            if self._is_whole:
                self._communicator.launch(launch, kernels)
            else:
                self._communicator.launch(self._inside(launch), [self._mapped(kernel) for kernel in kernels])
        except RaycollectError as exc:
            self._translate(exc, launch)
            raise

    def end(self, launch: Launch, ok: bool, owed: Sequence[Kernel] = ()) -> tuple[int, ...]:
        """Ends a launch."""
        if self._is_whole:
            return self._communicator.end(launch, ok, owed)
        mapped = [self._mapped(kernel) for kernel in owed]
        self._kernels.clear()
        return tuple(self._client.ranks[rank] for rank in self._communicator.end(self._inside(launch), ok, mapped))

    def abort(self, seq: int) -> None:
        """Aborts a launch."""
        self._communicator.abort(seq)

    def lost(self, rank: int) -> bool:
        """Does nothing: `GroupCommunicator` tells the backend."""
        return False

    def close(self) -> None:
        """Does nothing: `GroupCommunicator` closes it."""

    def _inside(self, launch: Launch) -> Launch:
        return Launch(seq=launch.seq, ranks=self._everyone, timeout_s=launch.timeout_s)

    def _within_deadline(self, launch: Launch) -> Launch:
        # Limits a launch to the rest of the call's time; raises if the other ranks have left the call.
        if self._client.is_off(self.call):
            raise PlanAbortedError(detail="the other ranks have left the call")
        left_s = min(launch.timeout_s, max(self.call.deadline_s - time.monotonic(), 0))
        return Launch(seq=launch.seq, ranks=self._everyone, timeout_s=left_s)

    def _mapped(self, kernel: Kernel) -> Kernel:
        # Returns the same object each time, for backends that compare identities.
        if self._is_whole or kernel.kind not in (OpKind.SEND, OpKind.RECV):
            return kernel
        entry = self._kernels.get(id(kernel))
        if entry is None:
            entry = self._kernels[id(kernel)] = (kernel, replace(kernel, peer=self._client.ranks.index(kernel.peer)))
        return entry[1]

    def _translate(self, error: RaycollectError, launch: Launch) -> None:
        # Translates an error of the backend's communicator to the group's ranks and the call's time.
        ranks = self._client.ranks
        if isinstance(error, FaultError) and 0 <= error.rank < len(ranks):
            error.rank = ranks[error.rank]
        if isinstance(error, RefusedError) and not self._is_whole:
            error.violations = tuple(
                replace(violation, rank=ranks[violation.rank]) if violation.rank >= 0 else violation
                for violation in error.violations
            )
        if isinstance(error, CollectiveTimeoutError):
            error.missing = tuple(ranks[rank] for rank in error.missing)
            error.within = tuple(ranks[rank] for rank in error.within)
            error.timeout_s = launch.timeout_s
