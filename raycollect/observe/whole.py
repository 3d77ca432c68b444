"""A whole timeline: the spans of all processes, by the clock of the process that began it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from raycollect.observe.clocks import SAME_CLOCK, Alignment
from raycollect.observe.trace import Recorded, Span, TracedGroup


class Slice(NamedTuple):
    """A span by the clock of the timeline, with the fields of its `Label`, the group's name and the backend."""

    kind: str
    name: str
    begin_s: float
    end_s: float
    thread: int
    seq: int = 0
    op: str = ""
    group_id: str = ""
    rank: int = -1
    ranks: int = 0
    nbytes: int = 0
    calls: int = 0
    meeting: str = ""
    error: str = ""
    group: str = ""
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process of a timeline."""

    name: str  # its display name: ``"Worker(3f2a91)"``, ``"driver"``
    host: str
    pid: int
    leader: str = ""  # the id of the controller whose plans it runs, or of itself; empty: it makes calls of its own
    leads: bool = False  # whether it is that controller
    ranks: tuple[tuple[str, int], ...] = ()  # (group, rank) of its memberships
    uncertainty_s: float = 0.0  # the error of its times against the timeline's clock, in either direction
    dropped: int = 0  # how many entries its ring has overwritten
    newest: int = -1  # the number of its newest entry; -1: there is none
    threads: Mapping[int, str] = field(default_factory=dict, repr=False)  # their names
    slices: tuple[Slice, ...] = field(default=(), repr=False)

    @property
    def title(self) -> str:
        """The name, the ranks, the host and the pid."""
        ranks = ", ".join(f"rank {rank} of {group}" for group, rank in self.ranks)
        return f"{self.name}{f': {ranks}' if ranks else ''} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A participant whose spans are missing or incomplete, and the reason."""

    name: str
    host: str
    pid: int
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.host}, pid {self.pid}): {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineTrace:
    """A whole timeline."""

    began_s: float  # when it began, by `time.monotonic` of the process that began it
    ended_s: float
    processes: tuple[Process, ...]  # the process that began it comes first
    missing: tuple[Missing, ...] = ()  # the participants whose spans are missing

    @property
    def dropped(self) -> int:
        """How many entries were overwritten, in all rings."""
        return sum(process.dropped for process in self.processes)

    def __repr__(self) -> str:
        spans = sum(len(process.slices) for process in self.processes)
        lacks = f", {len(self.missing)} missing" if self.missing else ""
        duration_s = self.ended_s - self.began_s
        return f"<TimelineTrace of {duration_s:.3f} s: {spans} spans of {len(self.processes)} processes{lacks}>"


def process_of(recorded: Recorded, process: Process, aligned: Alignment = SAME_CLOCK) -> Process:
    """Adds the contents of a process's ring to its description."""
    groups = recorded.groups
    places = sorted({(place.name, place.rank) for place in groups.values() if place.rank >= 0})
    return replace(
        process,
        ranks=tuple(places),
        uncertainty_s=aligned.uncertainty_s,
        dropped=recorded.dropped,
        newest=max((entry[0] for entry in recorded.entries), default=-1),
        threads=recorded.threads,
        slices=tuple(_slice(span, groups, aligned) for span in recorded.spans),
    )


def _slice(span: Span, groups: Mapping[str, TracedGroup], aligned: Alignment) -> Slice:
    places = [groups[group_id] for group_id in span.label.group_id.split(",") if group_id in groups]
    begin_s = aligned.local(span.begin_s)
    return Slice(
        span.kind,
        span.name,
        begin_s,
        max(aligned.local(span.end_s), begin_s),
        span.thread,
        span.seq,
        **span.label._asdict(),
        error=span.error,
        group=", ".join(dict.fromkeys(group.name for group in places)),
        backend=", ".join(dict.fromkeys(group.backend for group in places)),
    )
