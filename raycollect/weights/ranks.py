"""The ranks of one side, as a driver sees them, and the rounds of puts and updates that it drives over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from raycollect.channel import DataClient
from raycollect.channel.messages import Look, Seen
from raycollect.core.model import TENSOR, Address, Key
from raycollect.driver import held_values
from raycollect.driver.plan_tracker import retrieve_errors
from raycollect.driver.side_layouts import SideLayouts, held_tensors
from raycollect.errors import (
    ActorGoneError,
    ChannelError,
    CollectiveTimeoutError,
    InternalError,
    RankReport,
    RaycollectError,
    SelfDrivenError,
    VersionError,
    VersionTimeoutError,
    Violation,
    kept,
    refusal,
    wrong_argument,
)
from raycollect.errors.text import a_type, not_a_name
from raycollect.group.watchdog import report_of
from raycollect.planner.layout import Layout, layout
from raycollect.planner.reshard.request import local_tensors
from raycollect.pos import Range
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import ray_actors, ray_session
from raycollect.weights import agent, protocol
from raycollect.weights.agent import Attached
from raycollect.weights.atoms import Layouts
from raycollect.weights.directory import Holder, Member
from raycollect.weights.protocol import Event, Failed, Lost, Round, Tell, Version

ATTACH_S = 60.0
"""How long a rank may take to come to where it hears of a publication, in seconds."""

LOOK_S, MOST_REPORTS = 1.0, 8
"""How long all ranks that are late may take to say what they are doing, in seconds, and how many are asked."""

_IN_ROUND = "/raycollect/weights/"  # in the stack of a process that does what a round told it to do


class Ranks:
    """The actors of one side, by rank, and the layouts of what their refs hold.

    Args:
        op: What is done, for messages.
        refs: One ref per rank; they are held as long as this.
        given: The layouts by name or pattern, or one of a tensor; None: DTensors say it, and of other tensors each rank
            has all.
        timeout_s: How long the methods that make the refs may take.

    Raises:
        RefusedError: Refs or layouts make no sense.
        CollectiveTimeoutError: The methods are late.
    """

    def __init__(self, op: str, refs: Sequence[Any], given: Any, timeout_s: float) -> None:
        if not isinstance(refs, (list, tuple)) or not refs or not all(isinstance(one, ray.ObjectRef) for one in refs):
            raise refusal(op, "", (wrong_argument("list of refs", _told(refs), "one ObjectRef per rank"),))
        self.op = op
        self.refs: list[Any] = list(refs)
        handles, violations = held_values.handles_of(dict(enumerate(refs)), timeout_s, op, "")
        if violations:
            raise refusal(op, "", tuple(violations))
        self.handles: list[Handle] = [handles[rank] for rank in range(len(refs))]
        self.layouts: Layouts = _layouts(op, self.handles, given)
        self.actors: list[Any] = [self._actor(rank, one) for rank, one in enumerate(self.handles)]
        self.members: list[Member] = []  # who they are, from `attach` on
        self.shown: list[Version | None] = []  # what they showed then

    def __len__(self) -> int:
        return len(self.refs)

    def _actor(self, rank: int, handle: Handle) -> Any:
        if handle.actor_id == ray_actors.current_actor_id():
            raise SelfDrivenError(actor=handle.actor)
        actor = ray_actors.actor_handle(handle.actor_id)
        if actor is None:
            expected = "one of whose actor this process has a handle"
            found = Violation(
                kind="foreign", rank=rank, field="ref", found="of an actor unknown here", expected=expected
            )
            raise refusal(self.op, "", (found,))
        return actor

    def call(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function in a rank's actor, in its queue; returns the ref."""
        return self.actors[rank].__ray_call__.options(max_task_retries=0).remote(function, *args)

    def items(self, rank: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a generator function in a rank's actor, in its queue; returns the generator of refs."""
        made = self.actors[rank]._raycollect_items
        return made.options(num_returns="streaming", max_task_retries=0).remote(function, *args, **kwargs)

    def keys(self, rank: int) -> frozenset[str]:
        """The names of a rank's local tensors."""
        return frozenset(one.key for one in local_tensors(tuple(self.layouts.items())).get(rank, ()))

    def check(self) -> None:
        """Raises what keeps any of them from taking part, while they are still parts of other sides."""
        args = [(self.op, one.key, self.layouts, rank) for rank, one in enumerate(self.handles)]
        answers = self._answers([self.call(rank, agent.check_side, *one) for rank, one in enumerate(args)])
        owners: dict[tuple[str, Range], int] = {}  # by actor and memory, which rank's tensor lies there
        for rank, (handle, spans) in enumerate(zip(self.handles, answers, strict=True)):
            for span in spans:
                if (owner := owners.setdefault((handle.actor_id, span), rank)) != rank:
                    found, expected = f"in the memory of rank {owner}'s", "tensors of its own for each rank"
                    wrong = Violation(kind="alias", rank=rank, field="tensor", found=found, expected=expected)
                    raise refusal(self.op, "", (wrong,))

    def attach(
        self, function: Callable[..., Attached], args: Callable[[int], tuple[Any, ...]], undo: tuple[Any, ...]
    ) -> None:
        """Calls a function in all of them, and raises what any of them raises: then all call `undo`, with arguments."""
        refs = [self.call(rank, function, *args(rank)) for rank in range(len(self))]
        try:
            attached: list[Attached] = self._answers(refs)
        except BaseException:
            for rank in range(len(self)):
                self.call(rank, *undo)
            raise
        self.members = [one for one, _ in attached]
        self.shown = [version for _, version in attached]

    def _answers(self, refs: list[Any]) -> list[Any]:
        retrieve_errors(refs)  # of which the first is raised
        try:
            found: list[Any] = ray.get(refs, timeout=ATTACH_S)
        except RayTaskError as exc:
            raise cause_of(exc) from None
        except GetTimeoutError as exc:
            late = tuple(rank for rank, ref in enumerate(refs) if not ray.wait([ref], timeout=0)[0])
            raise held_values.late_error(self.op, "", len(late), late, ATTACH_S) from exc
        except RayActorError as exc:
            raise ActorGoneError(op=self.op, detail=str(exc).partition("\n")[0]) from exc
        return found

    def holder(self, rank: int, key: Key, signature: bytes, *, is_publisher: bool) -> Holder:
        """A rank as a holder of a version."""
        return Holder(member=self.members[rank], key=key, signature=signature, rank=rank, is_publisher=is_publisher)

    def late_error(self, name: str, job: Job, timeout_s: float, *, is_shown: bool = False) -> VersionTimeoutError:
        """Makes the error of a round for which ranks were too late, with what they are doing."""
        waited = {rank: error for rank, error in job.errors.items() if isinstance(error, CollectiveTimeoutError)}
        late = tuple(sorted(job.round.waiting if job.is_late else waited))
        who = ", ".join(f"{rank} ({self.members[rank].actor})" for rank in late)
        detail = f"after {timeout_s:g} s these had not arrived: rank {who}"
        return VersionTimeoutError(
            name=name,
            version=str(job.round.version),
            missing=late,
            timeout_s=timeout_s,
            is_shown=is_shown,
            detail=detail if job.is_late else f"rank {who} {next(iter(waited.values())).detail}",
            reports=self._reports(late),
        )

    def _reports(self, ranks: Sequence[int]) -> tuple[RankReport, ...]:
        """What some ranks are doing, as far as they say so within a moment."""
        found = []
        for rank in ranks[:MOST_REPORTS]:
            one = self.members[rank]
            seen = _look(one.address, LOOK_S / min(len(ranks), MOST_REPORTS))
            has_begun = seen is not None and not seen.doing and any(_IN_ROUND in line for line in seen.stack)
            found.append(report_of(rank, one.actor, seen, has_begun=has_begun, awaited_s=0.0))
        return tuple(found)


def _look(address: Address, limit_s: float) -> Seen | None:
    """What a process is doing, whoever drives it; None: it gives no answer."""
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
    """The violation of a name that no publication can have."""
    wrong = not_a_name(name)
    return [wrong_argument("name", wrong, "a string")] if wrong else []


def why_over(session: Any, *, is_open: bool) -> str:
    """Why a side can't be used any more; empty where it can. `session`: that of Ray in which it was made."""
    if is_open and session is not None and not ray_session.is_in(session):
        return "of a Ray that was shut down"
    return "" if is_open else "closed"


def _told(refs: object) -> str:
    if not isinstance(refs, (list, tuple)):
        return a_type(refs)
    other = next((one for one in refs if not isinstance(one, ray.ObjectRef)), None)
    return "empty" if not refs else f"a list with {a_type(other)}"


def _layouts(op: str, handles: Sequence[Handle], given: Any) -> Layouts:
    named = {"": given} if isinstance(given, Layout) else given
    if named is None:
        plain = _replicated(handles)
        if plain is not None:
            return plain
    elif not isinstance(named, Mapping) or not all(isinstance(one, Layout) for one in named.values()):
        expected = "a Layout (see raycollect.layout), or a dict of Layouts by name or pattern"
        raise refusal(op, "", (wrong_argument("layout", type(given).__name__, expected),))
    side = SideLayouts("layout", named)
    if side.is_open:
        side.resolve_held([held_tensors(one) for one in handles], ())
    violations = list(side.violations)
    for name, one in side.layouts.items():
        if one.world_size > len(handles):
            expected = f"at most the {len(handles)} of the refs"
            violations.append(wrong_argument(f"layout of {name!r}", f"of {one.world_size} ranks", expected))
    if violations:
        raise refusal(op, "", tuple(violations))
    return dict(sorted(side.layouts.items()))


def _replicated(handles: Sequence[Handle]) -> Layouts | None:
    """Layouts of tensors of which each rank has all; None: some are DTensors, or no dict of tensors."""
    first = handles[0]
    names = ("",) if first.structure == TENSOR else tuple(map(str, first.structure.names))
    if any(one.placements for one in handles) or len(names) != len(first.infos):
        return None
    mesh = {"rank": len(handles)}
    return {
        name: replace(layout(one.shape, mesh=mesh, dtype=one.dtype), converts=False)  # which nobody has asked for
        for name, one in sorted(zip(names, first.infos, strict=True))
    }


def cause_of(error: RayTaskError) -> RaycollectError:
    """What a function that was called in an actor raised."""
    cause = error.cause
    if isinstance(cause, RaycollectError):
        return cause
    return InternalError(detail=f"{type(cause).__name__} in an actor: {cause}")


@dataclass(eq=False, kw_only=True)
class Job:
    """One round over the ranks of a side.

    Attributes:
        round: How far it is.
        errors: What ranks raised.
        is_late: Whether its time was over.
    """

    round: Round
    errors: dict[int, RaycollectError]
    is_late: bool = False

    @property
    def has_waited(self) -> bool:
        """Whether a rank has waited for memory until its time was over."""
        return any(isinstance(error, CollectiveTimeoutError) for error in self.errors.values())

    def end_late(self) -> None:
        """Its time is over."""
        if not self.round.is_over:
            self.is_late = True
            self.round, _ = protocol.advance(self.round, Failed(min(self.round.waiting)))


@dataclass(eq=False, kw_only=True)
class Update(Job):
    """A round whose ranks are told one thing after the other.

    Attributes:
        tell: Calls a rank, and returns the ref.
        read: What a rank's answer means; it keeps what else it needs of it.
    """

    tell: Callable[[Tell, int], Any]
    read: Callable[[int, Any], Event]

    def heard(self, rank: int, ref: Any) -> Event:
        """What a rank has answered; raises as `ray.get`."""
        return self.read(rank, ray.get(ref))


def drive(jobs: Sequence[tuple[Update, Tell]], timeout_s: float, beside: Callable[[], None]) -> None:
    """Drives rounds side by side until all are over, or the time is; `beside` is called when all have begun."""
    until_s = time.monotonic() + timeout_s
    pending: dict[Any, tuple[Update, int]] = {}
    for job, tell in jobs:
        _tell(pending, job, tell)
    beside()
    while pending:
        ready, _ = ray.wait(list(pending), timeout=max(until_s - time.monotonic(), 0.0))
        if not ready:
            for job, _ in jobs:
                job.end_late()
            break
        ready = ray.wait(list(pending), num_returns=len(pending), timeout=0)[0] or ready  # all of them in one pass
        for ref in ready:
            job, rank = pending.pop(ref)
            job.round, following = protocol.advance(job.round, event_of(job, rank, partial(job.heard, rank, ref)))
            if following is not None:
                _tell(pending, job, following)
        retrieve_errors(ref for ref, (job, _) in pending.items() if job.round.is_over)
        pending = {ref: one for ref, one in pending.items() if not one[0].round.is_over}
    retrieve_errors(pending)


def _tell(pending: dict[Any, tuple[Update, int]], job: Update, tell: Tell) -> None:
    for rank in sorted(job.round.waiting):
        pending[job.tell(tell, rank)] = job, rank


def event_of(job: Job, rank: int, heard: Callable[[], Event]) -> Event:
    """What a rank has answered, as `heard` reads it, or what it means that it gave no answer."""
    try:
        return heard()
    except RayTaskError as exc:
        job.errors[rank] = kept(cause_of(exc))
        return Failed(rank)
    except ActorUnavailableError as exc:  # it may live, and show what it showed
        what, _, _ = str(exc).partition("\n")
        detail = f"Ray can't reach its actor, which may live: {what}"
        job.errors[rank] = VersionError(name="", version=str(job.round.version), rank=rank, detail=detail)
        return Failed(rank)
    except RayActorError:
        return Lost(rank)
