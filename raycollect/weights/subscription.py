"""`subscribe`: a receiver group whose ranks get all of a version, or none of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import structs

from raycollect.driver.operand_binding import ensure_ray
from raycollect.errors import (
    PushError,
    RaycollectError,
    UnknownVersionError,
    VersionError,
    VersionNotWholeError,
    VersionTimeoutError,
    copy_error,
    refusal,
    refuse,
    strip_traceback,
    wrong_argument,
    wrong_flags,
    wrong_time_limit,
)
from raycollect.errors.text import shown
from raycollect.planner.layout import Layout
from raycollect.ray_bridge import ray_session
from raycollect.weights import agent, atoms, protocol
from raycollect.weights.cut import NO_CUT, Atom, Digests, VersionCut
from raycollect.weights.directory import Atoms, Holder, Holders, Listed, VersionDirectory
from raycollect.weights.hosts import Sharing
from raycollect.weights.protocol import (
    Phase,
    RankEvent,
    RankFailed,
    RankShown,
    RankVerified,
    Tell,
    Version,
)
from raycollect.weights.ranks import ATTACH_S, Job, Ranks, Update, drive, why_over, wrong_name
from raycollect.weights.receipts import Receipt
from raycollect.weights.side import WeightSide
from raycollect.weights.side_ranks import OwnRank, ranks_of
from raycollect.weights.turns import Turns


def subscribe(
    name: str,
    dst_refs: Any,
    *,
    layout: Layout | Mapping[str, Layout] | None = None,
    inplace: bool = False,
    lock: Any = None,
    dtype: Any = None,
    rank: int | None = None,
) -> Subscription:
    """Makes actors, or the calling process, a receiver group of a publication, which may begin later.

    With refs, call this in a driver, or in an actor outside `dst_refs`; another process may drive the publisher. With
    tensors, call it in the process that has them, of any kind; an update then runs in the thread that calls it. The
    processes need no group and no lease: they read from those that hold a version. Other subscriptions of these tensors
    end.

    Args:
        name: The name of the publication.
        dst_refs: One ref per rank, in the order of the layouts' ranks; or a tensor of this process, or a dict of them
            by name. Updates write the tensors.
        layout: As in `publish`; floats are converted to the dtype that a layout asks for.
        inplace: Saves the memory for what arrives from other hosts: an update writes the tensors themselves, between
            two methods. From its beginning until an update has succeeded, methods raise a `VersionDirtyError`.
            Not with tensors on a GPU.
        lock: As in `publish`; it is held while a verified version is copied into the tensors. Methods that hold it
            while they read the tensors, and call `Subscription.version`, see one whole version. Not with `inplace`.
        dtype: The dtype of the targets, to which floats of other dtypes are converted; ``"auto"``: each target has its
            own. None: only a layout asks for a conversion.
        rank: The rank of the layouts that this process has, if it gives its own tensors; None: it is the only rank.

    Raises:
        LayoutError, UnsupportedError, ReadOnlyError, AliasError, RefusedError: As `publish`.
    """
    refuse("subscribe", [*wrong_name(name), *wrong_flags(inplace=inplace)])
    ensure_ray("subscribe", dst_refs)
    ranks = ranks_of("subscribe", dst_refs, layout, timeout_s=ATTACH_S, lock=lock, dtype=dtype, rank=rank)
    return Subscription(name, ranks, inplace=bool(inplace))


class Subscription(WeightSide):
    """A receiver group; see `subscribe`. It may be used as a context, and be passed to methods of its actors.

    Attributes:
        name: The name of the publication.
    """

    _receives = True

    def __init__(self, name: str, ranks: Ranks, *, inplace: bool) -> None:
        super().__init__(name)
        self._id = secrets.token_hex(8)
        self._inplace = inplace
        self._ranks = ranks
        faults = tuple(atoms.target_faults(self._ranks.layouts))
        if faults:
            raise refusal("subscribe", "", faults)
        self._ranks.check(is_inplace=inplace)  # before another subscription of the same tensors ends
        self._directory = VersionDirectory(name)
        self._signature = self._directory.post_layouts(self._ranks.layouts, self._directory.epoch())
        layouts, handles = self._ranks.layouts, self._ranks.handles
        self._ranks.attach(
            agent.attach_receiver,
            lambda rank: (name, self._id, handles[rank].key, layouts, rank, inplace),
            (agent.drop_receiver, self._id),
        )
        self._version = protocol.shown_by_all(self._ranks.shown)
        self._turns = Turns(name, is_own=isinstance(ranks, OwnRank))
        # By signature, rank, and whether the holder is the publisher: where it has the atoms of a cut
        self._places: dict[tuple[bytes, int, bool], tuple[VersionCut, Atoms]] = {}
        self._opened()

    def version(self) -> Version | None:
        """Returns the version that methods see: in a rank's process its own version, elsewhere that of the last update.

        None: no update has ended yet.
        """
        is_rank, version = agent.shown(self._id)
        return version if is_rank else self._version

    def update(self, version: int | Version | str = "latest", *, timeout_s: float = 60.0) -> Receipt:
        """Updates the group to a version: all of its living ranks, or none.

        Each rank gets the parts that it lacks from any process that holds the version, while none of its methods runs,
        and recomputes their digests. When all ranks have verified the version, each copies it into its tensors between
        two methods. A busy rank is waited for.

        Args:
            version: A number of the newest publisher, a version that `put` returned, or ``"latest"``. If a later
                version replaces the latest before all ranks have it, the update continues with the later one.
            timeout_s: The time limit of the whole update, in seconds.

        Raises:
            UnknownVersionError: No such version was put; the update does not wait for one.
            InvalidArgumentError: The subscription was closed.
            LayoutError: The layouts do not fit those of the publisher.
            VersionNotWholeError: A rank could not get all parts, or all ranks have died. Methods see the last version.
            VersionTimeoutError: A rank was late, or the cluster's key-value store gave no answer, or another thread is
                updating this subscription. If `is_shown` is False, methods see the last version.
            TensorReplacedError: An actor has replaced its tensors by others of other names, shapes or types.
            VersionError: Ray can't reach a rank's actor, which may live; others may show the version. Update again.
        """
        refuse("update", wrong_time_limit(timeout_s, also=(0,)))
        self._check_open()
        return update_all([self], version, timeout_s)[0]

    def close(self) -> None:
        """Ends the subscription. The tensors keep their values, and are no longer served to others."""
        self._is_open = False
        if why_over(self._session, is_open=True):
            return  # its actors have ended with Ray
        for rank in range(len(self._ranks)):
            self._ranks.call(rank, agent.detach_receiver, self._id)

    # ------------------------------------------------------------------------------------------ an update

    def _find(self, version: int | Version | str) -> Version:
        """Looks up a version in the directory; raises as `update`."""
        if isinstance(version, Version):
            resolved = self._directory.version(version.epoch, version.number)
        elif isinstance(version, str) and version == "latest":
            resolved = self._directory.latest()
        elif type(version) is int and 0 <= version < 1 << 63:
            resolved = self._directory.version(self._directory.epoch(), version)
        else:
            raise refusal("update", "", (wrong_argument("version", shown(version), "a number, or 'latest'"),))
        src = None if resolved is None else self._directory.layouts(resolved.signature, resolved.epoch)
        if src is None and resolved is not None and version == "latest" and self._directory.latest() != resolved:
            return self._find(version)  # a publisher after that one has forgotten its layouts
        if resolved is None or src is None:
            wanted, newest = "" if version == "latest" else str(version), self._directory.latest()
            detail = f"it is not there; the newest is {newest}" if wanted and newest is not None else ""
            raise UnknownVersionError(name=self.name, version=wanted, detail=detail)
        self._check(src)
        return resolved

    def _check_open(self) -> None:
        if over := why_over(self._session, is_open=self._is_open):
            violation = wrong_argument("subscription", over, "one that is open: subscribe() again")
            raise refusal("update", "", (violation,))

    def _check(self, src: atoms.Layouts) -> None:
        """Raises if the subscription was closed, or a publisher's layouts do not fit."""
        self._check_open()
        faults = tuple(atoms.reader_faults(self._ranks.layouts, src))
        if faults:
            raise refusal("update", "", faults)

    def _open_stream(self, version: Version) -> list[frozenset[Atom]]:
        """Makes the ranks begin to receive a stream; returns the atoms that each needs."""
        if self._inplace:
            return []  # the ranks would be dirty for as long as the stream lasts
        wanted = []
        with self._turns.taken("stream", ATTACH_S, time.monotonic() + ATTACH_S):  # not between an update's two phases
            for rank in range(len(self._ranks)):
                self._ranks.call(rank, agent.receive, self._id, rank, "open_stream", version)
                wanted.append(frozenset(atoms.places(self._ranks.layouts, rank, version.cut, whole=False)))
        return wanted

    def _land(self, rank: int, version: Version, part: Digests, holders: Holders, limit_s: float) -> Any:
        """Makes a rank read atoms of a stream; returns the ref."""
        return self._ranks.call(rank, agent.receive, self._id, rank, "land", version, part, holders, limit_s)

    def _job(self, version: Version, records: Sequence[Holder], left_s: Callable[[], float]) -> Update:
        """Returns the round that updates the ranks to a version."""
        holders = self._holders(version, records)
        sharing = Sharing(self._ranks.members, self._ranks.layouts, holders, lends=not self._inplace)

        def tell(what: Tell, rank: int) -> Any:
            if what is Tell.STAGE:
                args = self._id, rank, version, sharing.holders(rank), left_s()
                if is_alone:
                    return self._ranks.call(rank, agent.update, *args, time.monotonic() + left_s())
                return self._ranks.call(rank, agent.stage, *args, sharing.is_lender(rank))
            return self._ranks.call(rank, agent.show, self._id, rank, version.label, left_s())

        def read(rank: int, answer: Any) -> RankEvent:
            if isinstance(answer, tuple):
                job.staged[rank] = answer[:2]
                verified = RankVerified(rank, answer[0].digests)
                if not is_alone:
                    sharing.staged(rank, answer[2], answer[0].digests)
                    return verified
                job.round, _ = protocol.advance(job.round, verified)
                _, _, answer = answer
            if answer is None:  # another driver has staged something else
                return RankFailed(rank)
            job.holders.append(structs.replace(self._ranks.members[rank], key=answer, signature=self._signature))
            return RankShown(rank)

        is_alone = sharing.is_alone(ray_session.machine_id())
        begun = protocol.begin_update(version, len(self._ranks))
        job = Update(round=begun, tell=tell, read=read, errors={}, is_alone=is_alone, after=sharing.after)
        return job

    def _holders(self, version: Version, records: Sequence[Holder]) -> Holders:
        holders = []
        for record in records:
            layouts = self._directory.layouts(record.signature, version.epoch)
            if layouts is None:
                continue
            of = record.signature, record.rank, record.is_publisher
            cut, places = self._places.get(of, (NO_CUT, {}))
            if cut != version.cut:
                lie = atoms.served_places if record.is_publisher else atoms.held_places
                places = lie(layouts, record.rank, version.cut)
                self._places[of] = version.cut, places
            holders.append((record, places))
        return holders

    def _finish(self, job: Update, began_s: float, timeout_s: float) -> Receipt:
        """Returns the receipt of a round that has ended; raises as `update`."""
        version = job.round.version
        if stale := {key for _, keys in job.staged.values() for key in keys}:
            with suppress(VersionError):  # other receivers can remove them, too
                self._directory.drop_holders(version, stale)
        if job.round.phase is not Phase.DONE:
            self._ranks.tell_each(agent.receive, self._id, "release")  # what holders lend until the next update
            raise self._failure(job, timeout_s)
        before, self._version = self._version, version
        since = before.count if before is not None and before.epoch == version.epoch else 0
        skipped = max(version.count - since - 1, 0) if before is not None else 0
        self._skipped += skipped
        return Receipt(
            name=self.name,
            version=version,
            ranks=tuple(job.staged[rank][0] for rank in sorted(job.round.done)),
            lost=tuple(sorted(job.round.lost)),
            skipped=skipped,
            seconds=time.monotonic() - began_s,
        )

    def _failure(self, job: Job, timeout_s: float) -> RaycollectError:
        self._check_open()  # the subscription may have been closed meanwhile
        if job.is_late or job.has_waited:
            is_shown = job.round.is_shown or (isinstance(job, Update) and job.is_alone and job.is_late)
            return self._ranks.late_error(self.name, job, timeout_s, is_shown=is_shown)
        where: dict[str, Any] = {"name": self.name, "version": str(job.round.version)}
        for error in job.errors.values():
            failure = copy_error(error)
            if isinstance(failure, VersionError) and not failure.name:
                failure.name = self.name  # the actor did not know it
            return failure
        if not job.round.done:
            return VersionNotWholeError(**where, detail="the processes of all its ranks have ended")
        return VersionNotWholeError(**where, detail="others have updated the same actors, or written their tensors")

    def __reduce__(self) -> tuple[Any, ...]:
        return agent.RankSubscription, (self.name, self._id, self._version)

    def __repr__(self) -> str:
        return f"<Subscription to {self.name!r}, {len(self._ranks)} ranks, version {self.version()}>"


def update_all(
    subscriptions: Sequence[Subscription],
    version: int | Version | str,
    timeout_s: float,
    *,
    resolved: Version | None = None,
    held: Sequence[Holder] = (),
    listed: Collection[Listed] = (),
) -> list[Receipt]:
    """Updates several receiver groups concurrently; see `Subscription.update`.

    Args:
        subscriptions: The receiver groups, of one publication.
        version: As in `Subscription.update`.
        timeout_s: As in `Subscription.update`.
        resolved: The version, if the caller has put it; saves the lookup.
        held: The publisher's ranks that hold it; saves the lookup of others, if all receivers are on their hosts.
        listed: The layouts that the directory is known to have.

    Raises:
        PushError: Some of several groups could not be updated; it has the receipts of the others.
        RaycollectError: The only group could not be updated, as `Subscription.update` raises it.
    """
    everyone = _Updates(subscriptions, version, timeout_s, resolved, held, listed)
    with ExitStack() as turns:
        for at, subscription in sorted(enumerate(subscriptions), key=lambda pair: pair[1]._id):  # prevents deadlocks
            with everyone.failing(at):
                turns.enter_context(subscription._turns.taken("update", timeout_s, everyone.until_s))
                turns.enter_context(subscription._directory.within(timeout_s, everyone.until_s))
        everyone.run()
    return everyone.receipts()


@dataclass(eq=False)
class _Updates:
    """Updates of several receiver groups; see `update_all`. A failed update does not affect the others."""

    subscriptions: Sequence[Subscription]
    wanted: int | Version | str
    timeout_s: float
    resolved: Version | None
    held: Sequence[Holder]
    listed: Collection[Listed]
    began_s: float = field(default_factory=time.monotonic)
    done: dict[int, Receipt] = field(default_factory=dict)
    errors: dict[int, RaycollectError] = field(default_factory=dict)

    @property
    def until_s(self) -> float:
        """The deadline, by `time.monotonic`."""
        return self.began_s + self.timeout_s

    def left_s(self) -> float:
        """Returns the time that is left, in seconds."""
        return max(self.until_s - time.monotonic(), 0.0)

    @contextmanager
    def failing(self, at: int) -> Iterator[None]:
        """Fails the update of one group if the block raises."""
        try:
            yield
        except RaycollectError as exc:
            self.errors[at] = strip_traceback(exc)

    def run(self) -> None:
        """Updates the groups that have not failed."""
        todo: dict[int, Version] = {}
        own = {at: isinstance(group._ranks, OwnRank) for at, group in enumerate(self.subscriptions)}
        for at in sorted(own, key=own.__getitem__):  # own ranks last, as they stage while they are called
            subscription = self.subscriptions[at]
            if at not in self.errors:
                with self.failing(at):
                    todo[at] = self.resolved or subscription._find(self.wanted)
        while todo:
            todo = self._round(todo)

    def _round(self, todo: Mapping[int, Version]) -> dict[int, Version]:
        """Updates groups to versions; returns newer versions to retry with, for groups whose version was replaced."""
        held, self.held = self.held, ()  # a retry asks the directory
        near, ranks = {holder.machine for holder in held}, [self.subscriptions[at]._ranks for at in todo if held]
        is_near = bool(held) and all(member.machine in near for some in ranks for member in some.members)
        records: dict[Version, Sequence[Holder]] = {self.resolved: held} if self.resolved and is_near else {}
        jobs: dict[int, Update] = {}
        for at, version in todo.items():
            with self.failing(at):
                if version not in records:
                    records[version] = self.subscriptions[at]._directory.holders(version)
                jobs[at] = self.subscriptions[at]._job(version, records[version], self.left_s)
        try:
            drive(jobs.values(), self.left_s(), partial(self._keep_layouts, todo))
        except BaseException:  # such as Ctrl-C
            for at, job in jobs.items():
                if not job.round.is_over:
                    self.subscriptions[at]._ranks.tell_each(agent.receive, self.subscriptions[at]._id, "release")
            raise
        for version in records:
            holders = [holder for at in jobs if todo[at] == version for holder in jobs[at].holders]
            with suppress(VersionError):  # others will ask the publisher instead
                self.subscriptions[min(todo)]._directory.post_holders(version, holders)
        again: dict[int, Version] = {}
        for at, job in jobs.items():
            subscription = self.subscriptions[at]
            with self.failing(at):
                try:
                    self.done[at] = subscription._finish(job, self.began_s, self.timeout_s)
                except VersionTimeoutError:
                    raise
                except RaycollectError as exc:
                    newer = self._newer(subscription) or todo[at]
                    if newer <= todo[at] and not (is_near and isinstance(exc, VersionNotWholeError)):
                        raise
                    again[at] = newer  # or the same, from holders that the directory has
        return again

    def _keep_layouts(self, versions: Mapping[int, Version]) -> None:
        """Posts layouts that the directory has lost, or does not have in an epoch."""
        for at, version in versions.items():
            with suppress(VersionError):  # without the layouts others can't read from these receivers
                self.subscriptions[at]._directory.keep_layouts(version.epoch, self.listed, is_hint=True)

    def _newer(self, subscription: Subscription) -> Version | None:
        """Returns the latest version if that was asked for; None if it can't be found."""
        if self.wanted == "latest":
            with suppress(RaycollectError):  # the caller has an error of its own
                return subscription._find("latest")
        return None

    def receipts(self) -> list[Receipt]:
        """Returns the receipts; raises the error of the only group, or a `PushError`."""
        if not self.errors:
            return [self.done[at] for at in range(len(self.subscriptions))]
        if len(self.subscriptions) == 1:
            raise copy_error(self.errors[0])
        raise PushError(
            name=self.subscriptions[0].name,
            detail=f"{len(self.errors)} of {len(self.subscriptions)} receiver groups were not updated",
            receipts=tuple(self.done.get(at) for at in range(len(self.subscriptions))),
            errors=tuple(self.errors.get(at) for at in range(len(self.subscriptions))),
        )
