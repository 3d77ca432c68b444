"""How much memory an allreduce takes beside its operands: the peak of resident memory of each actor's process.

Everything but the operation at that size has happened before: the operands are there and written, the group has worked
at a small size. Then the kernel's peak is reset (``/proc/self/clear_refs``), one allreduce runs, and the peak is read.
Shared memory counts for every process that has touched it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import ray

from benchmarks import names
from benchmarks.crew import Contestant
from benchmarks.ours import RaycollectAllreduce
from benchmarks.report import Peak, Record, Skip, size
from benchmarks.suite import Choice, close, entry, gather
from benchmarks.targets import MB
from benchmarks.theirs import RayAllreduce

NAME = "memory"
TITLE = "peak memory"
REFERENCE = names.RAY
NEEDS_RAY = True

CONTENDERS: dict[str, Callable[..., Contestant]] = {
    names.ORDINARY: RaycollectAllreduce,
    names.ARENA: partial(RaycollectAllreduce, arena=True),
    names.RAY: RayAllreduce,
}
SIZES = (64 * MB,)
_WARMUP_NBYTES = 4096
_WARMUP_RUNS = 3


def measure(choice: Choice) -> Iterator[Record]:
    """Measures one contender after the other: where all have actors at once, they compete for memory."""
    for ranks in choice.ranks or (2,):
        for name, make in CONTENDERS.items():
            for nbytes in choice.sizes or SIZES:
                choice.progress(f"{NAME}: {name}, {ranks} actors, {size(nbytes)}")
                contenders, skipped = gather(NAME, [entry(name, make, ranks)])
                yield from skipped
                yield from (_measure(contender, nbytes) for contender in contenders)
                close(contenders)


def _measure(contender: Contestant, nbytes: int) -> Peak | Skip:
    actors = contender.actors
    contender.prepare(_WARMUP_NBYTES)
    contender.fill()
    contender.run(_WARMUP_RUNS)
    contender.check(_WARMUP_RUNS)
    contender.prepare(nbytes)
    contender.fill()
    try:
        before = ray.get([actor.reset_peak.remote() for actor in actors])
    except OSError as exc:
        return Skip(suite=NAME, contender=contender.name, reason=f"no peak of memory to be had here: {exc}")
    contender.run(1)
    peaks = ray.get([actor.peak.remote() for actor in actors])
    contender.check(1)
    extra = tuple(max(0, peak - resident) for peak, resident in zip(peaks, before, strict=True))
    return Peak(op="allreduce", ranks=len(actors), nbytes=nbytes, contender=contender.name, extra_nbytes=extra)
