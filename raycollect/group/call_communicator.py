"""A member communicator as one call sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raycollect.core.model import Kernel, Launch, OpKind
from raycollect.core.protocols import Communicator, Completion, Together
from raycollect.errors import CollectiveTimeoutError, FaultError, PlanAbortedError
from raycollect.group.hub_client import HubClient


class CallCommunicator:
    """A backend's communicator by the group's ranks, within the call's time. Methods are those of `Communicator`."""

    def __init__(self, hub: HubClient, communicator: Communicator, deadline_s: float) -> None:
        self.rank: int = hub.ranks[communicator.rank]
        self.world_size: int = communicator.world_size
        self.device: Any = getattr(communicator, "device", "")  # where it says on which one it works
        self.meeting: str = hub.generation  # what tells its launches from those of other communicators in timelines
        self._hub = hub
        self._communicator = communicator
        self._deadline_s = deadline_s
        self._everyone = tuple(range(len(hub.ranks)))  # of the communicator's own ranks
        self._is_whole = hub.ranks == self._everyone
        self._kernels: dict[int, tuple[Kernel, Kernel]] = {}

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """Stages a kernel."""
        with self._translated(launch):
            self._communicator.stage(self._within_deadline(launch), self._mapped(kernel))

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Exchanges arrivals."""
        if self._hub.is_off():
            raise PlanAbortedError(detail="the other ranks have left the call")
        with self._translated(launch):
            blobs = self._communicator.agree(self._within_deadline(launch), arrival)
        self._hub.note_agreed()
        return blobs

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """Launches a kernel."""
        with self._translated(launch):
            return self._communicator.launch(self._inside(launch), self._mapped(kernel))

    def launch_together(self, launch: Launch, kernels: Sequence[Kernel]) -> int:
        """Launches kernels as one, where the backend can; see `protocols.Together`."""
        if not isinstance(self._communicator, Together):
            return 0
        with self._translated(launch):
            return self._communicator.launch_together(self._inside(launch), [self._mapped(one) for one in kernels])

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """Ends a launch."""
        return tuple(self._hub.ranks[rank] for rank in self._communicator.end(self._inside(launch), ok))

    def abort(self, seq: int) -> None:
        """Aborts a launch."""
        self._communicator.abort(seq)

    def close(self) -> None:
        """Does nothing: `MemberCommunicator` closes it."""

    def _inside(self, launch: Launch) -> Launch:
        return launch if self._is_whole else replace(launch, ranks=self._everyone)

    def _within_deadline(self, launch: Launch) -> Launch:
        left_s = min(launch.timeout_s, max(self._deadline_s - time.monotonic(), 0))
        return Launch(seq=launch.seq, ranks=self._everyone, timeout_s=left_s)

    def _mapped(self, kernel: Kernel) -> Kernel:
        # The same object each time, for backends that recognise it.
        if self._is_whole or kernel.kind not in (OpKind.SEND, OpKind.RECV):
            return kernel
        known = self._kernels.get(id(kernel))
        if known is None:
            known = self._kernels[id(kernel)] = (kernel, replace(kernel, peer=self._hub.ranks.index(kernel.peer)))
        return known[1]

    def _translated(self, launch: Launch) -> _Translated:
        return _Translated(self._hub.ranks, launch.timeout_s)


class _Translated:
    """Translates errors of the backend's communicator: to the group's ranks and the call's time."""

    __slots__ = ("_ranks", "_timeout_s")

    def __init__(self, ranks: tuple[int, ...], timeout_s: float) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if isinstance(exc, FaultError) and 0 <= exc.rank < len(self._ranks):
            exc.rank = self._ranks[exc.rank]
        if isinstance(exc, CollectiveTimeoutError):
            exc.missing = tuple(self._ranks[rank] for rank in exc.missing)
            exc.within = tuple(self._ranks[rank] for rank in exc.within)
            exc.timeout_s = self._timeout_s
