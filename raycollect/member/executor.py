"""Executes the plans and the runs of captured steps that a controller sends."""

from __future__ import annotations

from collections.abc import Callable

from raycollect.core import threads
from raycollect.errors import GroupBrokenError, PlanAbortedError, RaycollectError, strip_traceback
from raycollect.member.plan_queue import PlanQueue
from raycollect.member.reporter import Reporter
from raycollect.member.sequencer import PlanSequencer
from raycollect.observe import run_steps
from raycollect.observe.run_steps import RunStep


class Executor:
    """Executes the plans and runs of one controller in order (P2). Any thread may call it."""

    def __init__(self, sequencer: PlanSequencer, reporter: Reporter, queue: PlanQueue) -> None:
        self.sequencer = sequencer
        self._reporter = reporter
        self._queue = queue

    def carry_out(
        self,
        seq: int,
        predecessor: int,
        run: Callable[[RunStep], RaycollectError | None],
        *,
        what: str,
        after: bytes = b"",
        ended: Callable[[RaycollectError | None], None] = lambda error: None,
    ) -> tuple[RaycollectError | None, bool]:
        """Executes a plan or run after its predecessor, and reports a failure to the controller.

        Args:
            seq: The number of the plan or run.
            predecessor: The number of its predecessor.
            run: Executes it; returns or raises its error.
            what: Its name in messages, with a placeholder for its number.
            after: The task of the method call that must end before it; empty: none.
            ended: Called with its error before the next plan or run may begin.

        Returns:
            Its error, and whether it was aborted.
        """
        sequencer, step = self.sequencer, run_steps.here()
        step.at, step.number = "", seq
        error: RaycollectError | None = None
        try:
            if after:
                self._queue.wait_for_call(after, seq)
            reason = sequencer.start(seq, predecessor)
            if reason is not None:
                raise PlanAbortedError(detail=reason)
            error = run(step)
        except RaycollectError as exc:
            error = strip_traceback(exc)  # without frames, which would keep values alive
        except Exception as exc:  # noqa: BLE001 - a bug
            error = threads.failed(what.format(seq), exc)
        finally:
            step.number = 0
            if isinstance(error, GroupBrokenError) and (reason := sequencer.reason(seq)):
                error = PlanAbortedError(detail=reason)  # the cause, not its consequence
            ended(error)
            was_aborted = sequencer.end(seq)  # in any case, the successors continue
        if error is not None:
            self._reporter.tell_failure(seq, error)
        return error, was_aborted
