"""A whole timeline: the spans of all processes, by the clock of the process that began it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from raycollect.observe.clocks import SAME_CLOCK, Alignment
from raycollect.observe.trace import Recorded, Span, TracedGroup


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
    spans: tuple[Span, ...] = field(default=(), repr=False)  # by the clock of the timeline

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
        spans = sum(len(process.spans) for process in self.processes)
        lacks = f", {len(self.missing)} missing" if self.missing else ""
        duration_s = self.ended_s - self.began_s
        return f"<TimelineTrace of {duration_s:.3f} s: {spans} spans of {len(self.processes)} processes{lacks}>"


def process_of(recorded: Recorded, process: Process, alignment: Alignment = SAME_CLOCK) -> Process:
    """Adds the contents of a process's ring to its description."""
    groups = recorded.groups
    places = sorted({(place.name, place.rank) for place in groups.values() if place.rank >= 0})
    return replace(
        process,
        ranks=tuple(places),
        uncertainty_s=alignment.uncertainty_s,
        dropped=recorded.dropped,
        newest=max((entry[0] for entry in recorded.entries), default=-1),
        threads=recorded.threads,
        spans=tuple(_aligned(span, groups, alignment) for span in recorded.spans),
    )


def _aligned(span: Span, groups: Mapping[str, TracedGroup], alignment: Alignment) -> Span:
    places = [groups[group_id] for group_id in span.label.group_id.split(",") if group_id in groups]
    begin_s = alignment.local(span.begin_s)
    return span._replace(
        begin_s=begin_s,
        end_s=max(alignment.local(span.end_s), begin_s),
        group=", ".join(dict.fromkeys(group.name for group in places)),
        backend=", ".join(dict.fromkeys(group.backend for group in places)),
    )
