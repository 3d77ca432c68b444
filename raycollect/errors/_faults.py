"""Errors that occur while a plan is in flight, and errors of versions of weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from raycollect.errors._base import RaycollectError, culprit
from raycollect.errors.text import MOST_LISTED, listed

COULD_NOT_LOOK = "could not look: "
"""The prefix of a process's report about itself if the inspection failed; the cause follows."""


class FaultError(RaycollectError):
    """Something failed while a plan was in flight.

    Attributes:
        op: The operation.
        group_name: The group.
        rank: The rank at fault; -1 for none.
        actor: The actor of that rank.
        detail: What happened.
        story: The last events of the participant that reported the error, oldest first.
    """

    op: str = ""
    group_name: str = ""
    rank: int = -1
    actor: str = ""
    detail: str = ""
    story: tuple[str, ...] = ()
    _tells_story: ClassVar[bool] = True

    def _where(self) -> str:
        group = f" on group {self.group_name!r}" if self.group_name else ""
        return f"{self.op or 'a plan'}{group}{culprit(self.rank, self.actor)}"

    def _text(self) -> str:
        story = ("\nThe last events of the reporting rank:", *self.story) if self.story and self._tells_story else ()
        return super()._text() + "\n  | ".join(story)


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
    """A report of what a rank was doing while others waited for it.

    Attributes:
        rank: The rank.
        actor: The display name of the rank's actor.
        answers: False if the process gave no answer: it is stopped, or a call in it holds the interpreter's lock.
        has_begun: Whether the rank had begun the collective in question.
        step: The rank's position in the collective: the consistency check, or a bundle of calls or a call of a captured
            step; or empty.
        awaited_s: How long others had waited for the rank in the consistency check, from the first arrival on, in
            seconds; 0 for none.
        doing: The outermost user call under way: name, file and line; empty for none. If the process could not look:
            ``"could not look: "``, followed by the cause.
        stack: One line per frame from that call on, innermost last.
        ended: The last collective, or run, of this controller that the rank had ended; 0 for none, or in a report about
            members' own calls.
        story: The rank's last events, oldest first; empty for members' own calls.
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
        text = f"{who} {what}{step}{place}{last}{self._awaited}"
        return "\n    ".join((text, *(() if self.has_begun and not self.doing else self.stack)))

    @property
    def _awaited(self) -> str:
        return f"; awaited for {self.awaited_s:.1f} s" if self.awaited_s else ""


class CollectiveTimeoutError(FaultError):
    """Ranks did not arrive in time.

    Attributes:
        missing: The ranks that had not arrived. If all ranks had arrived and a kernel did not end: the ranks that gave
            no answer, or did not leave the kernel when it was aborted.
        timeout_s: The limit, in seconds.
        reports: The reports of these ranks, made just after.
        within: The ranks that ran the kernel with the reporting rank; empty if it waited in the consistency check.
        cut: The links between hosts on which nothing was acknowledged, by the hosts' addresses: ``"10.0.0.1 and
            10.0.0.2"``. The ranks in `missing` may be healthy then.
    """

    missing: tuple[int, ...] = ()
    timeout_s: float = 0.0
    reports: tuple[RankReport, ...] = ()
    within: tuple[int, ...] = ()
    cut: tuple[str, ...] = ()
    cure = "see what the missing ranks are doing; raise timeout_s if they are only slow"
    _tells_story: ClassVar[bool] = False  # the reporting rank only waited; the reports tell more

    def describe_missing(self, who: Sequence[str], others: Sequence[str]) -> str:
        """Returns the text of `detail`, from the names of the ranks in `missing` and in `within`."""
        if not others:
            late = f"these had not arrived: {listed(who)}" if who else "all ranks had arrived"
            return f"after {self.timeout_s:g} s {late}"
        silent = f"these gave no answer: {listed(who)}"
        alive = "all of them answer, but not over the library's own connections, or too slowly"
        return f"after {self.timeout_s:g} s in the kernel, with {listed(others)}: {silent if who else alive}"

    def unfinished(self, who: Sequence[str]) -> str:
        """Returns the text of `detail` for a caller's limit that has passed, from the names of unfinished ranks."""
        late = f"these had not finished: {listed(who)}" if who else "all ranks had finished"
        return f"after {self.timeout_s:g} s {late}"

    def _text(self) -> str:
        text = listed((super()._text(), *self.reports), "\n  - ", 1 + MOST_LISTED)
        if self.cut:
            text += f"\nNothing was acknowledged between {listed(self.cut)}: the link is cut, or a host is down"
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


class MethodError(FaultError):
    """A method of a captured step raised, or returned a value that a run can't return; `op` is its name.

    Attributes:
        call: The index of the call among all calls of the step, from 0.
        raised: The type of the exception, as ``"ValueError"``; empty: the returned value can't be returned by a run.
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
        return "\n  | ".join((f"call {self.call} of the step, {self.op}{who}, {what}", *self.trace.splitlines()))

    def _advice(self) -> str:
        plain = "let the step return plain values and arrays, and read other values with an ordinary method"
        return self.cure if self.raised else f"{plain}, and capture it again"


class VersionError(RaycollectError):
    """A version of weights can't be put or read; the tensors that methods see are unchanged.

    Attributes:
        name: The name of the publication.
        version: The version, as text; empty for none.
        rank: The rank at fault, of the publisher or of the receiver group; -1 for none.
        actor: The actor of that rank.
        detail: What happened.
    """

    name: str
    detail: str = ""
    version: str = ""
    rank: int = -1
    actor: str = ""

    def _where(self) -> str:
        which = f"version {self.version} of {self.name!r}" if self.version else f"publication {self.name!r}"
        return f"{which}{culprit(self.rank, self.actor)}"


class UnknownVersionError(VersionError):
    """No such version exists: it was not put, or the publication was closed."""

    cure = "call publish() and put() first, and update to one of the two newest versions, which a publisher keeps"


class PublisherReplacedError(VersionError):
    """Another publisher has taken this name since."""

    cure = "let one publisher put versions of a name; the newer publisher can continue"


class PublicationExistsError(VersionError):
    """Another living process publishes under this name."""

    cure = "publish under another name; or close() the other publication, or end its process, and call publish() again"


class VersionNotPutError(VersionError):
    """A version was not put: a rank of the publisher failed, or replicas differ; no receiver can read it."""

    cure = "see the cause, and call put() again; after a death, call publish() again with the actors that live"


class VersionNotWholeError(VersionError):
    """A receiver could not get all parts with the right digests; the group's methods see the last version."""

    cure = (
        "call update() again: it reads only what is missing; where the subscription has ended, or all of its actors, "
        "call subscribe() again. In vLLM's trainer, call send_weights() again; in verl, update_weights() of the "
        "CheckpointEngineManager"
    )


class VersionDirtyError(VersionError):
    """A method was refused: an update has begun to write this actor's tensors in place, and has not ended."""

    cure = "update again; parts that have landed are not read again"


class VersionTimeoutError(VersionError):
    """Ranks did not answer in time.

    Attributes:
        missing: The ranks that did not answer.
        timeout_s: The limit, in seconds.
        is_shown: Whether ranks may show the version. A missing rank whose call still waits may show it before its next
            method; one that has given up keeps the old version until an update succeeds.
        has_given_up: Whether the missing ranks have given up themselves, as they waited too long for a lock, or for
            readers of the tensors.
        reports: The reports of the missing ranks, made just after.
    """

    missing: tuple[int, ...] = ()
    timeout_s: float = 0.0
    is_shown: bool = False
    has_given_up: bool = False
    reports: tuple[RankReport, ...] = ()
    cure = "see what these ranks are doing; raise timeout_s if they are only busy, and call update() again"

    def _text(self) -> str:
        others = ""
        if self.is_shown and self.has_given_up:
            others = "; other ranks may show the version, and these keep the old one until an update succeeds"
        elif self.is_shown:
            others = "; other ranks may show the version, and these may before their next method"
        return listed((super()._text() + others, *self.reports), "\n  - ", 1 + MOST_LISTED)

    def _advice(self) -> str:
        if not self.missing:
            return "call it again; raise timeout_s if the wait takes longer"
        if self.has_given_up:
            return (
                "see what holds the lock or reads the tensors; raise timeout_s if that only takes long, and call again"
            )
        return self.cure


class PushError(VersionError):
    """Some of several receiver groups could not be updated; the others show the version.

    Attributes:
        receipts: The receipt of each group, in the order of the subscriptions; None for one that was not updated.
        errors: The error of each group, as `Subscription.update` raises it; None for one that was updated.
    """

    receipts: tuple[Any, ...] = ()
    errors: tuple[RaycollectError | None, ...] = ()
    cure = "see the error of each group, and update those groups again"

    def _text(self) -> str:
        rows = (f"group {at}: {type(error).__name__}: {error._text()}" for at, error in enumerate(self.errors) if error)
        return f"{super()._text()}\n  - " + listed(rows, "\n  - ")
