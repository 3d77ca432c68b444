"""The environment that programs run in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raycollect.backends import arrays
from raycollect.core.model import TensorInfo
from raycollect.core.protocols import Faults
from raycollect.engine.fusion_buffer import FusionPool
from raycollect.engine.run_cache import RunCache
from raycollect.observe import Counters, Recorder, Tracer
from raycollect.pos import Store

# Where faults can be injected.
POINTS = (
    "start",
    "before_check",
    "after_check",
    "before_kernel",
    "after_kernel",
    "before_commit",
    "after_commit",
    "end",
)


@dataclass(slots=True, kw_only=True, eq=False)
class Instruments:
    """The environment of programs. A process has one; `faults` may change, the rest does not."""

    store: Store
    recorder: Recorder  # of events, for error reports
    clock: Callable[[], float]  # in seconds; never goes back
    faults: Faults | None = None  # injected by `raycollect.testing` and by tests
    allocate: Callable[[TensorInfo], Any] = arrays.empty  # outputs, scratch, staging; raises MemoryError
    staging: FusionPool = field(default_factory=FusionPool)
    cache: RunCache = field(default_factory=RunCache)
    tracer: Tracer = field(default_factory=Tracer)
    counters: Counters = field(default_factory=Counters)
