"""What this process does and holds, and how far its plans are: the answers to a controller's questions."""

from __future__ import annotations

from dataclasses import asdict

from raycollect.channel.messages import Look, Measure, Measured, Seen, Survey, Surveyed
from raycollect.core import sockets
from raycollect.engine.instruments import Instruments
from raycollect.engine.progress import NOWHERE, BytesDone
from raycollect.member.sequencer import PlanSequencer, arrivals
from raycollect.observe import run_steps
from raycollect.observe.stacks import what_runs
from raycollect.pos import Store
from raycollect.pos.segments import Segments


def look(message: Look, instruments: Instruments, sequencer: PlanSequencer) -> Seen:
    """What this process is doing."""
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
    """What this process is doing, as far as it belongs to no controller."""
    doing = what_runs()
    return Seen(request=0, doing=doing.what, stack=list(doing.stack))


def measure(message: Measure, sequencer: PlanSequencer, bytes_done: BytesDone | None) -> Measured:
    """How far a plan, or a run, is; `bytes_done`: of one under way."""
    has_ended = sequencer.has_ended(message.seq)
    has_begun = has_ended or bytes_done is not None or message.seq in sequencer.running()
    progress = (bytes_done or NOWHERE)._asdict()
    return Measured(request=message.request, has_begun=has_begun, has_ended=has_ended, **progress)


def survey(message: Survey, store: Store) -> Surveyed:
    """What this process holds."""
    return Surveyed(request=message.request, **asdict(store.statistics()), **asdict(Segments.current().statistics()))
