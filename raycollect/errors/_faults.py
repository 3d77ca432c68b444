"""Errors that occur while a plan is in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raycollect.errors._base import RaycollectError, culprit
from raycollect.errors.text import listed

COULD_NOT_LOOK = "could not look: "
"""Begins what a process reports about itself where looking failed; the cause follows."""


@dataclass(eq=False, kw_only=True)
class FaultError(RaycollectError):
    """Something failed while a plan was in flight.

    Attributes:
        op: The operation.
        group_name: The group.
        rank: The rank at fault; -1 where there is none.
        actor: The actor of that rank.
        detail: What happened.
        story: The last events of the participant that reported it, oldest first.
    """

    op: str = ""
    group_name: str = ""
    rank: int = -1
    actor: str = ""
    detail: str = ""
    story: tuple[str, ...] = ()
    _tells_story: ClassVar[bool] = True

    def _text(self) -> str:
        where = self.op or "a plan"
        if self.group_name:
            where += f" on group {self.group_name!r}"
        text = f"{where}{culprit(self.rank, self.actor)}: {super()._text()}"
        if self.story and self._tells_story:
            text += "\nWhat the rank that reported it did last:"
            text += "".join(f"\n  | {line}" for line in self.story)
        return text


class ParticipantDiedError(FaultError):
    """The process of a participant ended."""

    cure = (
        "group.replace(dead, new), or group.rebuild() over the members that live, which are unharmed; where members "
        "made the group, destroy and make it again in all of them"
    )


class ActorGoneError(FaultError):
    """An actor is dead already, often because its last handle was dropped."""

    cure = "make a new actor, and keep a handle of it as long as its refs are used"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank was doing while others waited for it.

    Attributes:
        rank: Its rank.
        actor: Its actor's name for people.
        answers: False where its process gave no answer: it is stopped, or a call in it holds the interpreter's lock.
        has_begun: Whether it had begun the collective in question.
        step: Where in it the rank was: in the consistency check, or in which bundle of calls or call of a captured
            step; or empty.
        awaited_s: How long others had waited for it in the consistency check, from the first arrival on, in seconds; 0:
            nobody did.
        doing: The outermost call of the user's that was under way there: name, file and line; empty for none. Where its
            process could not say so: ``"could not look: "``, and the cause.
        stack: From there on a line per frame, the innermost last.
        ended: The last collective, or run, of this controller that it had ended; 0: none, or these are members' own
            calls.
        story: Its last events, oldest first; empty for members' own calls.
    """

    rank: int
    actor: str
    answers: bool
    has_begun: bool
    doing: str
    stack: tuple[str, ...]
    ended: int
    story: tuple[str, ...]
    step: str = ""
    awaited_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stack", "story"):  # lists, where it has travelled
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def __str__(self) -> str:
        who = f"rank {self.rank} ({self.actor})" if self.actor else f"rank {self.rank}"
        if not self.answers:
            silent = "its process is stopped, or cut off, or a call in it holds the interpreter's lock"
            return f"{who} gives no answer: {silent}{self._awaited}"
        what = "is in it" if self.has_begun else "has not begun it"
        step = f" ({self.step})" if self.step else ""
        place = f", and is in {self.doing}" if self.doing else "" if self.has_begun else ", and is in no method"
        if self.doing.startswith(COULD_NOT_LOOK):
            what, place = ("is in it", f", and {self.doing}") if self.has_begun else (self.doing, "")
        last = f"; the last that it has ended is {self.ended}" if self.ended else ""
        told = f"{who} {what}{step}{place}{last}{self._awaited}"
        return "\n    ".join((told, *(() if self.has_begun and not self.doing else self.stack)))

    @property
    def _awaited(self) -> str:
        return f"; awaited for {self.awaited_s:.1f} s" if self.awaited_s else ""


@dataclass(eq=False, kw_only=True)
class CollectiveTimeoutError(FaultError):
    """Not everyone came in time.

    Attributes:
        missing: The ranks that had not arrived; where all had, and a kernel did not end, those that gave no answer, or
            did not leave it when it was aborted.
        timeout_s: The limit, in seconds.
        reports: What these ranks were doing just after.
        within: In a kernel, the ranks that ran it with the one that reports this; empty: it waited in the consistency
            check.
        cut: The links between hosts over which nothing was acknowledged, by the hosts' addresses: ``"10.0.0.1 and
            10.0.0.2"``. Then the ranks in `missing` may be healthy.
    """

    missing: tuple[int, ...] = ()
    timeout_s: float = 0.0
    reports: tuple[RankReport, ...] = ()
    within: tuple[int, ...] = ()
    cut: tuple[str, ...] = ()
    cure = "see what the missing ranks are doing; raise timeout_s if they are only slow"
    _tells_story: ClassVar[bool] = False  # of one that waited; what matters is in the reports

    def told(self, who: Sequence[str], others: Sequence[str]) -> str:
        """The text of `detail`, from the names of the ranks in `missing` and in `within`."""
        if not others:
            return f"after {self.timeout_s:g} s these had not arrived: {listed(who) or 'nobody'}"
        silent = f"these gave no answer: {listed(who)}"
        alive = "all of them answer, but not over the library's own connections, or too slowly"
        return f"after {self.timeout_s:g} s in the kernel, with {listed(others)}: {silent if who else alive}"

    def unfinished(self, who: Sequence[str]) -> str:
        """The text of `detail` where the caller's limit is over, from the names of those who are not done."""
        return f"after {self.timeout_s:g} s these had not finished: {listed(who) or 'nobody'}"

    def _text(self) -> str:
        text = super()._text()
        if self.reports:
            text += "\n  - " + listed(self.reports, "\n  - ")
        if self.cut:
            text += f"\nNothing was acknowledged between {listed(self.cut)}: the link is cut, or a host is gone"
        return text

    def _advice(self) -> str:
        return "check the network between these hosts; the ranks named above may be healthy" if self.cut else self.cure


class PlanAbortedError(FaultError):
    """The plan was aborted because another rank or the driver failed, or it was cancelled."""


class DispatchError(FaultError):
    """The plan could not be submitted to every participant; it was aborted everywhere."""

    cure = "see the cause; no kernel ran and the group works on"


class KernelError(FaultError):
    """A communication library failed in mid-kernel; tensors that it was writing are dirty."""


@dataclass(eq=False, kw_only=True)
class MethodError(FaultError):
    """A method that a captured step calls raised, or returned what a run can't give back; `op` is its name.

    Attributes:
        call: The place of the call among all calls of the step, from 0.
        raised: The type of the exception, as ``"ValueError"``; empty: it returned what can't be given back.
        trace: The end of its traceback, as text.
    """

    call: int = -1
    raised: str = ""
    trace: str = ""
    cure = (
        "correct the method, close the step and capture it again; this actor has done the collectives before that call"
    )

    def _text(self) -> str:
        who = f" of {self.actor}" if self.actor else ""
        what = f"raised {self.raised}: {self.detail}" if self.raised else f"returned {self.detail}"
        return f"call {self.call} of the step, {self.op}{who}, {what}" + "".join(
            f"\n  | {line}" for line in self.trace.splitlines()
        )

    def _advice(self) -> str:
        return self.cure if self.raised else _RETURN_PLAIN


_RETURN_PLAIN = (
    "let the step return plain values and arrays, read other things with an ordinary method, and capture it again"
)
