"""Explanations of plans and steps: their values, which `explain` works out, and their text.

In the text, calls that differ only in their number share a row, and so do those of one method. Notebooks show the table
of the calls, which unfolds to the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raycollect.core.html import Markup, block, folded, table
from raycollect.errors.text import listed
from raycollect.planner.wording import clipped, columns, counted, nbytes_words, numbered, ranks_words, seconds_words

MOST_ACTS = 8
"""How many different roles of ranks are listed per call; the others are counted."""

MOST_RANKS = 40
"""How many characters a list of ranks may take."""

MOST_ACTORS = 4
"""How many actors of a method's calls are named; the others are counted."""

_HEAD = (
    *("calls", "operation", "group", "ranks", "tensors", "dtype", "bytes per rank"),
    *("algorithm", "launches", "inside hosts", "between hosts", "time"),
)
_RIGHT = frozenset({"tensors", "bytes per rank", "inside hosts", "between hosts", "time"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedRank:
    """What one rank moves in a reshard, in bytes."""

    rank: int
    nbytes_sent: int  # to other ranks
    nbytes_received: int  # from other ranks
    nbytes_own: int  # from its own tensors
    staging: int  # in which its messages are packed
    gives: tuple[tuple[int, int], ...]  # (another rank, what it gets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What a reshard moves, and who gives what to whom."""

    ranks: tuple[MovedRank, ...]
    nbytes_inside: int  # between ranks of one host
    nbytes_between: int  # between hosts
    rounds: int  # how many exchanges there are
    pieces: int  # how many boxes travel
    least_between: int  # the least bytes that any plan moves between hosts; -1: not known, for partial sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One call."""

    call: int  # its place in the batch, from 0
    op: str  # the operation, with its reduce op and root
    group: str
    backend: str
    chosen: str  # why the group has this backend, if nobody named one; or empty
    ranks: tuple[int, ...]
    tensors: int  # how many tensors a rank gives
    dtypes: tuple[str, ...]  # their distinct dtypes
    nbytes: int  # the most bytes that a rank gives
    after: tuple[int, ...]  # the calls that must run before it, because one of the two writes what the other uses
    bundle: int  # its place in the execution order; calls with the same place run together
    packed: tuple[int, int, int]  # how many tensors of its bundle travel packed, of how many, and in how many kernels
    together: int  # how many tensors of its bundle the backend runs with one synchronization of the ranks
    algorithm: str
    why: str
    bits: str  # what is promised about the bits of a reduction (P7); empty for other operations
    nbytes_inside: int  # the bytes that all ranks together move inside hosts
    nbytes_between: int  # the same between hosts
    launches: tuple[int, ...]  # the launches of the plan in which it runs; 0 is that of the agreement
    acts: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...]  # what ranks do: "send piece 2 to rank 1 (launch 3)"
    made_nbytes: int  # the most bytes of output that are made on a rank
    scratch_nbytes: int  # the most bytes of scratch that are made on a rank
    time_s: float  # how long its bundle takes, in seconds
    moved: Moved | None = None  # what a reshard moves; None for other operations


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """What links are taken to cost; see `raycollect.planner.Link`."""

    place: str  # "inside": between ranks of one host; "between": between hosts, in an exchange of all with all
    latency_s: float
    bandwidth: float  # in bytes per second
    source: str  # "assumed", "from the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The most memory that a participant needs beyond the operands, in bytes."""

    outputs: int  # what is made for the user
    scratch: int  # what is made for the steps only
    packing: int  # the staging of tensors that travel packed
    stand_ins: int  # copies, where the backends work, of tensors that lie elsewhere
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

    calls: tuple[Invoked, ...]  # the calls, in order; those of different actors run at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """What both kinds of explanations say, and how they are shown; a notebook shows a table."""

    participants: int  # how many processes take part; each gets one message
    launches: int  # how many launches there are, that of the agreement included
    memory: Memory  # the most that a participant needs beyond the operands
    time_s: float  # the time of all collectives after their agreements, in seconds
    nbytes_inside: int  # the bytes moved inside hosts, by all ranks together
    nbytes_between: int  # the same between hosts

    def explain(self) -> str:
        """The explanation as text, in ASCII except for the user's names."""
        lines = [self._title(), "", *self._body(), *_listed(self._totals())]
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """The explanation as values that JSON gives back as they are."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    def _repr_html_(self) -> Markup:
        rows = [cells for plan in self._plans() for bundle in plan._bundles() for cells in _cells(bundle)]
        calls = table(_HEAD, rows, right=_RIGHT, most=len(rows)) if rows else ""
        return block("plan", self._title(), calls, folded("all that it does", self.explain()))

    def __str__(self) -> str:
        return self.explain()

    def _title(self) -> str:
        raise NotImplementedError

    def _body(self) -> Iterator[str]:
        raise NotImplementedError

    def _plans(self) -> Sequence[Explanation]:
        raise NotImplementedError

    def _totals(self) -> list[tuple[str, str]]:
        raise NotImplementedError

    def _needs(self, *, kept: str = "", allowed: str = "") -> list[tuple[str, str]]:
        memory = self.memory
        return [
            ("bytes inside hosts", nbytes_words(self.nbytes_inside)),
            ("bytes between hosts", nbytes_words(self.nbytes_between)),
            ("outputs on a rank", f"{nbytes_words(memory.outputs)}{kept}"),
            ("scratch on a rank", nbytes_words(memory.scratch)),
            ("packing on a rank", f"{nbytes_words(memory.packing)}{allowed}"),
            *([("stand-ins on a rank", nbytes_words(memory.stand_ins))] if memory.stand_ins else []),
            ("chunks, at most", ", ".join(f"{name} {_chunks(nbytes)}" for name, nbytes in memory.chunks)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(_Totals):
    """What a call or a batch will do, and how to show it; a notebook shows it as a table."""

    name: str  # the operation, or "batch"
    agreement: str  # where they agree: the name of a group, or "the controller"
    rounds: int  # how many rounds of agreement there are
    staging: int  # the bytes in which tensors may travel packed; 0: none does
    rows: tuple[Row, ...]
    links: tuple[LinkCost, ...]  # what the links are taken to cost, and where the numbers are from

    def __repr__(self) -> str:
        calls = counted(len(self.rows), "call")
        ways = ", ".join(dict.fromkeys(row.algorithm for row in self.rows))
        return f"<Explanation of {self.name}: {calls}, {self.participants} participants, {ways}; .explain() tells all>"

    def _title(self) -> str:
        calls, who = counted(len(self.rows), "call"), counted(self.participants, "participant")
        return f"{self.name}: {calls}, {who}, {seconds_words(self.time_s)} estimated"

    def _plans(self) -> Sequence[Explanation]:
        return (self,)

    def _bundles(self) -> list[list[Row]]:
        found: dict[int, list[Row]] = {}
        for row in sorted(self.rows, key=lambda one: one.bundle):
            found.setdefault(row.bundle, []).append(row)
        return list(found.values())

    def _body(self) -> Iterator[str]:
        bundles = self._bundles()
        cells = [_HEAD, *(line for rows in bundles for line in _cells(rows))]
        dashes = ["-" * max(map(len, column)) for column in zip(*cells, strict=True)]
        yield from columns([cells[0], dashes, *cells[1:]], _RIGHT)
        yield ""
        for rows in bundles:
            yield f"{_calls(rows)}: {rows[0].op}"
            yield from (f"  {name:<10} {what}" for name, what in _details(rows))
            yield from (f"    {line}" for line in (*_moved_lines(rows[0].moved), *_act_lines(rows[0].acts)))
            yield ""

    def _totals(self) -> list[tuple[str, str]]:
        return [
            ("messages", f"{self.participants}, one per participant"),
            ("consistency check", f"{self.agreement}, {counted(self.rounds, 'round')}"),
            ("launches", f"{self.launches}, with that of the consistency check"),
            *self._needs(allowed=f", of {nbytes_words(self.staging)} allowed"),
            *((f"a link {one.place} hosts", _link(one)) for one in self.links),
            ("time", f"{seconds_words(self.time_s)} after the consistency check"),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExplanation(_Totals):
    """What each run of a captured step will do, and how to show it; a notebook shows it as a table."""

    calls: int  # how many calls there are, of methods and of collectives
    # In order: method calls, or the explanation of a plan; calls are numbered over the whole step
    stages: tuple[MethodCalls | Explanation, ...]
    # For each stage, how many refs are its operands and arguments: they are the same in every run
    fixed: tuple[int, ...]

    def __repr__(self) -> str:
        what = f"{counted(self.calls, 'call')} in {counted(len(self.stages), 'stage')}"
        who = counted(self.participants, "participant")
        return f"<StepExplanation of a captured step: {what}, {who}; .explain() tells all>"

    def _title(self) -> str:
        calls, stages = counted(self.calls, "call"), counted(len(self.stages), "stage")
        return f"captured step: {calls} in {stages}, {counted(self.participants, 'participant')}"

    def _plans(self) -> Sequence[Explanation]:
        return [stage for stage in self.stages if isinstance(stage, Explanation)]

    def _body(self) -> Iterator[str]:
        for at, (stage, fixed) in enumerate(zip(self.stages, self.fixed, strict=True)):
            if isinstance(stage, MethodCalls):
                yield f"stage {at}: {counted(len(stage.calls), 'method call')}"
                told = _method_lines(stage)
            else:
                yield f"stage {at}: {stage._title()}"
                told = [*stage._body(), *_listed(stage._totals()[1:], "in this stage")]
            if fixed:
                each = "each the same" if fixed > 1 else "the same"
                told.append(f"fixed when captured: {counted(fixed, 'ref')}, {each} value in every run")
            yield from (line and f"  {line}" for line in told)
            yield ""

    def _totals(self) -> list[tuple[str, str]]:
        plans = len(self._plans())
        messages = ("messages", f"{self.participants} per run, one per participant")
        if not plans:
            return [messages]
        return [
            messages,
            ("launches", f"{self.launches}, with those of {counted(plans, 'consistency check')}"),
            *self._needs(kept=" at most, kept until the run that follows"),
            ("time", f"{seconds_words(self.time_s)} after the consistency checks, without the methods"),
        ]


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return {name: _plain(one) for name, one in value.items()} if isinstance(value, dict) else value


def _listed(totals: Sequence[tuple[str, str]], title: str = "in all") -> list[str]:
    width = max(len(name) for name, _ in totals)
    return [title, *(f"  {name:<{width}}  {what}" for name, what in totals)]


def _calls(rows: Sequence[Row | Invoked]) -> str:
    return numbered([row.call for row in rows])


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table rows of a bundle; its time stands only in the first."""
    alike: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        alike.setdefault((row.tensors, row.dtypes, row.nbytes), []).append(row)
    return [_line(one, told=at == 0) for at, one in enumerate(alike.values())]


def _line(rows: Sequence[Row], *, told: bool) -> tuple[str, ...]:
    row, each = rows[0], f"{len(rows)} x " if len(rows) > 1 else ""
    launches = ranks_words([launch for launch in row.launches if launch])
    return (
        ranks_words([one.call for one in rows]),
        row.op,
        row.group,
        clipped(ranks_words(row.ranks), MOST_RANKS),
        f"{each}{row.tensors}",
        ", ".join(row.dtypes) or "-",
        f"{each}{nbytes_words(row.nbytes)}",
        row.algorithm,
        ", ".join(filter(None, ["check" if 0 in row.launches else "", launches])),
        nbytes_words(sum(one.nbytes_inside for one in rows)),
        nbytes_words(sum(one.nbytes_between for one in rows)),
        seconds_words(row.time_s) if told else '"',
    )


def _details(rows: Sequence[Row]) -> list[tuple[str, str]]:
    row = rows[0]
    packed, tensors, kernels = row.packed
    after = sorted({call for one in rows for call in one.after})
    made, scratch = sum(one.made_nbytes for one in rows), sum(one.scratch_nbytes for one in rows)
    found = {
        "backend": row.chosen and f"{row.backend}: chosen, as {row.chosen}",
        "why": f"{row.algorithm}: {row.why}",
        "after": after and numbered(after),
        "packed": packed and f"{packed} of {tensors} tensors travel in {counted(kernels, 'kernel')}",
        "together": row.together and f"{row.together} of {tensors} tensors with one meeting of the ranks",
        "bits": row.bits,
        "boxes": _boxes(row.moved),
        "makes": made and f"{nbytes_words(made)} of output on a rank, at most",
        "scratch": scratch and f"{nbytes_words(scratch)} on a rank, at most",
    }
    return [(name, str(what)) for name, what in found.items() if what]


def _more(items: Sequence[object], what: str) -> list[str]:
    return [f"and {len(items) - MOST_ACTS} more {what}"] if len(items) > MOST_ACTS else []


def _boxes(moved: Moved | None) -> str:
    if moved is None:
        return ""
    least = "" if moved.least_between < 0 else f", the least is {nbytes_words(moved.least_between)}"
    return (
        f"{moved.pieces} boxes in {counted(moved.rounds, 'round')}; {nbytes_words(moved.nbytes_between)} "
        f"between hosts{least}; staging of up to {nbytes_words(max(one.staging for one in moved.ranks))} on a rank"
    )


def _moved_lines(moved: Moved | None) -> list[str]:
    """What each rank of a reshard moves, and to whom it gives it."""
    if moved is None:
        return []
    lines = [
        f"rank {one.rank}: sends {nbytes_words(one.nbytes_sent)}, receives {nbytes_words(one.nbytes_received)}, "
        f"copies {nbytes_words(one.nbytes_own)}; gives "
        f"{listed([f'{nbytes_words(n)} to {taker}' for taker, n in one.gives], most=MOST_ACTORS) or 'nothing'}"
        for one in moved.ranks
    ]
    return [*lines[:MOST_ACTS], *_more(lines, "ranks")]


def _act_lines(acts: Sequence[tuple[Sequence[int], Sequence[str]]]) -> list[str]:
    lines = []
    for ranks, steps in acts[:MOST_ACTS]:
        who = f"rank{'s' if len(ranks) > 1 else ''} {clipped(ranks_words(ranks), MOST_RANKS)}"
        first, *others = steps or ("nothing but the consistency check",)
        lines += [f"{who}: {first}", *(f"{'':{len(who)}}  {step}" for step in others)]
    return lines + _more(acts, "parts of other ranks")


def _method_lines(stage: MethodCalls) -> list[str]:
    found: dict[str, list[Invoked]] = {}
    for call in stage.calls:
        found.setdefault(call.method, []).append(call)
    lines = []
    for method, calls in found.items():
        actors = list(dict.fromkeys(call.actor for call in calls))
        more = f" and {len(actors) - MOST_ACTORS} more" if len(actors) > MOST_ACTORS else ""
        after = sorted({one for call in calls for one in call.after})
        given = f", with what {numbered(after)} {'give' if len(after) > 1 else 'gives'}" if after else ""
        lines.append(f"{_calls(calls)}: {method} of {', '.join(actors[:MOST_ACTORS])}{more}{given}")
    return lines


def _link(cost: LinkCost) -> str:
    return f"{seconds_words(cost.latency_s)} and {cost.bandwidth / 1e9:.3g} GB/s, {cost.source}"


def _chunks(nbytes: int) -> str:
    return "unknown" if nbytes < 0 else nbytes_words(nbytes)
