"""The ranks of one side, in the driver, and the rounds of puts and updates that the driver runs over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError

from raycollect.channel import DataClient
from raycollect.channel.messages import Look, Seen
from raycollect.core.model import Address, Key
from raycollect.driver import held_values
from raycollect.driver.plan_tracker import retrieve_errors
from raycollect.errors import (
    ActorGoneError,
    ChannelError,
    CollectiveTimeoutError,
    InternalError,
    RankReport,
    RaycollectError,
    VersionError,
    VersionTimeoutError,
    Violation,
    refusal,
    strip_traceback,
    wrong_argument,
)
from raycollect.errors.text import not_a_name
from raycollect.group.watchdog import report_of
from raycollect.planner.reshard.matching import CONVERTED
from raycollect.planner.reshard.request import local_tensors
from raycollect.pos import Range
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import ray_session
from raycollect.weights import agent, protocol
from raycollect.weights.agent import Attached
from raycollect.weights.atoms import Layouts
from raycollect.weights.directory import Holder
from raycollect.weights.protocol import Phase, RankEvent, RankFailed, RankLost, Tell, Version, VersionRound
from raycollect.weights.receipts import RankReceipt

ATTACH_S = 60.0
"""How long a rank may take to attach, in seconds."""

LOOK_S, MOST_REPORTS = 1.0, 8
"""How long late ranks may take to report what they are doing, in seconds, and how many of them are asked."""

_IN_ROUND = "/raycollect/weights/"  # in the stack of a process that runs an action of a round


class Ranks:
    """The ranks of one side, and the layouts of their tensors.

    Args:
        op: The operation, for messages.
        handles: The tensors of each rank.
        layouts: The layouts of these tensors, by name.
        lock: The lock of each actor, or None.
        dtype: The dtype as which a publisher's floats are put; empty: their own.

    Attributes:
        layouts: The layouts of the versions.
        held_layouts: The layouts of the tensors, which only differ in the dtype.
        overlapping: The ranks of actors whose methods overlap, from `check` on. Calls to them can overtake each other.
    """

    def __init__(self, op: str, handles: Sequence[Handle], layouts: Layouts, lock: Any, dtype: str = "") -> None:
        self.op = op
        self.handles: list[Handle] = list(handles)
        self.held_layouts: Layouts = layouts
        self.dtype: str = dtype
        self.layouts: Layouts = {
            name: replace(layout, dtype=dtype) if dtype and layout.dtype in CONVERTED else layout
            for name, layout in layouts.items()
        }
        self._lock = lock
        self._overlapping: frozenset[int] = frozenset()
        self.members: list[Holder] = []  # their processes, from `attach` on
        self.shown: list[Version | None] = []  # the versions that they showed then

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def overlapping(self) -> frozenset[int]:
        """See the class."""
        return self._overlapping

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in a rank's process, in order of these calls; returns a ref of the result."""
        raise NotImplementedError

    def items(self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a generator function in a rank's process, as `call` does; returns a generator of refs."""
        raise NotImplementedError

    def keys(self, rank: int) -> frozenset[str]:
        """Returns the names of a rank's local tensors."""
        return frozenset(tensor.key for tensor in local_tensors(tuple(self.layouts.items())).get(rank, ()))

    def check(self, *, is_inplace: bool = False) -> None:
        """Raises if a rank can't take part, before any rank leaves another side."""
        refs = [
            self.call(rank, agent.check_side, self.op, handle.key, self.held_layouts, rank, self._lock, is_inplace)
            for rank, handle in enumerate(self.handles)
        ]
        answers: list[tuple[list[Range], bool]] = self._answers(refs)
        self._overlapping = frozenset(rank for rank, (_, overlaps) in enumerate(answers) if overlaps)
        owners: dict[tuple[str, Range], int] = {}  # by actor and memory range: the rank of the tensor
        for rank, (handle, (spans, _)) in enumerate(zip(self.handles, answers, strict=True)):
            for span in spans:
                if (owner := owners.setdefault((handle.actor_id, span), rank)) != rank:
                    actual, expected = f"in the memory of rank {owner}'s", "tensors of its own for each rank"
                    wrong = Violation(kind="alias", rank=rank, field="tensor", found=actual, expected=expected)
                    raise refusal(self.op, "", (wrong,))

    def attach(
        self, function: Callable[..., Attached], args: Callable[[int], tuple[Any, ...]], undo: tuple[Any, ...]
    ) -> None:
        """Calls a function in all actors. If it raises in any of them, all call `undo` and the error is raised."""
        refs = [self.call(rank, function, *args(rank), self._lock) for rank in range(len(self))]
        try:
            attached: list[Attached] = self._answers(refs)
        except BaseException:
            for rank in range(len(self)):
                self.call(rank, *undo)
            raise
        self.members = [member for member, _ in attached]
        self.shown = [version for _, version in attached]

    def _answers(self, refs: list[Any]) -> list[Any]:
        retrieve_errors(refs)  # the first one is raised
        try:
            answers: list[Any] = ray.get(refs, timeout=ATTACH_S)
        except RayTaskError as exc:
            raise cause_of(exc) from None
        except GetTimeoutError as exc:
            late = tuple(rank for rank, ref in enumerate(refs) if not ray.wait([ref], timeout=0)[0])
            raise held_values.late_error(self.op, "", len(late), late, ATTACH_S) from exc
        except RayActorError as exc:
            raise ActorGoneError(op=self.op, detail=str(exc).partition("\n")[0]) from exc
        return answers

    def tell_each(self, function: Callable[..., Any], name: str, *args: object) -> None:
        """Calls ``function(actor, name, rank, *args)`` in each rank; neither waits nor raises."""
        for rank in range(len(self)):
            with suppress(Exception):  # such as those of a busy actor with `max_pending_calls`
                retrieve_errors([self.call(rank, function, name, rank, *args)])

    def late_error(self, name: str, job: Job, timeout_s: float, *, is_shown: bool = False) -> VersionTimeoutError:
        """Builds the error of a round for which ranks were late, with their reports."""
        waited = {rank: error for rank, error in job.errors.items() if isinstance(error, CollectiveTimeoutError)}
        late = tuple(sorted(job.unanswered if job.is_late else waited))
        who = ", ".join(f"{rank} ({self.members[rank].actor})" for rank in late)
        detail = f"after {timeout_s:g} s these had not arrived: rank {who}"
        return VersionTimeoutError(
            name=name,
            version=str(job.round.version),
            missing=late,
            timeout_s=timeout_s,
            is_shown=is_shown,
            has_given_up=not job.is_late,
            detail=detail if job.is_late else f"rank {who} {next(iter(waited.values())).detail}",
            reports=self._reports(late),
        )

    def _reports(self, ranks: Sequence[int]) -> tuple[RankReport, ...]:
        """Returns the reports of ranks, as far as they answer within a moment."""
        reports = []
        for rank in ranks[:MOST_REPORTS]:
            member = self.members[rank]
            seen = _look(member.address, LOOK_S / min(len(ranks), MOST_REPORTS))
            has_begun = seen is not None and not seen.doing and any(_IN_ROUND in line for line in seen.stack)
            reports.append(report_of(rank, member.actor, seen, has_begun=has_begun, awaited_s=0.0))
        return tuple(reports)


def _look(address: Address, limit_s: float) -> Seen | None:
    """Asks a process what it is doing; None if it gives no answer."""
    try:
        client = DataClient(address, limit_s)
        try:
            seen = client.request(Look(request=0), limit_s)
        finally:
            client.close()
    except ChannelError:
        return None
    return seen if isinstance(seen, Seen) else None


def wrong_name(name: object) -> list[Violation]:
    """Returns the violation by an invalid name of a publication."""
    wrong = not_a_name(name)
    return [wrong_argument("name", wrong, "a string")] if wrong else []


def why_over(session: Any, *, is_open: bool) -> str:
    """Returns why a side can't be used any more; empty if it can. `session` is the Ray session in which it was made."""
    if is_open and session is not None and not ray_session.is_in(session):
        return "of a Ray that was shut down"
    return "" if is_open else "closed"


def cause_of(error: RayTaskError) -> RaycollectError:
    """Returns the error that a function raised in an actor."""
    cause = error.cause
    if isinstance(cause, RaycollectError):
        return cause
    return InternalError(detail=f"{type(cause).__name__} in an actor: {cause}")


@dataclass(eq=False, kw_only=True)
class Job:
    """One round over the ranks of a side.

    Attributes:
        round: The state of the round.
        errors: The errors of ranks.
        is_late: Whether the time limit has passed.
    """

    round: VersionRound
    errors: dict[int, RaycollectError]
    is_late: bool = False

    @property
    def has_waited(self) -> bool:
        """Whether a rank has waited for readers of its memory until the time limit."""
        return any(isinstance(error, CollectiveTimeoutError) for error in self.errors.values())

    @property
    def unanswered(self) -> frozenset[int]:
        """The ranks that were called and have not answered."""
        return self.round.waiting

    def end_late(self) -> None:
        """Fails the round because the time limit has passed."""
        if not self.round.is_over:
            self.is_late = True
            self.round, _ = protocol.advance(self.round, RankFailed(min(self.round.waiting)))


@dataclass(eq=False, kw_only=True)
class Update(Job):
    """An update of one receiver group, whose ranks run one action after the other.

    Attributes:
        tell: Calls a rank, and returns the ref.
        read: Converts a rank's answer to an event, and stores its other contents.
        is_alone: Whether an only rank stages and shows in one call.
        after: The ranks that stage after another rank, and that rank of each.
        staged: By rank, the receipt, and the keys of holders that did not have the version.
        holders: The ranks that show the version, as its holders.
    """

    tell: Callable[[Tell, int], Any]
    read: Callable[[int, Any], RankEvent]
    is_alone: bool = False
    after: Mapping[int, int] = field(default_factory=dict)
    staged: dict[int, tuple[RankReceipt, tuple[Key, ...]]] = field(default_factory=dict)
    holders: list[Holder] = field(default_factory=list)

    @property
    def unanswered(self) -> frozenset[int]:
        """See `Job`; a rank that stages after another one is called once that one has staged."""
        waiting = self.round.waiting
        if self.round.is_shown:
            return waiting
        return frozenset(rank for rank in waiting if self.after.get(rank) not in waiting)

    def heard(self, rank: int, ref: Any) -> RankEvent:
        """Returns the event of a rank's answer; raises the errors of `ray.get`."""
        return self.read(rank, ray.get(ref))


def drive(jobs: Iterable[Update], timeout_s: float, beside: Callable[[], None]) -> None:
    """Drives updates until all have ended or the time limit has passed; calls `beside` after the first calls."""
    until_s = time.monotonic() + timeout_s
    pending: dict[Any, tuple[Update, int]] = {}
    for job in jobs:
        _tell(pending, job, Tell.STAGE)
    beside()
    while pending:
        ready, _ = ray.wait(list(pending), timeout=max(until_s - time.monotonic(), 0.0))
        if not ready:
            for job in jobs:
                job.end_late()
            break
        ready = ray.wait(list(pending), num_returns=len(pending), timeout=0)[0] or ready  # all of them in one pass
        for ref in ready:
            job, rank = pending.pop(ref)
            event = event_of(job, rank, partial(job.heard, rank, ref))
            job.round, following = protocol.advance(job.round, event)
            if following is not None:
                _tell(pending, job, following)
            elif job.round.phase is Phase.STAGING:
                for follower in (it for it, leader in job.after.items() if leader == rank):
                    pending[job.tell(Tell.STAGE, follower)] = job, follower
        retrieve_errors(ref for ref, (job, _) in pending.items() if job.round.is_over)
        pending = {ref: entry for ref, entry in pending.items() if not entry[0].round.is_over}
    retrieve_errors(pending)


def _tell(pending: dict[Any, tuple[Update, int]], job: Update, tell: Tell) -> None:
    for rank in sorted(job.round.waiting - (job.after.keys() if tell is Tell.STAGE else set())):
        pending[job.tell(tell, rank)] = job, rank


def event_of(job: Job, rank: int, heard: Callable[[], RankEvent]) -> RankEvent:
    """Returns the event that `heard` reads from a rank's answer, or the event of a failed call."""
    try:
        return heard()
    except RayTaskError as exc:
        job.errors[rank] = strip_traceback(cause_of(exc))
        return RankFailed(rank)
    except ActorUnavailableError as exc:  # the actor may live and show its last version
        return _unheard(job, rank, "Ray can't reach its actor, which may live", exc)
    except RayActorError:
        return RankLost(rank)
    except RayError as exc:
        return _unheard(job, rank, "its answer is lost", exc)


def _unheard(job: Job, rank: int, what: str, error: RayError) -> RankEvent:
    detail = "{}: {}".format(what, str(error).partition("\n")[0])
    job.errors[rank] = VersionError(name="", version=str(job.round.version), rank=rank, detail=detail)
    return RankFailed(rank)
