"""A participant's answers to its controller: activity, tensors, progress of plans, and recorded timelines."""

from __future__ import annotations

from raycollect.channel.messages import (
    Collect,
    Collected,
    Look,
    Measure,
    Measured,
    Record,
    Seen,
    Survey,
    Surveyed,
    Tick,
    Ticked,
)
from raycollect.core import sockets, threads
from raycollect.engine.instruments import Instruments
from raycollect.engine.progress import NOWHERE, BytesDone
from raycollect.member.reporter import Reporter
from raycollect.member.runtime import Runtime
from raycollect.member.sequencer import PlanSequencer, arrivals
from raycollect.observe import Ring, run_steps
from raycollect.observe.clocks import clock_id
from raycollect.observe.stacks import what_runs
from raycollect.observe.trace import MOST, encode_recorded
from raycollect.pos import Store
from raycollect.pos.segments import Segments

SETTLE_S = 0.25
"""How long to wait for the end of plans in progress before the recording is read, in seconds."""

PART_NBYTES = 512 << 10
"""The bytes of a recording per message."""


def look(message: Look, instruments: Instruments, sequencer: PlanSequencer) -> Seen:
    """Describes the activity of this process."""
    recorder, running = instruments.recorder, sequencer.running()
    doing, places = what_runs(), run_steps.steps()
    checks = arrivals(recorder.story(), instruments.clock())
    return Seen(
        request=message.request,
        doing=doing.what,
        stack=list(doing.stack),
        running=list(running),
        steps=[places.get(seq, "") for seq in running],
        checks=list(checks),
        checks_ms=[int(1000 * since_s) for since_s in checks.values()],
        ended=sequencer.last,
        story=recorder.tail(),
        cut=list(sockets.cut_links()),
    )


def look_at_process() -> Seen:
    """Describes the activity of this process, without plans of controllers."""
    doing = what_runs()
    return Seen(request=0, doing=doing.what, stack=list(doing.stack))


def measure(message: Measure, sequencer: PlanSequencer, bytes_done: BytesDone | None) -> Measured:
    """The progress of a plan or run; `bytes_done` is that of one in progress."""
    is_running = message.seq in sequencer.running()  # first, as the plan may end meanwhile
    has_ended = sequencer.has_ended(message.seq)
    progress = (bytes_done or NOWHERE)._asdict()
    return Measured(request=message.request, has_begun=is_running or has_ended, has_ended=has_ended, **progress)


def survey(message: Survey, store: Store) -> Surveyed:
    """The tensors and the memory of this process, in numbers."""
    return Surveyed(request=message.request, store=store.statistics(), arena=Segments.current().statistics())


class RecordingAgent:
    """One controller's recording in this process. The channel's thread calls its methods, which never wait."""

    def __init__(self, controller: str, runtime: Runtime, reporter: Reporter, sequencer: PlanSequencer) -> None:
        self._controller = controller
        self._runtime = runtime
        self._reporter = reporter
        self._sequencer = sequencer
        self._tracer = runtime.tracer

    def record(self, message: Record) -> None:
        """Starts recording, unless this process records its own timeline."""
        ring = self._tracer.begin(self._controller, min(max(message.limit, 1), MOST))
        self._tell_time(message.request, "" if ring is not None else "it records a timeline of its own")

    def tick(self, message: Tick) -> None:
        """Sends the time."""
        self._tell_time(message.request, "")

    def collect(self, message: Collect) -> None:
        """Sends the recording; with `ends`, also stops recording."""
        ring = self._tracer.end(self._controller) if message.ends else self._tracer.of(self._controller)
        # In a helper thread: packing takes long, and this thread handles aborts.
        threads.call_in_helper(threads.survives, self._tell_recorded, message, ring)

    def end(self) -> None:
        """Stops recording."""
        threads.survives(self._tracer.end, self._controller)

    def _tell_time(self, request: int, refusal: str) -> None:
        at_s = self._runtime.instruments.clock()
        self._reporter.tell(Ticked(request=request, at_s=at_s, clock=clock_id(), refusal=refusal))

    def _tell_recorded(self, message: Collect, ring: Ring | None) -> None:
        request = message.request
        try:
            packed = b""
            if ring is not None:
                self._sequencer.settle(SETTLE_S)  # a plan that has answered may not have recorded its end
                recorded = ring.read(message.after)
                places = self._runtime.process_groups.places()
                packed = encode_recorded(recorded._replace(groups={**recorded.groups, **places}))
            for at in range(0, max(len(packed), 1), PART_NBYTES):
                part = packed[at : at + PART_NBYTES]
                self._reporter.tell(Collected(request=request, payload=part, more=at + PART_NBYTES < len(packed)))
        except Exception as exc:  # noqa: BLE001 - the controller waits for an answer
            self._reporter.tell_unable(request, threads.failed("reading what was recorded", exc))
