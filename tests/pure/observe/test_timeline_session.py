"""A timeline over participants: who answers, who does not, whose clock is another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raycollect.channel.messages import Collect, Collected, Message, Record, Tick, Ticked
from raycollect.driver.participant_link import MOST_COLLECTED_NBYTES, ParticipantLink
from raycollect.errors import ConnectionLostError, ProtocolError, TimelineError
from raycollect.member.introspection import PART_NBYTES
from raycollect.observe import Label, Ring, TracedGroup, Tracer, timeline_session
from raycollect.observe.clocks import clock_id
from raycollect.observe.timeline_session import Timelines, TimelineSession, round_trips
from raycollect.observe.trace import KERNEL, PART, PLAN, encode_recorded

LABEL = Label(op="allreduce", group_id="g1", rank=0, ranks=2, nbytes=64, calls=1)


class Participant:
    """The other end of a link: it answers at once, unless it is told otherwise.

    Attributes:
        ahead_s: How far its clock is ahead.
        clock: What names its clock.
        mute: The messages that it does not answer.
    """

    def __init__(self, ahead_s: float = 0.0, clock: str = "") -> None:
        self.ahead_s, self.clock = ahead_s, clock or clock_id()
        self.mute: tuple[type[Message], ...] = ()
        self.refusal = ""
        self.payload: bytes | None = None
        self.ring: Ring | None = None
        self.heard: list[Message] = []
        self.limit = 0
        self.peer: Any = None
        self.is_gone = False

    def now_s(self) -> float:
        return time.monotonic() + self.ahead_s

    def end(self) -> None:
        """Its process ends, and the connection with it."""
        self.is_gone = True
        self.peer.closed(self, ConnectionLostError(detail="reset"))

    def send(self, message: Any) -> None:
        if self.is_gone:
            raise ConnectionLostError(detail="the link is closed")
        self.heard.append(message)
        if isinstance(message, self.mute):
            return
        if isinstance(message, (Record, Tick)):
            if isinstance(message, Record) and not self.refusal:
                self.ring, self.limit = Ring(message.limit, self.now_s), message.limit
            answer = Ticked(request=message.request, at_s=self.now_s(), clock=self.clock, refusal=self.refusal)
            self.peer.received(self, answer)
        elif isinstance(message, Collect):
            ring, self.ring = self.ring, None if message.ends else self.ring
            packed = self.payload
            if packed is None:
                packed = b"" if ring is None else encode_recorded(ring.read())
            cut = len(packed) // 2
            for part, more in ((packed[:cut], True), (packed[cut:], False)):
                self.peer.received(self, Collected(request=message.request, payload=part, more=more))

    def work(self, seq: int, took_s: float = 0.001) -> None:
        """Records one collective."""
        assert self.ring is not None
        begin_s = self.now_s()
        self.ring.groups["g1"] = TracedGroup("default", "shm", 0, 2)
        self.ring.add(PART, "allreduce", begin_s, begin_s + took_s, seq, LABEL._replace(calls=0))
        self.ring.add(KERNEL, "allreduce", begin_s, begin_s + took_s, seq, LABEL)


def joined(participant: Participant, name: str = "W", pid: int = 7) -> ParticipantLink:
    info = {"participant": True, "actor": name, "address": SimpleNamespace(host="10.0.0.2"), "pid": pid}
    peer = participant.peer = ParticipantLink(cast(Any, SimpleNamespace(lost=lambda *_: None)), info, object())
    peer.link = participant  # type: ignore[assignment]
    return peer


@pytest.fixture
def timelines() -> Iterator[Timelines]:
    """Those of a process; one that goes on ends with the test."""
    sessions = Timelines(Tracer(), dict)
    yield sessions
    if sessions.running is not None:
        sessions.running.end(0.0)
    assert sessions.tracer.ring is None


@pytest.fixture
def begin(timelines: Timelines) -> Callable[..., TimelineSession]:
    """Begins timelines."""
    return partial(timelines.begin, "a test")


def test_what_participants_record_comes_together(timelines: Timelines, begin: Callable[..., TimelineSession]) -> None:
    line, first, late = begin(limit=100), Participant(), Participant()
    line.leased(joined(first, "A", 1))
    first.work(5)
    line.leased(joined(late, "B", 2))
    late.work(5)
    ring = timelines.tracer.ring
    assert ring is not None
    ring.add(PLAN, "allreduce", line.began_s, time.monotonic(), 5, Label(op="allreduce", group_id="g1"))
    assert [len(process.spans) for process in line.peek().processes] == [1, 2, 2], "which ends nothing"
    trace = line.end()
    assert line.end() is trace
    assert [(process.name, process.host, process.pid, process.leads) for process in trace.processes[1:]] == [
        ("A", "10.0.0.2", 1, False),
        ("B", "10.0.0.2", 2, False),
    ]
    assert {process.leader for process in trace.processes} == {line.leader}
    assert [len(process.spans) for process in trace.processes] == [1, 2, 2]
    assert (first.limit, trace.missing, first.ring) == (100, (), None)
    assert not any(isinstance(message, Tick) for message in first.heard), "it has the same clock"
    assert timelines.last is trace


def test_another_one_can_begin_where_a_signal_has_ended_the_end(
    timelines: Timelines, begin: Callable[..., TimelineSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, participant = begin(), Participant()
    line.leased(joined(participant))
    participant.work(5)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(timeline_session, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            line.end()
    assert timelines.running is None
    other = begin()
    assert len(line.end().processes[1].spans) == 2, "nobody was asked yet"
    assert timelines.running is other
    assert timelines.tracer.ring is not None


def test_a_participant_that_is_leased_as_it_ends_does_not_go_on_recording(
    begin: Callable[..., TimelineSession],
) -> None:
    line = begin()
    ending = threading.Thread(target=line.end)

    class Late(Participant):
        def send(self, message: Any) -> None:
            if isinstance(message, Record):
                ending.start()
                ending.join(0.2)  # it has ended, or waits
            super().send(message)

    participant = Late()
    line.leased(joined(participant))
    ending.join(20)
    assert participant.ring is None


def test_who_is_gone_silent_or_strange_is_named_and_the_others_are_there(begin: Callable[..., TimelineSession]) -> None:
    line = begin()
    participants = {name: Participant() for name in ("good", "gone", "silent", "own", "junk", "new", "clockless")}
    participants["own"].refusal = "it records a timeline of its own"
    participants["clockless"].clock, participants["clockless"].mute = "another", (Tick,)
    for name, participant in participants.items():
        line.leased(joined(participant, name))
    participants["good"].work(1)
    participants["gone"].end()
    participants["silent"].mute = (Collect,)
    participants["junk"].payload = b"junk"
    participants["new"].ring = None
    began_s = time.monotonic()
    trace = line.end(0.2)
    assert time.monotonic() - began_s < 5
    assert [process.name for process in trace.processes[1:]] == ["good"]
    why = {missing.name: missing.why for missing in trace.missing}
    assert set(why) == set(participants) - {"good"}
    assert "has ended" in why["gone"]
    assert "in time" in why["silent"]
    assert why["own"] == "it records a timeline of its own"
    assert "malformed" in why["junk"]
    assert "no longer" in why["new"]
    assert "clock" in why["clockless"]


def test_who_does_not_answer_at_the_beginning_may_do_so_at_the_end(begin: Callable[..., TimelineSession]) -> None:
    line, participant = begin(), Participant()
    participant.mute = (Record,)
    line.leased(joined(participant))
    line.begun(0.01)
    participant.mute, participant.ring = (), Ring()
    participant.work(1)
    request = next(message.request for message in participant.heard if isinstance(message, Record))
    participant.peer.received(
        participant, Ticked(request=request, at_s=participant.now_s(), clock=participant.clock, refusal="")
    )
    assert line.end().missing == ()


def test_the_clock_of_another_host_is_compared_at_both_ends(begin: Callable[..., TimelineSession]) -> None:
    line, participant = begin(), Participant(ahead_s=5000.0, clock="another host's")
    line.leased(joined(participant))
    before_s = time.monotonic()
    participant.work(1)
    after_s = time.monotonic()
    process = line.end().processes[1]
    assert 0 < process.uncertainty_s < 1
    assert before_s - process.uncertainty_s <= process.spans[0].begin_s <= after_s + process.uncertainty_s
    assert sum(isinstance(message, Tick) for message in participant.heard) == 2 * timeline_session.ROUND_TRIPS


def test_round_trips_are_timed_when_the_answer_is_there() -> None:
    """By an injected clock, with a way back that is longer than the way there."""
    participant, now = Participant(), [100.0]
    peer = joined(participant)

    def send(message: Any) -> None:
        now[0] += 0.001
        answer = Ticked(request=message.request, at_s=now[0] + 7.0, clock="x", refusal="")
        now[0] += 0.003
        peer.received(participant, answer)  # type: ignore[arg-type]

    participant.send = send  # type: ignore[method-assign]
    fix = round_trips(peer, lambda: now[0], 3).result(0)
    assert fix is not None
    assert fix.uncertainty_s == pytest.approx(0.002)
    assert fix.offset_s == pytest.approx(7.0 - 0.001)


def test_who_is_given_back_has_told_what_it_recorded(begin: Callable[..., TimelineSession]) -> None:
    line, participant = begin(), Participant()
    peer = joined(participant)
    line.leased(peer)
    participant.work(1)
    line.leaving(peer)
    participant.end()
    line.leaving(joined(Participant()))  # which was never asked
    other = Participant()
    line.leased(joined(other))
    other.work(1)
    line.drain()  # as before Ray ends
    other.end()
    trace = line.end()
    assert (trace.missing, [len(process.spans) for process in trace.processes[1:]]) == ((), [2, 2])


def test_one_timeline_at_a_time(timelines: Timelines, begin: Callable[..., TimelineSession]) -> None:
    line = begin()
    with pytest.raises(TimelineError, match="recorded already, begun by a test: stop it first"):
        timelines.begin("another")
    line.end()
    begin().end()
    timelines.tracer.begin("a controller")
    try:
        with pytest.raises(TimelineError, match="the controller that drives this process"):
            timelines.begin("another")
    finally:
        timelines.tracer.end("a controller")


def test_answers_without_an_end_are_a_broken_rule() -> None:
    participant = Participant()
    participant.mute = (Collect,)
    peer = joined(participant)
    answer = peer.ask(Collect, ends=True, after=-1)
    (request,) = (message.request for message in participant.heard if isinstance(message, Collect))
    part = bytes(8 << 20)
    with pytest.raises(ProtocolError, match="more than"):
        for _ in range(MOST_COLLECTED_NBYTES // len(part) + 1):
            peer.received(participant, Collected(request=request, payload=part, more=True))  # type: ignore[arg-type]
    participant.end()
    assert answer.result(0) is None
    assert not peer._collected
    peer.received(participant, Collected(request=request, payload=part, more=True))  # type: ignore[arg-type]
    assert not peer._collected, "nobody asks any more"


def test_parts_fit_into_frames() -> None:
    from raycollect.channel.messages import encode
    from raycollect.channel.protocol import MAX_FRAME_NBYTES

    assert len(encode(Collected(request=2**40, payload=bytes(PART_NBYTES), more=True))) <= MAX_FRAME_NBYTES


@pytest.mark.parametrize("writable", [True, False])
def test_a_process_that_makes_calls_of_its_own_is_recorded_to_the_file_that_the_environment_names(
    tmp_path: Path, writable: bool
) -> None:
    """A program without a cluster: a group of one process, and one allreduce of it."""
    path = tmp_path / ("t.json" if writable else "absent/t.json")
    program = f"""
import numpy as np
import raycollect as col
col.init_collective_group(1, 0, "local", "alone", rendezvous="file://{tmp_path}/meeting")
col.allreduce(np.ones(1000), "alone")
col.destroy_collective_group("alone")
"""
    environ = {**os.environ, timeline_session.ENVIRONMENT_VARIABLE: str(path), "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert ("the timeline can't be written to" in run.stderr) == (not writable)
    if writable:
        (row,) = json.loads(path.read_text())["otherData"]["raycollect"]["summary"]["rows"]
        values = [row[name] for name in ("group", "op", "backend", "calls", "nbytes")]
        assert values == ["alone", "allreduce", "local", 1, 8000]
