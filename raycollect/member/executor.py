"""Carries out what a controller sends: plans, and runs of captured steps."""

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
    """Carries out the plans and runs of one controller, each in its turn (P2). Any thread may call it."""

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
        """Carries out a plan or run after its predecessor, and tells the controller if it fails.

        Args:
            seq: Its number.
            predecessor: That of the one before it.
            run: Does it; returns the error with which it has ended, or raises that.
            what: What to call it in messages, with a place for its number.
            after: The task of the method call behind which it comes; empty: none.
            ended: Called with its error before the next one may begin.

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
            error = strip_traceback(exc)  # its frames would keep values alive
        except Exception as exc:  # noqa: BLE001 - a bug
            error = threads.failed(what.format(seq), exc)
        finally:
            step.number = 0
            if isinstance(error, GroupBrokenError) and (reason := sequencer.reason(seq)):
                error = PlanAbortedError(detail=reason)  # the cause, not what came of it
            ended(error)
            was_aborted = sequencer.end(seq)  # whatever happened, what comes after goes on
        if error is not None:
            self._reporter.tell_failure(seq, error)
        return error, was_aborted
