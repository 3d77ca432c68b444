"""What `raycollect bench` times: a collective between actors, in several ways, over a range of sizes.

Sizes and bandwidths are those of nccl-tests (see `raycollect.observe.summary`): the bytes of an allgather are those of
its result, of a reduce-scatter and an all-to-all those of what a rank gives. The tensors are float32 and lie in the
arena. All ways have the same ones, and take turns.

Each result is first checked against numpy's, on random integers that float32 adds up exactly in any order. While it is
timed the tensors hold zeros, as sums in place would grow beyond all bounds.

Files: ``operations`` (what is called, and the actors), ``measuring`` (the ways, in turn), ``result`` (rows, as tables
and as a picture).
"""

from __future__ import annotations

from raycollect.bench.measuring import WAYS, Settings, measure
from raycollect.bench.operations import OPERATIONS
from raycollect.bench.result import Result, Row, draw, table

__all__ = ["OPERATIONS", "WAYS", "Result", "Row", "Settings", "draw", "measure", "table"]
