"""One run of a program on a participant: first runs and repeated runs use the same path.

The order keeps P3 and P4. The run finds its preparation in the cache, or prepares itself, where all local failures
become violations. All ranks agree. Then the steps run, and a failure of a step marks exactly the tensors being written
as dirty. In any case, each opened launch ends once (`launches`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from raycollect.core.model import Key, Launch
from raycollect.core.protocols import Communicator, Reaching
from raycollect.engine.agreement import Agreement, is_batch
from raycollect.engine.device_staging import Patience, home_of
from raycollect.engine.fusion_buffer import FusionBuffer
from raycollect.engine.launches import Launches
from raycollect.engine.long_arrivals import exchange, whole
from raycollect.engine.missing_operand import MissingOperand, missing
from raycollect.engine.observer import Observer
from raycollect.engine.preparation import Preparation
from raycollect.engine.prepared import Prepared
from raycollect.engine.progress import NOWHERE, BytesDone
from raycollect.engine.steps import Kernels, ReshardKernels
from raycollect.errors import (
    FaultError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    RefusedError,
    refusal,
    strip_traceback,
)
from raycollect.observe import run_steps
from raycollect.observe.run_steps import RunStep
from raycollect.planner import Domain
from raycollect.pos import Absence, Container, State

Operands = Sequence[Container | MissingOperand]

Keep = Callable[[Sequence[Container]], None]
"""Takes the outputs of a program, before another participant can report the end of this one; may raise
RaycollectError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a program on this participant."""

    error: RaycollectError | None = None  # None: success
    outputs: tuple[Container, ...] = ()  # in the order of the requests
    ended: tuple[int, ...] = ()  # positions of participants that have ended the plan; see `Communicator.end`


OK = Outcome()
"""The outcome of most runs."""


@dataclass(eq=False)
class Run(Launches):
    """One run of a program. Any thread may call `abort` and `bytes_done`; only its thread calls the other methods.

    Attributes:
        operands: The operand of each key, in order; None: the operands are in the store.
        keys: The keys; empty for the operands of a member's call.
        is_call: Whether the operands are those of a member's call.
        waiting: Called if an operand's method has not ended yet; None: missing operands stay missing, as ordered actors
            run methods in order.
        keep: Takes the outputs; None: the caller takes them from the outcome.
        succeeded: Called after success, before the end of the launch.
        label: The name of a member's own call in timelines; see `Label`.
        slot: The slot in which the run notes its position; None: the slot of this thread.
        has_touched: Whether the current bundle may have changed its outputs.
        has_committed: Whether all ranks have arrived at the commit of the current bundle.
        is_loaded: Whether the staging buffers of the first kernel hold its inputs.
        packs: Whether a kernel has used the fusion buffer.
    """

    operands: Operands | None = None
    keys: Sequence[Key] = ()
    is_call: bool = False
    waiting: Callable[[Key], None] | None = None
    keep: Keep | None = None
    succeeded: Callable[[], None] | None = None
    label: str = ""
    slot: RunStep | None = None
    observer: Observer = field(init=False)  # as in the base, for type checkers: it is assigned here
    opened: tuple[Communicator, Launch] | None = field(init=False, default=None)
    has_touched: bool = field(init=False, default=False)
    has_committed: bool = field(init=False, default=False)
    is_loaded: bool = field(init=False, default=False)
    packs: bool = field(init=False, default=False)
    _buffer: FusionBuffer | None = field(init=False, default=None)  # the taken fusion buffer

    def run(self) -> Outcome:
        """Runs the program. A RaycollectError or MemoryError is an outcome; other exceptions, bugs, are raised."""
        instruments, slot = self.instruments, self.slot or run_steps.here()
        ring = instruments.tracer.ring
        observer = self.observer = Observer(self.program, self.seq, self.label, instruments.recorder, ring, slot)
        slot.kernels.cover()
        if ring is not None:
            observer.began_s = ring.clock()
        failed = "unknown"  # the name of the exception; empty: none
        outputs: tuple[Container, ...] = ()
        ended: tuple[int, ...] = ()
        try:
            outputs = self._run_all(observer)
            failed = ""
        except (RaycollectError, MemoryError) as exc:
            error = exc if isinstance(exc, RaycollectError) else KernelError(detail=f"out of memory: {exc}")
            failed = type(error).__name__
            return Outcome(error=self._located(error))
        except BaseException as exc:
            failed = type(exc).__name__
            raise
        finally:
            slot.at = run_steps.ENDS  # not the function of this object, which the slot would keep alive
            try:
                ended = self._end(is_ok=not failed)
            finally:
                if ring is not None:
                    observer.note(failed)
                if failed:
                    self._count_failure()
                if instruments.counters.is_idle:
                    instruments.counters.wake()
        return Outcome(outputs=outputs, ended=ended) if outputs or ended else OK

    def _run_all(self, observer: Observer) -> tuple[Container, ...]:
        """Runs everything but the end of the launch; returns the outputs."""
        program, seq, instruments = self.program, self.seq, self.instruments
        faults, rank, clock = instruments.faults, program.agreement.rank, instruments.counters.clock
        self.open()
        if faults is not None:
            faults.at("start", seq, rank)
        operands = self._look_up() if self.operands is None else self.operands
        cached = instruments.cache.find(program, operands, instruments.store, is_call=self.is_call)
        preparation: Preparation | None = None
        if cached is None:
            preparation = self._prepare(operands)
        else:
            observer.cached, self._buffer = cached, cached.buffer
        if faults is not None:
            faults.at("before_check", seq, rank)
        prepared = observer.prepared = self._agree(cached, preparation, operands)
        began_s = observer.agreed_s = clock()
        if observer.ring is not None:
            observer.agreed(observer.ring)
        observer.slot.at = observer.words
        if faults is not None:
            faults.at("after_check", seq, rank)
        with instruments.store.writing(prepared.writes, self.aborted or _never, program.timeout_s):
            waited_s, at = began_s - observer.check_s, 0
            for bundle in prepared.bundles:
                bundle.run(self)
                ended_s = clock()
                tally, calls, nbytes, part = prepared.counts[at]  # `zip` takes longer
                tally.calls += calls
                tally.nbytes += nbytes
                tally.seconds += ended_s - began_s
                tally.wait_seconds += waited_s * part
                began_s, at = ended_s, at + 1
        observer.ended_s = began_s
        if faults is not None:
            faults.at("end", seq, rank)
        outputs = () if preparation is None else self._keep(preparation)
        if self.succeeded is not None:
            self.succeeded()
        return outputs

    def bytes_done(self) -> BytesDone:
        """Returns the progress of the run."""
        observer: Observer | None = getattr(self, "observer", None)  # None: not begun
        return NOWHERE if observer is None else observer.bytes_done()

    # ------------------------------------------------------------------------------------------ before the agreement

    def _look_up(self) -> Operands:
        current = self.instruments.store.current
        operands = list(map(current, self.keys))
        if Absence not in map(type, operands):
            return operands  # type: ignore[return-value]  # of containers alone
        for key in self.keys:
            self._wait_for(key, current(key))
        # Again for all operands: an awaited method may have replaced tensors in an existing list or dict.
        return [operand if isinstance(operand, Container) else missing(operand) for operand in map(current, self.keys)]

    def _wait_for(self, key: Key, operand: Container | Absence) -> None:
        # Waits for an operand whose method has not ended, if methods may be late.
        if isinstance(operand, Absence) and operand.state is State.ABSENT and self.waiting is not None:
            self.waiting(key)
            observer, aborted = self.observer, self.aborted or _never
            observer.event("waiting", key.hex())
            with observer.waiting():
                operand = self.instruments.store.wait(key, lambda: aborted() is not None)
            if isinstance(operand, Absence) and operand.state is State.ABSENT:
                raise PlanAbortedError(detail=aborted() or "aborted while waiting for an operand")

    def _prepare(self, operands: Operands) -> Preparation:
        self.observer.event("prepare")
        preparation = self._new_preparation(operands)
        if self.program.rounds == 1:
            self._complete(preparation)
        return preparation

    def _new_preparation(self, operands: Operands) -> Preparation:
        home = partial(_home_of, self.communicators)  # a method would be a reference cycle, which keeps tensors alive
        return Preparation(self.program, operands, self.keys, self.instruments, home, is_call=self.is_call)

    def _complete(self, preparation: Preparation) -> None:
        # Before the last round of the agreement.
        preparation.complete()
        self._buffer = preparation.buffer
        first, buffers = preparation.first, preparation.staging_buffers
        if first is None or buffers is None or self.opened is None:
            return
        copies = buffers.staging_copies([(first.src, first.dst)])
        if copies is not None:
            with self.observer.staging("load staging buffers"):
                copies.load(self.patience())
            self.is_loaded = True

    # ------------------------------------------------------------------------------------------ the agreement

    def _agree(self, cached: Prepared | None, preparation: Preparation | None, operands: Operands) -> Prepared:
        """Runs the agreement of all ranks; returns the prepared run that follows from it."""
        observer = self.observer
        if self.program.shares[0].template.boxes and not is_batch(self.program):  # alike on all ranks
            self._show_boxes(cached)
        observer.slot.at = run_steps.IN_CHECK
        observer.recorder.add("check", self.seq, self.program.name)
        observer.check_s = self.instruments.counters.clock()
        blobs: Sequence[bytes] | None = None
        if cached is not None:
            try:
                messages = self.agree(cached.message, cached.first, cached.messages)
            except RefusedError as exc:
                preparation = self._new_preparation(operands)
                preparation.refuse(exc.violations)
            else:
                if messages is cached.messages:
                    return cached
                blobs = whole(self.agree, cached.arrival, messages)
        agreement = Agreement(self.program)
        if blobs is None:
            assert preparation is not None  # nothing was cached
            blobs = self._meet(agreement, preparation)
        else:  # this rank's arrival was cached, and other ranks' arrivals have changed
            assert cached is not None
            self._judge(agreement, blobs)
            observer.prepared = cached  # the other ranks may wait for this rank in their kernels
            preparation = self._new_preparation(operands)
            preparation.check_unchanged(cached)
        prepared = preparation.prepared(agreement, blobs)
        observer.event("agreed")
        if prepared.places:
            self.instruments.cache.keep(prepared, operands, is_call=self.is_call)  # type: ignore[arg-type]
        return prepared

    def _meet(self, agreement: Agreement, preparation: Preparation) -> Sequence[bytes]:
        """Runs all rounds of the agreement; returns all arrivals of the last round."""
        rounds, ranks = self.program.rounds, len(self.program.agreement.ranks)
        for round_index in range(rounds):
            if round_index:
                preparation.go_on(round_index - 1, agreement.verdicts)
                if round_index == rounds - 1:
                    self._complete(preparation)
                self.observer.event("check")
            try:
                blobs = exchange(self.agree, preparation.arrival_for(round_index), preparation.first, ranks=ranks)
            except RefusedError as exc:  # the arrival was not sent: the violations are sent instead
                preparation.refuse(exc.violations)
                blobs = exchange(self.agree, preparation.arrival_for(round_index), ranks=ranks)
            self._judge(agreement, blobs)
        return blobs

    def _judge(self, agreement: Agreement, blobs: Sequence[bytes]) -> None:
        violations = agreement.meet(blobs)
        if violations:
            raise refusal(self.program.name, "", violations)

    def _show_boxes(self, cached: Prepared | None) -> None:
        # Shows the addresses of a reshard's boxes to the other ranks, if an earlier run has cached them.
        if self.opened is None:
            return
        communicator, launch = self.opened
        if isinstance(communicator, Reaching):
            steps = cached.bundles[0].steps if cached is not None else ()
            communicator.show_boxes(
                launch, next((step.exchange for step in steps if isinstance(step, ReshardKernels)), None)
            )

    # ------------------------------------------------------------------------------------------ interface for steps

    def launch(self, step: Kernels) -> None:
        """Runs the kernels of a step in the open launch."""
        assert self.opened is not None  # `enter` has opened it
        communicator, launch = self.opened
        with self.observer.kernels(step):
            communicator.launch(launch, step.kernels)
        self.observer.ended()

    def launch_boxes(self, step: ReshardKernels) -> bool:
        """Moves boxes without messages, if the backend can; False: on no rank, and no tensor was written."""
        assert self.opened is not None  # `enter` has opened it
        communicator, launch = self.opened
        if not isinstance(communicator, Reaching):
            return False
        self.reach("before_kernel")
        self.packs = True
        with self.observer.kernels(step):
            if not communicator.launch_boxes(launch, step.exchange):
                return False
        self.observer.ended()
        self.reach("after_kernel")
        return True

    def touch(self) -> None:
        """Notes that outputs of the bundle may change from now on; before a commit, only memory of the plan changes."""
        if self.has_committed or not self.program.commits:
            self.has_touched = True

    def commit(self) -> None:
        """Waits until all ranks have arrived at the commit; raises as `wait_for_all`."""
        self.wait_for_all()
        self.has_committed = self.has_touched = True

    def patience(self) -> Patience:
        """Makes the check that ends waits for a device; no abort ends them after the commit."""
        return Patience(_never if self.has_committed else self.aborted or _never, self.program.timeout_s)

    def reach(self, point: str) -> None:
        """Marks a point at which tests inject faults."""
        faults = self.instruments.faults
        if faults is not None:
            faults.at(point, self.seq, self.program.agreement.rank)

    # ------------------------------------------------------------------------------------------ its end

    def _end(self, *, is_ok: bool) -> tuple[int, ...]:
        """Ends the open launch; returns the positions of participants that are known to have ended their programs.

        Empty if other participants may continue, or if this participant reports its own end.
        """
        opened, self.opened, self._exchanging = self.opened, None, None
        ranks: tuple[int, ...] = ()
        try:
            if opened is not None:
                communicator, launch = opened
                ranks = communicator.end(launch, is_ok, () if is_ok else self._owed())
        finally:
            # After a failure a slow rank may still write in the fusion buffer.
            if self._buffer is not None and (is_ok or not self.packs):
                self._buffer.give()
        return self.program.positions_of(ranks) if ranks and not self._number and self.succeeded is None else ()

    def _count_failure(self) -> None:
        # Counts for the current bundle, or the first one.
        bundle, program = self.observer.bundle, self.program
        share = program.shares[program.tasks[0].share] if bundle is None else bundle.share
        self.instruments.counters.of(share.group_id, share.op).failures += 1

    def _keep(self, preparation: Preparation) -> tuple[Container, ...]:
        outputs = preparation.outputs()
        if outputs and self.keep is not None:
            self.observer.slot.at = "stores its outputs"
            self.keep(outputs)
        self.observer.event("done")
        return outputs

    def _located(self, error: RaycollectError) -> RaycollectError:
        """Records a failure, and adds its position in the program, which only this participant knows."""
        program, bundle = self.program, self.observer.bundle
        self.observer.event("failed", type(error).__name__)
        if isinstance(error, FaultError):
            share = bundle.share if bundle else program.shares[0] if len(program.shares) == 1 else None
            error.op = error.op or (share.op if share else program.name)
            error.group_name = error.group_name or (share.group_id if share else program.agreement.group_id)
            if share and error.rank < 0 and isinstance(error, KernelError):
                error.rank = share.rank
        return strip_traceback(error)  # without frames, which would keep the tensors alive


def _home_of(communicators: Callable[[str], Communicator], domain: Domain) -> str:
    return home_of(domain.memory, communicators(domain.group_id))


def _never() -> None:
    """The `aborted` function of a run that is never aborted."""
