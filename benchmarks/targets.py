"""What was asked of the library, as a table, and whether it is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import Judged, Report, size
from benchmarks.suite import KB, MB


@dataclass(frozen=True, slots=True)
class Target:
    """How many times faster than a peer a contender has to be; below 1, it may take longer."""

    suite: str
    op: str
    ranks: int
    nbytes: int
    contender: str
    peer: str
    ratio: float

    def judge(self, times_ms: dict[str, float]) -> Judged:
        """Compares the medians of a case, by contender."""
        ours, peers = times_ms.get(self.contender), times_ms.get(self.peer)
        ratio = peers / ours if ours and peers else 0.0
        value, limit, comparison = ratio, f"target {self.ratio:g}", "times faster than"
        if self.ratio < 1:
            value, comparison = (1 / ratio if ratio else 0.0), "times as long as"
            limit = f"target at most {1 / self.ratio:.3g}"
        said = f"{value:.2f} {comparison} {self.peer}" if ratio else f"not measured beside {self.peer}"
        case = f"{self.suite} {self.op}, {self.ranks} ranks, {size(self.nbytes)}, {self.contender}"
        return Judged(said=f"{case}: {said} ({limit})", reached=ratio >= self.ratio)


def _targets(
    suite: str, op: str, contender: str, peer: str, ratios: dict[int, float], ranks: int = 2
) -> Sequence[Target]:
    return [Target(suite, op, ranks, nbytes, contender, peer, ratio) for nbytes, ratio in ratios.items()]


_RAY, _INSIDE, _ARENA = "ray.util.collective", "ray.util.collective inside the method", "raycollect, arena"
_STEP = {ranks: {4: least, 64 * KB: 6.0, MB: 5.0, 16 * MB: 2.6} for ranks, least in ((2, 8.0), (4, 6.0))}
_EAGER = {ranks: {4: 0.9, 64 * KB: 1.1, MB: least, 16 * MB: 2.0} for ranks, least in ((2, 1.5), (4, 1.3))}
_TO_TORCH = {4: 4.0, 64 * KB: 15.0, MB: 5.0, 16 * MB: 5.0, 64 * MB: 5.0}
_TO_XOSCAR = {4: 1.0, 64 * KB: 2.0, MB: 2.0, 16 * MB: 1.3, 64 * MB: 1.3}
_EVERY_SIZE = dict.fromkeys((4, 64 * KB, MB, 16 * MB, 64 * MB), 4.0)
_MANY = 200 * 4 * KB

TARGETS = [
    *_targets("driver", "allreduce", _ARENA, _RAY, {4: 5.0, MB: 3.5, 64 * MB: 5.0}),
    *_targets("driver", "allreduce", "raycollect", _RAY, {64 * MB: 2.0}),
    *_targets("driver", "allreduce", _ARENA, _RAY, {4: 5.0, MB: 3.5, 64 * MB: 3.5}, ranks=4),
    *_targets("cold", "pauses of 10 ms", "raycollect, captured", "bare ping", {4: 0.5}),
    *_targets("cold", "pauses of 10 ms", "raycollect, captured", "bare ping", {4: 0.5}, ranks=4),
    *_targets("batch", "200 broadcasts", "raycollect, batch", "raycollect, a call each", {_MANY: 30.0}),
    *_targets("batch", "200 broadcasts", "raycollect, batch", f"{_RAY}, a call each", {_MANY: 30.0}),
    *_targets("batch", "200 broadcasts", "raycollect, batch", _RAY, {_MANY: 4.0}),
    *(
        target
        for n in _STEP
        for target in _targets("iteration", "methods of 0 ms", "raycollect, col.step", _INSIDE, _STEP[n], n)
    ),
    *(
        target
        for n in _EAGER
        for target in _targets("iteration", "methods of 0 ms", "raycollect, eager", _INSIDE, _EAGER[n], n)
    ),
    *_targets("captured", "allreduce", "raycollect, captured", _RAY, {4: 12.0, MB: 10.0}),
    *_targets("captured", "allreduce", "raycollect, captured", _RAY, {4: 13.0}, ranks=4),
    *_targets("p2p", "send", "raycollect", "Ray Direct Transport", _EVERY_SIZE),
    *_targets("p2p", "send", _ARENA, "Ray Direct Transport", _EVERY_SIZE),
    *_targets("p2p", "send", _ARENA, "object store", {64 * MB: 4.0}),
    *_targets("kernel", "allreduce", "raycollect shm, arena", "torch gloo", _TO_TORCH),
    *_targets("kernel", "allreduce", "raycollect shm, arena", "MPICH", dict.fromkeys((MB, 16 * MB, 64 * MB), 2.5)),
    *_targets("kernel", "allreduce", "raycollect shm, arena", "limit", {64 * MB: 0.85}),
    *_targets("kernel", "allreduce", "raycollect tcp", "xoscar gloo", _TO_XOSCAR),
]


def judge(report: Report) -> list[Judged]:
    """Judges those targets of which a case was measured."""
    verdicts = []
    for target in TARGETS:
        case = target.suite, target.op, target.ranks, target.nbytes
        rows = [row for row in report.rows if (row.suite, row.op, row.ranks, row.nbytes) == case]
        if rows:
            verdicts.append(target.judge({row.contender: row.median_ms for row in rows}))
    return verdicts
