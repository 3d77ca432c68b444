"""A put whose parts go to receivers while other parts are still being computed.

A stream needs no more memory than a put. A part is copied into the publisher's copy of the version when it is sealed,
and receivers verify it there, or read it from another host. Only digests are queued in between. A receiver reads one
batch of parts at a time: those that were sealed while it read the last batch.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import ray

from raycollect.core.bound_to_process import BoundToProcess
from raycollect.core.model import Key
from raycollect.driver.plan_tracker import retrieve_errors
from raycollect.errors import VersionNotPutError, refuse, wrong_argument, wrong_time_limit
from raycollect.errors.text import shown
from raycollect.weights import agent, protocol
from raycollect.weights.cut import Atom, VersionCut
from raycollect.weights.directory import Atoms, Holder, Holders
from raycollect.weights.protocol import RankEvent, RankSealed, RankSealedPart, Tell, Version
from raycollect.weights.ranks import ATTACH_S, Job, Ranks, event_of
from raycollect.weights.receipts import Receipt
from raycollect.weights.receiver import HOLDER_S
from raycollect.weights.subscription import Subscription, update_all

_Target = tuple[int, int]
"""The number of a receiver group, and a rank in it."""


class Publisher(Protocol):
    """What streams use of their `Publication`."""

    name: str
    _ranks: Ranks

    @property
    def _count(self) -> int:
        """How many versions were put."""

    def _one_at_a_time(self, op: str, timeout_s: float, until_s: float) -> AbstractContextManager[None]:
        """Waits until no other thread puts anything, and bounds what the directory may take."""

    def _places_on(self, rank: int, cut: VersionCut) -> Atoms:
        """Where the atoms of a stream lie on a rank."""

    def _holder(self, rank: int, key: Key) -> Holder:
        """A rank, of which some atoms can be had."""

    def _forget_overwritten(self) -> None:
        """Forgets the version before the last, in whose place the next one is sealed."""

    def _finish(self, job: Job, timeout_s: float, keys: Mapping[int, Key]) -> None:
        """Posts the version of a put that is over."""


class Stream(BoundToProcess):
    """A version that is being put part by part; see `Publication.stream`. For one thread at a time.

    Attributes:
        version: The version; it has no digests before it is put.
    """

    _INSTEAD = "call and commit it here; subscribe(name, ...) reads the version from there"

    def __init__(self, publication: Publisher, subscriptions: Sequence[Subscription], version: Version) -> None:
        self.version: Version = version
        self._publication = publication
        self._subscriptions = list(subscriptions)
        self._attempt = secrets.token_bytes(8)
        begun, _ = protocol.begin_put(version, len(publication._ranks))
        self._job = Job(round=begun, errors={})
        self._keys: dict[int, Key] = {}
        self._has = [set[Atom]() for _ in range(len(publication._ranks))]  # by rank: the sealed atoms
        # By rank, the pending calls in order: a ref or a generator, and whether the call seals all
        self._sealing: list[deque[tuple[Any, bool]]] = [deque() for _ in range(len(publication._ranks))]
        self._untold: list[VersionCut | None] = [version.cut] * len(publication._ranks)
        self._landing: dict[Any, _Target] = {}
        self._due: dict[_Target, dict[Atom, bytes]] = {}
        self._wanted: dict[_Target, frozenset[Atom]] = {}
        for number, subscription in enumerate(self._subscriptions):
            for rank, atoms in enumerate(subscription._open_stream(version)):
                self._wanted[number, rank] = atoms

    def call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Calls a generator method in each of the publisher's actors. Each item that it yields is a part.

        An item is the name of a tensor, a list of names, or a dict by name of tensors that replace the published ones.
        It is copied before the method continues.

        Raises:
            VersionNotPutError: Another version was put since this stream began.
        """
        with self._submitting():
            for rank in range(len(self._publication._ranks)):
                items = self._publication._ranks.items(rank, agent.seal_parts, *self._of(rank), method, *args, **kwargs)
                self._sealing[rank].append((items, False))
        self._pump(0.0)

    def part(self, *names: str) -> None:
        """Makes tensors a part, after the actors' methods that were called before; raises as `call`.

        Waits for actors whose methods overlap, as their calls have no order.
        """
        held = [self._publication._ranks.keys(rank) for rank in range(len(self._publication._ranks))]
        unknown = [name for name in names if not isinstance(name, str) or not any(name in keys for keys in held)]
        if unknown or not names:
            refuse("part", [wrong_argument("names", shown(unknown), "names of tensors that are published")])
        with self._submitting():
            for rank, keys in enumerate(held):
                mine = [name for name in names if name in keys]
                if mine:
                    ref = self._publication._ranks.call(rank, agent.seal_part, *self._of(rank), mine)
                    self._sealing[rank].append((ref, False))
            self._await_overlapping()
        self._pump(0.0)

    def commit(self, *, timeout_s: float = 60.0) -> list[Receipt]:
        """Puts the version, including tensors that were in no part, and updates the receiver groups to it.

        Raises:
            VersionError: As `Publication.put` and `Publication.push`. If a part has failed, nothing was put.
        """
        refuse("put", wrong_time_limit(timeout_s, also=(0,)))
        until_s = time.monotonic() + timeout_s
        with self._publication._one_at_a_time("commit", timeout_s, until_s):
            self._put(until_s, timeout_s)
        if not self._subscriptions:
            return []
        left_s = max(until_s - time.monotonic(), 0.0)
        return update_all(self._subscriptions, self.version, left_s, resolved=self.version)

    def _put(self, until_s: float, timeout_s: float) -> None:
        """Puts the version; the caller has the publication to itself."""
        self._check_first()
        for rank in sorted(self._job.round.waiting):
            left_s = max(until_s - time.monotonic(), 0.0)
            ref = self._publication._ranks.call(rank, agent.seal, *self._of(rank), left_s)
            self._sealing[rank].append((ref, True))
        self._publication._forget_overwritten()  # while the actors work
        while not self._job.round.is_over:
            if not self._pump(max(until_s - time.monotonic(), 0.0)):
                self._job.end_late()
        self._publication._finish(self._job, timeout_s, self._keys)
        self.version = self._job.round.version

    def __repr__(self) -> str:
        return f"<Stream of {self._publication.name!r}, version {self.version}>"

    @contextmanager
    def _submitting(self) -> Iterator[None]:
        """Excludes puts of other threads, so that the actors get a part before them, or not at all."""
        with self._publication._one_at_a_time("stream", ATTACH_S, time.monotonic() + ATTACH_S):
            self._check_first()
            yield

    def _await_overlapping(self) -> None:
        """Waits for ranks whose methods overlap: the next call, of any stream or put, could overtake this one."""
        until_s = time.monotonic() + ATTACH_S
        while any(self._sealing[rank] for rank in self._publication._ranks.overlapping):
            if not self._pump(max(until_s - time.monotonic(), 0.0)):
                self._job.end_late()
                return

    def _check_first(self) -> None:
        """Raises if another version was put since, which a part would overwrite."""
        if self._publication._count >= self.version.count:
            detail = "another version was put since this stream began"
            raise VersionNotPutError(name=self._publication.name, version=str(self.version), detail=detail)

    def _of(self, rank: int) -> tuple[Any, ...]:
        """Returns the first arguments of a call to a rank of the publisher; the cut is sent only once."""
        cut, self._untold[rank] = self._untold[rank], None
        return self._publication.name, rank, self.version.label, cut, self._attempt

    def _pump(self, wait_s: float) -> bool:
        """Handles the answers that have arrived, and waits up to `wait_s` for the first; returns whether any had."""
        some = False
        while True:
            heads = {queue[0][0]: rank for rank, queue in enumerate(self._sealing) if queue}
            pending = [*heads, *self._landing]
            ready = ray.wait(pending, timeout=0.0 if some else wait_s)[0] if pending else []
            if not ready:
                return some
            some = True
            if ready[0] in self._landing:
                self._land(self._landing.pop(ready[0]))
            else:
                self._take(heads[ready[0]])

    def _take(self, rank: int) -> None:
        ref, is_all = self._sealing[rank][0]
        if isinstance(ref, ray.ObjectRefGenerator):
            try:
                ref = next(ref)
            except StopIteration:
                self._sealing[rank].popleft()
                return
        else:
            self._sealing[rank].popleft()
        before = self._job.round
        event = event_of(self._job, rank, partial(self._heard, rank, ref, is_all=is_all))
        self._job.round, tell = protocol.advance(before, event)
        if tell is Tell.LAND and isinstance(event, RankSealedPart):
            self._sealed({atom: digest for atom, digest in event.digests.items() if atom not in before.parts})
        elif self._job.round.is_over:
            for queue in self._sealing:
                retrieve_errors(ref for ref, _ in queue if not isinstance(ref, ray.ObjectRefGenerator))
                queue.clear()
            retrieve_errors(self._landing)
            self._landing.clear()

    def _sealed(self, fresh: Mapping[Atom, bytes]) -> None:
        for target, wanted in self._wanted.items():
            mine = {atom: digest for atom, digest in fresh.items() if atom in wanted}
            if mine:
                self._due.setdefault(target, {}).update(mine)
                if target not in self._landing.values():
                    self._land(target)

    def _heard(self, rank: int, ref: Any, *, is_all: bool) -> RankEvent:
        self._keys[rank], digests = ray.get(ref)
        self._has[rank].update(digests)
        return RankSealed(rank, digests) if is_all else RankSealedPart(rank, digests)

    def _land(self, target: _Target) -> None:
        """Makes a receiver read the parts that are due; if that fails, the update reads what is missing."""
        part = self._due.pop(target, None)
        if part:
            number, rank = target
            ref = self._subscriptions[number]._land(rank, self.version.label, part, self._holders(part), HOLDER_S)
            self._landing[ref] = target

    def _holders(self, part: Mapping[Atom, bytes]) -> Holders:
        holders: list[tuple[Holder, Atoms]] = []
        for rank, key in self._keys.items():
            places = self._publication._places_on(rank, self.version.cut)
            mine = {atom: places[atom] for atom in part if atom in self._has[rank] and atom in places}
            if mine:
                holders.append((self._publication._holder(rank, key), mine))
        return holders
