"""Writes the support matrix as Markdown, from the capability table, the planner's substitutes and the reduction rules.

``python docs/support_matrix.py --write docs/backends.md`` writes the tables between the markers there;
``--check`` only checks whether they are up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from raycollect.backends import BACKENDS
from raycollect.backends.capabilities import BUILT_IN, Capabilities
from raycollect.backends.folds import refusal_reason
from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.operations import OPERATIONS

__all__ = ["reduction_table", "support_matrix", "write"]

DTYPES = (
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "longdouble", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("complex64", "complex128"),
)
"""The dtypes of the reduction table. Equal rows are merged."""

DEVICES = {"cpu": "CPU", "cuda": "CUDA", "xpu": "XPU", "npu": "NPU", "tpu": "TPU", "any": "any"}

_LEGEND = """\
N: reduced by the backend's library; the same bits on all ranks. F: moved as bytes and folded in rank order by numpy,
floats of 16 and 8 bits in float32; the same bits whatever the chunks. ✘: has no meaning, and is refused. On bool, SUM
is a logical or and PRODUCT a logical and."""

_RUNS, _MADE, _REFUSED = "✔", "✔ ({})", "✘"


def support_matrix(lines: Sequence[Capabilities] = tuple(BUILT_IN.values())) -> str:
    """Returns the table operation x backend x device, and the meaning of its marks.

    Args:
        lines: The backends; those of the package by default.
    """
    columns = [(line, device) for line in lines for device in sorted(line.devices)]
    notes: dict[str, int] = {}
    rows = [
        ["Backend", *(f"`{line.name}`" for line, _ in columns)],
        ["Device", *(DEVICES.get(device, device) for _, device in columns)],
    ]
    rows.append(["Status", *(_status(line) for line, _ in columns)])
    rows += [[f"`{kind.value}`", *(_mark(kind, line, notes) for line, _ in columns)] for kind in OpKind]
    text = [*_table(rows), "", f"{_RUNS} the backend runs it. {_REFUSED} refused before anything runs, by name."]
    text += [f"({number}) made by the planner, as {made}." for made, number in notes.items()]
    untested = ", ".join(f"`{line.name}`" for line in lines if not line.tested)
    if untested:
        text.append(f"Not tested here, for want of the hardware or the library: {untested}.")
        text.append(
            "Experimental: never run on its devices; a process that uses it warns once (`ExperimentalWarning`)."
        )
    return "\n".join(_paragraphs(text)) + "\n"


def _status(line: Capabilities) -> str:
    return "tested" if line.tested else "experimental" if line.is_experimental else "untested"


def reduction_table(lines: Sequence[Capabilities] = tuple(BUILT_IN.values())) -> str:
    """Returns a table dtype x reduce op for each backend that is tested here; backends with equal tables share one."""
    bodies: dict[str, list[str]] = {}
    for line in lines:
        if line.tested:
            body = "\n".join(_table([["dtype", *(op.name for op in ReduceOp)], *_reductions(line)]))
            bodies.setdefault(body, []).append(f"`{line.name}`")
    text = [_LEGEND]
    for body, names in bodies.items():
        text += ["", f"{', '.join(names)}:", "", body]
    return "\n".join(text) + "\n"


def write(path: Path, *, check: bool = False) -> bool:
    """Puts the tables between the markers of a file.

    Args:
        path: The file.
        check: Whether to leave it unchanged.

    Returns:
        Whether the file had different tables.

    Raises:
        ValueError: It has none of the markers.
    """
    before = path.read_text(encoding="utf-8")
    after, found = before, 0
    for name, make in _SECTIONS.items():
        begin, end = f"<!-- {name}: written by python docs/support_matrix.py -->", f"<!-- end of {name} -->"
        section = re.compile(f"(?<={re.escape(begin)}).*?(?={re.escape(end)})", re.DOTALL)
        after, count = section.subn(partial(_between, f"\n\n{make()}\n"), after)
        found += count
    if not found:
        raise ValueError(f"{path} has no marker of {' or '.join(_SECTIONS)}")
    if after != before and not check:
        path.write_text(after, encoding="utf-8")
    return after != before


_SECTIONS: dict[str, Callable[[], str]] = {"support matrix": support_matrix, "reduction table": reduction_table}


def _between(text: str, _match: re.Match[str]) -> str:
    return text


def _mark(kind: OpKind, line: Capabilities, notes: dict[str, int]) -> str:
    if kind in line.ops:
        return _RUNS
    ways = OPERATIONS[kind].substitutes if kind in OPERATIONS else ()
    parts = next((parts for parts in ways if line.ops and line.ops.issuperset(parts)), None)
    if parts is None:
        return _REFUSED
    made = " and ".join(f"`{part.value}`" for part in parts) or "the ranks' agreement alone"
    return _MADE.format(notes.setdefault(made, len(notes) + 1))


def _reductions(line: Capabilities) -> list[list[str]]:
    is_native = getattr(import_module(line.module), "is_native", None)

    def mark(dtype: str, op: ReduceOp) -> str:
        if refusal_reason(op, dtype) or op not in line.reduce_ops:
            return _REFUSED
        return "N" if is_native is not None and is_native(op, dtype) else "F"

    marks: dict[tuple[str, ...], list[str]] = {}
    for dtype in DTYPES:
        marks.setdefault(tuple(mark(dtype, op) for op in ReduceOp), []).append(dtype)
    return [[", ".join(alike), *row] for row, alike in marks.items()]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = rows
    rule = ["---", *[":-:"] * (len(head) - 1)]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *body)]


def _paragraphs(lines: Sequence[str]) -> list[str]:
    """Markdown joins lines of text; a blank line between them keeps them apart."""
    apart: list[str] = []
    for line in lines:
        if apart and line and apart[-1] and not line.startswith("|"):
            apart.append("")
        apart.append(line)
    return apart


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python docs/support_matrix.py", description="Writes what runs where; without options, prints it."
    )
    parser.add_argument("--write", nargs="+", type=Path, default=[], metavar="FILE", help="between the markers there")
    parser.add_argument("--check", nargs="+", type=Path, default=[], metavar="FILE", help="exit with 1 if out of date")
    arguments = parser.parse_args(argv)
    if not (arguments.write or arguments.check):
        print(support_matrix(tuple(BACKENDS.values())), reduction_table(), sep="\n", end="")
    for path in arguments.write:
        if write(path):
            print(f"{path} was written")
    stale = [str(path) for path in arguments.check if write(path, check=True)]
    if stale:
        print(f"out of date: {', '.join(stale)}; correct it by --write")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
