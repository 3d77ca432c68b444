"""Finds the ranks that have not arrived at a member's call, while the call waits and after it has timed out.

Backends notice a missing rank only at the timeout. So the members ask each other through the coordinator: a waiting
rank asks, and each rank answers with its position and its activity. A timer watches the calls in progress: it asks,
answers and warns, once per call. A call that has timed out asks in its own thread.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raycollect.channel.messages import Answer, Ask, Seen
from raycollect.core import threads
from raycollect.core.timers import Watcher
from raycollect.errors import COULD_NOT_LOOK, ConnectionLostError, RankReport
from raycollect.errors.text import listed, shown
from raycollect.group.coordinator_client import ActiveCall, CoordinatorClient, RankPosition
from raycollect.group.group_member import GroupMember
from raycollect.observe.stacks import Doing, what_runs

_log = logging.getLogger("raycollect")

WARNING_VARIABLE = "RAYCOLLECT_STALL_WARNING_S"
"""The environment variable for the seconds of waiting after which a warning is logged; 0: never."""
WARN_AFTER_S = 10.0


def warn_after_s(environ: Mapping[str, str] = os.environ) -> float:
    """The seconds of waiting after which a warning is logged."""
    text = environ.get(WARNING_VARIABLE, "")
    try:
        limit_s = float(text) if text else WARN_AFTER_S
    except ValueError:
        _log.warning("%s is %s, not a number of seconds: %g is taken", WARNING_VARIABLE, shown(text), WARN_AFTER_S)
        limit_s = WARN_AFTER_S
    return limit_s if limit_s > 0 else math.inf


QUIET_S = warn_after_s()
"""The same for this process."""

ANSWER_S = 1.0
"""How long members may take to answer, in seconds. A slower member counts as unresponsive."""
LATE_ANSWER_S = 0.5
"""The same for a call that has timed out: the questions delay its error by at most this time."""

_NEXT = "\n  - "


def report_fields(seen: Seen | None) -> dict[str, Any]:
    """The answer of a process, as fields of `RankReport` and `MemberStatus`; None: the process did not answer."""
    if seen is None:
        return {"answers": False, "doing": "", "stack": (), "ended": 0, "story": ()}
    return {
        "answers": True,
        "doing": seen.doing,
        "stack": tuple(seen.stack),
        "ended": seen.ended,
        "story": tuple(seen.story),
    }


def report_of(
    rank: int, actor: str, seen: Seen | None, *, has_begun: bool, awaited_s: float, step: str = ""
) -> RankReport:
    """The report of a rank, from the answer of its process; None: the process did not answer."""
    return RankReport(
        rank=rank, actor=actor, has_begun=has_begun, awaited_s=awaited_s, step=step, **report_fields(seen)
    )


@dataclass(slots=True, eq=False)
class _Inquiry:
    """A question about one call to some ranks; waits for answers until `until_s` by `time.monotonic`."""

    call: int
    ranks: Sequence[int]
    until_s: float
    answers: dict[int, Answer] = field(default_factory=dict)
    is_logged: bool = False  # whether the warning was logged

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have answered."""
        return all(rank in self.answers for rank in self.ranks)


class Watchdog(Watcher):
    """The questions and answers of one member of a group.

    Any thread calls `begun` and `reports`, the coordinator's `received`.

    Attributes:
        clients: The communicators, by name.
    """

    def __init__(self, member: GroupMember) -> None:
        super().__init__()
        self.clients: dict[str, CoordinatorClient] = {}
        self._member = member
        self._queried: set[str] = set()  # the communicators about which other ranks have asked
        self._inquiries: dict[str, _Inquiry] = {}  # communicator -> the last question about a call in progress
        self._late: dict[str, _Inquiry] = {}  # communicator -> the question about a call that has timed out
        self._changed = threading.Condition()

    def begun(self) -> None:
        """Watches the calls from now on: a call has begun."""
        if self.timer is None:
            # If no thread can be started, calls continue without warnings.
            threads.survives(self.look_after, QUIET_S, place="watching calls")

    def received(self, message: Answer | Ask) -> None:
        """Handles a question or an answer of another member."""
        with self._changed:
            if isinstance(message, Ask):
                self._queried.add(message.communicator)
            else:
                for inquiry in (self._inquiries.get(message.communicator), self._late.get(message.communicator)):
                    if inquiry is not None and message.rank in inquiry.ranks:
                        inquiry.answers[message.rank] = message
                self._changed.notify_all()
        # The timer's thread answers, as this thread may be the coordinator's.
        threads.survives(self.look_after, 0.0, place="looking at calls under way")

    def reports(self, client: CoordinatorClient, ranks: Sequence[int], mine: RankPosition) -> tuple[RankReport, ...]:
        """Asks missing ranks for their activity; waits at most `LATE_ANSWER_S`. Empty while the group forms.

        `mine` is the position of this rank.
        """
        others = [rank for rank in ranks if rank in client.ranks and rank != self._member.rank]
        if not others or not self._member.members:
            return ()
        try:
            return self._reports(client, others, mine)
        except Exception as exc:  # noqa: BLE001 - the error that needs the reports matters more
            threads.failed("asking members what they do", exc)
            return ()

    def _reports(self, client: CoordinatorClient, ranks: Sequence[int], mine: RankPosition) -> tuple[RankReport, ...]:
        call = client.call
        if call is None:
            return ()
        awaited_s, inquiry = time.monotonic() - call.since_s, _Inquiry(call.number, ranks, math.inf)
        with self._changed:
            self._late[client.name] = inquiry
        if self._ask(client, ranks):
            with self._changed:
                self._changed.wait_for(lambda: inquiry.is_complete, LATE_ANSWER_S)
        with self._changed:
            del self._late[client.name]  # one call at a time is in progress
            return tuple(self._report(rank, inquiry.answers.get(rank), mine, awaited_s) for rank in ranks)

    def _report(self, rank: int, answer: Answer | None, mine: RankPosition, awaited_s: float) -> RankReport:
        actor, seen, has_begun = self._member.actor(rank), None, False
        if answer is not None:
            has_begun = RankPosition(answer.place, answer.seq).has_reached(mine)
            seen = Seen(request=0, doing=answer.doing, stack=answer.stack)
        return report_of(rank, actor, seen, has_begun=has_begun, awaited_s=awaited_s)

    # ------------------------------------------------------------------------------------------ the timer's thread

    def look(self) -> float:
        """Answers, asks and warns."""
        with self._changed:
            names, self._queried = self._queried, set()
        for name in names:
            threads.survives(self._answer, name)
        now_s = time.monotonic()
        return min((self._look_at(client, now_s) for client in list(self.clients.values())), default=math.inf) - now_s

    def _answer(self, name: str) -> None:
        client = self.clients.get(name)  # None: no call has been made on this communicator
        try:
            position, doing = RankPosition("", 0) if client is None else client.position, what_runs()
        except Exception as exc:  # noqa: BLE001 - the answer carries the error
            error = threads.failed("looking at a communicator", exc)
            position, doing = RankPosition("", 0), Doing(f"{COULD_NOT_LOOK}{error.detail}", ())
        member = self._member
        self._send(
            Answer(
                group_id=member.spec.group_id,
                communicator=name,
                rank=member.rank,
                place=position.place,
                seq=position.seq,
                doing=doing.what,
                stack=list(doing.stack),
            )
        )

    def _look_at(self, client: CoordinatorClient, now_s: float) -> float:
        """Returns when to look again, by `time.monotonic`."""
        call, inquiry = client.call, self._inquiries.get(client.name)
        if call is None:
            return math.inf
        if inquiry is None or inquiry.call != call.number:
            if now_s < call.since_s + QUIET_S:
                return call.since_s + QUIET_S
            others = [rank for rank in client.ranks if rank != self._member.rank]
            inquiry = self._inquiries[client.name] = _Inquiry(call.number, others, now_s + ANSWER_S)
            self._ask(client, others)
        if inquiry.is_logged:
            return math.inf
        if now_s < inquiry.until_s and not inquiry.is_complete:
            return inquiry.until_s
        inquiry.is_logged = True
        if client.call is call:
            self._warn(client, call, inquiry)
        return math.inf

    def _warn(self, client: CoordinatorClient, call: ActiveCall, inquiry: _Inquiry) -> None:
        member, mine, awaited_s = self._member, client.position, time.monotonic() - call.since_s
        late = []
        for rank in inquiry.ranks:
            report = self._report(rank, inquiry.answers.get(rank), mine, awaited_s)
            if not report.answers and not member.members:
                late.append(f"rank {rank} has not joined")
            elif not report.has_begun:
                late.append(str(report))
        said = f"these ranks have not arrived:\n  - {listed(late, _NEXT)}" if late else "all ranks have arrived"
        text = "%s on group %r, here rank %d, is still under way after %g s; %s"
        _log.warning(text, call.op, member.spec.name, member.rank, QUIET_S, said)

    def _ask(self, client: CoordinatorClient, ranks: Sequence[int]) -> bool:
        return self._send(Ask(group_id=self._member.spec.group_id, communicator=client.name, ranks=list(ranks)))

    def _send(self, message: Answer | Ask) -> bool:
        try:
            self._member.send(message)
        except ConnectionLostError:  # the end of the connection ends the calls
            return False
        return True
