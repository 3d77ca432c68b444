"""A communicator's end of its coordinator: meetings, rendezvous values, and the state that messages change.

Ranks are in step while they number launches alike. The states:

===========  =========================================================  ==============================================
state        meaning                                                    left by
===========  =========================================================  ==============================================
OUT_OF_STEP  the ranks have to meet before the next launch: no launch   a call that starts forming: FORMING
             has begun yet, or a rank has left a launch early
FORMING      the ranks meet, and make the backend's communicators       all have met: OK; a rank leaves: OUT_OF_STEP
OK           launches are numbered from the last meeting on             a rank leaves a launch early: OUT_OF_STEP
BROKEN       a rank has died or departed, or this process has left      final
===========  =========================================================  ==============================================

The meeting begins an *epoch*, which is named by the nonce of the lowest rank. Messages of another epoch are ignored.
"""

from __future__ import annotations

import enum
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from raycollect.channel.messages import Drop, Meet, Message, Met, Publish, Withdraw
from raycollect.core.codec import Codec
from raycollect.errors import (
    CollectiveTimeoutError,
    ConnectionLostError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    copy_error,
    from_wire,
)
from raycollect.group.coordinator import PLANS, ranks_of
from raycollect.group.group_member import GroupMember

_ANSWER_S = 5.0
"""How long the coordinator may take to answer, in seconds. After that it counts as dead."""
CAUSE_S = 2.0
"""How long to wait for the coordinator to send the cause of a failure, in seconds."""

FORM, MADE, CHECK = "form", "made", "check"
"""The places of a call: forming the communicator; waiting until all ranks have one (followed by the epoch); in a
launch."""


class CommunicatorState(enum.Enum):
    """The state of a communicator; see the module's table."""

    OUT_OF_STEP = "out of step"
    FORMING = "forming"
    OK = "ok"
    BROKEN = "broken"


class RankPosition(NamedTuple):
    """The progress of a rank: the epoch, or the place at which it waits; and its last launch."""

    place: str
    seq: int

    def has_reached(self, other: RankPosition) -> bool:
        """Whether this position is the other rank's, or a later one."""
        return self.place == other.place and self.seq >= other.seq


class Presence(NamedTuple):
    """The value of a rank in the meeting that begins an epoch."""

    nonce: str
    made_in: str  # the epoch of the backend's communicator that the rank still has; empty: none
    seq: int  # the last launch on that communicator


PRESENCES = Codec[Presence](Presence, "presence of a rank")


class ActiveCall:
    """A call in progress: its operation, its deadline (by `time.monotonic`) and its state."""

    __slots__ = ("agreed", "deadline_s", "final", "number", "op", "place", "restarts", "since_s", "stop")

    def __init__(self, number: int, op: str, since_s: float, timeout_s: float) -> None:
        self.number: int = number
        self.op: str = op
        self.since_s: float = since_s
        self.deadline_s: float = since_s + timeout_s
        self.place: str = ""  # `FORM`, `MADE` with the epoch, `CHECK`; or another meeting; empty: nowhere
        self.agreed: bool = False  # whether all ranks have arrived at the agreement of the launch in progress
        self.restarts: bool = False  # whether the attempt in progress has to be abandoned and repeated
        self.stop: RaycollectError | None = None  # the error that the call has to raise
        self.final: bool = False  # whether the coordinator does not answer any more


class CoordinatorClient:
    """The state of one communicator, and its messages. `lock` guards all attributes; `changed` notifies of changes.

    The coordinator's thread calls `answered`, `left`, `published`, `stop` and `fail`; the call's thread calls the rest.
    """

    def __init__(self, member: GroupMember, name: str) -> None:
        self.name = name
        self.member = member
        self.ranks: tuple[int, ...] = ranks_of(name, member.spec.world_size)
        self.lock: threading.RLock = threading.RLock()
        self.changed: threading.Condition = threading.Condition(self.lock)
        self.state: CommunicatorState = CommunicatorState.OUT_OF_STEP
        self.broken: RaycollectError | None = None  # the reason for BROKEN
        self.epoch: str = ""
        self.made_in: str = ""  # the epoch of the backend's communicator of this rank; empty: none
        self.seq: int = 0  # the last launch of the epoch
        self.formed: bool = False  # whether all ranks had a communicator in this epoch, and this rank has not left
        self.cause: tuple[int, RaycollectError] | None = None  # the rank that has left the epoch, and its error
        self.call: ActiveCall | None = None  # the call in progress
        self.values: dict[str, bytes] = {}  # of the rendezvous of this epoch
        if name == PLANS:  # all members join at the same time, and once
            self.state, self.epoch = CommunicatorState.FORMING, member.spec.group_id
        self._numbers = itertools.count(1)  # of calls and meetings
        self._meeting = 0
        self._answer: Met | None = None

    def begin(self, op: str, since_s: float, timeout_s: float) -> ActiveCall:
        """Begins a call; the caller holds the lock."""
        self.call = call = ActiveCall(next(self._numbers), op, since_s, timeout_s)
        return call

    @property
    def number(self) -> int:
        """The number of the call in progress; 0: none."""
        call = self.call
        return 0 if call is None else call.number

    @property
    def position(self) -> RankPosition:
        """The position of this rank."""
        with self.lock:
            if self.formed:
                return RankPosition(self.epoch, self.seq)
            return RankPosition(self.call.place if self.call is not None else "", 0)

    def is_off(self, call: ActiveCall) -> bool:
        """Whether a launch that waits in its agreement has to stop."""
        return self.state is not CommunicatorState.OK or call.restarts or call.stop is not None

    def note_agreed(self, call: ActiveCall) -> None:
        """Notes that all ranks have arrived; from then on another thread can't restart the attempt.

        Raises:
            PlanAbortedError: The attempt has to restart. No kernel may begin.
        """
        with self.lock:
            call.agreed = True
            if call.restarts:
                raise PlanAbortedError(detail="aborted while the last rank arrived")

    def notify(self) -> None:
        """Wakes all waits of this communicator."""
        with self.lock:
            self.changed.notify_all()

    # ------------------------------------------------------------------------------------------ meetings

    def meet(
        self, call: ActiveCall, place: str, blob: bytes, timeout_s: float, halted: Callable[[], bool] = lambda: False
    ) -> Sequence[bytes]:
        """Waits at a place of the coordinator for all ranks, which name the same place; returns their values.

        `halted` returns whether to stop waiting; it is called under the lock.

        Raises:
            CollectiveTimeoutError: A rank has timed out; the error names the missing ranks.
            PlanAbortedError: `halted` returned True.
            RaycollectError: The call's error.
        """
        number = self._begin_meeting(call, place)

        def over() -> bool:
            return self._answer is not None or call.stop is not None or halted()

        meet = Meet(group_id=self.member.spec.group_id, communicator=self.name, place=place, call=number, blob=blob)
        try:
            self.send(meet)
            with self.lock:
                timed_out = not self.changed.wait_for(over, max(timeout_s, 0))
                pending = self._answer is None
            if pending:
                self._withdraw(call, number, timed_out=timed_out)
        except RaycollectError:  # the coordinator has ended
            raise
        except BaseException:  # a signal: the other ranks must not meet a rank that has left
            with suppress(RaycollectError):
                self._withdraw(call, number, timed_out=False)
            raise
        finally:
            with self.lock:
                self._meeting, answer, stop = 0, self._answer, call.stop
        if answer is not None and answer.blobs:
            self.member.flush()
            return answer.blobs
        if stop is not None:
            raise copy_error(stop)
        if answer is None:
            raise CollectiveTimeoutError(detail="the coordinator (the driver, or rank 0) does not answer")
        if timed_out or not halted():
            raise CollectiveTimeoutError(missing=tuple(answer.missing))
        raise PlanAbortedError(detail="the other ranks have left the call")

    def _begin_meeting(self, call: ActiveCall, place: str) -> int:
        with self.lock:
            self._meeting = next(self._numbers)
            call.place, self._answer = place, None
            return self._meeting

    def _withdraw(self, call: ActiveCall, number: int, *, timed_out: bool) -> None:
        group_id = self.member.spec.group_id
        self.send(Withdraw(group_id=group_id, communicator=self.name, call=number, timed_out=timed_out))
        with self.lock:
            self.changed.wait_for(lambda: self._answer is not None or call.final, _ANSWER_S)

    def answered(self, message: Met) -> None:
        """Handles the coordinator's answer to `Meet`."""
        with self.lock:
            call = self.call
            if message.call != self._meeting or call is None:
                return
            self._answer = message
            # In this thread rather than the call's, so that later messages match the epoch.
            if message.blobs and call.place == FORM:
                self._enter([PRESENCES.decode(blob) for blob in message.blobs])
            elif message.blobs and call.place.startswith(MADE):
                self._in_step()
            self.changed.notify_all()

    def _enter(self, ranks: Sequence[Presence]) -> None:
        """Begins an epoch: the ranks keep their backend's communicators, or have to make new ones."""
        self.epoch, self.cause, self.values = ranks[0].nonce, None, {}
        self.seq = max([presence.seq for presence in ranks])
        if ranks[0].made_in and len({presence.made_in for presence in ranks}) == 1:
            self._in_step()
        else:
            self.made_in, self.seq = "", 0

    def _in_step(self) -> None:
        if self.state is CommunicatorState.FORMING:
            self.state, self.formed = CommunicatorState.OK, True

    def send(self, message: Message) -> None:
        """Sends a message to the coordinator; if the coordinator has ended, raises the call's error."""
        try:
            self.member.send(message)
        except ConnectionLostError as exc:
            with self.lock:
                call = self.call
                if call is None:
                    raise
                self.changed.wait_for(lambda: call.stop is not None, CAUSE_S)  # a more specific error
                raise copy_error(call.stop or exc) from None

    # ------------------------------------------------------------------------------------------ other ranks

    def left(self, message: Drop, *, sees: bool) -> bool:
        """Handles `Drop`: another rank has left a launch. Returns whether this rank's launch has to be aborted.

        A rank that is ahead has completed this launch; a rank that is behind has not arrived at it. `sees`: the backend
        itself knows what the other rank has not done, so kernels after the agreement continue.
        """
        error = from_wire(message.error)
        if isinstance(error, KernelError) and error.rank < 0:
            error.rank = message.rank
        with self.lock:
            if message.epoch != self.epoch:
                return False
            self.cause = message.rank, error
            if self.state is not CommunicatorState.BROKEN:
                self.state = CommunicatorState.OUT_OF_STEP
            self.changed.notify_all()
            call = self.call
            if call is None:
                return False
            # A rank that has met the other ranks is about to begin its first launch.
            mine = self.seq + call.place.startswith((FORM, MADE))
            same = not self.formed or message.seq in (0, mine)
            waits = bool(call.place) and not call.agreed
            begins_again = isinstance(error, PlanAbortedError)  # the other rank meets this rank again
            if waits and same and not begins_again and self.member.rank not in getattr(error, "missing", ()):
                call.stop = call.stop or error
            return (same or (waits and message.seq < self.seq)) and not (call.agreed and sees)

    def stop(self, error: RaycollectError, number: int = 0) -> bool:
        """Ends the call in progress with an error. With a `number`, only that call, and only before all ranks agreed.

        Returns whether a call has to end. Without a number, the coordinator does not answer any more.
        """
        with self.lock:
            call = self.call
            if call is None or (number and (number != call.number or call.agreed)):
                return False
            if self._meeting and self._answer is not None and not self._answer.blobs:
                return False  # the call ends by that answer, the cause of this error
            call.stop, call.final = call.stop or error, call.final or not number
            self.changed.notify_all()
            return True

    def fail(self, error: RaycollectError) -> None:
        """Breaks the communicator: later calls are refused. The first error counts."""
        with self.lock:
            self.state, self.broken = CommunicatorState.BROKEN, self.broken or error
            self.changed.notify_all()

    # ------------------------------------------------------------------------------------------ the rendezvous

    def published(self, message: Publish) -> None:
        """Handles a value of the rendezvous that another rank has published."""
        with self.lock:
            if message.epoch == self.epoch:
                self.values[message.name] = message.value
                self.changed.notify_all()

    def wait_made(self, epoch: str, is_made: Callable[[], bool], deadline_s: float) -> bool:
        """Waits for the backend's factory; False if another rank gives up meanwhile."""
        with self.lock:
            self.changed.wait_for(lambda: is_made() or self.why_over(epoch), max(deadline_s - time.monotonic(), 0))
            if is_made():
                return True
            if self.call is not None and self.call.stop is not None:
                raise copy_error(self.call.stop)
            if self.why_over(epoch):
                return False
        raise CollectiveTimeoutError(op="join", detail="the members could not connect to each other in time")

    def why_over(self, epoch: str) -> str:
        """The reason not to wait for an epoch any more, or an empty text; under the lock."""
        stop = self.call.stop if self.call is not None else None
        error = self.broken or stop
        if epoch == self.epoch and error is None and self.state is not CommunicatorState.OUT_OF_STEP:
            return ""
        return getattr(error, "detail", "") or "the forming of the group was abandoned"


class CoordinatorRendezvous:
    """The `Rendezvous` of one epoch: the coordinator relays values to the other ranks.

    `deadline_s` is the deadline of all waits, by `time.monotonic`.
    """

    def __init__(self, client: CoordinatorClient, deadline_s: float = math.inf) -> None:
        self.deadline_s = deadline_s
        self._client = client
        self._epoch = client.epoch
        self._values = client.values

    def put(self, name: str, value: bytes) -> None:
        """Publishes a value to all ranks."""
        client = self._client
        with client.lock:
            self._values[name] = value
        group_id = client.member.spec.group_id
        client.send(Publish(group_id=group_id, communicator=client.name, epoch=self._epoch, name=name, value=value))

    def get(self, name: str, timeout_s: float) -> bytes:
        """Waits for a value."""
        limit_s, client = min(timeout_s, self.deadline_s - time.monotonic()), self._client
        with client.lock:
            client.changed.wait_for(lambda: name in self._values or client.why_over(self._epoch), max(limit_s, 0))
            if name in self._values:
                return self._values[name]
            why = client.why_over(self._epoch)
        if why:
            raise PlanAbortedError(op="join", detail=why)
        raise CollectiveTimeoutError(op="join", detail=f"nobody published {name!r}", timeout_s=limit_s)
