"""The launches of one run of a program: the open launch, its abort, and its unfinished kernels.

A program opens its launches in ascending order; the first is the launch of the agreement. One launch is open at a time:
it ends when the next one opens, or in any case when the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from raycollect.core.model import Kernel, Launch
from raycollect.core.protocols import Communicator, Exchange
from raycollect.engine.instruments import Instruments
from raycollect.engine.observer import Observer
from raycollect.engine.steps import Kernels, ReshardKernels
from raycollect.errors import GroupBrokenError, PlanAbortedError
from raycollect.planner import Program


@dataclass(eq=False)  # without slots, so that unset fields cost no time
class Launches:
    """The launches of one run. Any thread may call `abort`; only the run's thread calls the other methods.

    Attributes:
        program: The program.
        seq: The plan's number in its controller's order, and the number of its first launch.
        communicators: Returns this participant's end of a group, by the group's id; raises GroupBrokenError.
        instruments: The environment.
        aborted: Returns the reason of an abort, or None; called before each launch, and after `abort` in each wait.
            None: the run is never aborted.
        exchange: The exchange of participants without a common group, and for commits.
        observer: The observer of the run, from its start on.
        opened: The open launch and its communicator. None before the first launch, if the controller carries the
            agreement, and at the end.
    """

    program: Program
    seq: int
    communicators: Callable[[str], Communicator]
    instruments: Instruments
    aborted: Callable[[], str | None] | None = None
    exchange: Exchange | None = None
    observer: Observer = field(init=False)
    opened: tuple[Communicator, Launch] | None = field(init=False, default=None)
    _exchanging: Exchange | None = field(init=False, default=None)  # in which the run may wait
    _number: int = field(init=False, default=0)  # of the latest launch, relative to the first

    def abort(self) -> None:
        """Ends the waits of the run; `aborted` already returns the reason."""
        opened, exchange = self.opened, self._exchanging
        if exchange is not None:
            exchange.abort(self.seq)
        if opened is not None:
            communicator, launch = opened
            communicator.abort(launch.seq)
        self.instruments.store.wake()

    def open(self) -> None:
        """Opens the launch of the agreement; raises GroupBrokenError if this participant is not in the group."""
        agreement = self.program.agreement
        if agreement.group_id:
            launch = Launch(seq=self.seq, ranks=agreement.ranks, timeout_s=self.program.timeout_s)
            self.opened = self.communicators(agreement.group_id), launch
        elif self.exchange is not None:
            self._exchanging = self.exchange
        else:
            raise GroupBrokenError(group_name="", detail="the participants have no group in common, and no controller")
        self._check()

    def agree(
        self, arrival: bytes, kernel: Kernel | None = None, expected: Sequence[bytes] | None = None
    ) -> Sequence[bytes]:
        """Sends an arrival to the agreement, and waits for all arrivals; see `Communicator.agree`."""
        if self.opened is not None:
            communicator, launch = self.opened
            return communicator.agree(launch, arrival, kernel, expected)
        assert self.exchange is not None  # `open` has checked it
        program = self.program
        launch = Launch(seq=self.seq, ranks=program.agreement.ranks, timeout_s=program.timeout_s)
        blobs = tuple(map(bytes, self.exchange(launch, arrival)))
        return expected if expected is not None and blobs == expected else blobs

    def enter(self, step: Kernels) -> None:
        """Begins a step: opens its launch if necessary, and waits for all ranks there.

        Raises:
            PlanAbortedError: The plan was aborted.
            GroupBrokenError: This participant is not in the group.
            CollectiveTimeoutError: Some ranks did not arrive in time.
        """
        if step.number != self._number or self.opened is None:
            self._open_next(step)
        self.observer.begin(step)

    def _open_next(self, step: Kernels) -> None:
        communicator, program, number = self.communicators(step.group_id), self.program, step.number
        seq, timeout_s = self.seq + number, program.timeout_s
        launch = Launch(seq=seq, ranks=step.ranks, timeout_s=timeout_s)
        # The other ranks may be busy with earlier parts, each with its own limit: late ranks are detected there,
        # and the controller aborts the plan.
        parts = number + (len(program.everyone) or len(program.tasks))
        before_it, self.opened = self.opened, None
        if before_it is not None:
            before_it[0].end(before_it[1], True)
        self.opened, self._number = (communicator, launch), number
        self._check()
        communicator.agree(Launch(seq=seq, ranks=step.ranks, timeout_s=timeout_s * (1 + parts)), b"")

    def wait_for_all(self) -> None:
        """Waits until all participants have arrived at the controller.

        Only the controller decides: it lets all participants continue, or aborts the plan for all.

        Raises:
            PlanAbortedError: The plan was aborted, for all participants.
            CollectiveTimeoutError: Some participants did not arrive in time.
        """
        exchange, program = self.exchange, self.program
        assert exchange is not None  # given for each program that commits
        ranks = tuple(range(len(program.agreement.ranks)))
        patient = program.timeout_s * (2 + self._number)  # the others may be busy with earlier parts
        self._exchanging = exchange
        self._check()
        exchange(Launch(seq=self.seq, ranks=ranks, timeout_s=patient), b"")
        self._exchanging = None

    def _check(self) -> None:
        # Called after the possible wait was noted: an earlier abort is seen here, a later one ends the wait.
        if self.aborted is not None and (reason := self.aborted()) is not None:
            raise PlanAbortedError(detail=reason)

    def _owed(self) -> Sequence[Kernel]:
        """The kernels of the open launch on which all ranks have agreed, and that this rank has not ended."""
        observer = self.observer
        prepared, latest = observer.prepared, observer.step
        if prepared is None:
            return ()
        steps = list[Kernels]()
        for step in (step for bundle in prepared.bundles for step in bundle.launched):
            if isinstance(step, ReshardKernels) and any(packed is latest for packed in step.otherwise):
                steps += step.otherwise
            else:
                steps.append(step)
        at = next((at for at, step in enumerate(steps) if step is latest), -1)
        begun = () if latest is None else latest.kernels[len(latest.kernels) - observer.left :]
        later = (step.kernels for step in steps[at + 1 :] if step.number == self._number)
        return [*begun, *(kernel for kernels in later for kernel in kernels)]
