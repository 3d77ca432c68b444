"""A timeline under way: what this process records, and what the participants do that it drives.

One at a time per process. Participants are asked over the control channel, which answers while methods run; whoever is
gone, or does not answer in time, is left out and named.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

from raycollect import ray_internals
from raycollect.channel.messages import Ticked
from raycollect.errors import TimelineError
from raycollect.metrics import Publisher
from raycollect.observe import Place, Ring, Tracer, chrome
from raycollect.observe.clocks import ROUND_TRIPS, Alignment, Fix, Sample, clock_id, fix
from raycollect.observe.trace import LIMIT, PLAN, RUN, decode_recorded
from raycollect.observe.whole import Missing, Process, Slice, Trace, process_of
from raycollect.peer import Peer
from raycollect.seats import Seats

__all__ = ["ENVIRONMENT_VARIABLE", "LEAVING_S", "STOP_S", "Tracing", "begin_from_environment", "round_trips"]

_log = logging.getLogger("raycollect")

ENVIRONMENT_VARIABLE = "RAYCOLLECT_TIMELINE"

STOP_S = 10.0
"""How long participants may take to say what they have recorded, in seconds, where nobody says."""
BEGIN_S = 3.0
"""How long the beginning waits for them."""
LEAVING_S = 3.0
"""The same for one that is given back meanwhile."""
_CLOCK_S = 2.0
"""How long of that is for the clocks of other hosts."""

_GONE = "its process, or the connection to it, has ended"
_SILENT = "it did not answer in time"


def round_trips(peer: Peer, clock: Callable[[], float] = monotonic, count: int = ROUND_TRIPS) -> Future[Fix | None]:
    """Asks a participant again and again what its clock shows; the result is None where it gave no answer at all.

    Args:
        peer: The participant.
        clock: One's own clock. It is read on the hub's thread, as soon as an answer is there.
        count: How often.
    """
    done, samples = Future[Fix | None](), list[Sample]()

    def ask() -> None:
        sent_s = clock()
        peer.tick().add_done_callback(partial(answered, sent_s))

    def answered(sent_s: float, asked: Future[Ticked | None]) -> None:
        received_s, tick = clock(), asked.result()
        if tick is not None:
            samples.append(Sample(sent_s=sent_s, remote_s=tick.at_s, received_s=received_s))
        if tick is None or len(samples) == count:
            done.set_result(fix(samples))
        else:
            ask()

    ask()
    return done


class _Tracked:
    """A participant that was asked to record.

    Attributes:
        peer: The participant.
        first: How its clock was at the beginning; None: it is this process's, or not known yet.
        refusal: Why it does not record.
        process: What it has recorded, once that is collected for good.
    """

    def __init__(self, peer: Peer, limit: int, *, metrics: bool) -> None:
        self.peer = peer
        self.first: Future[Fix | None] | None = None
        self.refusal = ""
        self.clock = ""
        self.process: Process | None = None
        self.asked = peer.record(limit, metrics=metrics)
        self.asked.add_done_callback(self._began)

    def _began(self, asked: Future[Ticked | None]) -> None:
        """It has answered; on the hub's thread."""
        tick = asked.result()
        if tick is None:
            return
        self.clock, self.refusal = tick.clock, tick.refusal
        if not tick.refusal and (not tick.clock or tick.clock != clock_id()):
            self.first = round_trips(self.peer)

    def missing(self, why: str) -> Missing:
        """It, where it is left out."""
        info = self.peer.info
        return Missing(name=info["actor"], host=info["address"].host, pid=info["pid"], why=why)


class Tracing:
    """A timeline from its beginning on. Any thread may call it.

    Args:
        ring: What this process records into.
        holder: Who has begun it, as its `Tracer` knows it.
        limit: How many entries participants keep.
        metrics: Whether what is recorded is published to Ray's metrics.

    Attributes:
        began_s: When, by `time.monotonic`.
        leader: What its plans are known by among those of several timelines.
    """

    _current: ClassVar[Tracing | None] = None
    _changing: ClassVar[threading.Lock] = threading.Lock()
    last: ClassVar[Trace | None] = None

    def __init__(self, ring: Ring, holder: str, *, limit: int = LIMIT, metrics: bool = False) -> None:
        self.began_s: float = ring.clock()
        self.leader: str = secrets.token_hex(8)
        self.holder = holder
        self._ring = ring
        self._limit = limit
        self._metrics = metrics
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._tracked: dict[int, _Tracked] = {}
        self._is_over = False
        self._publisher = Publisher(ring, dict) if metrics else None

    # ------------------------------------------------------------------------------------------ beginning and end

    @classmethod
    def current(cls) -> Tracing | None:
        """The one that runs in this process."""
        found = cls._current
        return found if found is not None and found._pid == os.getpid() else None

    @classmethod
    def begin(cls, what: str, *, limit: int = LIMIT, metrics: bool = False) -> Tracing:
        """Begins one.

        Args:
            what: What begins it, for messages.
            limit: See `Ring`.
            metrics: See above.

        Raises:
            TimelineError: One runs in this process, or its controller records it.
        """
        with cls._changing:
            running = cls.current()
            if running is not None:
                detail = f"a timeline is recorded already, begun by {running.holder}: stop that first"
                raise TimelineError(detail=detail)
            ring = Tracer.current().begin(what, limit)
            if ring is None:
                detail = "the controller that drives this process records a timeline of it: read that one"
                raise TimelineError(detail=detail)
            made = cls._current = cls(ring, what, limit=limit, metrics=metrics)
            return made

    def end(self, timeout_s: float = STOP_S) -> Trace:
        """Ends it, and collects what was recorded; a second time gives the same.

        Args:
            timeout_s: How long participants may take, in seconds.
        """
        with self._changing:
            if self._is_over:
                return Tracing.last or self._whole((), (), monotonic())
            self._is_over = True
            ended_s = monotonic()
            Tracer.current().end(self.holder)
            if self._publisher is not None:
                self._publisher.close()
            trace = self._collected(timeout_s, ended_s, ends=True)
            Tracing.last = trace
            if Tracing._current is self:
                Tracing._current = None
            return trace

    def peek(self, timeout_s: float = STOP_S) -> Trace:
        """What was recorded by now; it goes on."""
        return self._collected(timeout_s, monotonic(), ends=False)

    # ------------------------------------------------------------------------------------------ participants

    def leased(self, peer: Peer) -> None:
        """A participant is there: it records from now on; never waits."""
        with self._lock:
            if self._is_over or id(peer) in self._tracked:
                return
            self._tracked[id(peer)] = _Tracked(peer, self._limit, metrics=self._metrics)

    def begun(self, timeout_s: float = BEGIN_S) -> None:
        """Waits until the participants that there are record; no longer than that for those who do not answer."""
        _wait([one.asked for one in list(self._tracked.values())], monotonic() + timeout_s)

    def leaving(self, peer: Peer) -> None:
        """A participant is about to be given back: what it has recorded is collected now."""
        found = self._tracked.get(id(peer))
        if found is not None and not self._is_over:
            self._collect([found], LEAVING_S, ends=True)

    def drain(self) -> None:
        """All participants are about to end: what they have recorded is collected now."""
        if not self._is_over:
            self._collect(list(self._tracked.values()), LEAVING_S, ends=True)

    def _collected(self, timeout_s: float, ended_s: float, *, ends: bool) -> Trace:
        tracked = list(self._tracked.values())
        processes, missing = self._collect(tracked, timeout_s, ends=ends)
        return self._whole(processes, missing, ended_s)

    def _whole(self, processes: Sequence[Process], missing: Sequence[Missing], ended_s: float) -> Trace:
        name, host = _this_process()
        recorded = self._ring.read()
        groups = {**recorded.groups, **_seats()}
        own = process_of(
            recorded._replace(groups=groups),
            name=name,
            host=host,
            pid=os.getpid(),
            clock=clock_id(),
            leader=self.leader,
            leads=True,
        )
        return Trace(
            began_s=self.began_s,
            ended_s=ended_s,
            clock=clock_id(),
            processes=(_with_bytes(own, processes), *processes),
            missing=tuple(missing),
        )

    def _collect(
        self, tracked: Sequence[_Tracked], timeout_s: float, *, ends: bool
    ) -> tuple[list[Process], list[Missing]]:
        """What participants have recorded, and of whom that is not known."""
        deadline_s = monotonic() + timeout_s
        clocks_s = deadline_s - max(timeout_s - _CLOCK_S, timeout_s / 2)
        left = [one for one in tracked if one.process is None]
        _wait([one.asked for one in left], clocks_s)
        foreign = [one for one in left if one.first is not None]
        lasts = {id(one): round_trips(one.peer) for one in foreign}
        _wait([*lasts.values(), *(one.first for one in foreign if one.first is not None)], clocks_s)
        asked = {id(one): one.peer.collect(ends=ends) for one in left if not one.refusal}
        _wait(asked.values(), deadline_s)
        processes, missing = list[Process](), list[Missing]()
        for one in tracked:
            known = one.process
            found = known or self._heard(one, asked.get(id(one)), lasts.get(id(one)))
            if isinstance(found, Missing):
                missing.append(found)
            else:
                processes.append(found)
                one.process = found if ends else known
        return processes, missing

    def _heard(
        self, one: _Tracked, asked: Future[bytes | None] | None, last: Future[Fix | None] | None
    ) -> Process | Missing:
        """What one participant has said."""
        if asked is None:
            return one.missing(one.refusal)
        if not asked.done():
            return one.missing(_SILENT)
        payload = asked.result()
        if payload is None:
            return one.missing(_GONE)
        if not payload:
            return one.missing("it records no more: another one took its place, or it began anew")
        alignment = None
        if one.clock != clock_id() or not one.clock:
            fixes = [found for found in map(_settled, (one.first, last)) if found is not None]
            if not fixes:
                return one.missing("its clock could not be compared with this one's")
            alignment = Alignment(first=fixes[0], last=fixes[-1] if len(fixes) > 1 else None)
        info = one.peer.info
        try:
            return process_of(
                decode_recorded(payload),
                name=info["actor"],
                host=info["address"].host,
                pid=info["pid"],
                clock=one.clock,
                leader=self.leader,
                alignment=alignment,
            )
        except ValueError as exc:
            return one.missing(str(exc))


def _wait(futures: Iterable[Future[Any]], until_s: float) -> None:
    wait_for(list(futures), max(until_s - monotonic(), 0))


def _settled(future: Future[Fix | None] | None) -> Fix | None:
    return future.result() if future is not None and future.done() else None


def _this_process() -> tuple[str, str]:
    """What to call this process, and where it runs."""
    if not ray_internals.is_connected():
        return f"process {os.getpid()}", "this host"
    actor_id = ray_internals.current_actor_id()
    if actor_id:
        return ray_internals.short_actor(ray_internals.current_class(), actor_id), ray_internals.node_address()
    return ("task" if ray_internals.is_worker() else "driver"), ray_internals.node_address()


def _seats() -> Mapping[str, Place]:
    """The groups whose calls this process can make itself."""
    return {
        one.spec.group_id: Place(one.spec.name, one.spec.backend, one.rank, one.spec.world_size)
        for one in Seats.current().all()
    }


def _with_bytes(own: Process, others: Sequence[Process]) -> Process:
    """This process, its plans with the bytes that participants have seen: it knows of no tensor how large it is."""
    numbers = sorted(one.seq for one in own.slices if one.kind in (PLAN, RUN))
    nbytes: dict[int, int] = {}
    for process in others:
        launches: dict[int, int] = defaultdict(int)
        for one in process.slices:
            if one.calls and one.seq and not one.meeting:
                launches[one.seq] = max(launches[one.seq], one.nbytes)  # a batch, of whose bytes its calls are part
        sums: dict[int, int] = defaultdict(int)
        for seq, most in launches.items():
            at = bisect_right(numbers, seq)  # a captured step has several plans
            if at:
                sums[numbers[at - 1]] += most
        for seq, total in sums.items():
            nbytes[seq] = max(nbytes.get(seq, 0), total)

    def filled(one: Slice) -> Slice:
        return one._replace(nbytes=nbytes.get(one.seq, 0)) if one.kind in (PLAN, RUN) else one

    return replace(own, slices=tuple(map(filled, own.slices)))


# ---------------------------------------------------------------------------------------------- the environment


def begin_from_environment() -> None:
    """Records into the file that `RAYCOLLECT_TIMELINE` names, to the end of this process; called at first use.

    In an actor or task the file's name gets the process id: these have the environment of the driver, as a rule.
    """
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if not path or Tracing.current() is not None or _is_done():
        return
    target = Path(path).absolute()
    if ray_internals.is_worker():
        base, dot, suffixes = target.name.partition(".")
        target = target.with_name(f"{base}.{os.getpid()}{dot}{suffixes}")
    try:
        tracing = Tracing.begin(ENVIRONMENT_VARIABLE)
    except TimelineError:
        return  # its controller records it
    _done.append(os.getpid())
    undo = ray_internals.before_shutdown(tracing.drain)
    atexit.register(_write, tracing, target, undo)


_done: list[int] = []
"""The processes, by id, in which that was begun: this one, and those that have forked it."""


def _is_done() -> bool:
    return os.getpid() in _done


def _write(tracing: Tracing, target: Path, undo: Callable[[], None]) -> None:
    if os.getpid() != _done[-1]:
        return
    undo()
    trace = tracing.end()
    try:
        chrome.write(trace, target)
    except OSError as exc:
        _log.error("the timeline can't be written to %s: %s", target, exc)
    for one in trace.missing:
        _log.warning("the timeline in %s lacks %s", target, one)
