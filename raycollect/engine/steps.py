"""The steps of a prepared run. Each runs itself, and tells the run where it is."""

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


class Position(Protocol):
    """Where a run is, as its steps note it."""

    bundle: Bundle | None
    step: Kernels | None
    left: int

    def begin(self, step: Kernels) -> None:
        """A step begins."""

    def collective(self, bundle: Bundle) -> AbstractContextManager[None]:
        """Around a bundle."""
        ...

    def staging(self, what: str) -> AbstractContextManager[None]:
        """Around copies before and behind kernels."""
        ...


class Environment(Protocol):
    """What steps need of a process."""

    @property
    def store(self) -> Store:
        """Its tensors."""
        ...

    @property
    def faults(self) -> Faults | None:
        """Those that tests inject."""
        ...


class Run(Protocol):
    """What steps need of the run that they are part of; see `run.Run`."""

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
    def observer(self) -> Position:
        """Where the run is."""
        ...

    def enter(self, step: Kernels) -> None:
        """Opens the launch of a step, unless it is open."""

    def launch(self, step: Kernels) -> None:
        """Runs the kernels of a step in the open launch."""

    def launch_boxes(self, step: Boxes) -> bool:
        """Moves boxes without messages, if the backend can."""
        ...

    def touch(self) -> None:
        """Notes that what the bundle writes may change from now on."""

    def commit(self) -> None:
        """Waits until all ranks have come to the commit."""

    def patience(self) -> Patience:
        """What ends a wait for a device."""
        ...

    def reach(self, point: str) -> None:
        """Comes to a place where tests inject faults."""


@dataclass(frozen=True, slots=True, eq=False)
class Kernels:
    """Kernels on the operands themselves, or on stand-ins for them: one, or several that the backend coalesces.

    Attributes:
        number: Its launch, counted over the plan.
        group_id: The group of the launch.
        ranks: Who takes part in it.
        kernels: What they run.
    """

    number: int
    group_id: str
    ranks: tuple[int, ...]
    kernels: tuple[Kernel, ...]

    def run(self, run: Run) -> None:
        """Opens the launch and runs the step there."""
        run.enter(self)
        run.touch()
        self.launch(run)

    def launch(self, run: Run) -> None:
        """Runs the step in the open launch."""
        run.reach("before_kernel")
        run.launch(self)
        run.reach("after_kernel")


@dataclass(frozen=True, slots=True, eq=False)
class Packed(Kernels):
    """A kernel on a fusion buffer, between the copies into and out of it."""

    packed: FusedKernel | PackedBoxes

    def launch(self, run: Run) -> None:
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
class Boxes(Kernels):
    """The rounds of a reshard: without messages, where the backend's ranks reach each other's memory; else packed."""

    otherwise: tuple[Packed, ...]
    exchange: BoxExchange

    def launch(self, run: Run) -> None:
        """Moves the boxes in the open launch."""
        if run.launch_boxes(self):
            return
        for step in self.otherwise:
            run.observer.begin(step)
            step.launch(run)


class Staged(NamedTuple):
    """A step on stand-ins for tensors that lie elsewhere than the backend works.

    Until all of its kernels have ended, tensors that have a stand-in are unchanged.
    """

    inner: Kernels
    copies: StagingCopies

    def run(self, run: Run) -> None:
        """Loads the stand-ins, runs the step on them, and copies back what it wrote."""
        run.enter(self.inner)
        if not self.copies.is_whole:
            run.touch()
        if not run.is_loaded:
            with run.observer.staging("load stand-ins"):
                self.copies.load(run.patience())
        run.is_loaded = False
        self.inner.launch(run)
        run.touch()
        with run.observer.staging("unload stand-ins"):
            self.copies.unload(run.patience())


class Copies(NamedTuple):
    """Copies that a rank makes by itself."""

    copies: tuple[tuple[Any, Any], ...]  # (to, from)

    def run(self, run: Run) -> None:
        """Makes the copies."""
        if self.copies:
            run.touch()
        with run.observer.staging("copy"):
            patience = run.patience()
            for target, source in self.copies:
                transfer(target, source, patience)


class Commit(NamedTuple):
    """All ranks wait for each other before anything that they gave is overwritten."""

    def run(self, run: Run) -> None:
        """Waits for the controller's word."""
        run.reach("before_commit")
        run.commit()
        run.reach("after_commit")


Step = Kernels | Staged | Copies | Commit


class Bundle(NamedTuple):
    """The steps of one bundle, and what they write: a failure among them leaves exactly that dirty (P4)."""

    share: Share
    tasks: int  # how many
    steps: tuple[Step, ...]
    ranges: Sequence[Range]  # addresses that it writes
    owners: Sequence[object]  # of each range, the object that lives as long as its memory
    dense: Sequence[Range]  # ranges that it writes whole
    verdicts: tuple[Verdict, ...]  # for each task
    versioned: Sequence[object]  # see `TaskBuffers`

    @property
    def is_one_kernel(self) -> bool:
        """Whether it is one kernel on one call's tensors, so that the bundle and its kernel are the same."""
        steps = self.steps
        return self.tasks == 1 and len(steps) == 1 and type(steps[0]) is Kernels and len(steps[0].kernels) == 1

    @property
    def launched(self) -> list[Kernels]:
        """Its steps that run kernels, in order."""
        inner = [step.inner if isinstance(step, Staged) else step for step in self.steps]
        return [step for step in inner if isinstance(step, Kernels)]

    def run(self, run: Run) -> None:
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


class Direct(Bundle):
    """A bundle of one kernel on the operands themselves, in the launch of the agreement: what loops are made of.

    It does what a `Bundle` does, in as few function calls as possible.
    """

    __slots__ = ()

    def run(self, run: Run) -> None:
        """Runs the kernel."""
        observer, faults, store = run.observer, run.instruments.faults, run.instruments.store
        (step,), opened = self.steps, run.opened
        assert type(step) is Kernels and opened is not None  # noqa: PT018 - as the schedule has made it
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
