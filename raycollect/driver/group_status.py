"""Snapshots of a group's members: their activity, their memory, and how both are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raycollect.channel.messages import ArenaStatistics, Seen, StoreStatistics, Surveyed
from raycollect.core import html
from raycollect.core.model import Member
from raycollect.driver import stall_report
from raycollect.driver.plan_tracker import PlanTracker
from raycollect.errors import COULD_NOT_LOOK
from raycollect.group import watchdog
from raycollect.group.membership import DESTROYED
from raycollect.planner.wording import counted, nbytes_words, seconds_words

_HEAD = ("rank", "actor", "host", "pid", "device", "state", "collectives under way", "awaited for")
_RIGHT = frozenset({"rank", "pid", "awaited for"})

_NOW = frozenset({"state", "collectives under way", "awaited for"})  # columns of a member's current activity

_SELDOM = frozenset({"collectives under way", "awaited for"})  # columns that are left out if empty

_CELL = re.compile(r"[^\s(]*/ipykernel_\d+/\d+\.py:(\d+)")  # the file that Python names for a notebook's cell


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One rank, at the moment of asking.

    Attributes:
        rank: Its rank.
        actor: The actor's class, and name if it has one.
        node_id: The Ray node that it runs on.
        pid: Its process.
        ordered: True: its methods run one at a time, and collectives run in their order. False (async and threaded
            actors): collectives run after their operands' methods and after earlier collectives, and may overlap other
            methods.
        plans: The collectives of this controller that it has not ended.
        steps: For each of them how far it is: in the consistency check, or in which bundle of calls, or in which call
            of a captured step; empty where it has not begun it.
        awaited_s: How long others have waited for it in a consistency check where it has not arrived, in seconds; 0:
            nobody waits.
        answers: Whether its process has answered. It does while methods run, but not where it is gone or stopped, or a
            call in it holds the interpreter's lock.
        doing: The user's outermost call that is under way: name, file and line; empty for none. Where its process could
            not find out: ``"could not look: "``, and the cause.
        stack: A line per frame from there on, the innermost last.
        ended: The last collective of this controller that it has ended; 0: none.
        story: The tail of its recorder, oldest first.
        host: The address of the machine that it runs on.
        device: The accelerators that Ray gave it: ``"GPU 0"``; ``"CPU"`` where there are none.
    """

    rank: int
    actor: str
    node_id: str
    pid: int
    ordered: bool
    plans: tuple[int, ...]
    steps: tuple[str, ...]
    awaited_s: float
    answers: bool
    doing: str
    stack: tuple[str, ...]
    ended: int
    story: tuple[str, ...]
    host: str = ""
    device: str = ""

    @property
    def state(self) -> str:
        """Its activity, in words: its current method, that it runs none, or that it did not answer."""
        if not self.answers:
            return "no answer"
        if self.doing.startswith(COULD_NOT_LOOK):
            return self.doing
        return f"in {self.doing}" if self.doing else "in no method"

    @property
    def places(self) -> str:
        """The collectives that it has not ended, and how far it is in each, in words."""
        pairs = zip(self.plans, self.steps, strict=True)
        return ", ".join(f"{plan} ({step})" if step else str(plan) for plan, step in pairs)

    @html.shown
    def _repr_html_(self) -> str:
        title = f"rank {self.rank}: {self.actor}"
        return html.block("member", title, html.table(_HEAD, [_cells(self)], right=_RIGHT))

    def __str__(self) -> str:
        text = f"rank {self.rank} ({self.actor}, pid {self.pid}): {self.state}"
        text += f", has ended {self.ended}" if self.answers and self.ended else ""
        text += f", has not ended {self.places}" if self.plans else ""
        if self.awaited_s:
            text += f", awaited for {self.awaited_s:.1f} s"
        return "\n    ".join((text, *(self.stack if self.doing else ())))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GroupStatus:
    """A group, at the moment of asking.

    Attributes:
        state: ``"alive"``, ``"broken"`` or ``"destroyed"``.
        detail: Why it is broken.
        members: By rank.
    """

    state: str
    detail: str
    members: tuple[MemberStatus, ...]

    def _rows(self) -> html.Markup:
        """The ranks as an HTML table without columns that say nothing; of very many ranks the most interesting ones."""
        chosen = sorted(self.members, key=_is_dull)[: html.MOST_ROWS]
        rows = [_cells(status) for status in sorted(chosen, key=lambda status: status.rank)]
        idle = {name for name, *column in zip(_HEAD, *rows, strict=True) if not any(column)}
        left_out = _NOW if self.state == DESTROYED else _SELDOM & idle
        columns = [at for at, name in enumerate(_HEAD) if name not in left_out]
        shown = [[row[at] for at in columns] for row in rows]
        return html.table([_HEAD[at] for at in columns], shown, right=_RIGHT, count=len(self.members))

    @html.shown
    def _repr_html_(self) -> str:
        title = f"group of {counted(len(self.members), 'rank')}: {self.state}"
        return html.block("status", title, *([html.line(self.detail)] if self.detail else []), self._rows())

    def __repr__(self) -> str:
        detail = f": {self.detail}" if self.detail else ""
        return "\n  ".join((f"<GroupStatus {self.state}{detail}", *map(str, self.members))) + ">"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatistics:
    """The tensors and memory of one rank's process, for all its groups, at the moment of its answer.

    Attributes:
        rank: Its rank.
        actor: The actor's class, and name if it has one.
        store: The tensors that its methods returned.
        arena: Its shared memory, and what it has mapped of others'.
    """

    rank: int
    actor: str
    store: StoreStatistics
    arena: ArenaStatistics

    def __str__(self) -> str:
        store, arena = self.store, self.arena
        text = f"rank {self.rank} ({self.actor}): {store.held} refs held, {store.freed} freed, {store.dirty} dirty; "
        if arena.limit:
            in_use, backed = nbytes_words(arena.in_use), nbytes_words(arena.backed)
            text += f"arena: {in_use} in {arena.blocks} blocks, {backed} backed, "
            text += f"limit {nbytes_words(arena.limit)}"
        else:
            text += "no arena"
        return f"{text}, {nbytes_words(arena.mapped)} mapped of others"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GroupStatistics:
    """The tensors and memory of a group's members, at the moment of asking.

    Attributes:
        members: By rank; None for a member that has ended, or did not answer in time.
    """

    members: tuple[MemberStatistics | None, ...]

    def __repr__(self) -> str:
        lines = (str(member or f"rank {rank}: gone, or silent") for rank, member in enumerate(self.members))
        return "\n  ".join(("<GroupStatistics", *lines)) + ">"


def _is_dull(status: MemberStatus) -> tuple[bool, float, bool]:
    return status.answers, -status.awaited_s, not (status.plans or status.doing)


def _cells(status: MemberStatus) -> tuple[object, ...]:
    node = f" (node {status.node_id[:6]})" if status.node_id else ""
    state, stack = (_CELL.sub(r"a cell, line \1", words) for words in (status.state, "\n".join(status.stack)))
    return (
        status.rank,
        status.actor,
        f"{status.host}{node}",
        status.pid,
        status.device,
        html.folded(state, stack) if stack and status.doing else state,
        status.places,
        seconds_words(status.awaited_s) if status.awaited_s else "",
    )


def member_status(member: Member, trackers: Sequence[PlanTracker], seen: Mapping[str, Seen | None]) -> MemberStatus:
    """The status of a member, from its group's plans under way and the members' answers, by actor."""
    pending = [tracker for tracker in trackers if tracker.is_pending(tracker.plan.positions.get(member.actor_id, -1))]
    mine = seen[member.actor_id]
    return MemberStatus(
        rank=member.rank,
        actor=member.actor,
        node_id=member.node_id,
        pid=member.pid,
        ordered=member.ordered,
        plans=tuple(tracker.seq for tracker in pending),
        steps=tuple(stall_report.step_of(tracker, mine) for tracker in pending),
        awaited_s=max((stall_report.awaited_s(tracker, member.actor_id, seen) for tracker in pending), default=0.0),
        host=member.address.host,
        device=", ".join(f"{kind} {', '.join(ids)}" for kind, ids in member.accelerators) or "CPU",
        **watchdog.report_fields(mine),
    )


def member_statistics(member: Member, answer: Surveyed) -> MemberStatistics:
    """The statistics of a member, from its answer."""
    return MemberStatistics(rank=member.rank, actor=member.actor, store=answer.store, arena=answer.arena)
