"""Writes the tables of benchmarks in the documents: ``python docs/results.py --write``, after ``make bench``.

All numbers are from ``benchmarks/results/*.json``. A comment before each table says what it shows, such as
``<!-- results: driver | allreduce -->`` (suite and operation), and ends with ``<!-- end of results -->``.
``--check`` writes nothing, and ends with 1 if something is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).with_name("performance.md")
PAGES = (PAGE, Path(__file__).parents[1] / "README.md")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

_SECTION = re.compile(
    r"(?P<begin><!-- results: (?P<what>[^>]+?) -->\n)(?P<body>.*?)(?P<end><!-- end of results -->)", re.S
)
_OURS, _RAY = "raycollect", "ray.util.collective"
_INSIDE = f"{_RAY} inside the method"
_MB = 1 << 20
_OF_A_SUITE = frozenset({"load before", "huge pages", "huge pages of shared memory"})
"""Fields of a machine's description that differ between suites, or are of no use to a reader."""


def fill(text: str) -> str:
    """A page with its tables as the results have them.

    Raises:
        LookupError: It asks for results that do not exist.
    """
    return _SECTION.sub(lambda found: f"{found['begin']}\n{_body(found['what'])}\n\n{found['end']}", text)


def read(suite: str) -> dict[str, Any]:
    """What was measured; see `benchmarks.report.Report`."""
    found: dict[str, Any] = json.loads((RESULTS / f"{suite}.json").read_text(encoding="utf-8"))
    return found


def _body(what: str) -> str:
    if what in _WHOLE:
        return _WHOLE[what]()
    suite, _, op = (part.strip() for part in what.partition("|"))
    rows = [row for row in read(suite)["rows"] if row["op"] == op]
    if not rows:
        raise LookupError(f"benchmarks/results/{suite}.json has no operation {op!r}")
    cases = sorted({(row["ranks"], row["nbytes"]) for row in rows})
    several = len({ranks for ranks, _ in cases}) > 1
    by_case = {(row["contender"], row["ranks"], row["nbytes"]): row["median_ms"] for row in rows}
    body = [
        [_strong(contender), *(_number(by_case.get((contender, *case))) for case in cases)]
        for contender in dict.fromkeys(row["contender"] for row in rows)
    ]
    return _table(["median, ms", *(_case(ranks, nbytes, several) for ranks, nbytes in cases)], body)


def _machine() -> str:
    machines = {path.stem: read(path.stem)["machine"] for path in sorted(RESULTS.glob("*.json"))}
    loads = sorted(float(machine["load before"]) for machine in machines.values())
    names = [name for name in next(iter(machines.values())) if name not in _OF_A_SUITE]
    rows = [[name, _by_suite({suite: machine.get(name, "") for suite, machine in machines.items()})] for name in names]
    return _table(["what", "it was"], [*rows, ["load before the suites", f"{loads[0]:g} to {loads[-1]:g}"]])


def _by_suite(values: Mapping[str, str]) -> str:
    """A value that all suites share; else each value with the suites that were measured with it."""
    suites: dict[str, list[str]] = {}
    for suite, value in values.items():
        suites.setdefault(value, []).append(suite)
    if len(suites) == 1:
        return next(iter(suites))
    return "; ".join(f"{value or 'none'} ({', '.join(found)})" for value, found in suites.items())


def _iteration() -> str:
    rows = [row for row in read("iteration")["rows"] if row["op"] == "methods of 0 ms"]
    cases = {(row["contender"], row["nbytes"], row["ranks"]): row["median_ms"] for row in rows}
    ranks = sorted({row["ranks"] for row in rows})[:2]
    sizes = sorted({row["nbytes"] for row in rows})
    body = [
        [_strong(contender)]
        + [" / ".join(f"{cases[_INSIDE, size, n] / cases[contender, size, n]:.2g}" for n in ranks) for size in sizes]
        for contender in dict.fromkeys(row["contender"] for row in rows)
        if contender != _INSIDE
    ]
    return _table([f"times faster, {' / '.join(map(str, ranks))} actors", *map(_size, sizes)], body)


def _headline() -> str:
    rows = []
    for told, suite, op, nbytes, ours in _HEADLINE:
        found = [row for row in read(suite)["rows"] if row["op"] == op and row["nbytes"] == nbytes]
        least = min(row["ranks"] for row in found)
        by_name = {row["contender"]: row["median_ms"] for row in found if row["ranks"] == least}
        theirs = min(time_ms for name, time_ms in by_name.items() if name.startswith(_RAY))
        rows.append([told, _number(by_name[ours]), _number(theirs), _times(theirs / by_name[ours])])
    return _table(["ms", _strong(_OURS), _RAY, "faster"], rows)


def _targets() -> str:
    judged = [one for path in sorted(RESULTS.glob("*.json")) for one in read(path.stem)["judged"]]
    missed = [one["said"] for one in judged if not one["reached"]]
    return "\n".join(
        [f"{len(judged) - len(missed)} of {len(judged)} targets were reached. These were not:", ""]
        + [f"- {said}" for said in missed]
    )


_HEADLINE = (
    ("a call after 10 ms: allreduce of 4 B", "cold", "pauses of 10 ms", 4, "raycollect, arena"),
    ("a call: allreduce of 1 MB", "driver", "allreduce", _MB, "raycollect, arena"),
    ("a call: allreduce of 64 MB", "driver", "allreduce", 64 * _MB, "raycollect, arena"),
    ("in a loop: allreduce of 1 MB, captured", "captured", "allreduce", _MB, "raycollect, captured"),
    ("200 broadcasts of 4 KB in a batch", "batch", "200 broadcasts", 200 << 12, "raycollect, batch"),
    ("a send of 1 MB from actor to actor", "p2p", "send", _MB, "raycollect, arena"),
)
"""What is said, the suite, the operation, the bytes, and the contender that is ours."""

_WHOLE: Mapping[str, Callable[[], str]] = {
    "headline": _headline,
    "iteration": _iteration,
    "machine": _machine,
    "targets": _targets,
}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, rule, *rows))


def _strong(contender: str) -> str:
    return f"**{contender}**" if contender.startswith(_OURS) else contender


def _case(ranks: int, nbytes: int, several: bool) -> str:
    parts = [f"{ranks} ranks"] if several or not nbytes else []
    return ": ".join([*parts, _size(nbytes)] if nbytes else parts)


def _size(nbytes: int) -> str:
    for unit, name in ((_MB, "MB"), (1 << 10, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def _times(ratio: float) -> str:
    return f"{ratio:.1f} times" if ratio < 10 else f"{ratio:.0f} times"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value < 1 else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description="The tables of benchmarks in the documents.")
    parser.add_argument("--write", action="store_true", help="write them into the pages")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is out of date")
    arguments = parser.parse_args(argv)
    stale = [page for page in PAGES if fill(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    for page in stale:
        if arguments.write:
            page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"{page} was written")
        else:
            print(f"{page} is out of date; correct it by --write")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
