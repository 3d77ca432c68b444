"""`publish`: a trainer's weights as versions with digests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from msgspec import structs

from raycollect.core.bound_to_process import BoundToProcess
from raycollect.core.model import Key
from raycollect.driver.operand_binding import ensure_ray
from raycollect.errors import (
    LayoutError,
    PublicationExistsError,
    PublisherReplacedError,
    TensorReplacedError,
    VersionError,
    VersionNotPutError,
    copy_error,
    refusal,
    refuse,
    wrong_argument,
    wrong_time_limit,
)
from raycollect.errors.text import shown
from raycollect.planner.layout import Layout
from raycollect.planner.wording import counted
from raycollect.ray_bridge import ray_actors, ray_cluster, ray_session
from raycollect.weights import agent, atoms
from raycollect.weights.cut import NO_CUT, VersionCut
from raycollect.weights.directory import Atoms, Holder, Listed, VersionDirectory, sweep
from raycollect.weights.protocol import Phase, Version, VersionRound
from raycollect.weights.ranks import ATTACH_S, Job, Ranks, why_over, wrong_name
from raycollect.weights.receipts import Receipt
from raycollect.weights.side import WeightSide
from raycollect.weights.side_ranks import OwnRank, ranks_of
from raycollect.weights.stream import Stream
from raycollect.weights.subscription import Subscription, update_all
from raycollect.weights.turns import Turns

_MOST_NUMBER = 1 << 63


def publish(
    refs: Any,
    name: str = "default",
    *,
    layout: Layout | Mapping[str, Layout] | None = None,
    lock: Any = None,
    dtype: Any = None,
) -> Publication:
    """Publishes tensors of actors, or of the calling process, so that receivers can update to versions of them.

    The first version is available after the first `Publication.put`. A publication of the same name is replaced if this
    process made it, or if it has ended: its versions stay available until that put, and it can put no more. With
    refs, call this in a driver, or in an actor outside `refs`. With tensors, call it in the process that has them, of
    any kind; `Publication.put` then copies them in the thread that calls it.

    Args:
        refs: One ref per rank, in the order of the layouts' ranks. Each stands for a tensor, or for a dict of tensors
            by name. Or a tensor of this process, or a dict of them by name; this process is the only
            rank. The tensors are only read.
        name: The name, unique in the cluster.
        layout: The layout of the tensor; with dicts, of each tensor by name or pattern, as `src` of `reshard_refs`.
            None: DTensors have their own layouts, and other tensors are replicated.
        lock: The name of an attribute of the actors: a lock, or a method that returns a context manager, both also of
            `asyncio`. It is held while the tensors are copied. Actors whose methods overlap (async, threaded, with
            concurrency groups) need one, which their methods hold while they write the tensors. With tensors of this
            process: the lock or the function itself, or None.
        dtype: The dtype to which `Publication.put` converts floats, such as ``"bfloat16"`` for the rollouts of a
            float32 trainer: versions then take half the memory, and half the bytes travel. None: their own.

    Raises:
        LayoutError: The tensors do not fit the layouts, or no rank has some of their elements.
        UnsupportedError: Methods of an actor overlap and there is no lock.
        RefusedError: As `reshard_refs`.
        PublicationExistsError: Another living process publishes under this name.
        PublisherReplacedError: Another publisher has taken the name meanwhile.
    """
    return Publication(refs, name, layout, lock, dtype)


class _Put(NamedTuple):
    """A version that was put. It is one value, as another thread may push meanwhile.

    Attributes:
        version: The version.
        held: The ranks, as its holders.
        listed: The layouts in the directory, as of this put; None before the first one.
    """

    version: Version
    held: Sequence[Holder] = ()
    listed: frozenset[Listed] | None = None


class Publication(WeightSide, BoundToProcess):
    """A publisher's side; see `publish`. It may be used as a context, which closes it.

    Attributes:
        name: The name.
        epoch: Counts up with the publishers of this name.
    """

    _INSTEAD = "pass its name: subscribe(name, ...) reads its versions from there; put them here"

    def __init__(self, refs: Any, name: str, layout: Any, lock: Any, dtype: Any) -> None:
        refuse("publish", wrong_name(name))
        ensure_ray("publish", refs)
        super().__init__(name)
        self._ranks: Ranks = ranks_of("publish", refs, layout, timeout_s=ATTACH_S, lock=lock, dtype=dtype)
        faults = tuple(atoms.source_faults(self._ranks.layouts))
        if faults:
            raise refusal("publish", "", faults)
        layouts = self._ranks.layouts.values()
        self._nbytes = sum(prod(layout.shape) * layout.itemsize for layout in layouts)
        self._ranks.check()  # before another publication is replaced
        self._directory = VersionDirectory(name)
        self._turns = Turns(name, is_own=isinstance(self._ranks, OwnRank))
        self._check_free()
        self._publisher = ray_actors.describe_process()
        self.epoch: int = 0
        while not self._begin():
            pass
        # For streams, which take single tensors, and for puts: the layouts of the readers, and how they cut the tensors
        self._cuts: dict[bool, tuple[frozenset[bytes], VersionCut]] = {}
        self._places: dict[int, tuple[VersionCut, Atoms]] = {}
        # The last version with a used number, even if its record is lost, and the one before that
        self._used = self._before = Version(self.epoch, 0)
        self._last = self._pushed = _Put(self._used)
        self._opened()

    def _check_free(self) -> None:
        """Raises if another living process publishes under this name."""
        worker = self._directory.publisher()
        if worker and worker != ray_session.worker_id() and worker in ray_cluster.living_workers():
            latest = self._directory.latest()
            who = latest.publisher if latest is not None else f"process {worker[:6]} of Ray"
            raise PublicationExistsError(name=self.name, detail=f"{who} publishes under this name")

    def _begin(self) -> bool:
        """Begins an epoch; returns False if the directory has lost its records, and the actors know a later epoch."""
        self.epoch = self._directory.begin_epoch(ray_session.worker_id())
        self._signature = self._directory.post_layouts(self._ranks.layouts, self.epoch)
        sweep(self.name)
        layouts, handles = self._ranks.held_layouts, self._ranks.handles
        try:
            self._ranks.attach(
                agent.attach_source,
                lambda rank: (self.name, self.epoch, handles[rank].key, layouts, rank, self._ranks.dtype),
                (agent.detach_source, self.name, self.epoch),
            )
        except PublisherReplacedError:
            if self._directory.epoch() != self.epoch:
                raise
            return False
        return True

    def put(self, version: int | None = None, *, timeout_s: float = 60.0) -> Version:
        """Makes the actors' current tensors a version, which receivers can update to from then on.

        Each actor copies its tensors after the methods that were called before; so the actors may write their tensors
        when this returns. The two newest versions are available.

        Args:
            version: Its number, above that of the last version; by default the next.
            timeout_s: How long the actors may take, in seconds.

        Returns:
            The version, with the digest of each of its parts.

        Raises:
            VersionNotPutError: An actor has died or failed, or replicas have different bits. Nothing was put.
            VersionTimeoutError: An actor was late, or another thread is putting a version: nothing was put. Or the
                cluster's key-value store gave no answer: then the version may have been put.
            TensorReplacedError: An actor has replaced its tensors by others of other names, shapes or types.
            PublisherReplacedError: Another publisher has taken the name.
            InvalidArgumentError: The publication was closed.
        """
        refuse("put", wrong_time_limit(timeout_s, also=(0,)))
        until_s = time.monotonic() + timeout_s
        with self._one_at_a_time("put", timeout_s, until_s):
            stream = self._begun((), version, in_buckets=True)
            stream._put(until_s, timeout_s)
        return stream.version

    def stream(self, subscriptions: Sequence[Subscription] = (), *, version: int | None = None) -> Stream:
        """Begins a version that receivers read part by part, while other parts are still being computed.

        The parts that `Stream.call` and `Stream.part` name are copied and digested at once, and receivers read them.
        `Stream.commit` puts the version and updates the receivers. No method sees any of it before. Parts move while
        the driver is in one of these calls.

        Args:
            subscriptions: Receiver groups that this process drives. Other groups get the version when it is put.
            version: As in `put`.

        Raises:
            LayoutError: Layouts of a receiver group do not fit those of the publisher.
        """
        with self._one_at_a_time("stream", ATTACH_S, time.monotonic() + ATTACH_S):
            return self._begun(subscriptions, version)

    @contextmanager
    def _one_at_a_time(self, op: str, timeout_s: float, until_s: float) -> Iterator[None]:
        """Waits until no other thread is putting a version, and bounds the time of the directory's requests."""
        with self._turns.taken(op, timeout_s, until_s), self._directory.within(timeout_s, until_s):
            yield

    def _begun(self, subscriptions: Iterable[Subscription], version: int | None, *, in_buckets: bool = False) -> Stream:
        number = self._used.number + 1 if version is None else version
        if type(number) is not int or not self._used.number < number < _MOST_NUMBER:
            expected = f"above {self._used.number}, and below {_MOST_NUMBER}"
            raise refusal("put", "", (wrong_argument("version", shown(version), expected),))
        groups = self._checked_groups("stream", subscriptions)
        listed = self._last.listed  # a later put knows the receivers that the put before it has found
        if listed is None:
            _, listed, _ = self._directory.listed()
        readers = self._directory.all_layouts(listed)
        readers |= {group._signature: group._ranks.layouts for group in groups}
        before, cut = self._cuts.get(in_buckets, (frozenset(), None))
        if cut is None or before != readers.keys():
            # A bucket that was cut for no readers may lie on none of them as a whole, who then can't serve it to others
            cut = atoms.cut(self._ranks.layouts, readers.values(), in_buckets=in_buckets and bool(readers))
            self._cuts[in_buckets] = frozenset(readers), cut
        wanted = replace(
            Version(self.epoch, number, self._publisher, self._signature),
            nbytes=self._nbytes,
            cut=cut,
            count=self._used.count + 1,
        )
        return Stream(self, groups, wanted)

    # ------------------------------------------------------------------------------------------ for a stream

    @property
    def _count(self) -> int:
        """How many versions this publication has put."""
        return self._used.count

    def _places_on(self, rank: int, cut: VersionCut) -> Atoms:
        """Returns where the atoms of a stream lie on a rank."""
        before, places = self._places.get(rank, (NO_CUT, {}))
        if before != cut:
            places = atoms.served_places(self._ranks.layouts, rank, cut)
            self._places[rank] = cut, places
        return places

    def _holder(self, rank: int, key: Key) -> Holder:
        """Returns the record of a rank as a holder."""
        return structs.replace(self._ranks.members[rank], key=key, signature=self._signature)

    def _forget_overwritten(self) -> None:
        """Removes the version before the last, which the actors drop."""
        if self._before.number:
            self._directory.forget(self._before)
            self._before = Version(self.epoch, 0)

    def _finish(self, job: Job, timeout_s: float, keys: Mapping[int, Key]) -> None:
        """Posts the version of a put that has ended; raises the errors of `put`."""
        self._check(job, timeout_s)
        version = job.round.version
        ordered = replace(version, digests={atom: version.digests[atom] for atom in version.cut.atoms})
        job.round = replace(job.round, version=ordered)
        self._post(ordered, keys)

    def _checked_groups(self, op: str, subscriptions: Iterable[Subscription]) -> tuple[Subscription, ...]:
        groups = tuple(subscriptions) if isinstance(subscriptions, Iterable) else None
        if groups is None or not all(isinstance(group, Subscription) for group in groups):
            refuse(op, [wrong_argument("subscriptions", shown(subscriptions), "a list of what subscribe() returned")])
        if over := why_over(self._session, is_open=self._is_open):
            raise refusal(op, "", (wrong_argument("publication", over, "one that is open: publish() again"),))
        if len(set(groups)) < len(groups):
            refuse(op, [wrong_argument("subscriptions", "a list with the same one twice", "each of them once")])
        for group in groups:
            if group.name != self.name:
                raise refusal(op, "", (wrong_argument("subscriptions", f"one to {group.name!r}", f"to {self.name!r}"),))
            group._check(self._ranks.layouts)
        return groups

    def _post(self, version: Version, keys: Mapping[int, Any]) -> None:
        """Posts a version; removes it again if a later publisher has begun by then."""
        self._before, self._used = self._used, version
        held = [self._holder(rank, keys[rank]) for rank in range(len(self._ranks))]
        self._directory.post_version(version, held)
        newest, listed, numbers = self._directory.listed()
        if newest > self.epoch:
            self._directory.forget(version)
            raise PublisherReplacedError(name=self.name, version=str(version), detail=f"epoch {newest} has begun")
        if newest < self.epoch:  # the directory was lost
            self._directory.keep_epoch(self.epoch, ray_session.worker_id())
        self._directory.keep_layouts(self.epoch, listed)
        if not self._last.version.number:
            self._directory.forget_before(version)
        for number in numbers:  # of a late update's holders, for example
            if number < (self.epoch, self._before.number):
                self._directory.forget(Version(*number))
        self._last = _Put(version, held, listed)

    def push(self, subscriptions: Sequence[Subscription], *, timeout_s: float = 60.0) -> list[Receipt]:
        """Updates receiver groups that this process drives to the newest version, all at once; see `update`.

        Raises:
            InvalidArgumentError: A subscription is named twice, or belongs to another publication.
            PushError: Some of several groups could not be updated; it has the receipts of the others.
            RaycollectError: The only group could not be updated, as `Subscription.update` raises it.
        """
        refuse("push", wrong_time_limit(timeout_s, also=(0,)))
        groups = self._checked_groups("push", subscriptions)
        last = self._last
        if not last.version.number:
            return update_all(groups, "latest", timeout_s)
        held = () if last is self._pushed else last.held  # later pushes find the receivers of this one
        self._pushed = last
        return update_all(groups, "latest", timeout_s, resolved=last.version, held=held, listed=last.listed or ())

    def close(self) -> None:
        """Ends the publication: from now on only receivers that know of a version can read it from each other."""
        self._is_open = False
        if why_over(self._session, is_open=True):
            return  # its actors and records have ended with Ray
        for rank in range(len(self._ranks)):
            self._ranks.call(rank, agent.detach_source, self.name, self.epoch)
        if self._directory.epoch() == self.epoch:
            self._directory.end_epoch(self.epoch)
            self._directory.forget_all(self.epoch)

    def _check(self, job: Job, timeout_s: float) -> None:
        if job.round.phase is Phase.DONE:
            return
        if job.is_late or job.has_waited:
            raise self._ranks.late_error(self.name, job, timeout_s)
        where: dict[str, Any] = {"name": self.name, "version": str(job.round.version)}
        if job.round.differing:
            detail = f"replicas have different bits in {counted(len(job.round.differing), 'part')}, first in "
            detail += self._first_differing(job.round)
            raise VersionNotPutError(**where, detail=detail)
        for rank, error in job.errors.items():
            if isinstance(error, PublisherReplacedError):
                raise copy_error(error)
            if (newest := self._directory.epoch()) > self.epoch:  # its actors may have left that epoch, too
                raise PublisherReplacedError(**where, rank=rank, detail=f"epoch {newest} has begun") from error
            if isinstance(error, (TensorReplacedError, LayoutError)):
                raise copy_error(error)
            detail = error.detail if isinstance(error, VersionError) else "it could not copy its tensors"
            raise VersionNotPutError(
                **where, rank=rank, actor=self._ranks.members[rank].actor, detail=detail
            ) from error
        (lost,) = job.round.lost
        raise VersionNotPutError(
            **where, rank=lost, actor=self._ranks.members[lost].actor, detail="its process has ended"
        )

    @staticmethod
    def _first_differing(over: VersionRound) -> str:
        """Describes the first part whose bits differ between replicas."""
        atom, cut = over.differing[0], over.version.cut
        sealed = [some[atom] for some in (over.parts, *over.done.values()) if atom in some]
        return cut.shown(next((cut.differing(atom, sealed[0], other) for other in sealed if other != sealed[0]), atom))

    def __repr__(self) -> str:
        number = self._last.version.number
        return f"<Publication {self.name!r}, epoch {self.epoch}, {len(self._ranks)} ranks, version {number}>"
