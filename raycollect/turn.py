"""The communicator of a lane as one call sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from raycollect.contracts import Communicator, Completion, Together
from raycollect.errors import CollectiveTimeoutError, FaultError, PlanAbortedError
from raycollect.model import Kernel, Launch, OpKind

__all__ = ["Turn", "TurnLane"]


class TurnLane(Protocol):
    """What a turn needs of its lane."""

    ranks: tuple[int, ...]

    @property
    def generation(self) -> str:
        """The nonce of its communicator."""
        ...

    def is_off(self) -> bool:
        """Whether the launch that waits at the door has to stop."""
        ...

    def pass_door(self) -> None:
        """Notes that all ranks have come."""
        ...


class Turn:
    """The communicator of a lane as one call sees it: by the group's ranks, within the call's time."""

    def __init__(self, lane: TurnLane, communicator: Communicator, deadline_s: float) -> None:
        self.rank: int = lane.ranks[communicator.rank]
        self.world_size: int = communicator.world_size
        self.device: Any = getattr(communicator, "device", "")  # where it says on which one it works
        self.meeting: str = lane.generation  # what tells its launches from those of other lanes, in timelines
        self._lane = lane
        self._communicator = communicator
        self._deadline_s = deadline_s
        self._is_whole = lane.ranks == tuple(range(len(lane.ranks)))
        self._kernels: dict[int, tuple[Kernel, Kernel]] = {}

    def stage(self, launch: Launch, kernel: Kernel) -> None:
        """See `Communicator.stage`."""
        with self._translated(launch):
            self._communicator.stage(self._at_door(launch), self._mapped(kernel))

    def agree(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """See `Communicator.agree`."""
        if self._lane.is_off():
            raise PlanAbortedError(detail="the others have left")
        with self._translated(launch):
            blobs = self._communicator.agree(self._at_door(launch), arrival)
        self._lane.pass_door()
        return blobs

    def launch(self, launch: Launch, kernel: Kernel) -> Completion:
        """See `Communicator.launch`."""
        with self._translated(launch):
            return self._communicator.launch(self._inside(launch), self._mapped(kernel))

    def launch_together(self, launch: Launch, kernels: Sequence[Kernel]) -> int:
        """See `contracts.Together`."""
        if not isinstance(self._communicator, Together):
            return 0
        with self._translated(launch):
            return self._communicator.launch_together(self._inside(launch), [self._mapped(one) for one in kernels])

    def end(self, launch: Launch, ok: bool) -> tuple[int, ...]:
        """See `Communicator.end`."""
        return tuple(self._lane.ranks[rank] for rank in self._communicator.end(self._inside(launch), ok))

    def abort(self, seq: int) -> None:
        """See `Communicator.abort`."""
        self._communicator.abort(seq)

    def close(self) -> None:
        """Does nothing: the lane closes its communicator."""

    def _inside(self, launch: Launch) -> Launch:
        return launch if self._is_whole else replace(launch, ranks=tuple(range(len(self._lane.ranks))))

    def _at_door(self, launch: Launch) -> Launch:
        left_s = min(launch.timeout_s, max(self._deadline_s - time.monotonic(), 0))
        return replace(self._inside(launch), timeout_s=left_s)

    def _mapped(self, kernel: Kernel) -> Kernel:
        """The kernel by the lane's ranks: the same object each time, for backends that know it again."""
        if self._is_whole or kernel.kind not in (OpKind.SEND, OpKind.RECV):
            return kernel
        known = self._kernels.get(id(kernel))
        if known is None:
            known = self._kernels[id(kernel)] = (kernel, replace(kernel, peer=self._lane.ranks.index(kernel.peer)))
        return known[1]

    def _translated(self, launch: Launch) -> _Translated:
        return _Translated(self._lane.ranks, launch.timeout_s)


class _Translated:
    """Around a use of a lane's communicator: in errors, ranks become the group's and times the call's."""

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
            exc.timeout_s = self._timeout_s
