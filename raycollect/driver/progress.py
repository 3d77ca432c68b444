"""The progress of a collective, or of a run of a captured step, from its participants' answers.

A participant that has not answered the last question is not asked again, and counts as where it
was when it last answered. The thread that waits draws the progress bars, by tqdm, on stderr.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from msgspec.structs import replace

from raycollect.channel.messages import Measured
from raycollect.driver.dispatch_lock import answered
from raycollect.driver.participants import Participants
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import MOST_S, ProgressError, is_time_limit, refusal, wrong_argument
from raycollect.errors.text import shown
from raycollect.planner.wording import nbytes_words, seconds_words
from raycollect.ray_bridge import ray_session

_log = logging.getLogger("raycollect")

SILENT_S = 1.0  # after how long without an answer a participant counts as silent, in seconds

FAR_BEHIND = 0.2  # a participant is behind if this part less is done than on the foremost one

RATE_S = 3.0  # the time over which the rate is measured, in seconds

AFTER_S = 0.5  # after how long a wait shows a bar by default, in seconds

EVERY_S = 0.2  # how often participants are asked for their progress, in seconds

around_s: ContextVar[tuple[float, ...]] = ContextVar("raycollect_progress", default=())
"""After how long waits show a bar, for each block of `progress` around the caller, the innermost last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far one participant is.

    Attributes:
        rank: Its rank, in the group of its first call.
        actor: The actor's class, and name if it has one.
        done_nbytes: How many bytes of its tensors are done, by itself or by others.
        total_nbytes: The bytes of all of them; 0: unknown, as not all ranks have arrived in the consistency check.
        has_begun: Whether it is known to have begun.
        has_ended: Whether it has ended, and nothing has failed.
        is_heard: Whether it has reported anything yet.
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
            (not self.total_nbytes, "is in the consistency check"),
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
        total_nbytes: How many there are; participants that have not reported count like the others. 0: unknown, as not
            all have arrived in the consistency check. The first run of a captured step counts the plans that it has
            reached.
        elapsed_s: For how long it has been under way, in seconds.
        rate: Bytes per second of late, or at the end in all; the time before the consistency check does not count.
        left_s: How long the rest takes at this rate, in seconds; None: nothing moves.
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
        """The participant that is far behind the others or keeps them waiting, if any."""
        ahead = max((rank.fraction for rank in self.ranks), default=0.0)
        some_begun = any(rank.has_begun for rank in self.ranks)

        def is_behind(rank: RankProgress) -> bool:
            return (some_begun and not rank.has_begun) or ahead - rank.fraction > FAR_BEHIND

        running = [rank for rank in self.ranks if not rank.has_ended]
        late = [rank for rank in running if not rank.answers or (rank.is_heard and is_behind(rank))]
        return min(late, key=lambda rank: (rank.answers, rank.has_begun, rank.fraction, rank.rank), default=None)

    def __str__(self) -> str:
        if not self.total_nbytes:
            return f"nobody has told of bytes, after {seconds_words(self.elapsed_s)}"
        far = f"{nbytes_words(self.done_nbytes)} of {nbytes_words(self.total_nbytes)} ({100 * self.fraction:.0f} %)"
        rate = f", {nbytes_words(self.rate)}/s" if self.rate else ""
        left = f", {seconds_words(self.left_s)} left" if self.left_s else ""
        return far + rate + left


class ProgressProbe:
    """The reported progress of a plan's participants. For one thread at a time."""

    def __init__(
        self,
        participants: Participants,
        tracker: PlanTracker,
        began_s: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        count = len(tracker.plan.participants)
        self._participants = participants
        self._tracker = tracker
        self._clock = clock or time.monotonic
        self._began_s = began_s
        self._questions: list[tuple[Future[Any], float] | None] = [
            None
        ] * count  # open questions, and when they were asked
        self._said: list[Measured | None] = [None] * count  # the last answers, whose numbers never decrease
        self._most = 0
        self._samples = deque([(began_s, 0)])  # (time, bytes done): the last one without bytes, and all later ones
        self._ended_s: float | None = None
        self._idle_s = began_s  # the latest time at which no bytes were known

    def ask(self) -> None:
        """Asks the participants that have not ended and have answered the last question."""
        tracker = self._tracker
        for at, question in enumerate(self._questions):
            if question is None and tracker.is_pending(at):
                answer = self._participants.measure(tracker.member(at), tracker.seq)
                self._questions[at] = None if answer is None else (answer, self._clock())

    def hear(self, timeout_s: float = 0.0) -> None:
        """Takes the answers that arrive within `timeout_s` seconds."""
        if timeout_s:
            answered([question and question[0] for question in self._questions], timeout_s)
        for at, question in enumerate(self._questions):
            if question is None or not question[0].done():
                continue
            said, before, self._questions[at] = question[0].result(), self._said[at], None
            if isinstance(said, Measured) and min(said.done, said.total, said.lent) >= 0:
                total = said.total or (0 if before is None else before.total)  # an ended participant reports zero
                done = max(0 if before is None else before.done, min(said.done, total))
                self._said[at] = replace(said, total=total, done=done)

    def read(self) -> Progress:
        """The progress as reported."""
        tracker = self._tracker
        if tracker.resolved and self._ended_s is None:
            self._ended_s = self._clock()
        now_s = self._clock() if self._ended_s is None else self._ended_s
        went_well = tracker.resolved and tracker.error is None
        credit = 0.0 if went_well else self._credit()
        ranks = tuple(self._rank(at, credit, now_s) for at in range(len(self._said)))
        heard = [rank for rank in ranks if rank.total_nbytes]
        each = sum(rank.total_nbytes for rank in heard) // max(len(heard), 1)
        total = sum(rank.total_nbytes or each for rank in ranks)
        done = sum(int(rank.fraction * (rank.total_nbytes or each)) for rank in ranks)
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
        """The part of lent bytes that counts as done: the same as of all others."""
        said = [answer for answer in self._said if answer is not None]
        rest = sum(answer.total - answer.lent for answer in said)
        return min(sum(answer.done for answer in said) / rest, 1.0) if rest > 0 else 0.0

    def _rate(self, now_s: float, done: int, total: int) -> float:
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

    def _rank(self, at: int, credit: float, now_s: float) -> RankProgress:
        tracker, said, question = self._tracker, self._said[at] or _NOTHING, self._questions[at]
        member = tracker.member(at)
        has_ended = tracker.error is None and (tracker.resolved or not tracker.is_pending(at) or said.has_ended)
        done = said.done + min(int(said.lent * credit), said.total - said.done)
        return RankProgress(
            rank=member.rank,
            actor=member.actor,
            done_nbytes=said.total if has_ended else done,
            total_nbytes=said.total,
            has_begun=has_ended or said.has_begun,
            has_ended=has_ended,
            is_heard=has_ended or said is not _NOTHING,
            answers=has_ended or question is None or now_s - question[1] < SILENT_S,
        )


_NOTHING = Measured(request=0, has_begun=False, has_ended=False, done=0, total=0, lent=0)


class ProgressBars:
    """The block of `progress`, inside of which long waits show a bar. Threads may share it."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s

    def __enter__(self) -> ProgressBars:  # noqa: PYI034 - Python 3.10 has no `Self`
        around_s.set((*around_s.get(), self._after_s))
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        around_s.set(around_s.get()[:-1])


def progress(*, after_s: float = AFTER_S) -> ProgressBars:
    """Shows the progress of collectives while they are waited for.

    Inside a block ``with progress():``, long waits for a collective show a bar on stderr: the
    driver's operations, the ends of batches, `Work.wait`, runs of captured steps, `get` and `free`. ``await`` shows
    none, nor do threads that the block starts. A bar counts the bytes of all participants together, and names the rank
    that is far behind.

    Args:
        after_s: How long a wait has to last, in seconds.

    Raises:
        ProgressError: tqdm is not installed.
        RayClientError: This process is connected by ray://.
        InvalidArgumentError: An argument makes no sense.
    """
    ray_session.refuse_client()
    if not (is_time_limit(after_s) or (isinstance(after_s, (int, float)) and after_s == 0)):
        expected = f"a number of seconds from 0 to {MOST_S:g}"
        raise refusal("progress", "", (wrong_argument("after_s", shown(after_s), expected),))
    _tqdm()
    return ProgressBars(after_s)


def _tqdm() -> Any:
    try:
        from tqdm.auto import tqdm  # it is heavy, and an extra
    except ImportError as exc:
        detail = f"progress bars are drawn by tqdm, which can't be imported ({exc}): pip install 'raycollect[progress]'"
        raise ProgressError(detail=detail) from None
    return _rated(tqdm)


@cache
def _rated(made_by: Any) -> Any:
    """A class of bars with a given rate: without progress, tqdm's own rate never falls."""

    class Rated(made_by):  # type: ignore[misc]
        rate = 0.0

        @property
        def format_dict(self) -> dict[str, Any]:
            return {**super().format_dict, "rate": self.rate}

    return Rated


class Bar:
    """The bar of one wait: a context manager around the wait; meanwhile `look` is called when `left_s` is over.

    It ends full where the plan succeeded, and stays where it is where that failed, or is not known.

    Raises:
        ProgressError: tqdm is not installed.
    """

    def __init__(self, participants: Participants, tracker: PlanTracker) -> None:
        after_s = (AFTER_S, *around_s.get())[-1]
        self._tracker = tracker
        self._make = _tqdm()
        self._probe = ProgressProbe(participants, tracker, time.monotonic())
        self._drawn: Any = None
        self._is_asked = False
        self._next_s = time.monotonic() + max(after_s - EVERY_S, 0.0)

    def __enter__(self) -> Bar:  # noqa: PYI034 - Python 3.10 has no `Self`
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        drawn, self._drawn, self._next_s = self._drawn, None, math.inf
        if drawn is None:
            return
        try:
            far = self._probe.read()
            went_well = self._tracker.resolved and self._tracker.error is None
            self._show(drawn, far, "" if went_well else None)
            drawn.leave = bool(far.total_nbytes) or not went_well  # a bar without bytes is removed
            drawn.close()
        except Exception as exc:  # noqa: BLE001 - see `look`
            _log.debug("a progress bar could not be ended: %s", exc)

    @property
    def left_s(self) -> float:
        """In how many seconds the next look is due."""
        return self._next_s - time.monotonic()

    def look(self) -> None:
        """Takes the participants' answers, shows them, and asks again; does not wait."""
        self._probe.hear()
        try:
            if self._is_asked:
                far = self._probe.read()
                if self._drawn is None:
                    total, name = far.total_nbytes or None, self._tracker.plan.name
                    self._drawn = self._make(desc=name, unit="B", unit_scale=True, total=total)
                self._show(self._drawn, far)
            self._next_s = time.monotonic() + EVERY_S
        except Exception as exc:  # noqa: BLE001 - a closed stderr, a closed widget: the wait continues without a bar
            self._drawn, self._next_s = None, math.inf
            _log.debug("a progress bar could not be drawn: %s", exc)
            return
        self._probe.ask()
        self._is_asked = True

    def _show(self, drawn: Any, far: Progress, postfix: str | None = None) -> None:
        if far.total_nbytes:
            drawn.total, drawn.n = far.total_nbytes, far.done_nbytes
        drawn.start_t = time.time() - far.elapsed_s  # tqdm's clock is the wall's
        drawn.rate = far.rate
        behind = far.laggard
        drawn.set_postfix_str(("" if behind is None else str(behind)) if postfix is None else postfix, refresh=False)
        drawn.refresh()
