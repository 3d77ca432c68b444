"""How a lane is formed: the backend's factory at work, and what it works with."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from raycollect.contracts import Communicator
from raycollect.errors import CollectiveTimeoutError, InternalError, PlanAbortedError, RaycollectError
from raycollect.model import GroupSpec, Launch

__all__ = ["FormingLane", "LaneExchange", "LaneRendezvous", "Making"]


class FormingLane(Protocol):
    """What the parts of this room need of their lane."""

    ranks: tuple[int, ...]

    def meet(self, place: str, blob: bytes, timeout_s: float, halted: Callable[[], bool] = ...) -> Sequence[bytes]:
        """Waits at a place of the hub for all ranks of the lane."""
        ...

    def make(self, making: Making, spec: GroupSpec, deadline_s: float) -> Communicator:
        """Runs the backend's factory."""
        ...

    def wait_made(self, making: Making, deadline_s: float) -> bool:
        """Waits for the factory; False where it is in vain."""
        ...

    def wait_value(self, generation: str, name: str, timeout_s: float) -> bytes:
        """Waits for a value of the rendezvous."""
        ...

    def publish(self, generation: str, name: str, value: bytes) -> None:
        """Publishes a value of the rendezvous."""
        ...

    def is_off(self) -> bool:
        """Whether the launch that waits at the door has to stop."""
        ...

    def notify(self) -> None:
        """Lets all waits of the lane look again."""
        ...


class Making:
    """A factory at work. It can't be interrupted everywhere, so it runs in a thread that may be left behind."""

    def __init__(self, lane: FormingLane, generation: str, spec: GroupSpec, deadline_s: float) -> None:
        self.generation = generation
        self.settled: bool = False
        self._lane = lane
        self._spec = spec
        self._deadline_s = deadline_s
        self._made: Communicator | None = None
        self._error: BaseException | None = None
        self._left = False
        self._lock = threading.Lock()
        threading.Thread(target=self._make, name="raycollect-form", daemon=True).start()

    def wait(self) -> Communicator | None:
        """Waits for the communicator; None where another rank gave up meanwhile."""
        try:
            there = self._lane.wait_made(self, self._deadline_s)
        except RaycollectError:
            self._leave()
            raise
        if not there or isinstance(self._error, PlanAbortedError):
            self._leave()
            return None
        if self._error is not None:
            raise self._error
        return self._made

    def _leave(self) -> None:
        with self._lock:
            self._left = True
            made = self._made
        if made is not None:
            made.close()

    def _make(self) -> None:
        made: Communicator | None = None
        try:
            made = self._lane.make(self, self._spec, self._deadline_s)
        except RaycollectError as exc:
            self._error = exc
        except Exception as exc:  # noqa: BLE001 - the library is not ours
            self._error = InternalError(detail=f"forming the group failed: {type(exc).__name__}: {exc}")
        with self._lock:
            self._made = made
            left = self._left
        if left and made is not None:
            made.close()
        self.settled = True
        self._lane.notify()


class LaneRendezvous:
    """The `Rendezvous` of one generation of a lane."""

    def __init__(self, lane: FormingLane, generation: str, deadline_s: float) -> None:
        self._lane = lane
        self._generation = generation
        self.deadline_s = deadline_s

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value to all ranks of the lane."""
        self._lane.publish(self._generation, name, value)

    def get(self, name: str, timeout_s: float) -> bytes:
        """Waits for a value, but no longer than the call that forms the lane does."""
        return self._lane.wait_value(self._generation, name, min(timeout_s, self.deadline_s - time.monotonic()))


class LaneExchange:
    """The `Exchange` of one generation of a lane: doors at the hub."""

    def __init__(self, lane: FormingLane, generation: str) -> None:
        self._lane = lane
        self._generation = generation
        self._round: tuple[int, int] = (0, 0)
        self._aborted = 0

    def __call__(self, launch: Launch, arrival: bytes) -> Sequence[bytes]:
        """Gives one's arrival and waits for everybody's; see `Exchange`."""
        seq, turn = self._round
        turn = turn + 1 if seq == launch.seq else 0
        self._round = (launch.seq, turn)
        place = f"door {self._generation}/{launch.seq}/{turn}"
        lane = self._lane
        try:
            return lane.meet(place, arrival, launch.timeout_s, lambda: lane.is_off() or self._aborted >= launch.seq)
        except CollectiveTimeoutError as exc:  # communicators speak of the lane's ranks, the hub of the group's
            exc.missing = tuple(map(lane.ranks.index, exc.missing))
            raise
        except RaycollectError as exc:
            raise PlanAbortedError(detail="aborted at the door") from exc

    def abort(self, seq: int) -> None:
        """Wakes whoever waits in this launch, or will."""
        self._aborted = max(self._aborted, seq)
        self._lane.notify()
