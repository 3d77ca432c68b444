"""What `raycollect bench` times: a collective between actors, in several ways, over a range of sizes.

Sizes and bandwidths are those of nccl-tests (see `raycollect.observe.summary`): the bytes of an allgather are those of
its result; those of a reduce-scatter and an all-to-all are what a rank gives. The tensors are float32 and lie in the
arena. All ways use the same tensors, and alternate.

Each result is first checked against numpy's, on random integers that float32 adds up exactly in any order. While it is
timed the tensors hold zeros, since sums in place would overflow.
"""

from __future__ import annotations

from raycollect.cli.bench.measuring import WAYS, Settings, measure
from raycollect.cli.bench.operations import OPERATIONS
from raycollect.cli.bench.result import Result, Row, draw, table

__all__ = ["OPERATIONS", "WAYS", "Result", "Row", "Settings", "draw", "measure", "table"]
