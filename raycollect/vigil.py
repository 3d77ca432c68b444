"""Who has not come to a call that members make themselves: asked where it lasts, and where it has failed by that.

The backends only know when the time is over. So the members tell each other: the one that waits asks, over the hub, and
each answers how far it has come, and what it does. A thread per process looks at the calls under way; it asks, answers
and warns, once per call, and ends where there are none. A call whose time is over asks in its own thread.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from raycollect.channel.messages import Message, Publish
from raycollect.channel.packing import pack, unpack
from raycollect.errors import ConnectionLostError, ProtocolError, RankReport
from raycollect.lane import Lane, Standing
from raycollect.model import GroupSpec
from raycollect.stacks import Doing, what_runs

__all__ = ["QUIET_S", "WARNING_VARIABLE", "Place", "Vigil", "wake", "warn_after_s"]

_log = logging.getLogger("raycollect")

WARNING_VARIABLE = "RAYCOLLECT_STALL_WARNING_S"
"""The environment variable that says after how many seconds of waiting a warning is logged; 0: never."""
WARN_AFTER_S = 10.0


def warn_after_s(environ: Mapping[str, str] = os.environ) -> float:
    """After how long a wait is warned of, in seconds."""
    text = environ.get(WARNING_VARIABLE, "")
    try:
        found = float(text) if text else WARN_AFTER_S
    except ValueError:
        _log.warning("%s is %r, not a number of seconds: %g is taken", WARNING_VARIABLE, text, WARN_AFTER_S)
        found = WARN_AFTER_S
    return found if found > 0 else math.inf


QUIET_S = warn_after_s()
"""After how long waits are warned of in this process, in seconds."""

ANSWER_S = 1.0
"""How long members may take to say how far they have come, in seconds; who takes longer is unresponsive."""
LATE_ANSWER_S = 0.5
"""The same where a call's time is over: for so long its error is held back at most."""

_QUESTION, _ANSWER = "?standing", "!standing"
"""The names under which members ask each other, and answer, beside the values of rendezvous."""


class Place(Protocol):
    """The seat whose calls are looked at.

    Attributes:
        spec: Its group.
        rank: Its rank.
        members: What a person calls each rank, in rank order; empty: it is being joined.
        send: Sends to the group's hub; raises ConnectionLostError where that is gone.
    """

    spec: GroupSpec
    rank: int
    members: tuple[str, ...]
    send: Callable[[Message], None]

    def lane(self, name: str) -> Lane:
        """One of its lanes."""
        ...

    @property
    def lanes(self) -> Sequence[Lane]:
        """Those that there are."""
        ...

    def actor(self, rank: int) -> str:
        """What a person calls the actor of a rank; empty: unknown."""
        ...


class _Answer(NamedTuple):
    """What a rank says of itself: how far it has come on a lane, and what its process is doing."""

    standing: Standing
    doing: Doing


class _Inquiry:
    """What one rank asks the others of one call.

    Args:
        call: The call.
        ranks: Who is asked.
        until_s: How long to wait for the answers, by `time.monotonic`.
    """

    __slots__ = ("answers", "call", "ranks", "told", "until_s")

    def __init__(self, call: int, ranks: Sequence[int], until_s: float) -> None:
        self.call = call
        self.ranks = ranks
        self.until_s = until_s
        self.answers: dict[int, _Answer] = {}
        self.told = False  # whether the warning is out

    @property
    def is_complete(self) -> bool:
        """Whether all have answered."""
        return all(rank in self.answers for rank in self.ranks)


class Vigil:
    """What is asked and answered at one seat.

    `begun` and `reports` by any thread; `received` by the hub's; `look` by the watcher's.

    Args:
        place: The seat.

    Attributes:
        is_unwatched: Whether the watcher has to hear of the next call.
    """

    def __init__(self, place: Place) -> None:
        self.is_unwatched = True
        self._place = place
        self._asked: set[str] = set()  # the lanes of which others want to know
        self._inquiries: dict[str, _Inquiry] = {}  # what this rank has asked last of calls that last, by lane
        self._late: dict[str, _Inquiry] = {}  # of calls whose time is over
        self._changed = threading.Condition()

    def begun(self) -> None:
        """A call has begun; it may last."""
        if self.is_unwatched and math.inf != QUIET_S:
            _watcher.watch(self)

    def received(self, message: Publish) -> bool:
        """Takes a question, or an answer, of another member; False where it is neither."""
        if message.name == _QUESTION:
            self._wanted(message)
        elif message.name == _ANSWER:
            self._heard(message)
        else:
            return False
        _watcher.watch(self)  # which answers: the hub may be this very thread
        return True

    def _wanted(self, message: Publish) -> None:
        """Another rank asks; the hub tells it to all of the lane."""
        try:
            asked = [int(rank) for rank in unpack(message.value)]
        except (TypeError, ValueError, OverflowError):
            raise ProtocolError(detail="a member does not say whom it asks") from None
        if self._place.rank in asked:
            with self._changed:
                self._asked.add(message.lane)

    def _heard(self, message: Publish) -> None:
        """Another rank says how far it has come."""
        try:
            rank, place, seq, what, stack = unpack(message.value)
            known = int(rank)
            answer = _Answer(Standing(str(place), int(seq)), Doing(str(what), tuple(map(str, stack))))
        except (TypeError, ValueError, OverflowError):
            raise ProtocolError(detail="a member does not say how far it has come") from None
        with self._changed:
            for inquiry in (self._inquiries.get(message.lane), self._late.get(message.lane)):
                if inquiry is not None and known in inquiry.ranks:
                    inquiry.answers[known] = answer
            self._changed.notify_all()

    def reports(self, lane: Lane, ranks: Sequence[int], mine: Standing) -> tuple[RankReport, ...]:
        """Asks what ranks are doing that have not come in time; waits `LATE_ANSWER_S` for them at most.

        Args:
            lane: Where the call was made whose time is over.
            ranks: Who was awaited in it.
            mine: How far this rank had come in it.

        Returns:
            A report of each; none while the group is being joined, as those who have not come can't be asked.
        """
        asked = [rank for rank in ranks if rank in lane.ranks and rank != self._place.rank]
        if not asked or not self._place.members:
            return ()
        awaited_s = time.monotonic() - lane.since_s
        inquiry = _Inquiry(lane.call, asked, math.inf)
        with self._changed:
            self._late[lane.name] = inquiry
        if self._ask(lane, asked):
            with self._changed:
                self._changed.wait_for(lambda: inquiry.is_complete, LATE_ANSWER_S)
        with self._changed:
            del self._late[lane.name]  # one call at a time is under way on a lane
            return tuple(self._report(rank, inquiry.answers.get(rank), mine, awaited_s) for rank in asked)

    def _report(self, rank: int, answer: _Answer | None, mine: Standing, awaited_s: float) -> RankReport:
        """What a rank has said, for whoever waits for it."""
        return RankReport(
            rank=rank,
            actor=self._place.actor(rank),
            answers=answer is not None,
            has_begun=answer is not None and answer.standing.is_with(mine),
            doing=answer.doing.what if answer is not None else "",
            stack=answer.doing.stack if answer is not None else (),
            ended=0,
            story=(),
            awaited_s=awaited_s,
        )

    # ------------------------------------------------------------------------------------------ the watcher's thread

    def look(self, now_s: float) -> float:
        """Answers who has asked, asks who is awaited, and warns.

        Returns:
            When to look again, by `time.monotonic`.
        """
        with self._changed:
            asked, self._asked = self._asked, set()
        for name in asked:
            lane = self._place.lane(name)
            self._publish(lane, _ANSWER, (self._place.rank, *lane.standing, *what_runs()))
        return min((self._look_at(lane, now_s) for lane in self._place.lanes), default=math.inf)

    def _look_at(self, lane: Lane, now_s: float) -> float:
        call, due_s, inquiry = lane.call, lane.since_s + QUIET_S, self._inquiries.get(lane.name)
        if not call:
            return math.inf
        if inquiry is None or inquiry.call != call:
            if now_s < due_s:
                return due_s
            others = [rank for rank in lane.ranks if rank != self._place.rank]
            inquiry = self._inquiries[lane.name] = _Inquiry(call, others, now_s + ANSWER_S)
            self._ask(lane, others)
        if inquiry.told:
            return math.inf
        if now_s < inquiry.until_s and not inquiry.is_complete:
            return inquiry.until_s
        inquiry.told = True
        if lane.call == call:
            self._warn(lane, inquiry)
        return math.inf

    def _warn(self, lane: Lane, inquiry: _Inquiry) -> None:
        """Says who has not come to a call, and what they do."""
        place, mine, awaited_s = self._place, lane.standing, time.monotonic() - lane.since_s
        late = []
        for rank in inquiry.ranks:
            report = self._report(rank, inquiry.answers.get(rank), mine, awaited_s)
            if not report.answers and not place.members:
                late.append(f"rank {rank} has not joined")
            elif not report.has_begun:
                late.append(str(report))
        listed = "\n  - ".join(("these have not come to it:", *late)) if late else "all have come to it"
        text = "%s on group %r, here rank %d, is still under way after %g s; %s"
        _log.warning(text, lane.op, place.spec.name, place.rank, QUIET_S, listed)

    def _ask(self, lane: Lane, ranks: Sequence[int]) -> bool:
        return self._publish(lane, _QUESTION, ranks)

    def _publish(self, lane: Lane, name: str, value: Sequence[Any]) -> bool:
        """Tells all of a lane; False where the hub is gone."""
        told = Publish(
            group_id=self._place.spec.group_id, lane=lane.name, generation="", name=name, value=pack(list(value))
        )
        try:
            self._place.send(told)
        except ConnectionLostError:  # whoever is gone ends its calls
            return False
        return True


class _Watcher:
    """Looks at the seats of this process that have calls under way: a thread that ends while there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._vigils: set[Vigil] = set()
        self._is_news = False
        self._thread: threading.Thread | None = None

    def watch(self, vigil: Vigil) -> None:
        """A seat has to be looked at; any thread."""
        with self._changed:
            vigil.is_unwatched = False
            self._vigils.add(vigil)
            if self._thread is None or not self._thread.is_alive():  # in a forked child it never lives
                self._thread = threading.Thread(target=self._look, name="raycollect-vigil", daemon=True)
                self._thread.start()
            self._tell()

    def wake(self) -> None:
        """A seat may need it no more; any thread."""
        with self._changed:
            self._tell()

    def _tell(self) -> None:
        self._is_news = True
        self._changed.notify_all()

    def _look(self) -> None:
        while True:
            with self._changed:
                if not self._vigils:
                    self._thread = None
                    return
                self._is_news = False
                vigils = tuple(self._vigils)
            next_s = min(self._look_at(vigil) for vigil in vigils)
            with self._changed:
                left_s = next_s - time.monotonic()
                self._changed.wait_for(lambda: self._is_news or not self._vigils, min(left_s, threading.TIMEOUT_MAX))

    def _look_at(self, vigil: Vigil) -> float:
        """When a seat has to be looked at again; one without calls that may last tells of the next."""
        vigil.is_unwatched = True  # before it is looked at: a call that begins meanwhile is seen, or tells
        next_s = vigil.look(time.monotonic())
        with self._changed:
            if next_s < math.inf:
                vigil.is_unwatched = False
            elif vigil.is_unwatched:  # else it was told of anew
                self._vigils.discard(vigil)
        return next_s


_watcher = _Watcher()

wake: Callable[[], None] = _watcher.wake
"""Lets this process look again at the calls under way, as something has changed; any thread may call it."""
