"""`subscribe`: a receiver group that gets versions whole, or not at all."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any

from raycollect.core.model import Key
from raycollect.driver.operand_binding import ensure_ray
from raycollect.errors import (
    PushError,
    RaycollectError,
    UnknownVersionError,
    VersionError,
    VersionNotWholeError,
    VersionTimeoutError,
    anew,
    kept,
    refusal,
    refuse,
    wrong_argument,
    wrong_flags,
    wrong_time_limit,
)
from raycollect.errors.text import shown
from raycollect.planner.layout import Layout
from raycollect.ray_bridge import ray_session
from raycollect.weights import agent, atoms, protocol
from raycollect.weights.directory import Directory, Holder, Holders
from raycollect.weights.protocol import Atom, Digests, Event, Failed, Phase, Shown, Tell, Verified, Version
from raycollect.weights.ranks import ATTACH_S, Job, Ranks, Update, drive, why_over, wrong_name
from raycollect.weights.receipts import RankReceipt, Receipt
from raycollect.weights.turns import Turns

Landed = tuple[RankReceipt, tuple[Key, ...]]
"""What a rank has staged, and the keys of holders that did not have the version."""

MOST_RECEIVERS = 8
"""How many receivers that hold a version a rank may ask, before it asks the publisher."""


def subscribe(
    name: str,
    dst_refs: Sequence[Any],
    *,
    layout: Layout | Mapping[str, Layout] | None = None,
    inplace: bool = False,
) -> Subscription:
    """Makes actors a receiver group of a publication, which need not be there yet.

    In any driver, or in an actor that is none of these; the publisher may be driven by another one. The actors need no
    group, and no controller has to lease them: they read from the processes that hold a version. Other subscriptions of
    these tensors end.

    Args:
        name: That of the publication.
        dst_refs: One ref per rank, in the order of the layouts' ranks; what they stand for is written by updates.
        layout: As of `publish`; floats become those of a dtype that a layout asks for.
        inplace: Saves the memory of a second set of tensors: an update writes the tensors themselves, between two
            methods. From then on until it has ended, the actors' methods raise a `VersionDirtyError`, also when it has
            failed, until another one ends.

    Raises:
        LayoutError, UnsupportedError, ReadOnlyError, AliasError, RefusedError: As `publish`.
    """
    return Subscription(name, dst_refs, layout, inplace=inplace)


class Subscription:
    """A receiver group; see `subscribe`. It may be used as a context, and be passed to methods of its actors.

    Attributes:
        name: That of the publication.
    """

    _is_open = True
    _session: Any = None

    def __init__(self, name: str, dst_refs: Sequence[Any], layout: Any, *, inplace: bool) -> None:
        refuse("subscribe", [*wrong_name(name), *wrong_flags(inplace=inplace)])
        ensure_ray("subscribe", dst_refs)
        self._session = ray_session.core_worker() if ray_session.is_connected() else None
        self.name = name
        self._id = secrets.token_hex(8)
        self._inplace = inplace = bool(inplace)
        self._ranks = Ranks("subscribe", dst_refs, layout, ATTACH_S)
        faults = tuple(atoms.target_faults(self._ranks.layouts))
        if faults:
            raise refusal("subscribe", "", faults)
        self._ranks.check()  # before another subscription of the same tensors ends
        self._directory = Directory(name)
        self._signature = self._directory.post_layouts(self._ranks.layouts, self._directory.epoch())
        layouts, handles = self._ranks.layouts, self._ranks.handles
        self._ranks.attach(
            agent.attach_receiver,
            lambda rank: (name, self._id, handles[rank].key, layouts, rank, inplace),
            (agent.drop_receiver, self._id),
        )
        self._version = protocol.shown_by_all(self._ranks.shown)
        self._turns = Turns(name)
        self._places: dict[tuple[bytes, int], tuple[tuple[Atom, ...], dict[Atom, Any]]] = {}

    def version(self) -> Version | None:
        """The version that methods see: in a rank's own process what it computes with, elsewhere the last update's.

        None: no update has ended yet.
        """
        is_rank, found = agent.shown(self._id)
        return found if is_rank else self._version

    def update(self, version: int | Version | str = "latest", *, timeout_s: float = 60.0) -> Receipt:
        """Brings the group to a version: all of its ranks that live, or none.

        Each rank reads what it lacks into a second set of tensors, from any process that holds the version, beside no
        method of its own, and recomputes the digests of what landed. When all have, each copies it into its tensors
        between two methods. A rank that is busy is waited for.

        Args:
            version: A number of the newest publisher, what `put` returned, or ``"latest"``. If a later one replaces the
                latest before all have it, the update goes on with that.
            timeout_s: How long all of it may take, in seconds.

        Raises:
            UnknownVersionError: There is no such version; it does not wait for one.
            InvalidArgumentError: The subscription was closed.
            LayoutError: The layouts do not fit those of the publisher.
            VersionNotWholeError: A rank could not get all of it, or all ranks are gone. Methods see what they saw.
            VersionTimeoutError: A rank did not come to it in time, or the cluster's key-value store gave no answer, or
                another thread's update of this subscription lasts. If `is_shown` is False, methods see what they saw.
            TensorReplacedError: An actor has put tensors of other names, shapes or types in place of those that it had.
            VersionError: Ray can't reach a rank's actor, which may live; others may show the version. Update again.
        """
        refuse("update", wrong_time_limit(timeout_s, also=(0,)))
        self._check_open()
        return update_all([self], version, timeout_s)[0]

    def close(self) -> None:
        """Ends the subscription. The tensors stay as they are, and are served to others no more."""
        self._is_open = False
        if why_over(self._session, is_open=True):
            return  # its actors have ended with Ray
        for rank in range(len(self._ranks)):
            self._ranks.call(rank, agent.detach_receiver, self._id)

    # ------------------------------------------------------------------------------------------ an update

    def _find(self, version: int | Version | str) -> Version:
        """The version that is asked for, as the directory knows it; raises as `update`."""
        if isinstance(version, Version):
            found = self._directory.version(version.epoch, version.number)
        elif isinstance(version, str) and version == "latest":
            found = self._directory.latest()
        elif type(version) is int and 0 <= version < 1 << 63:
            found = self._directory.version(self._directory.epoch(), version)
        else:
            raise refusal("update", "", (wrong_argument("version", shown(version), "a number, or 'latest'"),))
        src = None if found is None else self._directory.layouts(found.signature, found.epoch)
        if src is None and found is not None and version == "latest" and self._directory.latest() != found:
            return self._find(version)  # a publisher after that one has forgotten its layouts
        if found is None or src is None:
            asked, newest = "" if version == "latest" else str(version), self._directory.latest()
            detail = f"it is not there; the newest is {newest}" if asked and newest is not None else ""
            raise UnknownVersionError(name=self.name, version=asked, detail=detail)
        self._check(src)
        return found

    def _check_open(self) -> None:
        if over := why_over(self._session, is_open=self._is_open):
            found = wrong_argument("subscription", over, "one that is open: subscribe() again")
            raise refusal("update", "", (found,))

    def _check(self, src: atoms.Layouts) -> None:
        """Raises where the subscription was closed, or a publisher's layouts do not fit."""
        self._check_open()
        faults = tuple(atoms.reader_faults(self._ranks.layouts, src))
        if faults:
            raise refusal("update", "", faults)

    def _open_stream(self, version: Version, among: Sequence[Atom]) -> list[frozenset[Atom]]:
        """Has the ranks begin to take a version part by part; returns the atoms that each needs."""
        if self._inplace:
            return []  # they would be dirty for as long as the stream lasts
        found = []
        with self._turns.taken("stream", ATTACH_S, time.monotonic() + ATTACH_S):  # not between an update's two phases
            for rank in range(len(self._ranks)):
                self._ranks.call(rank, agent.open_stream, self._id, rank, version, among)
                found.append(frozenset(atoms.places(self._ranks.layouts, rank, among, whole=False)))
        return found

    def _land(self, rank: int, version: Version, part: Digests, holders: Holders, limit_s: float) -> Any:
        """Has a rank read atoms of a version that it takes part by part; returns the ref."""
        return self._ranks.call(rank, agent.land, self._id, rank, version, part, holders, limit_s)

    def _job(
        self, version: Version, records: Sequence[Holder], left_s: Callable[[], float]
    ) -> tuple[Update, Tell, dict[int, Landed]]:
        """The round that brings the ranks to a version, and what they will have staged."""
        holders = self._holders(version, records)
        staged: dict[int, Landed] = {}

        def tell(what: Tell, rank: int) -> Any:
            if what is Tell.STAGE:
                some = self._for_rank(holders, rank)
                return self._ranks.call(rank, agent.stage, self._id, rank, version, some, left_s())
            return self._ranks.call(rank, agent.show, self._id, rank, replace(version, digests={}), left_s())

        def read(rank: int, answer: Any) -> Event:
            if isinstance(answer, tuple):
                staged[rank] = answer
                return Verified(rank, answer[0].digests)
            if answer is None:  # another driver has staged something else
                return Failed(rank)
            with suppress(VersionError):  # others will ask the publisher instead
                self._directory.post_holders(
                    version, [self._ranks.holder(rank, answer, self._signature, is_publisher=False)]
                )
            return Shown(rank)

        begun, first = protocol.begin_update(version, len(self._ranks))
        return Update(round=begun, tell=tell, read=read, errors={}), first, staged

    def _holders(self, version: Version, records: Sequence[Holder]) -> Holders:
        among = tuple(version.digests)
        found = []
        for one in records:
            layouts = self._directory.layouts(one.signature, version.epoch)
            if layouts is None:
                continue
            known = self._places.get((one.signature, one.rank))
            if known is None or known[0] != among:
                known = self._places[one.signature, one.rank] = (
                    among,
                    {
                        atom: place
                        for atom, place in atoms.held_places(layouts, one.rank, among).items()
                        if layouts[atom[0]].dtype == version.dtypes[atom[0]]  # as they were put
                    },
                )
            found.append((one, known[1]))
        return found

    def _for_rank(self, holders: Holders, rank: int) -> Holders:
        """Whom a rank asks, in this order: receivers before the publisher, its host before others, others by turns."""
        at, here = rank % max(len(holders), 1), self._ranks.members[rank].machine
        turned = sorted(
            [*holders[at:], *holders[:at]], key=lambda one: (one[0].is_publisher, one[0].member.machine != here)
        )
        receivers = [one for one in turned if not one[0].is_publisher]
        return receivers[:MOST_RECEIVERS] + turned[len(receivers) :]

    def _finish(self, job: Job, staged: Mapping[int, Landed], began_s: float, timeout_s: float) -> Receipt:
        """The receipt of a round that is over; raises as `update`."""
        version = job.round.version
        with suppress(VersionError):  # others will find out, too
            for key in {key for _, gone in staged.values() for key in gone}:
                self._directory.drop_holder(version, key)
        if job.round.phase is not Phase.DONE:
            raise self._failure(job, timeout_s)
        before, self._version = self._version, version
        is_same_epoch = before is not None and before.epoch == version.epoch
        since = before.count if is_same_epoch and before is not None else 0
        return Receipt(
            name=self.name,
            version=version,
            ranks=tuple(staged[rank][0] for rank in sorted(job.round.done)),
            lost=tuple(sorted(job.round.lost)),
            skipped=max(version.count - since - 1, 0) if before is not None else 0,
            seconds=time.monotonic() - began_s,
        )

    def _failure(self, job: Job, timeout_s: float) -> RaycollectError:
        self._check_open()  # it may have been closed meanwhile
        if job.is_late or job.has_waited:
            return self._ranks.late_error(self.name, job, timeout_s, is_shown=job.round.is_shown)
        where: dict[str, Any] = {"name": self.name, "version": str(job.round.version)}
        for error in job.errors.values():
            found = anew(error)
            if isinstance(found, VersionError) and not found.name:
                found.name = self.name  # which the actor did not know
            return found
        if not job.round.done:
            return VersionNotWholeError(**where, detail="the processes of all its ranks have ended")
        return VersionNotWholeError(**where, detail="others have updated the same actors, or written their tensors")

    def __enter__(self) -> Subscription:  # noqa: PYI034 - Python 3.10 has no `Self`
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Elsewhere, (self.name, self._id, self._version)

    def __repr__(self) -> str:
        return f"<Subscription to {self.name!r}, {len(self._ranks)} ranks, version {self.version()}>"


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """What a subscription is in the process of a rank."""

    name: str
    _id: str
    _version: Version | None

    def version(self) -> Version | None:
        """As `Subscription.version`."""
        is_rank, found = agent.shown(self._id)
        return found if is_rank else self._version


def update_all(
    subscriptions: Sequence[Subscription],
    version: int | Version | str,
    timeout_s: float,
    *,
    known: Version | None = None,
) -> list[Receipt]:
    """Updates several receiver groups side by side; see `Subscription.update`.

    Args:
        subscriptions: The receiver groups, of one publication.
        version: As there.
        timeout_s: As there.
        known: What the version is, where the caller has put it: nobody has to look for it.

    Raises:
        PushError: Some of several could not be updated; it has the receipts of the others.
        RaycollectError: The only one could not be, as `Subscription.update` raises it.
    """
    everyone = _Updates(subscriptions, version, timeout_s, known)
    with ExitStack() as turns:
        for at, one in sorted(
            enumerate(subscriptions), key=lambda pair: pair[1]._id
        ):  # so that no two wait for each other
            with everyone.failing(at):
                turns.enter_context(one._turns.taken("update", timeout_s, everyone.until_s))
                turns.enter_context(one._directory.within(timeout_s, everyone.until_s))
        everyone.run()
    return everyone.receipts()


class _Updates:
    """Updates of several receiver groups; see `update_all`. What fails one of them costs the others nothing."""

    def __init__(
        self,
        subscriptions: Sequence[Subscription],
        version: int | Version | str,
        timeout_s: float,
        known: Version | None,
    ) -> None:
        self._began_s = time.monotonic()
        self.until_s: float = self._began_s + timeout_s
        self._subscriptions = subscriptions
        self._wanted = version
        self._known = known
        self._timeout_s = timeout_s
        self._done: dict[int, Receipt] = {}
        self._errors: dict[int, RaycollectError] = {}

    def left_s(self) -> float:
        """The time that is left, in seconds."""
        return max(self.until_s - time.monotonic(), 0.0)

    @contextmanager
    def failing(self, at: int) -> Iterator[None]:
        """What is raised in the block fails the update of one group."""
        try:
            yield
        except RaycollectError as exc:
            self._errors[at] = kept(exc)

    def run(self) -> None:
        """Updates those that nothing has failed."""
        todo: dict[int, Version] = {}
        for at, one in enumerate(self._subscriptions):
            if at not in self._errors:
                with self.failing(at):
                    todo[at] = self._known or one._find(self._wanted)
        while todo:
            todo = self._round(todo)

    def _round(self, todo: Mapping[int, Version]) -> dict[int, Version]:
        """Brings groups to versions; returns those for which a newer one was put meanwhile, which is to be tried."""
        records: dict[Version, list[Holder]] = {}
        jobs: dict[int, tuple[Update, Tell, dict[int, Landed]]] = {}
        for at, found in todo.items():
            with self.failing(at):
                if found not in records:
                    records[found] = self._subscriptions[at]._directory.holders(found)
                jobs[at] = self._subscriptions[at]._job(found, records[found], self.left_s)
        beside = partial(_keep_layouts, [(self._subscriptions[at], todo[at].epoch) for at in jobs])
        drive([(job, tell) for job, tell, _ in jobs.values()], self.left_s(), beside)
        again: dict[int, Version] = {}
        for at, (job, _, staged) in jobs.items():
            one = self._subscriptions[at]
            with self.failing(at):
                try:
                    self._done[at] = one._finish(job, staged, self._began_s, self._timeout_s)
                except VersionTimeoutError:
                    raise
                except RaycollectError:
                    newer = one._find("latest") if self._wanted == "latest" else todo[at]
                    if newer <= todo[at]:
                        raise
                    again[at] = newer
        return again

    def receipts(self) -> list[Receipt]:
        """The receipts; raises the error of the only group, or those of all."""
        if not self._errors:
            return [self._done[at] for at in range(len(self._subscriptions))]
        if len(self._subscriptions) == 1:
            raise anew(self._errors[0])
        raise PushError(
            name=self._subscriptions[0].name,
            detail=f"{len(self._errors)} of {len(self._subscriptions)} receiver groups were not updated",
            receipts=tuple(self._done.get(at) for at in range(len(self._subscriptions))),
            errors=tuple(self._errors.get(at) for at in range(len(self._subscriptions))),
        )


def _keep_layouts(subscriptions: Sequence[tuple[Subscription, int]]) -> None:
    # What the directory does not have of them in an epoch, or has lost.
    for one, epoch in subscriptions:
        with suppress(VersionError):  # without it others can't read from these receivers
            one._directory.keep_layouts(epoch)
