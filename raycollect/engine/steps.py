"""The steps of a prepared run. Each step runs itself, and notes its position in the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from raycollect.backends import arrays
from raycollect.core.boxes import BoxExchange
from raycollect.core.model import Kernel, Launch
from raycollect.core.protocols import Communicator, Faults
from raycollect.engine.agreement import Verdict
from raycollect.engine.device_staging import Patience, StagingCopies, transfer
from raycollect.engine.fusion_buffer import FusedKernel
from raycollect.engine.packed_boxes import PackedBoxes
from raycollect.planner import Share
from raycollect.pos import Range, Store


class StepObserver(Protocol):
    """The part of a run's observer that its steps use."""

    bundle: PreparedBundle | None
    step: Kernels | None
    left: int

    def begin(self, step: Kernels) -> None:
        """Notes that a step begins."""

    def collective(self, bundle: PreparedBundle) -> AbstractContextManager[None]:
        """A context around a bundle."""
        ...

    def staging(self, what: str) -> AbstractContextManager[None]:
        """A context around copies before and after kernels."""
        ...


class Environment(Protocol):
    """The part of a process's environment that steps use."""

    @property
    def store(self) -> Store:
        """The tensors."""
        ...

    @property
    def faults(self) -> Faults | None:
        """The faults that tests inject."""
        ...


class StepContext(Protocol):
    """The part of a run that its steps use; see `run.Run`."""

    opened: tuple[Communicator, Launch] | None
    has_touched: bool
    has_committed: bool
    is_loaded: bool
    packs: bool

    @property
    def instruments(self) -> Environment:
        """The environment."""
        ...

    @property
    def observer(self) -> StepObserver:
        """The observer."""
        ...

    def enter(self, step: Kernels) -> None:
        """Opens the launch of a step, unless it is open."""

    def launch(self, step: Kernels) -> None:
        """Runs the kernels of a step in the open launch."""

    def launch_boxes(self, step: ReshardKernels) -> bool:
        """Moves boxes without messages, if the backend can."""
        ...

    def touch(self) -> None:
        """Notes that outputs of the bundle may change from now on."""

    def commit(self) -> None:
        """Waits until all ranks have arrived at the commit."""

    def patience(self) -> Patience:
        """Makes the check that ends waits for a device."""
        ...

    def reach(self, point: str) -> None:
        """Marks a point at which tests inject faults."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """Kernels on the operands or on their staging buffers: one kernel, or several that the backend coalesces.

    Attributes:
        number: The number of the launch in the plan.
        group_id: The group of the launch.
        ranks: The ranks of the launch.
        kernels: The kernels of this rank.
    """

    number: int
    group_id: str
    ranks: tuple[int, ...]
    kernels: tuple[Kernel, ...]

    def run(self, run: StepContext) -> None:
        """Opens the launch and runs the step there."""
        run.enter(self)
        run.touch()
        self.launch(run)

    def launch(self, run: StepContext) -> None:
        """Runs the step in the open launch."""
        run.reach("before_kernel")
        run.launch(self)
        run.reach("after_kernel")


@dataclass(frozen=True, slots=True, eq=False)
class Packed(Kernels):
    """A kernel on a fusion buffer, between the copies into and out of it."""

    packed: FusedKernel | PackedBoxes

    def launch(self, run: StepContext) -> None:
        """Packs, runs the kernel in the open launch, and unpacks."""
        run.reach("before_kernel")
        run.packs = True
        with run.observer.staging("pack"):
            self.packed.load()
        run.launch(self)
        with run.observer.staging("unpack"):
            self.packed.unload()
        run.reach("after_kernel")


@dataclass(frozen=True, slots=True, eq=False)
class ReshardKernels(Kernels):
    """The rounds of a reshard: without messages, if the backend's ranks reach each other's memory; otherwise packed."""

    otherwise: tuple[Packed, ...]
    exchange: BoxExchange

    def launch(self, run: StepContext) -> None:
        """Moves the boxes in the open launch."""
        if run.launch_boxes(self):
            return
        for step in self.otherwise:
            run.observer.begin(step)
            step.launch(run)


class StagedStep(NamedTuple):
    """A step on staging buffers, for tensors on another device than the backend's.

    Tensors with a staging buffer are unchanged until all kernels of the step have ended.
    """

    inner: Kernels | None  # None: the copies are all of it
    copies: StagingCopies

    def run(self, run: StepContext) -> None:
        """Loads the staging buffers, runs the step on them, and copies the outputs back."""
        if self.inner is not None:
            run.enter(self.inner)
        if not self.copies.is_whole:
            run.touch()
        if not run.is_loaded:
            with run.observer.staging("load staging buffers"):
                self.copies.load(run.patience())
        run.is_loaded = False
        if self.inner is not None:
            self.inner.launch(run)
        run.touch()
        with run.observer.staging("unload staging buffers"):
            self.copies.unload(run.patience())


class Copies(NamedTuple):
    """Copies inside a rank."""

    copies: tuple[tuple[Any, Any], ...]  # (to, from)

    def run(self, run: StepContext) -> None:
        """Makes the copies."""
        if self.copies:
            run.touch()
        with run.observer.staging("copy"):
            patience = run.patience()
            for target, source in self.copies:
                transfer(target, source, patience)


class Commit(NamedTuple):
    """A barrier of all ranks before any of their inputs is overwritten."""

    def run(self, run: StepContext) -> None:
        """Waits for the controller's decision."""
        run.reach("before_commit")
        run.commit()
        run.reach("after_commit")


Step = Kernels | StagedStep | Copies | Commit


class PreparedBundle(NamedTuple):
    """The steps of one bundle, and their outputs: a failed step marks exactly these as dirty (P4)."""

    share: Share
    tasks: int  # the number of tasks
    steps: tuple[Step, ...]
    ranges: Sequence[Range]  # addresses that it writes
    owners: Sequence[object]  # for each range, the object that owns its memory
    dense: Sequence[Range]  # ranges that it writes whole
    verdicts: tuple[Verdict, ...]  # for each task
    versioned: Sequence[object]  # see `TaskBuffers`

    @property
    def is_one_kernel(self) -> bool:
        """Whether the bundle is one kernel on one call's tensors."""
        steps = self.steps
        return self.tasks == 1 and len(steps) == 1 and type(steps[0]) is Kernels and len(steps[0].kernels) == 1

    @property
    def launched(self) -> list[Kernels]:
        """Its steps that run kernels, in order."""
        inner = [step.inner if isinstance(step, StagedStep) else step for step in self.steps]
        return [step for step in inner if isinstance(step, Kernels)]

    def run(self, run: StepContext) -> None:
        """Runs the steps."""
        store, observer = run.instruments.store, run.observer
        run.has_touched = run.has_committed = False
        try:
            with observer.collective(self):
                for step in self.steps:
                    step.run(run)
        except BaseException:
            if run.has_touched:
                store.mark_dirty(self.ranges, self.owners)
            raise
        finally:
            if self.versioned and run.has_touched:
                arrays.raise_versions(self.versioned)
        store.mark_written(self.dense)
        observer.bundle = None


class SingleKernelBundle(PreparedBundle):
    """A bundle of one kernel on the operands themselves, in the launch of the agreement: the usual bundle of loops.

    It does the same as `PreparedBundle`, with as few function calls as possible.
    """

    __slots__ = ()

    def run(self, run: StepContext) -> None:
        """Runs the kernel."""
        observer, faults, store = run.observer, run.instruments.faults, run.instruments.store
        (step,), opened = self.steps, run.opened
        assert type(step) is Kernels and opened is not None  # noqa: PT018 - see `Scheduler._is_direct`
        communicator, launch = opened
        observer.bundle, observer.left, observer.step = self, 1, step
        try:
            if faults is not None:
                run.reach("before_kernel")
            communicator.launch(launch, step.kernels)
            observer.left = 0
            if faults is not None:
                run.reach("after_kernel")
        except BaseException:
            store.mark_dirty(self.ranges, self.owners)
            raise
        finally:
            if self.versioned:
                arrays.raise_versions(self.versioned)
        if store.dirty:
            store.mark_written(self.dense)
        observer.bundle = None
