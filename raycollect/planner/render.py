"""Shows an explanation as text, and as HTML that needs nothing else.

Calls that differ only in their number share a row; so do those of one method. Everything that a user named is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence

from raycollect.core.html import Markup, across, block, folded, line, lines, pairs, table
from raycollect.errors.text import listed
from raycollect.planner.picture import course, traffic
from raycollect.planner.report import Invoked, LinkCost, Memory, Methods, Report, Row, StepReport
from raycollect.planner.wording import (
    clipped,
    columns,
    counted,
    nbytes_words,
    numbered,
    ranks_words,
    seconds_words,
)

MOST_ACTS = 8
"""How many different roles of ranks are listed per call; the others are counted."""

MOST_RANKS = 40
"""How many characters a list of ranks may take."""

MOST_ACTORS = 4
"""How many actors of a method's calls are named; the others are counted."""

_MEMORIES = {"cpu": "the host's memory", "cuda": "its GPU"}
"""Device or memory of a backend -> its name for readers; others keep their names."""

_HEAD = (
    "calls",
    "operation",
    "group",
    "ranks",
    "tensors",
    "dtype",
    "bytes per rank",
    "algorithm",
    "launches",
    "inside hosts",
    "between hosts",
    "time",
)
_RIGHT = frozenset({"tensors", "bytes per rank", "inside hosts", "between hosts", "time"})


def text(report: Report) -> str:
    """The explanation of a plan as text, in ASCII except for the user's names."""
    return _joined([_title(report), "", *_body(report), *_listed(_totals(report))])


def step_text(report: StepReport) -> str:
    """The explanation of a captured step as text, in ASCII except for the user's names."""
    lines = [_step_title(report), ""]
    for at, stage in enumerate(report.stages):
        if isinstance(stage, Methods):
            lines += [f"stage {at}: {counted(len(stage.calls), 'method call')}"]
            lines += [f"  {line}" for line in (*_method_lines(stage), *_fixed_lines(report.fixed[at]))] + [""]
        else:
            lines += [f"stage {at}: {_title(stage)}"]
            told = (*_body(stage), *_listed(_stage_totals(stage), "in this stage"), *_fixed_lines(report.fixed[at]))
            lines += [line and f"  {line}" for line in told]
            lines += [""]
    return _joined([*lines, *_listed(_step_totals(report))])


def html(report: Report) -> Markup:
    """The explanation of a plan as HTML: a table, and pictures of the messages and of the time."""
    return _html(report, _title(report), _totals(report))


def step_html(report: StepReport) -> Markup:
    """The explanation of a captured step as HTML, stage by stage."""
    parts = []
    for at, stage in enumerate(report.stages):
        fixed = _fixed_lines(report.fixed[at])
        if isinstance(stage, Methods):
            title = f"stage {at}: {counted(len(stage.calls), 'method call')}"
            parts.append(block("methods", title, lines([*_method_lines(stage), *fixed])))
        else:
            parts.append(_html(stage, f"stage {at}: {_title(stage)}", _stage_totals(stage)))
            parts += map(line, fixed)
    return block("step", _step_title(report), *parts, pairs(_step_totals(report)))


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _body(report: Report) -> list[str]:
    bundles = _bundles(report.rows)
    lines = [*_table([_HEAD, *(cells for rows in bundles for cells in _cells(rows))]), ""]
    for rows in bundles:
        lines += [f"{_calls(rows)}: {rows[0].op}", *(f"  {name:<10} {what}" for name, what in _details(rows))]
        lines += [f"    {line}" for line in _acts(rows[0])] + [""]
    return lines


def _listed(totals: Sequence[tuple[str, str]], title: str = "in all") -> list[str]:
    width = max(len(name) for name, _ in totals)
    return [title, *(f"  {name:<{width}}  {what}" for name, what in totals)]


def _bundles(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda one: one.bundle):
        found.setdefault(row.bundle, []).append(row)
    return list(found.values())


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault((row.tensors, row.dtypes, row.nbytes), []).append(row)
    return list(found.values())


def _title(report: Report) -> str:
    calls, who = counted(len(report.rows), "call"), counted(report.participants, "participant")
    return f"{report.name}: {calls}, {who}, {seconds_words(report.time_s)} estimated"


def _step_title(report: StepReport) -> str:
    calls, stages = counted(report.calls, "call"), counted(len(report.stages), "stage")
    return f"captured step: {calls} in {stages}, {counted(report.participants, 'participant')}"


def _calls(rows: Sequence[Row | Invoked]) -> str:
    return numbered([row.call for row in rows])


def _method_lines(stage: Methods) -> list[str]:
    found: dict[str, list[Invoked]] = {}
    for call in stage.calls:
        found.setdefault(call.method, []).append(call)
    return [_method_line(calls) for calls in found.values()]


def _fixed_lines(count: int) -> list[str]:
    if not count:
        return []
    return [f"fixed when captured: {counted(count, 'ref')}, {'each ' if count > 1 else ''}the same value in every run"]


def _method_line(calls: Sequence[Invoked]) -> str:
    actors = list(dict.fromkeys(call.actor for call in calls))
    more = f" and {len(actors) - MOST_ACTORS} more" if len(actors) > MOST_ACTORS else ""
    after = sorted({one for call in calls for one in call.after})
    given = f", with what {numbered(after)} {'give' if len(after) > 1 else 'gives'}" if after else ""
    return f"{_calls(calls)}: {calls[0].method} of {', '.join(actors[:MOST_ACTORS])}{more}{given}"


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table rows of a bundle; its time stands only in the first."""
    return [_line(alike, told=at == 0) for at, alike in enumerate(_alike(rows))]


def _line(rows: Sequence[Row], *, told: bool) -> tuple[str, ...]:
    row, count = rows[0], len(rows)
    each = f"{count} x " if count > 1 else ""
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
        "packed": packed and f"{packed} of {tensors} tensors travel in {kernels} kernel{'s' if kernels > 1 else ''}",
        "together": row.together and f"{row.together} of {tensors} tensors with one meeting of the ranks",
        "brought": _brought(rows),
        "bits": row.bits,
        "boxes": _boxes(row),
        "makes": made and f"{nbytes_words(made)} of output on a rank, at most",
        "scratch": scratch and f"{nbytes_words(scratch)} on a rank, at most",
    }
    return [(name, str(what)) for name, what in found.items() if what]


def _brought(rows: Sequence[Row]) -> str:
    sums: dict[tuple[tuple[int, ...], str, str], tuple[int, int]] = {}
    for one in (one for row in rows for one in row.brought):
        there, back = sums.get((one.ranks, one.device, one.memory), (0, 0))
        sums[one.ranks, one.device, one.memory] = there + one.nbytes_there, back + one.nbytes_back
    words = [
        f"rank{'s' if len(ranks) > 1 else ''} {clipped(ranks_words(ranks), MOST_RANKS)} "
        f"from {_MEMORIES.get(device, device)} to {_MEMORIES.get(memory, memory)}: "
        f"{nbytes_words(there)}, and {nbytes_words(back)} back"
        for (ranks, device, memory), (there, back) in sums.items()
    ]
    more = [f"and {len(words) - MOST_ACTS} more kinds of ranks"] if len(words) > MOST_ACTS else []
    return "; ".join([*words[:MOST_ACTS], *more])


def _boxes(row: Row) -> str:
    moved = row.moved
    if moved is None:
        return ""
    least = "" if moved.least_between < 0 else f", the least is {nbytes_words(moved.least_between)}"
    return (
        f"{moved.pieces} boxes in {counted(moved.rounds, 'round')}; {nbytes_words(moved.nbytes_between)} "
        f"between hosts{least}; staging of up to {nbytes_words(max(one.staging for one in moved.ranks))} on a rank"
    )


def _moved_lines(row: Row) -> list[str]:
    """What each rank of a reshard moves, and to whom it gives it."""
    if row.moved is None:
        return []
    lines = []
    for one in row.moved.ranks[:MOST_ACTS]:
        takers = [f"{nbytes_words(link.nbytes)} to {link.taker}" for link in row.moved.links if link.giver == one.rank]
        lines.append(
            f"rank {one.rank}: sends {nbytes_words(one.nbytes_sent)}, receives {nbytes_words(one.nbytes_received)}, "
            f"copies {nbytes_words(one.nbytes_own)}; gives {listed(takers, most=MOST_ACTORS) or 'nothing'}"
        )
    if len(row.moved.ranks) > MOST_ACTS:
        lines.append(f"and {len(row.moved.ranks) - MOST_ACTS} more ranks")
    return lines


def _acts(row: Row) -> list[str]:
    lines = _moved_lines(row)
    for act in row.acts[:MOST_ACTS]:
        who = f"rank{'s' if len(act.ranks) > 1 else ''} {clipped(ranks_words(act.ranks), MOST_RANKS)}"
        first, *others = act.steps or ("nothing but the consistency check",)
        lines += [f"{who}: {first}", *(f"{'':{len(who)}}  {step}" for step in others)]
    if len(row.acts) > MOST_ACTS:
        lines.append(f"and {len(row.acts) - MOST_ACTS} more parts of other ranks")
    return lines


def _totals(report: Report) -> list[tuple[str, str]]:
    return [("messages", f"{report.participants}, one per participant"), *_stage_totals(report)]


def _stage_totals(report: Report) -> list[tuple[str, str]]:
    memory = report.memory
    return [
        ("consistency check", f"{report.agreement}, {report.rounds} round{'s' if report.rounds > 1 else ''}"),
        ("launches", f"{report.launches}, with that of the consistency check"),
        ("bytes inside hosts", nbytes_words(report.nbytes_inside)),
        ("bytes between hosts", nbytes_words(report.nbytes_between)),
        ("outputs on a rank", nbytes_words(memory.outputs)),
        ("scratch on a rank", nbytes_words(memory.scratch)),
        ("packing on a rank", f"{nbytes_words(memory.packing)}, of {nbytes_words(report.staging)} allowed"),
        *_stand_ins(memory),
        ("chunks, at most", _chunks(memory)),
        *((f"a link {one.place} hosts", _link(one)) for one in report.links),
        ("time", f"{seconds_words(report.time_s)} after the consistency check"),
    ]


def _link(cost: LinkCost) -> str:
    return f"{seconds_words(cost.latency_s)} and {cost.bandwidth / 1e9:.3g} GB/s, {cost.source}"


def _step_totals(report: StepReport) -> list[tuple[str, str]]:
    memory, plans = report.memory, sum(isinstance(stage, Report) for stage in report.stages)
    messages = ("messages", f"{report.participants} per run, one per participant")
    if not plans:
        return [messages]
    return [
        messages,
        ("launches", f"{report.launches}, with those of {counted(plans, 'consistency check')}"),
        ("bytes inside hosts", nbytes_words(report.nbytes_inside)),
        ("bytes between hosts", nbytes_words(report.nbytes_between)),
        ("outputs on a rank", f"{nbytes_words(memory.outputs)} at most, kept until the run that follows"),
        ("scratch on a rank", nbytes_words(memory.scratch)),
        ("packing on a rank", nbytes_words(memory.packing)),
        *_stand_ins(memory),
        ("chunks, at most", _chunks(memory)),
        ("time", f"{seconds_words(report.time_s)} after the consistency checks, without the methods"),
    ]


def _stand_ins(memory: Memory) -> list[tuple[str, str]]:
    return [("stand-ins on a rank", nbytes_words(memory.stand_ins))] if memory.stand_ins else []


def _chunks(memory: Memory) -> str:
    return ", ".join(f"{name} {'unknown' if nbytes < 0 else nbytes_words(nbytes)}" for name, nbytes in memory.chunks)


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    dashes = ["-" * max(map(len, column)) for column in zip(*rows, strict=True)]
    return columns([rows[0], dashes, *rows[1:]], _RIGHT)


def _html(report: Report, title: str, totals: Sequence[tuple[str, str]]) -> Markup:
    bundles = _bundles(report.rows)
    rows = [row for rows in bundles for row in _html_rows(rows)]
    calls = table(_HEAD, rows, right=_RIGHT, most=len(rows))
    return block("plan", title, calls, traffic(bundles), course(report), pairs(totals))


def _html_rows(rows: Sequence[Row]) -> list[tuple[str, ...] | Markup]:
    why, *details = _details(rows)
    told = "\n".join([*(f"{name}: {what}" for name, what in details), *_acts(rows[0])])
    return [*_cells(rows), across(folded(" ".join(why), told), len(_HEAD))]
