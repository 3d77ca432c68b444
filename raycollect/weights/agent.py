"""The functions that a driver calls in the actors of publications and subscriptions; inside the actor.

A driver calls these functions by `__ray_call__`, so they run in the order of the actor's queue, and no weights change
while a method runs. Where methods overlap, `one_at_a_time` calls them in a thread of their own, and the actor's lock
excludes methods (`Exclusion`). `pos.fetch` serves reads of other processes while methods run.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from raycollect.core import threads
from raycollect.core.model import Key
from raycollect.errors import (
    CollectiveTimeoutError,
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
from raycollect.weights.cut import Atom, Digests, VersionCut
from raycollect.weights.directory import Holder, Holders
from raycollect.weights.exclusion import Exclusion, OwnProcess, blocking_in_loop, running_loop
from raycollect.weights.hosts import Loan
from raycollect.weights.local_side import LocalSide
from raycollect.weights.protocol import Version, shown_by_all
from raycollect.weights.receipts import RankReceipt
from raycollect.weights.receiver import Receiver
from raycollect.weights.source import WAIT_S, Source

TOLD_NBYTES, TOLD_S = 8 << 20, 0.1
"""A stream reports its parts when they have so many bytes, or so many seconds after the last report."""


class _Agents:
    """The sources and receivers of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self.lock = threading.Lock()
        self.own_calls = threading.RLock()  # held during a call for own tensors; a signal handler may make another one
        self.sources: dict[str, tuple[int, dict[int, Source]]] = {}  # by name: the epoch, and by rank
        self.receivers: dict[str, dict[int, Receiver]] = {}  # by subscription and rank
        self.thread = threads.pool("raycollect-weights", 1)
        self.loop: asyncio.AbstractEventLoop | None = None  # of an async actor
        self._runtime = runtime

    def end(self) -> None:
        """Closes all, as the participant does; another one, of a later Ray, begins without them."""
        with self.lock:
            self._runtime.forget(_Agents)
            for _, sources in self.sources.values():
                _close(sources)
            for receivers in self.receivers.values():
                _close(receivers)
        self.thread.shutdown(wait=False)


@contextmanager
def _locked() -> Iterator[_Agents]:
    agents = this_runtime().part(_Agents, _Agents)
    with agents.lock:
        yield agents


Attached = tuple[Holder, Version | None]
"""The process of a rank, and the version that it shows already by an earlier subscription of the same tensors."""


def one_at_a_time(actor: Any, function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Calls one of these functions in the thread that calls all of them, as the actor's methods overlap.

    The event loop of an async actor goes on meanwhile.
    """
    agents = this_runtime().part(_Agents, _Agents)
    with suppress(RuntimeError):  # a threaded actor has no loop
        agents.loop = asyncio.get_running_loop()
    return threads.submit(agents.thread, _called, function, actor, *args)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (RaycollectError, MemoryError):
        raise
    except Exception as exc:
        raise threads.failed("a call for weights", exc) from exc


def in_own_process(process: OwnProcess, function: Callable[..., Any], *args: Any) -> Any:
    """Calls one of these functions in the calling thread, after the calls of other threads have ended.

    An event loop does not wait for them, as they may need it to release a lock. A helper thread closes the side then.

    Raises:
        UnsupportedError: The caller is in an event loop, and another thread makes a call.
    """
    turn = this_runtime().part(_Agents, _Agents).own_calls
    is_in_loop = running_loop() is not None
    if is_in_loop and not turn.acquire(blocking=False):
        if function not in (detach_source, detach_receiver):
            raise blocking_in_loop(process.op)
        context = contextvars.copy_context()
        threads.call_in_helper(threads.survives, partial(context.run, in_own_process, process, function, *args))
        return None
    try:
        with turn:
            return function(process, *args)
    finally:
        if is_in_loop:
            turn.release()


def check_side(
    actor: Any, op: str, key: Key, layouts: Layouts, rank: int, lock: Any = None, is_inplace: bool = False
) -> tuple[list[Range], bool]:
    """Raises the errors of `attach_source` or `attach_receiver`, before any rank is attached.

    Returns the memory ranges of the tensors that are to be written, and whether the actor's methods overlap.
    """
    is_written = op == "subscribe"
    _, exclusion = _member(actor, op, rank, lock, is_inplace=is_inplace)
    side = LocalSide(op, _held_to_be_written(key) if is_written else _held(key), layouts, rank, is_written=is_written)
    if is_inplace and side.is_staged:
        actual, expected = "True, with tensors on a GPU", "False: versions are verified in host memory"
        raise refusal(
            op, "", (Violation(kind="unsupported", rank=rank, field="inplace", found=actual, expected=expected),)
        )
    spans = [span for span in side.ranges() if span[0] < span[1]] if is_written else []
    return spans, exclusion.is_needed


def attach_source(
    actor: Any, name: str, epoch: int, key: Key, layouts: Layouts, rank: int, dtype: str = "", lock: Any = None
) -> Attached:
    """Makes this process a rank of a publisher, and ends its ranks of earlier epochs; `dtype` as in `Ranks`."""
    member, exclusion = _member(actor, "publish", rank, lock)
    source = Source(this_participant(), _held(key), layouts, rank, actor, dtype)
    source.exclusion = exclusion
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
    cut: VersionCut | None,
    attempt: bytes,
    limit_s: float = WAIT_S,
) -> tuple[Key, Digests]:
    """Calls `Source.seal`.

    Raises:
        PublisherReplacedError: A later publisher has taken this process.
        VersionNotPutError: No publisher has this process.
    """
    source, until_s = _source(name, rank, version), time.monotonic() + limit_s
    with source.exclusion.guard():
        return source.exclusion.run_until(lambda left_s: source.seal(version, cut, attempt, left_s), until_s)


def seal_part(
    actor: Any, name: str, rank: int, version: Version, cut: VersionCut | None, attempt: bytes, part: object
) -> tuple[Key, Digests]:
    """Calls `Source.seal_part`; raises the errors of `seal`."""
    source, until_s = _source(name, rank, version), time.monotonic() + WAIT_S
    with source.exclusion.guard(), _failing(source, version, attempt, "a part"):
        return source.exclusion.run_until(lambda left_s: source.seal_part(version, cut, attempt, part, left_s), until_s)


def seal_parts(
    actor: Any,
    name: str,
    rank: int,
    version: Version,
    cut: VersionCut | None,
    attempt: bytes,
    method: str,
    *args: Any,
    **kwargs: Any,
) -> Iterator[tuple[Key, Digests]]:
    """Calls `Source.seal_part` for each item that a method of the actor yields; raises the errors of `seal`.

    Small parts are reported together: a report costs some ms of a core, here and in each receiver.
    """
    source = _source(name, rank, version)
    with source.exclusion.guard(), _failing(source, version, attempt, f"{method!r}"):
        source.begin(version, cut, attempt)  # the method may yield nothing
        sealed: dict[Atom, bytes] = {}
        nbytes, told_s = 0, time.monotonic()
        for part in getattr(actor, method)(*args, **kwargs):
            key, part_digests = source.seal_part(version, cut, attempt, part)
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
    actor: Any, name: str, subscription: str, key: Key, layouts: Layouts, rank: int, inplace: bool, lock: Any = None
) -> Attached:
    """Makes this process a rank of a receiver group, and takes its tensors from any other group.

    If the other group has the same form, its receiver is taken over with its state.
    """
    member, exclusion = _member(actor, "subscribe", rank, lock, is_inplace=inplace)
    here, container, is_own = this_participant(), _held_to_be_written(key), isinstance(actor, OwnProcess)
    receiver = Receiver(here, name, container, layouts, rank, inplace=inplace, actor=actor, is_own=is_own)
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
        receiver.exclusion = exclusion
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
    with receiver.exclusion.guard() if receiver.inplace else nullcontext():
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

    Raises:
        CollectiveTimeoutError: The version was read too late to show it, or as `Receiver.show`.
    """
    receiver = _receiver(subscription, rank)
    with receiver.exclusion.guard():
        receipt = receiver.stage(version, holders, timeout_s)
        if time.monotonic() >= until_s:
            detail = "read the version, and the time limit had passed"
            raise CollectiveTimeoutError(timeout_s=timeout_s, detail=detail)
        is_fresh = receiver.exclusion.is_total
        key = receiver.exclusion.run_until(lambda left_s: receiver.show(version, left_s, is_fresh=is_fresh), until_s)
    return receipt, receiver.stale_holders, key


def receive(actor: Any, subscription: str, rank: int, method: str, *args: Any) -> Any:
    """Calls `Receiver.open_stream`, `land` or `release`."""
    return getattr(_receiver(subscription, rank), method)(*args)


def show(actor: Any, subscription: str, rank: int, version: Version, limit_s: float = WAIT_S) -> Key | None:
    """Calls `Receiver.show`, between two methods."""
    receiver, until_s = _receiver(subscription, rank), time.monotonic() + limit_s
    with receiver.exclusion.guard():
        return receiver.exclusion.run_until(lambda left_s: receiver.show(version, left_s), until_s)


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


@dataclass(frozen=True, slots=True)
class RankSubscription:
    """A subscription in the process of a rank."""

    name: str
    _id: str
    _version: Version | None

    def version(self) -> Version | None:
        """As `Subscription.version`."""
        is_rank, version = shown(self._id)
        return version if is_rank else self._version


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


def _member(actor: Any, op: str, rank: int, lock: Any, *, is_inplace: bool = False) -> tuple[Holder, Exclusion]:
    """Returns the record of this process, and what excludes its methods; raises as `attach_source`."""
    here, agents = this_participant(), this_runtime().part(_Agents, _Agents)
    here.at_close["weights"] = agents.end
    is_own = isinstance(actor, OwnProcess)
    is_ordered = not is_own and describe(actor)["ordered"]
    if lock is None and not is_own and not is_ordered:
        actual = "async, threaded or with concurrency groups, so that its methods overlap"
        expected = "lock=, the name of a lock of the actor that its methods hold while they use the tensors"
        overlapping = Violation(kind="unsupported", field="actor", found=actual, expected=expected, actor=here.actor)
        raise refusal(op, "", (overlapping,))
    if lock is not None and is_inplace:
        actual, expected = "True, with a lock", "False: an update in place would hold the lock while it reads"
        raise refusal(op, "", (Violation(kind="unsupported", field="inplace", found=actual, expected=expected),))
    holder = Holder(
        address=here.address,
        actor=here.actor,
        incarnation=here.identity.incarnation,
        rank=rank,
        is_publisher=op == "publish",
        machine=here.identity.machine,
    )
    if is_own:
        return holder, Exclusion(op, rank, None, lock, loop=actor.loop)
    if is_ordered:
        return holder, Exclusion(op, rank, actor, lock, guard=here.methods.guard)
    return holder, Exclusion(op, rank, actor, lock, loop=agents.loop, is_needed=True)
