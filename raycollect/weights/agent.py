"""The functions that a driver calls in the actors of publications and subscriptions; inside the actor.

A driver calls these functions by `__ray_call__`, so they run in the order of the actor's queue, and no weights change
while a method runs. `pos.fetch` serves reads of other processes while methods run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from raycollect.core.model import Key
from raycollect.errors import (
    PublisherReplacedError,
    RaycollectError,
    TensorDirtyError,
    VersionNotPutError,
    VersionNotWholeError,
    Violation,
    brief,
    refusal,
)
from raycollect.member.participant import describe, this_participant
from raycollect.member.runtime import Runtime, this_runtime
from raycollect.pos import Container, Range, held
from raycollect.weights.atoms import Layouts
from raycollect.weights.directory import Holder, Holders
from raycollect.weights.hosts import Loan
from raycollect.weights.local_side import LocalSide
from raycollect.weights.protocol import Atom, Digests, Version, shown_by_all
from raycollect.weights.receipts import RankReceipt
from raycollect.weights.receiver import Receiver
from raycollect.weights.source import WAIT_S, Source

TOLD_NBYTES, TOLD_S = 8 << 20, 0.1
"""A stream reports its parts when they have so many bytes, or so many seconds after the last report."""


class _Agents:
    """The sources and receivers of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self.lock = threading.Lock()
        self.sources: dict[str, tuple[int, dict[int, Source]]] = {}  # by name: the epoch, and by rank
        self.receivers: dict[str, dict[int, Receiver]] = {}  # by subscription and rank


@contextmanager
def _locked() -> Iterator[_Agents]:
    agents = this_runtime().part(_Agents, _Agents)
    with agents.lock:
        yield agents


Attached = tuple[Holder, Version | None]
"""The process of a rank, and the version that it shows already by an earlier subscription of the same tensors."""


def check_side(actor: Any, op: str, key: Key, layouts: Layouts, rank: int) -> list[Range]:
    """Raises the errors of `attach_source` or `attach_receiver`, before any rank is attached.

    Returns the memory ranges of the tensors that are to be written.
    """
    is_written = op == "subscribe"
    _member(actor, op, rank)
    side = LocalSide(op, _held_to_be_written(key) if is_written else _held(key), layouts, rank, is_written=is_written)
    return [span for span in side.ranges() if span[0] < span[1]] if is_written else []


def attach_source(actor: Any, name: str, epoch: int, key: Key, layouts: Layouts, rank: int) -> Attached:
    """Makes this process a rank of a publisher, and ends its ranks of earlier epochs."""
    member, source = _member(actor, "publish", rank), Source(this_participant(), _held(key), layouts, rank, actor)
    with _locked() as agents:
        current, sources = _sources(agents, name)
        if current > epoch:
            raise PublisherReplacedError(name=name, rank=rank, detail=f"epoch {current} has begun")
        if current < epoch:
            _close(sources)
            agents.sources[name] = epoch, sources
        elif rank in sources:  # a publisher whose records are lost
            sources[rank].close()
        sources[rank] = source
    return member, None


def seal(
    actor: Any,
    name: str,
    rank: int,
    version: Version,
    among: Sequence[Atom] | None,
    attempt: bytes,
    limit_s: float = WAIT_S,
) -> tuple[Key, Digests]:
    """Calls `Source.seal`.

    Raises:
        PublisherReplacedError: A later publisher has taken this process.
        VersionNotPutError: No publisher has this process.
    """
    with this_participant().methods.guard():
        return _source(name, rank, version).seal(version, among, attempt, limit_s)


def seal_part(
    actor: Any, name: str, rank: int, version: Version, among: Sequence[Atom] | None, attempt: bytes, part: object
) -> tuple[Key, Digests]:
    """Calls `Source.seal_part`; raises the errors of `seal`."""
    source = _source(name, rank, version)
    with this_participant().methods.guard(), _failing(source, version, attempt, "a part"):
        return source.seal_part(version, among, attempt, part)


def seal_parts(
    actor: Any,
    name: str,
    rank: int,
    version: Version,
    among: Sequence[Atom] | None,
    attempt: bytes,
    method: str,
    *args: Any,
    **kwargs: Any,
) -> Iterator[tuple[Key, Digests]]:
    """Calls `Source.seal_part` for each item that a method of the actor yields; raises the errors of `seal`.

    Small parts are reported together: a report costs some ms of a core, here and in each receiver.
    """
    source = _source(name, rank, version)
    with this_participant().methods.guard(), _failing(source, version, attempt, f"{method!r}"):
        source.begin(version, among, attempt)  # the method may yield nothing
        sealed: dict[Atom, bytes] = {}
        nbytes, told_s = 0, time.monotonic()
        for part in getattr(actor, method)(*args, **kwargs):
            key, part_digests = source.seal_part(version, among, attempt, part)
            sealed.update(part_digests)
            nbytes += source.nbytes(part_digests)
            if nbytes >= TOLD_NBYTES or time.monotonic() - told_s >= TOLD_S:
                yield key, sealed
                sealed, nbytes, told_s = {}, 0, time.monotonic()
        if sealed:
            yield key, sealed


@contextmanager
def _failing(source: Source, version: Version, attempt: bytes, what: str) -> Iterator[None]:
    """Fails the attempt to seal a version if the block raises."""
    try:
        yield
    except RaycollectError as exc:
        source.fail(version, attempt, brief(exc))
        raise
    except Exception as exc:
        raise source.fail(version, attempt, f"{what} raised {type(exc).__name__}: {exc}") from exc


def detach_source(actor: Any, name: str, epoch: int) -> None:
    """Undoes `attach_source`."""
    with _locked() as agents:
        current, sources = _sources(agents, name)
        if current == epoch:
            del agents.sources[name]
            _close(sources)


def _close(some: dict[int, Any]) -> None:
    for side in some.values():
        side.close()
    some.clear()


def attach_receiver(
    actor: Any, name: str, subscription: str, key: Key, layouts: Layouts, rank: int, inplace: bool
) -> Attached:
    """Makes this process a rank of a receiver group, and takes its tensors from any other group.

    If the other group has the same form, its receiver is taken over with its state.
    """
    member = _member(actor, "subscribe", rank)
    receiver = Receiver(this_participant(), name, _held_to_be_written(key), layouts, rank, inplace=inplace, actor=actor)
    with _locked() as agents:
        for of, by_rank in agents.receivers.items():
            for at, other in list(by_rank.items()):
                if of == subscription or not receiver.where or other.where_now() != receiver.where:
                    continue
                del by_rank[at]
                if other.form == receiver.form:
                    receiver = other
                else:
                    other.withdraw()
        agents.receivers.setdefault(subscription, {})[rank] = receiver
    return member, receiver.state.shown


def stage(
    actor: Any,
    subscription: str,
    rank: int,
    version: Version,
    holders: Holders,
    timeout_s: float,
    lends: bool = False,
) -> tuple[RankReceipt, tuple[Key, ...], Loan]:
    """Calls `Receiver.stage`, in place between two methods.

    Also returns the keys of holders without the version, and what the receiver lends.
    """
    receiver = _receiver(subscription, rank)
    with this_participant().methods.guard() if receiver.inplace else nullcontext():
        return receiver.stage(version, holders, timeout_s, lends=lends), receiver.stale_holders, receiver.loan


def update(
    actor: Any, subscription: str, rank: int, version: Version, holders: Holders, timeout_s: float, until_s: float
) -> tuple[RankReceipt, tuple[Key, ...], Key | None]:
    """Calls `Receiver.stage` and `Receiver.show` between two methods, for an only rank on the publisher's host.

    Args:
        actor: The actor.
        subscription: The subscription.
        rank: The rank.
        version: The version.
        holders: Those that the rank may read from.
        timeout_s: As in `stage`.
        until_s: When the driver gives up, by `time.monotonic`; after that, the rank does not begin to show it.

    Returns:
        The results of `stage` and of `show`.
    """
    receiver = _receiver(subscription, rank)
    with this_participant().methods.guard():
        receipt = receiver.stage(version, holders, timeout_s)
        left_s = until_s - time.monotonic()
        key = receiver.show(version, left_s, is_fresh=True) if left_s > 0 else None
    return receipt, receiver.stale_holders, key


def receive(actor: Any, subscription: str, rank: int, method: str, *args: Any) -> Any:
    """Calls `Receiver.open_stream`, `land` or `release`."""
    return getattr(_receiver(subscription, rank), method)(*args)


def show(actor: Any, subscription: str, rank: int, version: Version, limit_s: float = WAIT_S) -> Key | None:
    """Calls `Receiver.show`, between two methods."""
    with this_participant().methods.guard():
        return _receiver(subscription, rank).show(version, limit_s)


def detach_receiver(actor: Any, subscription: str) -> None:
    """Undoes `attach_receiver`; the tensors keep their values."""
    with _locked() as agents:
        _close(agents.receivers.pop(subscription, {}))


def drop_receiver(actor: Any, subscription: str) -> None:
    """Undoes an `attach_receiver` because another rank refused; a dirty receiver stays dirty."""
    with _locked() as agents:
        for receiver in agents.receivers.pop(subscription, {}).values():
            receiver.withdraw()


def shown(subscription: str) -> tuple[bool, Version | None]:
    """Returns whether this process has a rank of a subscription, and the version that its methods see."""
    with _locked() as agents:
        ranks = list(agents.receivers.get(subscription, {}).values())
    return bool(ranks), shown_by_all(receiver.state.shown for receiver in ranks)


def _source(name: str, rank: int, version: Version) -> Source:
    with _locked() as agents:
        current, sources = _sources(agents, name)
        source = sources.get(rank)
    where: dict[str, Any] = {"name": name, "version": str(version), "rank": rank}
    if current > version.epoch:
        raise PublisherReplacedError(**where, detail=f"epoch {current} has begun")
    if current < version.epoch or source is None:
        raise VersionNotPutError(**where, detail="the publication was closed, or its process has restarted")
    return source


def _sources(agents: _Agents, name: str) -> tuple[int, dict[int, Source]]:
    """Returns the epoch of a publication in this process, and its sources by rank; the caller holds the lock."""
    return agents.sources.get(name, (0, {}))


def _receiver(subscription: str, rank: int) -> Receiver:
    with _locked() as agents:
        receiver = agents.receivers.get(subscription, {}).get(rank)
    if receiver is None:
        raise VersionNotWholeError(
            name="", rank=rank, detail="its process has restarted, or another subscription has its tensors"
        )
    return receiver


def _held(key: Key) -> Container:
    return held.find(this_participant().store, key)


def _held_to_be_written(key: Key) -> Container:
    """Finds a container as `_held` does, and also a dirty one: the next update overwrites it."""
    try:
        return _held(key)
    except TensorDirtyError:
        return cast("Container", this_participant().store.current(key))


def _member(actor: Any, op: str, rank: int) -> Holder:
    member = describe(actor)
    if not member["ordered"]:
        actual = "async, threaded or with concurrency groups, so that its methods overlap"
        raise refusal(op, "", (Violation(kind="unsupported", field="actor", found=actual, actor=member["actor"]),))
    process = {name: member[name] for name in ("address", "actor", "incarnation", "machine")}
    return Holder(rank=rank, is_publisher=op == "publish", **process)
