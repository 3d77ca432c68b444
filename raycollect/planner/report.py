"""Explanations of plans and steps, and their text; `explain` works them out, of the values of `report_rows`.

In the text, calls that differ only in their number share a row, and so do those of one method. Notebooks show the table
of the calls, which unfolds to the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raycollect.core.html import Markup, block, folded, table
from raycollect.errors.text import listed
from raycollect.planner.report_rows import Act, Invoked, LinkCost, Memory, Methods, Moved, Row
from raycollect.planner.wording import clipped, columns, counted, nbytes_words, numbered, ranks_words, seconds_words

MOST_ACTS = 8
"""How many different roles of ranks are listed per call; the others are counted."""

MOST_RANKS = 40
"""How many characters a list of ranks may take."""

MOST_ACTORS = 4
"""How many actors of a method's calls are named; the others are counted."""

_MEMORIES = {"cpu": "the host's memory", "cuda": "its GPU"}
_HEAD = (
    *("calls", "operation", "group", "ranks", "tensors", "dtype", "bytes per rank"),
    *("algorithm", "launches", "inside hosts", "between hosts", "time"),
)
_RIGHT = frozenset({"tensors", "bytes per rank", "inside hosts", "between hosts", "time"})


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
    stages: tuple[Methods | Explanation, ...]
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
            if isinstance(stage, Methods):
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
        nbytes_words(sum(one.way.nbytes_inside for one in rows)),
        nbytes_words(sum(one.way.nbytes_between for one in rows)),
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
        "brought": _brought(rows),
        "bits": row.bits,
        "boxes": _boxes(row.moved),
        "makes": made and f"{nbytes_words(made)} of output on a rank, at most",
        "scratch": scratch and f"{nbytes_words(scratch)} on a rank, at most",
    }
    return [(name, str(what)) for name, what in found.items() if what]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {clipped(ranks_words(ranks), MOST_RANKS)}"


def _brought(rows: Sequence[Row]) -> str:
    sums: dict[tuple[tuple[int, ...], str, str], tuple[int, int]] = {}
    for one in (one for row in rows for one in row.brought):
        there, back = sums.get((one.ranks, one.device, one.memory), (0, 0))
        sums[one.ranks, one.device, one.memory] = there + one.nbytes_there, back + one.nbytes_back
    words = [
        f"{_ranks(ranks)} from {_MEMORIES.get(device, device)} to {_MEMORIES.get(memory, memory)}: "
        f"{nbytes_words(there)}, and {nbytes_words(back)} back"
        for (ranks, device, memory), (there, back) in sums.items()
    ]
    return "; ".join([*words[:MOST_ACTS], *_more(words, "kinds of ranks")])


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
    lines = []
    for one in moved.ranks:
        takers = [f"{nbytes_words(link.nbytes)} to {link.taker}" for link in moved.links if link.giver == one.rank]
        lines.append(
            f"rank {one.rank}: sends {nbytes_words(one.nbytes_sent)}, receives {nbytes_words(one.nbytes_received)}, "
            f"copies {nbytes_words(one.nbytes_own)}; gives {listed(takers, most=MOST_ACTORS) or 'nothing'}"
        )
    return [*lines[:MOST_ACTS], *_more(lines, "ranks")]


def _act_lines(acts: Sequence[Act]) -> list[str]:
    lines = []
    for act in acts[:MOST_ACTS]:
        who = _ranks(act.ranks)
        first, *others = act.steps or ("nothing but the consistency check",)
        lines += [f"{who}: {first}", *(f"{'':{len(who)}}  {step}" for step in others)]
    return lines + _more(acts, "parts of other ranks")


def _method_lines(stage: Methods) -> list[str]:
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
