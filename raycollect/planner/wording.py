"""Quantities and ranks of a plan in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import OPERATIONS
from raycollect.planner.ir import Request
from raycollect.planner.template import Local

PEER: dict[OpKind | Local, str] = {
    OpKind.RECV: "from",
    **{kind: "to" if spec.takes == "root" else "from" for kind, spec in OPERATIONS.items() if spec.root},
    OpKind.SEND: "to",
}
"""Operation -> the preposition before its peer."""


def nbytes_words(nbytes: float) -> str:
    """Bytes in the unit that fits: ``"1.5 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1023.95:  # which four digits would round up to 1024
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"


def seconds_words(seconds: float) -> str:
    """Seconds in the unit that fits: ``"3.1 ms"``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} us"


def counted(count: int, noun: str) -> str:
    """A count with its noun: ``"1 call"``, ``"3 calls"``, ``"3 boxes"``."""
    ending = "es" if noun.endswith(("s", "x")) else "s"
    return f"{count} {noun}{'' if count == 1 else ending}"


def op_words(request: Request) -> str:
    """An operation with its reduce op and root: ``"reduce sum to rank 1"``."""
    name = request.name
    words = [name, *reduce_op_words(request.op)]
    if request.kind is OpKind.SEND:
        words.append(f"from rank {request.root} to rank {request.peer}")
    elif request.kind in PEER:
        words.append(f"{PEER[request.kind]} rank {request.root}")
    return " ".join(words)


def ranks_words(ranks: Sequence[int]) -> str:
    """Ranks, with runs as ranges: ``"0-3, 6"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[1]}" for run in runs)


def columns(rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Rows as lines of text; the first one has the titles, of which those in `right` have their cells on that side."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if title in right else "<" for title in rows[0]]
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(map(format, row, forms)) for row in rows]


def clipped(words: str, most: int) -> str:
    """A list of ranks, cut with an ellipsis where it is too long."""
    return words if len(words) <= most else f"{words[: most - 5].rpartition(',')[0]}, ..."


def numbered(calls: Sequence[int]) -> str:
    """Calls by their numbers: ``"calls 0-3"``."""
    return f"call{'s' if len(calls) > 1 else ''} {ranks_words(calls)}"


def reduce_op_words(op: ReduceOp | None) -> list[str]:
    """The name of a reduce operation, as a list of one word, or none."""
    return [] if op is None else [op.name.lower()]
