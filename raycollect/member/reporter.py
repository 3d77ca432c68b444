"""The reports of a participant to the controller that holds its lease."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

from raycollect.channel import ControlLink
from raycollect.channel.messages import Done, Message, Stuck, Unable
from raycollect.core import threads
from raycollect.errors import (
    COULD_NOT_LOOK,
    ConnectionLostError,
    RaycollectError,
    RefusedError,
    refusal,
    to_wire,
)
from raycollect.member.sequencer import PlanSequencer
from raycollect.member.wait_monitor import WaitMonitor
from raycollect.observe import Recorder

MOST_VIOLATIONS = 500
"""How many violations are sent: those of thousands of calls, on all ranks, would not fit into a message."""


class Reporter:
    """Sends to one controller. Any thread may call it; no method waits.

    `watch` has the waits of this participant, one of which blocks its methods at a time.
    """

    def __init__(self, link: ControlLink, recorder: Recorder, sequencer: PlanSequencer, watch: WaitMonitor) -> None:
        self.link = link
        self._recorder = recorder
        self._watch = watch
        self._sequencer = sequencer

    def tell(self, message: Message) -> None:
        """Sends a message; does nothing if the connection has ended, which ends the lease."""
        with suppress(ConnectionLostError):
            self.link.send(message)

    def tell_failure(self, seq: int, error: RaycollectError) -> None:
        """Reports the failure of a plan or run; if the error can't be encoded, reports that error."""
        try:
            story = self._recorder.tail()
            self.tell(Done(seq=seq, ranks=[], error=to_wire(_shortened(error)), story=story))
        except Exception as exc:  # noqa: BLE001 - the controller would wait
            cause = threads.failed("telling an error", exc)
            self.tell(Done(seq=seq, ranks=[], error=to_wire(cause), story=[]))

    def tell_unable(self, request: int, error: threads.Failure) -> None:
        """Answers a question with an error."""
        self.tell(Unable(request=request, detail=f"{COULD_NOT_LOOK}{error.detail}"))

    def waiting(
        self,
        group_id: str,
        communicator: str,
        op: str,
        ranks: Sequence[int],
        *,
        seq: int,
        call: Callable[[], int],
        holds_up: bool = False,
    ) -> AbstractContextManager[None]:
        """A context around a wait. A long wait is reported to the controller, as it may be part of a deadlock.

        `holds_up`: methods wait for its end, though it is not in the thread that runs them.
        """

        def tell(is_long: bool, *, is_over: bool = False) -> None:
            stuck = Stuck(
                group_id=group_id,
                communicator="" if is_over else communicator,
                call=0 if is_over else call(),
                seq=0 if is_over else seq,
                op="" if is_over else op,
                ranks=list(ranks),
                begun=self._sequencer.begun,
                is_long=is_long,
            )
            self.tell(stuck)

        over = partial(tell, False, is_over=True)
        return self._watch.waiting(tell, over, holds_up=holds_up)


def _shortened(error: RaycollectError) -> RaycollectError:
    if not isinstance(error, RefusedError) or len(error.violations) <= MOST_VIOLATIONS:
        return error
    return refusal(error.op, error.group_name, error.violations[:MOST_VIOLATIONS])
