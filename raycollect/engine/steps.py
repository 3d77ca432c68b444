"""The steps of a prepared run. Each runs itself, and tells the run where it is.

A step of kernels belongs to one launch, which its run opens: `number` counts the launches of the plan, and `group_id`
and `ranks` say who takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
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
    step: Kernels | Packed | Boxes | None
    left: int

    def begin(self, step: Kernels | Packed | Boxes) -> None:
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

    here: tuple[Communicator, Launch] | None
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

    def enter(self, step: Kernels | Packed | Boxes) -> None:
        """Opens the launch of a step, unless it is open."""

    def launch(self, step: Kernels | Packed) -> None:
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


class Kernels(NamedTuple):
    """Kernels on the operands themselves, or on stand-ins for them: one, or several that the backend coalesces."""

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
        """Runs the kernels in the open launch."""
        run.reach("before_kernel")
        run.launch(self)
        run.reach("after_kernel")


class Packed(NamedTuple):
    """A kernel on a fusion buffer, between the copies into and out of it."""

    number: int
    group_id: str
    ranks: tuple[int, ...]
    kernels: tuple[Kernel, ...]  # one
    packed: FusedKernel | PackedBoxes

    def run(self, run: Run) -> None:
        """Opens the launch and runs the step there."""
        run.enter(self)
        run.touch()
        self.launch(run)

    def launch(self, run: Run) -> None:
        """Packs, runs the kernel in the open launch, and unpacks."""
        spans = run.observer
        run.reach("before_kernel")
        run.packs = True
        with spans.staging("pack"):
            self.packed.load()
        run.launch(self)
        with spans.staging("unpack"):
            self.packed.unload()
        run.reach("after_kernel")


class Boxes(NamedTuple):
    """The rounds of a reshard: without messages, where the backend's ranks reach each other's memory; else packed."""

    number: int
    group_id: str
    ranks: tuple[int, ...]
    kernels: tuple[Kernel, ...]
    otherwise: tuple[Packed, ...]
    exchange: BoxExchange

    def run(self, run: Run) -> None:
        """Opens the launch and runs the step there."""
        run.enter(self)
        run.touch()
        self.launch(run)

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

    inner: Kernels | Packed
    copies: StagingCopies

    @property
    def number(self) -> int:
        """The number of its launch."""
        return self.inner.number

    @property
    def group_id(self) -> str:
        """The group of its launch."""
        return self.inner.group_id

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Its kernels."""
        return self.inner.kernels

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

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """None."""
        return ()

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

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """None."""
        return ()

    def run(self, run: Run) -> None:
        """Waits for the controller's word."""
        run.reach("before_commit")
        run.commit()
        run.reach("after_commit")


Step = Kernels | Packed | Boxes | Staged | Copies | Commit


def parts_of(step: Step, latest: Kernels | Packed | Boxes | None) -> Sequence[Kernels | Packed | Boxes]:
    """The steps of kernels of which a step is made, in order; `latest`: the one that was begun last."""
    if isinstance(step, Copies | Commit):
        return ()
    if isinstance(step, Staged):
        return (step.inner,)
    if isinstance(step, Boxes) and any(one is latest for one in step.otherwise):
        return step.otherwise
    return (step,)


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
        return self.tasks == 1 and len(self.steps) == 1 and type(self.steps[0]) is Kernels

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
        (step,), here = self.steps, run.here
        assert type(step) is Kernels and here is not None  # noqa: PT018 - as the schedule has made it
        communicator, launch = here
        observer.bundle, observer.step, observer.left = self, step, 1
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
