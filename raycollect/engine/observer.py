"""The observer of a run in progress.

One object serves the recorder, whose last events errors show; the timeline, if one is recorded; the status, which shows
the position of each run (`observe.run_steps`); and the progress in bytes. The run notes its position by assignments;
any thread may convert it to words or numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from raycollect.engine.prepared import Prepared
from raycollect.engine.progress import NOWHERE, ByteMap, BytesDone, agreed_nbytes, nbytes_of_bundle, nbytes_read
from raycollect.engine.steps import Kernels, PreparedBundle, SingleKernelBundle
from raycollect.observe import Label, Recorder, Ring, run_steps
from raycollect.observe.run_steps import RunStep, calls
from raycollect.observe.trace import AGAIN, CHECK, CHECK_NAME, COLLECTIVE, KERNEL, NO_LABEL, PART, STAGING
from raycollect.planner import Program

_NOTHING: AbstractContextManager[None] = nullcontext()

_POSITIONS = {
    "waiting": run_steps.FOR_AN_OPERAND,
    "prepare": "prepares its operands",
    "check": run_steps.IN_CHECK,
}
"""Event -> the position of the run from then on, in words."""


@dataclass(eq=False)  # without slots, so that fields which most runs leave as they are take no time
class Observer:
    """The observer of one run. Any thread may call `bytes_done` and `words`; only the run's thread calls the rest."""

    program: Program
    seq: int
    label: str  # the name of a member's own call in timelines; empty for a plan
    recorder: Recorder
    ring: Ring | None  # of the timeline, if one is recorded
    slot: RunStep  # of the run's thread
    cached: Prepared | None = field(init=False, default=None)  # the result of an earlier run
    prepared: Prepared | None = field(init=False, default=None)  # set once all ranks have agreed
    bundle: PreparedBundle | None = field(init=False, default=None)  # in progress
    step: Kernels | None = field(init=False, default=None)  # the latest step
    left: int = field(init=False, default=0)  # the number of its kernels that have not ended
    began_s: float = field(init=False, default=0.0)  # set if a timeline is recorded
    check_s: float = field(init=False, default=0.0)  # when the agreement began; 0: not yet
    agreed_s: float = field(init=False, default=0.0)  # 0: not yet
    ended_s: float = field(init=False, default=0.0)
    _byte_map: ByteMap | None = field(init=False, default=None)  # made by the first `bytes_done`

    def event(self, what: str, detail: str = "") -> None:
        """Notes an event for error reports, and the new position of the run."""
        self.recorder.add(what, self.seq, detail)
        at = _POSITIONS.get(what)
        if at is not None:
            self.slot.at = at

    def begin(self, step: Kernels) -> None:
        """Notes that a step begins."""
        self.left = len(step.kernels)
        self.step = step

    def ended(self) -> None:
        """Notes that the kernels of the step have ended."""
        self.slot.kernels.cover()
        self.left = 0

    # ------------------------------------------------------------------------------------------ status, progress

    def bytes_done(self) -> BytesDone:
        """Returns the run's progress."""
        prepared = self.prepared
        if prepared is None:
            return NOWHERE
        if self._byte_map is None:
            self._byte_map = ByteMap(prepared.bundles)
        step = self.step  # read before `left`: in the other order, a step would seem done at its start
        return self._byte_map.at(step, self.left, self.slot.kernels.part)

    def words(self, first: int, is_named: bool) -> str:
        """Describes the position of the run to a person; `first` is the number of the program's first call."""
        prepared, bundle, program = self.prepared, self.bundle, self.program
        if prepared is None or bundle is None:
            return "waits for readers of its outputs"
        bundles = prepared.bundles
        if len(program.tasks) == 1 and is_named and not program.tasks[0].request:
            return f"in its kernels ({bundle.share.op})"
        if len(bundles) == 1 and not is_named:
            return "in its kernels"
        at = next(at for at, other in enumerate(bundles) if other is bundle)
        planned = [planned_bundle.tasks for planned_bundle in program.bundles]
        is_planned = (
            len(planned) == len(bundles) and bundle.share is program.shares[program.tasks[planned[at][0]].share]
        )
        tasks = planned[at] if is_planned else (at,)  # not as planned: one task per bundle
        which = f"bundle {at + 1} of {len(bundles)}: " if len(bundles) > 1 else ""
        return f"in {which}{bundle.share.op} of {calls([first + program.tasks[task].request for task in tasks])}"

    # ------------------------------------------------------------------------------------------ timeline

    def agreed(self, ring: Ring) -> None:
        """Records the agreement, except for a repeated run of one kernel, whose end records both."""
        cached = self.cached
        if cached is None or self.prepared is not cached or type(cached.bundles[0]) is not SingleKernelBundle:
            ring.put(CHECK, CHECK_NAME, self.check_s, self.agreed_s, self.seq, self._number(ring))

    def note(self, failed: str) -> None:
        """Records the end of the run; `failed`: the name of its error, or empty."""
        ring, program, prepared, cached = self.ring, self.program, self.prepared, self.cached
        assert ring is not None  # checked by the caller
        until_s, agreed_s = ring.clock(), self.agreed_s
        if cached is not None and type(cached.bundles[0]) is SingleKernelBundle and prepared in (None, cached):
            # All in one entry, for loops whose runs take some 100 us.
            at, number = next(ring.numbers), self._number_of_bundle(ring, cached.bundles[0])
            until_s, thread = self.ended_s or until_s, ring.meet()
            ring.entries.append(
                (at, AGAIN, program.name, self.began_s, until_s, thread, self.seq, number, failed, agreed_s)
            )
            return
        if self.check_s and not agreed_s:
            ring.put(CHECK, CHECK_NAME, self.check_s, until_s, self.seq, self._number(ring), failed)
        if prepared is not None and agreed_s:
            ended_s, bundles = self.ended_s or until_s, prepared.bundles
            if type(bundles[0]) is SingleKernelBundle:
                number = self._number_of_bundle(ring, bundles[0])
                ring.put(KERNEL, bundles[0].share.op, agreed_s, ended_s, self.seq, number, failed)
            elif len(program.tasks) > 1:
                nbytes = sum(agreed_nbytes(other.share.op, verdict) for other in bundles for verdict in other.verdicts)
                label = _label_of_batch(program, self.label)._replace(nbytes=nbytes, calls=1)
                ring.add(COLLECTIVE, program.name, agreed_s, ended_s, self.seq, label, failed)
        ring.put(PART, program.name, self.began_s, until_s, self.seq, self._number(ring), failed)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context around a wait for an operand, recorded if it lasts."""
        ring = self.ring
        began_s = 0.0 if ring is None else ring.clock()
        yield
        if ring is not None:
            ring.waited("an operand", began_s, self.seq)

    def collective(self, bundle: PreparedBundle) -> AbstractContextManager[None]:
        """A context around a bundle, recorded unless it is a single kernel."""
        self.bundle, prepared, ring = bundle, self.prepared, self.ring
        if prepared is not None and len(prepared.bundles) > 1:
            self.event("bundle", f"{bundle.share.op} of {bundle.tasks}")
        if ring is None or bundle.is_one_kernel:
            return _NOTHING
        return self._span(ring, COLLECTIVE, bundle.share.op, label_of_bundle(bundle, self.label))

    def staging(self, what: str) -> AbstractContextManager[None]:
        """A context around copies before and after kernels."""
        return _NOTHING if self.ring is None else self._span(self.ring, STAGING, what)

    def kernels(self, step: Kernels) -> AbstractContextManager[None]:
        """A context around the kernels of a step."""
        ring, bundle = self.ring, self.bundle
        if ring is None or bundle is None:
            return _NOTHING
        if bundle.is_one_kernel:
            return _Span(ring, KERNEL, bundle.share.op, self.seq, self._number_of_bundle(ring, bundle))
        rank = next((share.rank for share in self.program.shares if share.group_id == step.group_id), -1)
        label = _label_of_step(step, rank, self.label)
        return self._span(ring, KERNEL, label.op, label)

    def _number(self, ring: Ring) -> int:
        # The number of the program's label.
        program, label = self.program, self.label
        return ring.label_of(lambda: _label_of_program(program, label), program, label)

    def _number_of_bundle(self, ring: Ring, bundle: PreparedBundle) -> int:
        # The number of a bundle's label. The ring holds the verdicts of repeated runs only.
        label = self.label
        if self.prepared is not self.cached:
            return ring.label(label_of_bundle(bundle, label))
        # Together these determine the label; they refer to no tensor.
        return ring.label_of(lambda: label_of_bundle(bundle, label), bundle.verdicts, bundle.share, label)

    def _span(self, ring: Ring, kind: str, name: str, label: Label = NO_LABEL) -> AbstractContextManager[None]:
        return _Span(ring, kind, name, self.seq, ring.label(label))


@dataclass(slots=True, eq=False)
class _Span:
    # A class, as a generator takes twice as long.

    _ring: Ring
    _kind: str
    _name: str
    _seq: int
    _label: int
    _began_s: float = 0.0

    def __enter__(self) -> None:
        self._began_s = self._ring.clock()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        ring, failed = self._ring, "" if kind is None else kind.__name__
        ring.put(self._kind, self._name, self._began_s, ring.clock(), self._seq, self._label, failed)


def _label_of_program(program: Program, meeting: str) -> Label:
    if len(program.tasks) > 1:
        return _label_of_batch(program, meeting)
    share = program.shares[program.tasks[0].share]
    return Label(share.op, share.group_id, share.rank, len(share.ranks), 0, 0, meeting)


def _label_of_batch(program: Program, meeting: str) -> Label:
    agreement, groups = program.agreement, dict.fromkeys(share.group_id for share in program.shares)
    group_id = agreement.group_id or ",".join(groups)
    return Label(program.name, group_id, agreement.rank, len(agreement.ranks), 0, 0, meeting)


def label_of_bundle(bundle: PreparedBundle, meeting: str = "") -> Label:
    """Returns the label of one bundle."""
    share = bundle.share
    return Label(
        share.op, share.group_id, share.rank, len(share.ranks), nbytes_of_bundle(bundle), bundle.tasks, meeting
    )


def _label_of_step(step: Kernels, rank: int, meeting: str) -> Label:
    # A part of a collective, with the bytes that it reads.
    nbytes = sum(map(nbytes_read, step.kernels))
    return Label(step.kernels[0].kind.value, step.group_id, rank, len(step.ranks), nbytes, 0, meeting)
