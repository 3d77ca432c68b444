"""Explanations of plans and of captured steps: their values, which `explain` works out, and their text.

In the text, calls that differ only in their number share a row, and so do the calls of one method. Notebooks show the
table of the calls, which unfolds to the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raycollect.core.html import Markup, block, folded, table
from raycollect.errors.text import listed
from raycollect.planner.topology import Link
from raycollect.planner.wording import columns, counted, nbytes_words, ranks_words, seconds_words

MOST_LINES = 8
"""The number of lines about single ranks per call; the other ranks are counted."""

MOST_RANKS = 40
"""The number of characters of a list of ranks."""

MOST_ACTORS = 4
"""The number of actors that are named per method; the others are counted."""

_HEAD = (
    *("calls", "operation", "group", "ranks", "tensors", "dtype", "bytes per rank"),
    *("algorithm", "launches", "inside hosts", "between hosts", "time"),
)
_RIGHT = frozenset({"tensors", "bytes per rank", "inside hosts", "between hosts", "time"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The messages of a reshard."""

    sends: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]  # for each rank: (rank, (receiver, bytes) of each)
    copies: tuple[int, ...]  # for each of these ranks, the bytes that it copies from its own tensors
    staging: int  # the most bytes in which a rank packs its messages
    nbytes_inside: int  # between ranks of one host
    nbytes_between: int  # between hosts
    rounds: int  # the number of exchanges
    boxes: int  # the number of boxes that travel
    least_between: int  # the least bytes that any plan moves between hosts; -1: unknown, for partial sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call."""

    call: int  # its place in the batch, from 0
    op: str  # the operation, with its reduce op and root
    group: str
    backend: str  # the group's backend; with the reason, if "auto" chose it among several
    ranks: tuple[int, ...]
    tensors: int  # the number of tensors that a rank gives
    dtypes: tuple[str, ...]  # their distinct dtypes
    nbytes: int  # the most bytes that a rank gives
    after: tuple[int, ...]  # the calls that must run before it, because one of the two writes what the other uses
    bundle: int  # its place in the execution order; calls with the same place run together
    packed: tuple[int, int, int]  # the tensors of its bundle that travel packed, of all tensors, in how many kernels
    together: int  # the number of tensors of its bundle that the backend runs with one synchronization of the ranks
    algorithm: str
    why: str
    bits: str  # the order in which a reduction is folded (P7); empty for other operations
    nbytes_inside: int  # the bytes that all ranks together move inside hosts
    nbytes_between: int  # the same between hosts
    launches: tuple[int, ...]  # the launches of the plan in which it runs; 0 is the launch of the agreement
    acts: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]  # (ranks, their steps)
    made_nbytes: int  # the most bytes of output that are made on a rank
    scratch_nbytes: int  # the most bytes of scratch that are made on a rank
    time_s: float  # the time of its bundle, in seconds
    moved: Moved | None = None  # the messages of a reshard; None for other operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The most memory that a participant needs beyond the operands, in bytes."""

    outputs: int  # made for the user
    scratch: int  # made for the steps only
    packing: int  # the staging of tensors that travel packed
    device_staging: int  # copies, where the backends work, of tensors on other devices
    chunks: tuple[tuple[str, int], ...]  # for each group: (its name, the chunks of its backend; -1: unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invoked:
    """A method call of a captured step."""

    call: int  # its place among all calls of the step, from 0
    actor: str
    method: str
    after: tuple[int, ...]  # the calls whose results it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodCalls:
    """A stage of a captured step: method calls with no collective between them."""

    calls: tuple[Invoked, ...]  # in order; calls of different actors run at the same time

    def lines(self) -> Iterator[str]:
        """The stage as text."""
        yield counted(len(self.calls), "method call")
        methods: dict[str, list[Invoked]] = {}
        for call in self.calls:
            methods.setdefault(call.method, []).append(call)
        for method, calls in methods.items():
            actors = listed(dict.fromkeys(call.actor for call in calls), most=MOST_ACTORS)
            after = sorted({number for call in calls for number in call.after})
            results = f", with the results of {_numbered(after)}" if after else ""
            yield f"{_numbered([call.call for call in calls])}: {method} of {actors}{results}"


class _Explained:
    """The forms in which both kinds of explanations are shown."""

    def explain(self) -> str:
        """The explanation as text, in ASCII except for the user's names."""
        return "\n".join(line.rstrip() for line in self.lines()) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The explanation as values that JSON gives back as they are."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))  # type: ignore[call-overload]
        return values

    def lines(self) -> Iterator[str]:
        """The lines of the text; the first one is the title."""
        raise NotImplementedError

    @property
    def plans(self) -> Sequence[Explanation]:
        """The explanations of its plans."""
        raise NotImplementedError

    def _repr_html_(self) -> Markup:
        cells = [line for plan in self.plans for line in plan.cells()]
        calls = table(_HEAD, cells, right=_RIGHT, most=len(cells)) if cells else ""
        return block("plan", next(self.lines()), calls, folded("the whole explanation", self.explain()))

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {next(self.lines())}; .explain() has the whole>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(_Explained):
    """The explanation of a call or a batch; a notebook shows it as a table."""

    name: str  # the operation, or "batch"
    participants: int  # the number of processes that take part; each gets one message
    agreement: str  # where they agree: the name of a group, or "the controller"
    rounds: int  # the number of rounds of agreement
    launches: int  # the number of launches, that of the agreement included
    staging: int  # the bytes in which tensors may travel packed; 0: none does
    rows: tuple[Row, ...]
    memory: Memory
    time_s: float  # the time of all collectives after the agreement, in seconds
    nbytes_inside: int  # the bytes moved inside hosts, by all ranks together
    nbytes_between: int  # the same between hosts
    links: tuple[tuple[str, Link], ...]  # the assumed costs of the links "inside" and "between" hosts

    def lines(self) -> Iterator[str]:
        """The lines of the text; the first one is the title."""
        calls, processes = counted(len(self.rows), "call"), counted(self.participants, "participant")
        yield f"{self.name}: {calls}, {processes}, {seconds_words(self.time_s)} estimated"
        yield ""
        cells = [_HEAD, *self.cells()]
        dashes = ["-" * max(map(len, column)) for column in zip(*cells, strict=True)]
        yield from columns([cells[0], dashes, *cells[1:]], _RIGHT)
        for rows in self._bundles():
            yield ""
            yield f"{_numbered([row.call for row in rows])}: {rows[0].op}"
            yield from (f"  {line}" for line in (*_named(_details(rows)), *_rank_lines(rows[0])))
        yield ""
        yield "in all"
        yield from (f"  {line}" for line in _named(self._totals()))

    @property
    def plans(self) -> Sequence[Explanation]:
        """The explanations of its plans."""
        return (self,)

    def cells(self) -> Sequence[Sequence[str]]:
        """The rows of the table."""
        return [line for rows in self._bundles() for line in _cells(rows)]

    def _bundles(self) -> list[list[Row]]:
        bundles: dict[int, list[Row]] = {}
        for row in sorted(self.rows, key=lambda row: row.bundle):
            bundles.setdefault(row.bundle, []).append(row)
        return list(bundles.values())

    def _totals(self) -> dict[str, str]:
        return {
            "consistency check": f"{self.agreement}, {counted(self.rounds, 'round')}",
            "launches": f"{self.launches}; launch 0 is the consistency check",
            **_totals_of(self),
            "packing on a rank": f"{nbytes_words(self.memory.packing)}, of {nbytes_words(self.staging)} allowed",
            **{f"a link {place} hosts": _link_words(link) for place, link in self.links},
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepExplanation(_Explained):
    """The explanation of each run of a captured step; a notebook shows it as a table."""

    participants: int  # the number of processes that take part
    # In order: method calls, or the explanation of a plan; calls are numbered over the whole step
    stages: tuple[MethodCalls | Explanation, ...]
    # For each stage, the number of refs among its operands and arguments: they are the same in every run
    fixed: tuple[int, ...]

    @property
    def plans(self) -> Sequence[Explanation]:
        """The explanations of its plans."""
        return [stage for stage in self.stages if isinstance(stage, Explanation)]

    @property
    def calls(self) -> int:
        """The number of calls, of methods and of collectives."""
        return sum(len(stage.calls if isinstance(stage, MethodCalls) else stage.rows) for stage in self.stages)

    @property
    def launches(self) -> int:
        """The number of launches, those of the agreements included."""
        return sum(plan.launches for plan in self.plans)

    @property
    def nbytes_inside(self) -> int:
        """The bytes moved inside hosts, by all ranks together."""
        return sum(plan.nbytes_inside for plan in self.plans)

    @property
    def nbytes_between(self) -> int:
        """The same between hosts."""
        return sum(plan.nbytes_between for plan in self.plans)

    @property
    def time_s(self) -> float:
        """The time of all collectives after their agreements, in seconds."""
        return sum(plan.time_s for plan in self.plans)

    @property
    def memory(self) -> Memory:
        """The most memory of a participant: outputs of all plans, which it keeps, and what one plan needs at a time."""
        memories = [plan.memory for plan in self.plans]
        chunks = dict[str, int]()
        for name, size in (pair for memory in memories for pair in memory.chunks):
            chunks[name] = -1 if -1 in (size, chunks.get(name)) else max(size, chunks.get(name, 0))
        return Memory(
            outputs=sum(memory.outputs for memory in memories),
            scratch=max((memory.scratch for memory in memories), default=0),
            packing=max((memory.packing for memory in memories), default=0),
            device_staging=max((memory.device_staging for memory in memories), default=0),
            chunks=tuple(chunks.items()),
        )

    def to_dict(self) -> dict[str, Any]:
        """The explanation as values that JSON gives back as they are, with its totals."""
        totals = {
            name: getattr(self, name) for name in ("calls", "launches", "nbytes_inside", "nbytes_between", "time_s")
        }
        return {
            **super(StepExplanation, self).to_dict(),
            **totals,
            "memory": json.loads(json.dumps(asdict(self.memory))),
        }

    def lines(self) -> Iterator[str]:
        """The lines of the text; the first one is the title."""
        calls, stages = counted(self.calls, "call"), counted(len(self.stages), "stage")
        time = f"{seconds_words(self.time_s)} estimated without the methods"
        yield f"captured step: {calls} in {stages}, {counted(self.participants, 'participant')}, {time}"
        for at, (stage, fixed) in enumerate(zip(self.stages, self.fixed, strict=True)):
            title, *body = stage.lines()
            yield ""
            yield f"stage {at}: {title}"
            yield from (f"  {line}" for line in body)
            if fixed:
                yield f"  fixed when captured: {counted(fixed, 'ref')}, the same in every run"
        yield ""
        yield "in all"
        yield from (f"  {line}" for line in _named({"launches": str(self.launches), **_totals_of(self)}))


def _totals_of(explained: Explanation | StepExplanation) -> dict[str, str]:
    memory = explained.memory
    chunks = (f"{name} {'unknown' if size < 0 else nbytes_words(size)}" for name, size in memory.chunks)
    return {
        "bytes inside hosts": nbytes_words(explained.nbytes_inside),
        "bytes between hosts": nbytes_words(explained.nbytes_between),
        "outputs on a rank": nbytes_words(memory.outputs),
        "scratch on a rank": nbytes_words(memory.scratch),
        "packing on a rank": nbytes_words(memory.packing),
        "device staging": nbytes_words(memory.device_staging) if memory.device_staging else "",
        "chunks, at most": ", ".join(chunks),
    }


def _link_words(link: Link) -> str:
    return f"{seconds_words(link.latency_s)} and {link.bandwidth / 1e9:.3g} GB/s, {link.source}"


def _named(values: dict[str, str]) -> list[str]:
    """A line for each value that is not empty."""
    width = max(map(len, values))
    return [f"{name:<{width}}  {value}" for name, value in values.items() if value]


def _numbered(calls: Sequence[int]) -> str:
    return f"call{'s' if len(calls) > 1 else ''} {ranks_words(calls)}"


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """The table rows of a bundle; its time is only in the first."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.tensors, row.dtypes, row.nbytes), []).append(row)
    for at, group in enumerate(groups.values()):
        row, times = group[0], f"{len(group)} x " if len(group) > 1 else ""
        yield (
            ranks_words([row.call for row in group]),
            row.op,
            row.group,
            _clipped(row.ranks),
            f"{times}{row.tensors}",
            ", ".join(row.dtypes) or "-",
            f"{times}{nbytes_words(row.nbytes)}",
            row.algorithm,
            ranks_words(row.launches),
            nbytes_words(sum(row.nbytes_inside for row in group)),
            nbytes_words(sum(row.nbytes_between for row in group)),
            '"' if at else seconds_words(row.time_s),
        )


def _clipped(ranks: Sequence[int]) -> str:
    words = ranks_words(ranks)
    return words if len(words) <= MOST_RANKS else f"{words[: MOST_RANKS - 5].rpartition(',')[0]}, ..."


def _details(rows: Sequence[Row]) -> dict[str, str]:
    row, moved = rows[0], rows[0].moved
    packed, tensors, kernels = row.packed
    after = sorted({call for row in rows for call in row.after})
    outputs, scratch = sum(row.made_nbytes for row in rows), sum(row.scratch_nbytes for row in rows)
    details = {
        "backend": row.backend,
        "why": f"{row.algorithm}: {row.why}",
        "after": after and _numbered(after),
        "packed": packed and f"{packed} of {tensors} tensors travel in {counted(kernels, 'kernel')}",
        "together": row.together and f"{row.together} of {tensors} tensors with one synchronization of the ranks",
        "bits": row.bits,
        "makes": outputs and f"{nbytes_words(outputs)} of output on a rank, at most",
        "scratch": scratch and f"{nbytes_words(scratch)} on a rank, at most",
    }
    if moved is not None:
        least = "" if moved.least_between < 0 else f", the least is {nbytes_words(moved.least_between)}"
        details["boxes"] = (
            f"{moved.boxes} boxes in {counted(moved.rounds, 'round')}; {nbytes_words(moved.nbytes_between)} "
            f"between hosts{least}; staging of up to {nbytes_words(moved.staging)} on a rank"
        )
    return {name: str(value or "") for name, value in details.items()}


def _rank_lines(row: Row) -> list[str]:
    """The steps of the ranks; of a reshard, their messages."""
    lines = []
    if row.moved is not None:
        for (rank, sends), copied in zip(row.moved.sends, row.moved.copies, strict=True):
            to = listed([f"{nbytes_words(nbytes)} to {receiver}" for receiver, nbytes in sends], most=MOST_ACTORS)
            lines.append(f"  rank {rank}: sends {to or 'nothing'}; copies {nbytes_words(copied)}")
    else:
        for ranks, steps in row.acts:
            names = f"rank{'s' if len(ranks) > 1 else ''} {_clipped(ranks)}"
            lines.append(f"  {names}: {', '.join(steps) or 'only the consistency check'}")
    more = [f"  and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return [*lines[:MOST_LINES], *more]
