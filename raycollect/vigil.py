"""Who has not come to a call that members make themselves: asked where it lasts, and warned of, once per call.

The backends only know when the time is over. So the members tell each other: the one that waits asks, over the hub, and
each answers how far it has come, and what it does. A thread per process looks at the calls under way; it asks, answers
and warns, and ends where there are none.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from raycollect.channel.messages import Message, Publish
from raycollect.channel.packing import pack, unpack
from raycollect.errors import ConnectionLostError, ProtocolError
from raycollect.lane import Lane, Standing
from raycollect.model import GroupSpec
from raycollect.stacks import what_runs

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

_QUESTION, _ANSWER = "?standing", "!standing"
"""The names under which members ask each other, and answer, beside the values of rendezvous."""


class Place(Protocol):
    """The seat whose calls are looked at.

    Attributes:
        spec: Its group.
        rank: Its rank.
        send: Sends to the group's hub; raises ConnectionLostError where that is gone.
    """

    spec: GroupSpec
    rank: int
    send: Callable[[Message], None]

    def lane(self, name: str) -> Lane:
        """One of its lanes."""
        ...

    @property
    def lanes(self) -> Sequence[Lane]:
        """Those that there are."""
        ...

    def describe(self, rank: int) -> str:
        """What a person calls a rank."""
        ...


class _Inquiry:
    """What one rank asks the others of one call.

    Args:
        call: The call.
        until_s: How long to wait for the answers, by `time.monotonic`.
    """

    __slots__ = ("answers", "call", "told", "until_s")

    def __init__(self, call: int, until_s: float) -> None:
        self.call = call
        self.until_s = until_s
        self.answers: dict[int, tuple[Standing, str]] = {}
        self.told = False  # whether the warning is out


class Vigil:
    """What is asked and answered at one seat. `begun` by any thread; `received` by the hub's; `look` by the watcher's.

    Args:
        place: The seat.

    Attributes:
        is_unwatched: Whether the watcher has to hear of the next call.
    """

    def __init__(self, place: Place) -> None:
        self.is_unwatched = True
        self._place = place
        self._asked: set[str] = set()  # the lanes of which others want to know
        self._inquiries: dict[str, _Inquiry] = {}  # what this rank has asked last, by lane
        self._lock = threading.Lock()

    def begun(self) -> None:
        """A call has begun; it may last."""
        if self.is_unwatched and math.inf != QUIET_S:
            _watcher.watch(self)

    def received(self, message: Publish) -> bool:
        """Takes a question, or an answer, of another member; False where it is neither."""
        if message.name == _QUESTION:
            with self._lock:
                self._asked.add(message.lane)
        elif message.name == _ANSWER:
            self._heard(message)
        else:
            return False
        _watcher.watch(self)  # which answers: the hub may be this very thread
        return True

    def _heard(self, message: Publish) -> None:
        """Another rank says how far it has come."""
        try:
            rank, place, seq, doing = unpack(message.value)
            told = int(rank), Standing(str(place), int(seq)), str(doing)
        except (TypeError, ValueError, OverflowError):
            raise ProtocolError(detail="a member does not say how far it has come") from None
        inquiry = self._inquiries.get(message.lane)
        if inquiry is not None and told[0] in self._place.lane(message.lane).ranks:
            inquiry.answers[told[0]] = told[1:]

    # ------------------------------------------------------------------------------------------ the watcher's thread

    def look(self, now_s: float) -> float:
        """Answers who has asked, asks who is awaited, and warns.

        Returns:
            When to look again, by `time.monotonic`.
        """
        with self._lock:
            asked, self._asked = self._asked, set()
        for name in asked:
            lane = self._place.lane(name)
            self._publish(lane, _ANSWER, (self._place.rank, *lane.standing, what_runs().what))
        return min((self._look_at(lane, now_s) for lane in self._place.lanes), default=math.inf)

    def _look_at(self, lane: Lane, now_s: float) -> float:
        call, due_s, inquiry = lane.call, lane.since_s + QUIET_S, self._inquiries.get(lane.name)
        if not call:
            return math.inf
        if inquiry is None or inquiry.call != call:
            if now_s < due_s:
                return due_s
            inquiry = self._inquiries[lane.name] = _Inquiry(call, now_s + ANSWER_S)
            self._publish(lane, _QUESTION, (self._place.rank,))
        if inquiry.told:
            return math.inf
        others = [rank for rank in lane.ranks if rank != self._place.rank]
        if now_s < inquiry.until_s and not all(rank in inquiry.answers for rank in others):
            return inquiry.until_s
        inquiry.told = True
        if lane.call == call:
            self._warn(lane, inquiry.answers, others)
        return math.inf

    def _warn(self, lane: Lane, answers: Mapping[int, tuple[Standing, str]], others: Sequence[int]) -> None:
        """Says who has not come to a call, and what they do."""
        place, mine, late = self._place, lane.standing, []
        for rank in others:
            standing, doing = answers.get(rank, (None, ""))
            if standing is None:
                late.append(f"{place.describe(rank)} gives no answer")
            elif not standing.is_with(mine):
                late.append(f"{place.describe(rank)} {f'is in {doing}' if doing else 'does nothing'}")
        listed = "\n  - ".join(("these have not come to it:", *late)) if late else "all have come to it"
        text = "%s on group %r, here rank %d, is still under way after %g s; %s"
        _log.warning(text, lane.op, place.spec.name, place.rank, QUIET_S, listed)

    def _publish(self, lane: Lane, name: str, value: tuple[Any, ...]) -> None:
        told = Publish(
            group_id=self._place.spec.group_id, lane=lane.name, generation="", name=name, value=pack(list(value))
        )
        with suppress(ConnectionLostError):  # whoever is gone ends its calls
            self._place.send(told)


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

wake = _watcher.wake
"""Lets this process look again at the calls under way, as something has changed; any thread may call it."""
