"""Which algorithm the planner takes on links that differ, and how long each takes by force.

Twenty shapes are drawn at random, always the same: the links of three hosts, an operation, its size and root, and a
backend that has a choice. Hosts are as in `hosts`.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import on_hosts
from benchmarks.report import Record
from benchmarks.suite import Choice

NAME = "uneven"
TITLE = "algorithms over three hosts with two actors each, on links that differ"
REFERENCE = "raycollect, native"
NEEDS_RAY = False


def measure(choice: Choice) -> Iterator[Record]:
    """Measures on links drawn at random."""
    choice.progress(f"{NAME}: starts three hosts")
    yield from on_hosts.measured(NAME, choice)
