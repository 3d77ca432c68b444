"""How far a collective is, or a run of a captured step: asked of its participants, for as long as somebody looks.

Nobody is waited for. Who has not answered the last question is not asked another one, and counts as where it was when
it last answered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from raycollect.channel.messages import Measured
from raycollect.flight import Flight
from raycollect.model import Member
from raycollect.planner.wording import nbytes_words, seconds_words

__all__ = ["Gauge", "Progress", "RankProgress", "Surveyor"]

SILENT_S = 1.0
"""After how long a question that is not answered counts as a silence, in seconds."""

FAR_BEHIND = 0.2
"""How much less than the foremost one a participant has to have done to be named as behind."""

RATE_S = 3.0
"""Over how much of the time that has gone by a rate is measured, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far one participant is.

    Attributes:
        rank: Its rank, in the group of the first call that it takes part in.
        actor: What a person calls it.
        done_nbytes: The bytes of its tensors that are done; where others work in them, as far as these are.
        total_nbytes: The bytes of all of them; 0: not known, as not all have come to the door.
        has_begun: Whether it has begun, as far as it was heard of.
        has_ended: Whether it has ended, and nothing has failed.
        is_heard: Whether it has told anything yet.
        answers: Whether it answers; False: this is how far it was when it last did.
    """

    rank: int
    actor: str
    done_nbytes: int
    total_nbytes: int
    has_begun: bool
    has_ended: bool
    is_heard: bool
    answers: bool

    @property
    def fraction(self) -> float:
        """How much of it is done, from 0 to 1."""
        if self.has_ended:
            return 1.0
        return self.done_nbytes / self.total_nbytes if self.total_nbytes else 0.0

    def __str__(self) -> str:
        for holds, words in (
            (self.has_ended, "has ended"),
            (not self.answers, "gives no answer"),
            (not self.is_heard, "was not heard of yet"),
            (not self.has_begun, "has not begun"),
            (not self.total_nbytes, "is at the door"),
        ):
            if holds:
                return f"rank {self.rank} {words}"
        return f"rank {self.rank} is at {100 * self.fraction:.0f} %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a collective is, or a run of a captured step.

    Bytes are those of all participants together: an allreduce of 1 GiB over 4 ranks is 4 GiB.

    Attributes:
        done_nbytes: How many are done.
        total_nbytes: How many there are; who has not told counts like the others. 0: not known, as not all have come to
            the door. Of a captured step in its first run, those of the plans that were come to.
        elapsed_s: For how long it has been under way, in seconds.
        rate: How many were done per second lately, or at the end in all; the time before the door does not count.
        left_s: How long the rest takes at this rate, in seconds; None: nothing goes on.
        ranks: How far each participant is.
    """

    done_nbytes: int
    total_nbytes: int
    elapsed_s: float
    rate: float
    left_s: float | None
    ranks: tuple[RankProgress, ...] = ()

    @property
    def fraction(self) -> float:
        """How much of it is done, from 0 to 1."""
        return self.done_nbytes / self.total_nbytes if self.total_nbytes else 0.0

    @property
    def laggard(self) -> RankProgress | None:
        """Who is far behind the others, or keeps them waiting; None: nobody is."""
        ahead = max((one.fraction for one in self.ranks), default=0.0)
        some_begun = any(one.has_begun for one in self.ranks)
        late = [
            one
            for one in self.ranks
            if not one.has_ended and (not one.answers or (one.is_heard and self._is_behind(one, ahead, some_begun)))
        ]
        return min(late, key=lambda one: (one.answers, one.has_begun, one.fraction, one.rank), default=None)

    @staticmethod
    def _is_behind(one: RankProgress, ahead: float, some_begun: bool) -> bool:
        return (some_begun and not one.has_begun) or ahead - one.fraction > FAR_BEHIND

    def __str__(self) -> str:
        if not self.total_nbytes:
            return f"nobody has told of bytes, after {seconds_words(self.elapsed_s)}"
        far = f"{nbytes_words(self.done_nbytes)} of {nbytes_words(self.total_nbytes)} ({100 * self.fraction:.0f} %)"
        rate = f", {nbytes_words(self.rate)}/s" if self.rate else ""
        left = f", {seconds_words(self.left_s)} left" if self.left_s else ""
        return far + rate + left


class Surveyor(Protocol):
    """The controller, as far as a gauge needs it."""

    def measure(self, member: Member, seq: int) -> Future[Measured | None] | None:
        """Asks a member how far it is in a plan, and does not wait; None for one that is gone."""
        ...


class _Place:
    """What one participant has said.

    Attributes:
        is_heard: Whether it has answered at all.
        has_begun: Whether it has begun, as it says.
        has_ended: The same, of its end.
        total: The bytes of its tensors, as far as it has told.
        lent: How many of those that are left others work on.
        asked: The question that it has not answered; None: there is none.
        asked_s: When it was asked.
        done: The most that it has said to have done; numbers are read while they change.
    """

    __slots__ = ("asked", "asked_s", "done", "has_begun", "has_ended", "is_heard", "lent", "total")

    def __init__(self) -> None:
        self.is_heard = self.has_begun = self.has_ended = False
        self.total = self.lent = 0
        self.asked: Future[Any] | None = None
        self.asked_s = 0.0
        self.done = 0

    def hear(self) -> None:
        """Takes the answer, if it has come."""
        if self.asked is None or not self.asked.done():
            return
        said, self.asked = self.asked.result(), None
        if not isinstance(said, Measured) or min(said.done, said.total, said.lent) < 0:
            return
        self.is_heard, self.has_begun, self.has_ended, self.lent = True, said.has_begun, said.has_ended, said.lent
        self.total = said.total or self.total  # who has ended has nothing to tell
        self.done = max(self.done, min(said.done, self.total))


class Gauge:
    """What the participants of a flight have said of how far they are. For one thread at a time.

    Args:
        surveyor: Asks them.
        flight: The flight.
        began_s: When it began, by `clock`.
        clock: Where the times come from.
    """

    def __init__(
        self, surveyor: Surveyor, flight: Flight, began_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        self._surveyor = surveyor
        self._flight = flight
        self._clock = clock
        self._began_s = began_s
        self._places = [_Place() for _ in flight.plan.participants]
        self._most = 0
        self._samples = deque([(began_s, 0)])  # (time, bytes done): the last before there was anything, and then all
        self._ended_s: float | None = None
        self._idle_s = began_s  # the latest time at which nobody had told of bytes

    def ask(self) -> None:
        """Asks those who have not ended, and have answered the last question."""
        flight = self._flight
        for at, place in enumerate(self._places):
            if place.asked is None and flight.is_pending(at):
                place.asked = self._surveyor.measure(flight.member(at), flight.seq)
                place.asked_s = self._clock()

    def hear(self, timeout_s: float = 0.0) -> None:
        """Takes the answers that have come, or come in time.

        Args:
            timeout_s: How long to wait for them, in seconds.
        """
        if timeout_s:
            wait_for([one.asked for one in self._places if one.asked is not None], timeout_s)
        for place in self._places:
            place.hear()

    def read(self) -> Progress:
        """How far the flight is, by what was heard."""
        now_s, flight = self._now_s(), self._flight
        went_well = flight.resolved and flight.error is None
        credit = 0.0 if went_well else self._credit()
        ranks = tuple(self._rank(at, place, credit, now_s) for at, place in enumerate(self._places))
        told = [one for one in ranks if one.total_nbytes]
        each = sum(one.total_nbytes for one in told) // max(len(told), 1)
        total = sum(one.total_nbytes or each for one in ranks)
        done = sum(int(one.fraction * (one.total_nbytes or each)) for one in ranks)
        done = self._most = total if went_well else min(max(done, self._most), total)
        rate = self._rate(now_s, done, total)
        return Progress(
            done_nbytes=done,
            total_nbytes=total,
            elapsed_s=now_s - self._began_s,
            rate=rate,
            left_s=(total - done) / rate if rate else None,
            ranks=ranks,
        )

    def _credit(self) -> float:
        """How much of what is lent counts as done: as much as of all the rest."""
        lent, done = sum(one.lent for one in self._places), sum(one.done for one in self._places)
        rest = sum(one.total for one in self._places) - lent
        return min(done / rest, 1.0) if rest > 0 else 0.0

    def _rate(self, now_s: float, done: int, total: int) -> float:
        """Bytes per second: of late; at the end, of all the time since the door."""
        samples = self._samples
        if not total:
            samples[0] = (now_s, 0)
            self._idle_s = now_s
            return 0.0
        if self._ended_s is None:
            samples.append((now_s, done))
            while len(samples) > 2 and samples[1][0] <= now_s - RATE_S:
                samples.popleft()
            since_s, before = samples[0]
        else:
            since_s, before = self._idle_s, 0
        return (done - before) / (now_s - since_s) if now_s > since_s else 0.0

    def _now_s(self) -> float:
        """Now; once the outcome is known, when that was first seen."""
        if self._flight.resolved and self._ended_s is None:
            self._ended_s = self._clock()
        return self._clock() if self._ended_s is None else self._ended_s

    def _rank(self, at: int, place: _Place, credit: float, now_s: float) -> RankProgress:
        flight = self._flight
        member = flight.member(at)
        has_ended = flight.error is None and (flight.resolved or not flight.is_pending(at) or place.has_ended)
        done = place.done + min(int(place.lent * credit), place.total - place.done)
        return RankProgress(
            rank=member.rank,
            actor=member.actor,
            done_nbytes=place.total if has_ended else done,
            total_nbytes=place.total,
            has_begun=has_ended or place.has_begun,
            has_ended=has_ended,
            is_heard=has_ended or place.is_heard,
            answers=has_ended or place.asked is None or now_s - place.asked_s < SILENT_S,
        )
