"""A timeline while it is recorded, in this process and in the participants that it drives.

A process records one timeline at a time. Participants are asked over the control channel, which answers while methods
run. A participant that has ended, or does not answer in time, is left out and listed as missing.
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
from raycollect.observe import Ring, TracedGroup, Tracer, chrome
from raycollect.observe.clocks import ROUND_TRIPS, SAME_CLOCK, Alignment, Fix, Sample, clock_id, fix
from raycollect.observe.trace import LIMIT, decode_recorded
from raycollect.observe.whole import Missing, Process, TimelineTrace, process_of
from raycollect.ray_bridge import ray_actors, ray_session

_log = logging.getLogger("raycollect")

ENVIRONMENT_VARIABLE = "RAYCOLLECT_TIMELINE"

STOP_S = 10.0
"""How long participants may take by default to send their spans, in seconds."""
BEGIN_S = 3.0
"""How long to wait for participants at the beginning, in seconds."""
LEAVING_S = 3.0
"""How long to wait for a participant that is released meanwhile, in seconds."""
_CLOCK_S = 2.0
"""The share of that time for the clocks of other hosts, in seconds."""

_GONE = "its process, or the connection to it, has ended"
_SILENT = "it did not answer in time"


Groups = Callable[[], Mapping[str, TracedGroup]]
"""Returns the groups of this process, by id."""


class RecordedPeer(Protocol):
    """A participant that can be asked to record; implemented by `driver.participant_link`."""

    @property
    def info(self) -> Mapping[str, Any]:
        """The actor, the process and the address."""

    def ask(self, question: Callable[..., Message], **fields: Any) -> Future[Any]:
        """Sends a question; the result is the answer, or None if the connection ends first."""


def round_trips(
    peer: RecordedPeer, clock: Callable[[], float] = monotonic, count: int = ROUND_TRIPS
) -> Future[Fix | None]:
    """Compares clocks with a participant on the hub's thread; the result is None if it gave no answer."""
    done = Future[Fix | None]()
    _ask(peer, clock, count, done, [])
    return done


def _ask(
    peer: RecordedPeer, clock: Callable[[], float], count: int, done: Future[Fix | None], samples: list[Sample]
) -> None:
    sent_s = clock()

    def answered(answer: Future[Ticked | None]) -> None:
        received_s, tick = clock(), answer.result()
        if tick is not None:
            samples.append(Sample(sent_s=sent_s, remote_s=tick.at_s, received_s=received_s))
        if tick is None or len(samples) == count:
            done.set_result(fix(samples))
        else:
            _ask(peer, clock, count, done, samples)

    peer.ask(Tick).add_done_callback(answered)


class _Tracked:
    """A participant that was asked to record."""

    def __init__(self, peer: RecordedPeer, limit: int) -> None:
        self.peer = peer
        # The fix of its clock at the beginning; None: it has this process's clock, or the clock is unknown
        self.first: Future[Fix | None] | None = None
        self.refusal = ""
        self.clock = ""
        self.process: Process | None = None  # its recording, once that is final
        self.newest = -1  # the number of the newest entry that `recent` has returned
        self.answered = Future[None]()  # done when it has answered; the question's future would keep this object alive
        peer.ask(Record, limit=limit).add_done_callback(self._began)

    def _began(self, answer: Future[Ticked | None]) -> None:
        tick = answer.result()
        if tick is not None:
            self.clock, self.refusal = tick.clock, tick.refusal
            if not tick.refusal and (not tick.clock or tick.clock != clock_id()):
                self.first = round_trips(self.peer)
        self.answered.set_result(None)

    def missing(self, why: str) -> Missing:
        info = self.peer.info
        return Missing(name=info["actor"], host=info["address"].host, pid=info["pid"], why=why)


class Timelines:
    """The timelines of a process and of the participants that it drives, one at a time. Any thread may call it.

    Args:
        tracer: The tracer of the process.
        groups: Returns the groups of the process, by id.

    Attributes:
        running: The timeline that is being recorded, if any.
        last: The result of the last timeline, if any.
    """

    def __init__(self, tracer: Tracer, groups: Groups) -> None:
        self.running: TimelineSession | None = None
        self.last: TimelineTrace | None = None
        self.tracer = tracer
        self.groups = groups
        self.changing: threading.Lock = threading.Lock()  # held while a timeline begins or ends
        self._has_begun = False  # whether a timeline was begun for the environment variable

    def begin(self, what: str, *, limit: int = LIMIT, is_live: bool = False) -> TimelineSession:
        """Begins a timeline; `what` names the caller, for messages. `is_live`: only what is `recent` will be read.

        Raises:
            TimelineError: A timeline runs in this process, or its controller records it.
        """
        with self.changing:
            if self.running is not None:
                detail = f"a timeline is recorded already, begun by {self.running.holder}: stop it first"
                raise TimelineError(detail=detail)
            ring = self.tracer.begin(what, limit)
            if ring is None:
                detail = "the controller that drives this process records a timeline of it: read that timeline"
                raise TimelineError(detail=detail)
            self.running = TimelineSession(self, ring, what, limit=limit, is_live=is_live)
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
    """A timeline from its beginning on; `limit` is for the participants' rings. Any thread may call it."""

    def __init__(
        self, timelines: Timelines, ring: Ring, holder: str, *, limit: int = LIMIT, is_live: bool = False
    ) -> None:
        self.began_s: float = ring.clock()  # by `time.monotonic`
        self.leader: str = secrets.token_hex(8)  # the id of its plans among those of several timelines
        self.holder = holder  # the name under which the `Tracer` records
        self._timelines = timelines
        self._ring = ring
        self._limit = limit
        self._is_live = is_live
        self._lock = threading.Lock()
        self._tracked: dict[int, _Tracked] = {}
        self._is_over = False
        self._ended_s = 0.0
        self._newest = -1  # the number of the newest entry of this process that `recent` has returned
        self._whole: TimelineTrace | None = None  # the result, after the end

    def end(self, timeout_s: float = STOP_S) -> TimelineTrace:
        """Ends the timeline and collects all spans; a second call returns the same result."""
        timelines = self._timelines
        with timelines.changing:
            if not self._is_over:
                with self._lock:  # a participant that is leased meanwhile is asked to record before this, or never
                    self._is_over = True
                self._ended_s = monotonic()
                timelines.tracer.end(self.holder)
            if self._whole is None:
                try:
                    self._whole = self._collected(timeout_s, self._ended_s, ends=True)
                    if not self._is_live:
                        timelines.last = self._whole
                finally:  # a signal may end the wait for participants
                    if timelines.running is self:
                        timelines.running = None
            return self._whole

    def peek(self, timeout_s: float = STOP_S) -> TimelineTrace:
        """Returns the spans so far; recording continues."""
        return self._collected(timeout_s, monotonic(), ends=False)

    def recent(self, timeout_s: float = STOP_S) -> TimelineTrace:
        """Returns the spans that have ended since the last call; recording continues."""
        return self._collected(timeout_s, monotonic(), ends=False, only_new=True)

    def leased(self, peer: RecordedPeer) -> None:
        """Makes a new participant record from now on; never waits."""
        with self._lock:
            if self._is_over or id(peer) in self._tracked:
                return
            self._tracked[id(peer)] = _Tracked(peer, self._limit)

    def begun(self, timeout_s: float = BEGIN_S) -> None:
        """Waits until all participants record, or the time limit has passed."""
        _wait([entry.answered for entry in list(self._tracked.values())], monotonic() + timeout_s)

    def leaving(self, peer: RecordedPeer) -> None:
        """Collects from a participant that is about to be released."""
        if self._is_live:
            self._tracked.pop(id(peer), None)
            return
        entry = self._tracked.get(id(peer))
        if entry is not None and not self._is_over:
            self._collect([entry], LEAVING_S, ends=True)

    def drain(self) -> None:
        """Collects from all participants, which are about to end."""
        if not self._is_over and not self._is_live:
            self._collect(list(self._tracked.values()), LEAVING_S, ends=True)

    def _collected(self, timeout_s: float, ended_s: float, *, ends: bool, only_new: bool = False) -> TimelineTrace:
        processes, missing = self._collect(list(self._tracked.values()), timeout_s, ends=ends, only_new=only_new)
        name, host = _this_process()
        recorded = self._ring.read(self._newest if only_new else -1)
        groups = {**recorded.groups, **self._timelines.groups()}
        process = Process(name=name, host=host, pid=os.getpid(), leader=self.leader, leads=True)
        own = process_of(recorded._replace(groups=groups), process)
        if only_new:
            self._newest = max(self._newest, own.newest)
        return TimelineTrace(
            began_s=self.began_s,
            ended_s=ended_s,
            processes=(own, *processes),
            missing=tuple(missing),
        )

    def _collect(
        self, tracked: Sequence[_Tracked], timeout_s: float, *, ends: bool, only_new: bool = False
    ) -> tuple[list[Process], list[Missing]]:
        deadline_s = monotonic() + timeout_s
        clocks_s = deadline_s - max(timeout_s - _CLOCK_S, timeout_s / 2)
        left = [entry for entry in tracked if entry.process is None]
        tracked = left if only_new else tracked
        _wait([entry.answered for entry in left], clocks_s)
        foreign = [entry for entry in left if entry.first is not None]
        lasts = {id(entry): round_trips(entry.peer) for entry in foreign}
        _wait([*lasts.values(), *(entry.first for entry in foreign if entry.first is not None)], clocks_s)
        answers = {
            id(entry): entry.peer.ask(Collect, ends=ends, after=entry.newest if only_new else -1)
            for entry in left
            if not entry.refusal
        }
        _wait(answers.values(), deadline_s)
        processes, missing = list[Process](), list[Missing]()
        for entry in tracked:
            collected = entry.process
            result = collected or self._process_or_missing(entry, answers.get(id(entry)), lasts.get(id(entry)))
            if isinstance(result, Missing):
                missing.append(result)
                if only_new and result.why == _GONE:
                    self._tracked.pop(id(entry.peer), None)
            else:
                processes.append(result)
                entry.process = result if ends else collected
                if only_new:
                    entry.newest = max(entry.newest, result.newest)
        return processes, missing

    def _process_or_missing(
        self, entry: _Tracked, answer: Future[bytes | Unable | None] | None, last: Future[Fix | None] | None
    ) -> Process | Missing:
        if answer is None:
            return entry.missing(entry.refusal)
        if not answer.done():
            return entry.missing(_SILENT)
        payload = answer.result()
        if payload is None:
            return entry.missing(_GONE)
        if isinstance(payload, Unable):
            return entry.missing(payload.detail)
        if not payload:
            return entry.missing("it no longer records: another controller replaced the recording, or it restarted")
        aligned = SAME_CLOCK
        if entry.clock != clock_id() or not entry.clock:
            fixes = [
                result for future in (entry.first, last) if future and future.done() and (result := future.result())
            ]
            if not fixes:
                return entry.missing("its clock could not be compared with that of this process")
            aligned = Alignment(first=fixes[0], last=fixes[-1] if len(fixes) > 1 else None)
        info = entry.peer.info
        host, pid = info["address"].host, info["pid"]
        process = Process(name=info["actor"], host=host, pid=pid, leader=self.leader)
        try:
            return process_of(decode_recorded(payload), process, aligned)
        except ValueError as exc:
            return entry.missing(str(exc))


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
    for missing in trace.missing:
        _log.warning("the timeline in %s lacks %s", target, missing)
