"""A timeline while it is recorded, in this process and in the participants that it drives.

There is one at a time per process. Participants are asked over the control channel, which answers while methods run. A
participant that is gone, or does not answer in time, is left out and named.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from raycollect.channel.messages import Collect, Message, Record, Tick, Ticked, Unable
from raycollect.errors import TimelineError
from raycollect.observe import Place, Ring, Tracer, chrome
from raycollect.observe.clocks import ROUND_TRIPS, SAME_CLOCK, Alignment, Fix, Sample, clock_id, fix
from raycollect.observe.trace import LIMIT, decode_recorded
from raycollect.observe.whole import Missing, Process, Trace, process_of
from raycollect.ray_bridge import ray_actors, ray_session

_log = logging.getLogger("raycollect")

ENVIRONMENT_VARIABLE = "RAYCOLLECT_TIMELINE"

STOP_S = 10.0
"""The default for how long participants may take to send what they have recorded, in seconds."""
BEGIN_S = 3.0
"""How long the beginning waits for participants."""
LEAVING_S = 3.0
"""How long to wait for one that is given back meanwhile."""
_CLOCK_S = 2.0
"""How much of that is for the clocks of other hosts."""

_GONE = "its process, or the connection to it, has ended"
_SILENT = "it did not answer in time"


Groups = Callable[[], Mapping[str, Place]]
"""Gives the groups of this process, by id."""


class Peer(Protocol):
    """A participant that can be asked to record; implemented by `driver.participant_link`."""

    @property
    def info(self) -> Mapping[str, Any]:
        """Its actor, its process and its address."""

    def ask(self, question: Callable[..., Message], **fields: Any) -> Future[Any]:
        """Asks it something; the result is the answer, or None where its connection ends first."""


def round_trips(peer: Peer, clock: Callable[[], float] = monotonic, count: int = ROUND_TRIPS) -> Future[Fix | None]:
    """Compares clocks with a participant on the hub's thread; the result is None where it gave no answer."""
    done = Future[Fix | None]()
    _ask(peer, clock, count, done, [])
    return done


def _ask(peer: Peer, clock: Callable[[], float], count: int, done: Future[Fix | None], samples: list[Sample]) -> None:
    sent_s = clock()

    def answered(asked: Future[Ticked | None]) -> None:
        received_s, tick = clock(), asked.result()
        if tick is not None:
            samples.append(Sample(sent_s=sent_s, remote_s=tick.at_s, received_s=received_s))
        if tick is None or len(samples) == count:
            done.set_result(fix(samples))
        else:
            _ask(peer, clock, count, done, samples)

    peer.ask(Tick).add_done_callback(answered)


class _Tracked:
    """A participant that was asked to record."""

    def __init__(self, peer: Peer, limit: int) -> None:
        self.peer = peer
        # Its clock at the beginning; None: this process's clock, or not known
        self.first: Future[Fix | None] | None = None
        self.refusal = ""
        self.clock = ""
        self.process: Process | None = None  # what it has recorded, once that is collected for good
        self.asked = Future[None]()  # done when it has answered; the future of the question would keep this alive
        peer.ask(Record, limit=limit).add_done_callback(self._began)

    def _began(self, asked: Future[Ticked | None]) -> None:
        tick = asked.result()
        if tick is not None:
            self.clock, self.refusal = tick.clock, tick.refusal
            if not tick.refusal and (not tick.clock or tick.clock != clock_id()):
                self.first = round_trips(self.peer)
        self.asked.set_result(None)

    def missing(self, why: str) -> Missing:
        info = self.peer.info
        return Missing(name=info["actor"], host=info["address"].host, pid=info["pid"], why=why)


class Timelines:
    """The timelines that a process records of itself and of what it drives, one at a time. Any thread may call it.

    Args:
        tracer: What tells the process that it is recorded.
        groups: Gives the groups of the process, by id.

    Attributes:
        running: The one that is recorded now; None: none is.
        last: What the last one came to; None: there was none.
    """

    def __init__(self, tracer: Tracer, groups: Groups) -> None:
        self.running: TimelineSession | None = None
        self.last: Trace | None = None
        self.tracer = tracer
        self.groups = groups
        self.changing: threading.Lock = threading.Lock()  # held while one begins or ends
        self._has_begun = False  # for the environment

    def begin(self, what: str, *, limit: int = LIMIT) -> TimelineSession:
        """Begins one; `what` names who does, for messages.

        Raises:
            TimelineError: One runs in this process, or its controller records it.
        """
        with self.changing:
            if self.running is not None:
                detail = f"a timeline is recorded already, begun by {self.running.holder}: stop that first"
                raise TimelineError(detail=detail)
            ring = self.tracer.begin(what, limit)
            if ring is None:
                detail = "the controller that drives this process records a timeline of it: read that one"
                raise TimelineError(detail=detail)
            self.running = TimelineSession(self, ring, what, limit=limit)
            return self.running

    def begin_from_environment(self) -> None:
        """Records to the file named by `RAYCOLLECT_TIMELINE` until this process ends; called at first use.

        In an actor or task the file's name gets the process id, as these usually inherit the driver's environment.
        """
        path = os.environ.get(ENVIRONMENT_VARIABLE)
        if not path or self.running is not None or self._has_begun:
            return
        target = Path(path).absolute()
        if ray_session.is_worker():
            base, dot, suffixes = target.name.partition(".")
            target = target.with_name(f"{base}.{os.getpid()}{dot}{suffixes}")
        try:
            tracing = self.begin(ENVIRONMENT_VARIABLE)
        except TimelineError:
            return  # its controller records it
        self._has_begun = True
        undo = ray_session.before_shutdown(tracing.drain)
        atexit.register(_write, tracing, os.getpid(), target, undo)


class TimelineSession:
    """A timeline from its beginning on; `limit` is that of the participants' rings. Any thread may call it."""

    def __init__(self, timelines: Timelines, ring: Ring, holder: str, *, limit: int = LIMIT) -> None:
        self.began_s: float = ring.clock()  # by `time.monotonic`
        self.leader: str = secrets.token_hex(8)  # the id of its plans among those of several timelines
        self.holder = holder  # who began it, as the `Tracer` knows it
        self._timelines = timelines
        self._ring = ring
        self._limit = limit
        self._lock = threading.Lock()
        self._tracked: dict[int, _Tracked] = {}
        self._is_over = False
        self._ended_s = 0.0
        self._whole: Trace | None = None  # once it has ended

    def end(self, timeout_s: float = STOP_S) -> Trace:
        """Ends it, and collects what was recorded; a second call returns the same."""
        timelines = self._timelines
        with timelines.changing:
            if not self._is_over:
                with self._lock:  # what is leased meanwhile is asked to record either before, or never
                    self._is_over = True
                self._ended_s = monotonic()
                timelines.tracer.end(self.holder)
            if self._whole is None:
                try:
                    self._whole = timelines.last = self._collected(timeout_s, self._ended_s, ends=True)
                finally:  # a signal may end the wait for participants
                    if timelines.running is self:
                        timelines.running = None
            return self._whole

    def peek(self, timeout_s: float = STOP_S) -> Trace:
        """What was recorded so far; recording goes on."""
        return self._collected(timeout_s, monotonic(), ends=False)

    def leased(self, peer: Peer) -> None:
        """Makes a new participant record from now on; never waits."""
        with self._lock:
            if self._is_over or id(peer) in self._tracked:
                return
            self._tracked[id(peer)] = _Tracked(peer, self._limit)

    def begun(self, timeout_s: float = BEGIN_S) -> None:
        """Waits until all participants record, or the time is over."""
        _wait([one.asked for one in list(self._tracked.values())], monotonic() + timeout_s)

    def leaving(self, peer: Peer) -> None:
        """Collects from a participant that is about to be given back."""
        found = self._tracked.get(id(peer))
        if found is not None and not self._is_over:
            self._collect([found], LEAVING_S, ends=True)

    def drain(self) -> None:
        """Collects from all participants, which are about to end."""
        if not self._is_over:
            self._collect(list(self._tracked.values()), LEAVING_S, ends=True)

    def _collected(self, timeout_s: float, ended_s: float, *, ends: bool) -> Trace:
        return self._trace(*self._collect(list(self._tracked.values()), timeout_s, ends=ends), ended_s)

    def _trace(self, processes: Sequence[Process], missing: Sequence[Missing], ended_s: float) -> Trace:
        name, host = _this_process()
        recorded = self._ring.read()
        groups = {**recorded.groups, **self._timelines.groups()}
        known = Process(name=name, host=host, pid=os.getpid(), leader=self.leader, leads=True)
        own = process_of(recorded._replace(groups=groups), known)
        return Trace(
            began_s=self.began_s,
            ended_s=ended_s,
            processes=(own, *processes),
            missing=tuple(missing),
        )

    def _collect(
        self, tracked: Sequence[_Tracked], timeout_s: float, *, ends: bool
    ) -> tuple[list[Process], list[Missing]]:
        deadline_s = monotonic() + timeout_s
        clocks_s = deadline_s - max(timeout_s - _CLOCK_S, timeout_s / 2)
        left = [one for one in tracked if one.process is None]
        _wait([one.asked for one in left], clocks_s)
        foreign = [one for one in left if one.first is not None]
        lasts = {id(one): round_trips(one.peer) for one in foreign}
        _wait([*lasts.values(), *(one.first for one in foreign if one.first is not None)], clocks_s)
        asked = {id(one): one.peer.ask(Collect, ends=ends) for one in left if not one.refusal}
        _wait(asked.values(), deadline_s)
        processes, missing = list[Process](), list[Missing]()
        for one in tracked:
            known = one.process
            found = known or self._process_or_missing(one, asked.get(id(one)), lasts.get(id(one)))
            if isinstance(found, Missing):
                missing.append(found)
            else:
                processes.append(found)
                one.process = found if ends else known
        return processes, missing

    def _process_or_missing(
        self, one: _Tracked, asked: Future[bytes | Unable | None] | None, last: Future[Fix | None] | None
    ) -> Process | Missing:
        if asked is None:
            return one.missing(one.refusal)
        if not asked.done():
            return one.missing(_SILENT)
        payload = asked.result()
        if payload is None:
            return one.missing(_GONE)
        if isinstance(payload, Unable):
            return one.missing(payload.detail)
        if not payload:
            return one.missing("it records no more: another one took its place, or it began anew")
        aligned = SAME_CLOCK
        if one.clock != clock_id() or not one.clock:
            fixes = [found for asked in (one.first, last) if asked and asked.done() and (found := asked.result())]
            if not fixes:
                return one.missing("its clock could not be compared with this one's")
            aligned = Alignment(first=fixes[0], last=fixes[-1] if len(fixes) > 1 else None)
        info = one.peer.info
        host, pid = info["address"].host, info["pid"]
        known = Process(name=info["actor"], host=host, pid=pid, leader=self.leader)
        try:
            return process_of(decode_recorded(payload), known, aligned)
        except ValueError as exc:
            return one.missing(str(exc))


def _wait(futures: Iterable[Future[Any]], until_s: float) -> None:
    wait_for(list(futures), max(until_s - monotonic(), 0))


def _this_process() -> tuple[str, str]:
    if not ray_session.is_connected():
        return f"process {os.getpid()}", "this host"
    actor_id = ray_actors.current_actor_id()
    if actor_id:
        return ray_actors.short_actor(ray_actors.current_class(), actor_id), ray_session.node_address()
    return ("task" if ray_session.is_worker() else "driver"), ray_session.node_address()


def _write(tracing: TimelineSession, pid: int, target: Path, undo: Callable[[], None]) -> None:
    if os.getpid() != pid:  # a forked child
        return
    undo()
    trace = tracing.end()
    try:
        chrome.write(trace, target)
    except OSError as exc:
        _log.error("the timeline can't be written to %s: %s", target, exc)
    for one in trace.missing:
        _log.warning("the timeline in %s lacks %s", target, one)
