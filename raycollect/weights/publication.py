"""`publish`: a trainer's weights as versions with digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any

from raycollect.core import ray_internals
from raycollect.errors import (
    PublisherReplacedError,
    VersionNotPutError,
    VersionTimeoutError,
    anew,
    refusal,
    wrong_argument,
)
from raycollect.planner.layout import Layout
from raycollect.weights import agent, atoms, protocol
from raycollect.weights.directory import Directory, HolderRecord
from raycollect.weights.protocol import Atom, Event, Phase, Sealed, Version
from raycollect.weights.ranks import ATTACH_S, Job, Ranks, drive

if TYPE_CHECKING:
    from raycollect.weights.subscription import Receipt, Subscription


def publish(
    refs: Sequence[Any], name: str = "default", *, layout: Layout | Mapping[str, Layout] | None = None
) -> Publication:
    """Publishes the tensors of actors, so that others can have versions of them by a name.

    Nothing is there to be had before the first `Publication.put`. Who published under this name before is replaced: its
    versions can be had until then, and it can put no more. In any driver, or in an actor that is none of these.

    Args:
        refs: One ref per rank, in the order of the layouts' ranks. Each stands for a tensor, or for a dict of tensors
            by name, in host memory. They are only read.
        name: The name in the whole cluster.
        layout: The layout of the tensor; with dicts, of each tensor by name or pattern, as `src` of `reshard_refs`.
            None: DTensors say theirs, and of other tensors each rank has all.

    Raises:
        LayoutError: The tensors do not fit the layouts, or no rank has some of their elements.
        UnsupportedError: A tensor is on a GPU, or methods of an actor overlap.
        RefusedError: As `reshard_refs`.
    """
    return Publication(refs, name, layout)


class Publication:
    """A publisher's side; see `publish`. It may be used as a context, which closes it.

    Attributes:
        name: The name.
        epoch: Which publisher of this name it is, from 1.
    """

    def __init__(self, refs: Sequence[Any], name: str, layout: Any) -> None:
        ray_internals.ensure_ray()
        self.name = name
        self._ranks = Ranks("publish", refs, layout, ATTACH_S)
        faults = tuple(atoms.source_faults(self._ranks.layouts))
        if faults:
            raise refusal("publish", "", faults)
        self._directory = Directory(name)
        self._publisher = ray_internals.describe_process()
        self.epoch: int = self._directory.begin_epoch(self._publisher)
        self._signature = self._directory.post_layouts(self._ranks.layouts)
        layouts, handles = self._ranks.layouts, self._ranks.handles
        self._attached = self._ranks.attach(
            agent.attach_source, lambda rank: (name, self.epoch, handles[rank].key, layouts, rank)
        )
        self._cut: tuple[frozenset[bytes], tuple[Atom, ...]] = (frozenset(), ())
        self._last = Version(self.epoch, 0)

    def put(self, version: int | None = None, *, timeout_s: float = 60.0) -> Version:
        """Makes what the actors have now a version, which receivers can have from then on.

        It is taken behind the methods that were called before, by a copy in each actor; so the actors may write their
        tensors when this returns. The two newest versions can be had.

        Args:
            version: Its number, above that of the one before; by default the next.
            timeout_s: How long the actors may take, in seconds.

        Returns:
            The version, with the digest of each of its atoms.

        Raises:
            VersionNotPutError: An actor is gone or has failed, or replicas have different bits. Nothing was put.
            VersionTimeoutError: An actor did not come to it in time. Nothing was put.
            PublisherReplacedError: Another publisher has taken the name.
        """
        number = self._last.number + 1 if version is None else version
        if type(number) is not int or number <= self._last.number:
            raise refusal("put", "", (wrong_argument("version", repr(version), f"above {self._last.number}"),))
        known = self._directory.all_layouts()
        if frozenset(known) != self._cut[0]:
            self._cut = frozenset(known), atoms.cut(self._ranks.layouts, known.values())
        among = self._cut[1]
        asked = replace(
            Version(self.epoch, number, self._publisher, self._signature),
            nbytes=sum(prod(one.shape) * one.itemsize for one in self._ranks.layouts.values()),
            dtypes={name: one.dtype for name, one in self._ranks.layouts.items()},
            count=self._last.count + 1,
        )
        keys: dict[int, Any] = {}

        def read(rank: int, answer: Any) -> Event:
            keys[rank], digests = answer
            return Sealed(rank, digests)

        begun, tell = protocol.begin_put(asked, len(self._ranks))
        job = Job(
            round=begun,
            tell=lambda _, rank: self._ranks.call(rank, agent.seal, self.name, rank, asked, among),
            read=read,
            errors={},
        )
        drive([(job, tell)], timeout_s)
        self._check(job, timeout_s)
        self._post(job.round.version, keys)
        return self._last

    def _post(self, version: Version, keys: Mapping[int, Any]) -> None:
        newest = self._directory.epoch()
        if newest > self.epoch:
            raise PublisherReplacedError(name=self.name, version=str(version), detail=f"epoch {newest} has begun")
        if newest < self.epoch:  # the directory was lost
            self._directory.keep_epoch(self.epoch, self._publisher)
            self._directory.keep_layouts()
        self._directory.post_holders(
            version,
            (
                HolderRecord(
                    address=one.address,
                    key=keys[rank],
                    actor=one.actor,
                    incarnation=one.incarnation,
                    machine=one.machine,
                    signature=self._signature,
                    rank=rank,
                    is_publisher=True,
                )
                for rank, one in enumerate(self._attached)
            ),
        )
        self._directory.post_version(version)
        self._directory.forget_before(self._last if self._last.number else version)
        self._last = version

    def push(self, subscriptions: Sequence[Subscription], *, timeout_s: float = 60.0) -> list[Receipt]:
        """Updates receiver groups that this process drives to the newest version, all at once; see `update`.

        Raises:
            UnknownVersionError: Nothing was put.
            VersionError: A group could not be updated; the others are, and its cause is the first of these errors.
        """
        from raycollect.weights.subscription import update_all

        return update_all(subscriptions, self._last if self._last.number else "latest", timeout_s)

    def close(self) -> None:
        """Ends the publication: its versions can't be had any more, but from receivers that know of it."""
        for rank in range(len(self._ranks)):
            self._ranks.call(rank, agent.detach_source, self.name, rank, self.epoch)
        if self._directory.epoch() == self.epoch:
            self._directory.forget_all()

    def _check(self, job: Job, timeout_s: float) -> None:
        if job.round.phase is Phase.DONE:
            return
        where: dict[str, Any] = {"name": self.name, "version": str(job.round.version)}
        if job.is_late:
            late = tuple(sorted(job.round.waiting))
            who = ", ".join(f"{rank} ({self._attached[rank].actor})" for rank in late)
            raise VersionTimeoutError(
                **where,
                missing=late,
                timeout_s=timeout_s,
                detail=f"after {timeout_s:g} s these had not arrived: rank {who}",
            )
        if job.round.differing:
            first = atoms.shown(job.round.differing[0])
            detail = f"replicas have different bits in {len(job.round.differing)} atoms, first in {first}"
            raise VersionNotPutError(**where, detail=detail)
        for rank, error in job.errors.items():
            if isinstance(error, PublisherReplacedError):
                raise anew(error)
            detail = "it could not copy its tensors"
            raise VersionNotPutError(**where, rank=rank, actor=self._attached[rank].actor, detail=detail) from error
        gone = min(set(range(len(self._ranks))) - set(job.round.done))
        raise VersionNotPutError(**where, rank=gone, actor=self._attached[gone].actor, detail="its process has ended")

    def __enter__(self) -> Publication:  # noqa: PYI034 - Python 3.10 has no `Self`
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publication {self.name!r}, epoch {self.epoch}, {len(self._ranks)} ranks, version {self._last.number}>"
