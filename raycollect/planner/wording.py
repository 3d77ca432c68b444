"""Quantities and ranks in words."""

from __future__ import annotations

from collections.abc import Collection, Sequence


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
    """Rows as lines of text; the first row has the titles. Columns named in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if title in right else "<" for title in rows[0]]
    forms = [f"{side}{width}" for side, width in zip(sides, widths, strict=True)]
    return ["  ".join(map(format, row, forms)) for row in rows]
