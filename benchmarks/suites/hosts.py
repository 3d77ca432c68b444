"""Allreduce and broadcast over three hosts with two actors each, on links of 1 and 10 Gbit/s.

The hosts are network namespaces of this machine, whose kernel shapes their links (without a delay); so it needs root.
Beside the times stand the bytes that the busiest link sends, and the fewest possible.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import names, on_hosts
from benchmarks.report import Record
from benchmarks.suite import Choice

NAME = "hosts"
TITLE = "over three hosts with two actors each, float32, called from the driver"
REFERENCE = names.RAY
NEEDS_RAY = False  # the hosts have a cluster of their own


def measure(choice: Choice) -> Iterator[Record]:
    """Measures on links that are all alike."""
    choice.progress(f"{NAME}: starts three hosts")
    yield from on_hosts.measured(NAME, choice)
