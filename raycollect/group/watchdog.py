"""Finds out which ranks have not come to a call of the members, while it lasts and after its time is over.

Backends notice a missing rank only when the time is over. So the members ask each other through the coordinator:
the one that waits asks, and each answers how far it has come and what it does. A timer watches the calls under way: it
asks, answers and warns, once per call. A call whose time is over asks in its own thread.
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
from raycollect.group.coordinator_client import Call, CoordinatorClient, Position
from raycollect.group.group_member import GroupMember
from raycollect.observe.stacks import Doing, what_runs

_log = logging.getLogger("raycollect")

WARNING_VARIABLE = "RAYCOLLECT_STALL_WARNING_S"
"""The environment variable that says after how many seconds of waiting a warning is logged; 0: never."""
WARN_AFTER_S = 10.0


def warn_after_s(environ: Mapping[str, str] = os.environ) -> float:
    """After how many seconds of waiting a warning is logged."""
    text = environ.get(WARNING_VARIABLE, "")
    try:
        found = float(text) if text else WARN_AFTER_S
    except ValueError:
        _log.warning("%s is %s, not a number of seconds: %g is taken", WARNING_VARIABLE, shown(text), WARN_AFTER_S)
        found = WARN_AFTER_S
    return found if found > 0 else math.inf


QUIET_S = warn_after_s()
"""The same for this process."""

ANSWER_S = 1.0
"""How long members may take to answer, in seconds. A member that takes longer is unresponsive."""
LATE_ANSWER_S = 0.5
"""The same if a call's time is over: its error is held back for at most this long."""

_NEXT = "\n  - "


def told(seen: Seen | None) -> dict[str, Any]:
    """What a process said of itself, as fields of `RankReport` and `MemberStatus`; None: it gave no answer."""
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
    """What a rank was doing, by what its process said; `None`: it gave no answer."""
    return RankReport(rank=rank, actor=actor, has_begun=has_begun, awaited_s=awaited_s, step=step, **told(seen))


@dataclass(slots=True, eq=False)
class _Inquiry:
    """A question about one call to some ranks; the answers are awaited until `until_s` by `time.monotonic`."""

    call: int
    ranks: Sequence[int]
    until_s: float
    answers: dict[int, Answer] = field(default_factory=dict)
    told: bool = False  # whether the warning is out

    @property
    def is_complete(self) -> bool:
        """Whether all have answered."""
        return all(rank in self.answers for rank in self.ranks)


class Watchdog(Watcher):
    """What is asked and answered for one member of a group.

    Any thread calls `begun` and `reports`, the coordinator's `received`.

    Attributes:
        clients: The communicators, by name.
    """

    def __init__(self, member: GroupMember) -> None:
        super().__init__()
        self.clients: dict[str, CoordinatorClient] = {}
        self._member = member
        self._asked: set[str] = set()  # the communicators that others ask about
        self._inquiries: dict[str, _Inquiry] = {}  # communicator -> the last question about a call under way
        self._late: dict[str, _Inquiry] = {}  # communicator -> the question about a call whose time is over
        self._changed = threading.Condition()

    def begun(self) -> None:
        """A call has begun; it may last."""
        if self.timer is None:
            # Without a thread calls go on: nobody is warned.
            threads.survives(self.look_after, QUIET_S, place="watching calls")

    def received(self, message: Answer | Ask) -> None:
        """Takes a question or an answer of another member."""
        with self._changed:
            if isinstance(message, Ask):
                self._asked.add(message.communicator)
            else:
                for inquiry in (self._inquiries.get(message.communicator), self._late.get(message.communicator)):
                    if inquiry is not None and message.rank in inquiry.ranks:
                        inquiry.answers[message.rank] = message
                self._changed.notify_all()
        # Answered there, as this thread may be the coordinator's.
        threads.survives(self.look_after, 0.0, place="looking at calls under way")

    def reports(self, client: CoordinatorClient, ranks: Sequence[int], mine: Position) -> tuple[RankReport, ...]:
        """Asks ranks that have not come in time what they do; waits `LATE_ANSWER_S` at most.

        `mine` is how far this rank has come. None while the group is being joined: nobody can be asked.
        """
        asked = [rank for rank in ranks if rank in client.ranks and rank != self._member.rank]
        if not asked or not self._member.members:
            return ()
        try:
            return self._reports(client, asked, mine)
        except Exception as exc:  # noqa: BLE001 - any: the error that they are for matters more
            threads.failed("asking members what they do", exc)
            return ()

    def _reports(self, client: CoordinatorClient, asked: Sequence[int], mine: Position) -> tuple[RankReport, ...]:
        call = client.call
        if call is None:
            return ()
        awaited_s, inquiry = time.monotonic() - call.since_s, _Inquiry(call.number, asked, math.inf)
        with self._changed:
            self._late[client.name] = inquiry
        if self._ask(client, asked):
            with self._changed:
                self._changed.wait_for(lambda: inquiry.is_complete, LATE_ANSWER_S)
        with self._changed:
            del self._late[client.name]  # one call at a time is under way
            return tuple(self._report(rank, inquiry.answers.get(rank), mine, awaited_s) for rank in asked)

    def _report(self, rank: int, answer: Answer | None, mine: Position, awaited_s: float) -> RankReport:
        actor, seen, has_begun = self._member.actor(rank), None, False
        if answer is not None:
            has_begun = Position(answer.place, answer.seq).has_reached(mine)
            seen = Seen(request=0, doing=answer.doing, stack=answer.stack)
        return report_of(rank, actor, seen, has_begun=has_begun, awaited_s=awaited_s)

    # ------------------------------------------------------------------------------------------ the timer's thread

    def look(self) -> float:
        """Answers, asks and warns."""
        with self._changed:
            asked, self._asked = self._asked, set()
        for name in asked:
            threads.survives(self._answer, name)
        now_s = time.monotonic()
        return min((self._look_at(one, now_s) for one in list(self.clients.values())), default=math.inf) - now_s

    def _answer(self, name: str) -> None:
        client = self.clients.get(name)  # None: no call has been made on it
        try:
            position, doing = Position("", 0) if client is None else client.position, what_runs()
        except Exception as exc:  # noqa: BLE001 - who asks hears why
            error = threads.failed("looking at a communicator", exc)
            position, doing = Position("", 0), Doing(f"{COULD_NOT_LOOK}{error.detail}", ())
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
        if inquiry.told:
            return math.inf
        if now_s < inquiry.until_s and not inquiry.is_complete:
            return inquiry.until_s
        inquiry.told = True
        if client.call is call:
            self._warn(client, call, inquiry)
        return math.inf

    def _warn(self, client: CoordinatorClient, call: Call, inquiry: _Inquiry) -> None:
        member, mine, awaited_s = self._member, client.position, time.monotonic() - call.since_s
        late = []
        for rank in inquiry.ranks:
            report = self._report(rank, inquiry.answers.get(rank), mine, awaited_s)
            if not report.answers and not member.members:
                late.append(f"rank {rank} has not joined")
            elif not report.has_begun:
                late.append(str(report))
        said = f"these have not come to it:\n  - {listed(late, _NEXT)}" if late else "all have come to it"
        text = "%s on group %r, here rank %d, is still under way after %g s; %s"
        _log.warning(text, call.op, member.spec.name, member.rank, QUIET_S, said)

    def _ask(self, client: CoordinatorClient, ranks: Sequence[int]) -> bool:
        return self._send(Ask(group_id=self._member.spec.group_id, communicator=client.name, ranks=list(ranks)))

    def _send(self, message: Answer | Ask) -> bool:
        try:
            self._member.send(message)
        except ConnectionLostError:  # its end ends the calls
            return False
        return True
