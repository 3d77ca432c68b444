"""What the library has to reach, as a table, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import names
from benchmarks.report import Judged, Report, size

KB, MB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How many times faster than a peer the library has to be.

    Attributes:
        suite: The suite that measures both.
        op: The operation.
        ranks: The number of processes.
        nbytes: Bytes per rank.
        contender: The name of the contender that has to reach the target.
        peer: The name of the contender that it is compared with.
        ratio: The least ratio of the peer's median to the contender's; below 1: the contender may take longer.
    """

    suite: str
    op: str
    ranks: int
    nbytes: int
    contender: str
    peer: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """How much extra memory an operation may take on each rank.

    Attributes:
        op: The operation.
        nbytes: Bytes per rank.
        contender: The name of the contender.
        most_nbytes: The limit in bytes.
    """

    op: str
    nbytes: int
    contender: str
    most_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target beside what was measured.

    Attributes:
        target: The target.
        measured: The ratio, or the most bytes on any rank; None if a contender was not measured.
    """

    target: Target | Ceiling
    measured: float | None

    @property
    def reached(self) -> bool:
        """Whether the target was measured and reached."""
        if self.measured is None:
            return False
        if isinstance(self.target, Ceiling):
            return self.measured <= self.target.most_nbytes
        return self.measured >= self.target.ratio

    def in_words(self) -> Judged:
        """The verdict for a reader."""
        return Judged(said=_said(self.target, self.measured), reached=self.reached)


def _said(target: Target | Ceiling, measured: float | None) -> str:
    if isinstance(target, Ceiling):
        value = "?" if measured is None else f"{measured / 2**20:.1f}"
        limit = f"target at most {target.most_nbytes / 2**20:g}"
        return f"{target.op}, {size(target.nbytes)}, {target.contender}: {value} MB extra ({limit})"
    case = f"{target.suite} {target.op}, {target.ranks} ranks, {size(target.nbytes)}, {target.contender}: "
    if target.ratio < 1:
        value = "?" if not measured else f"{1 / measured:.2f}"
        return f"{case}{value} times as long as {target.peer} (target at most {1 / target.ratio:.3g})"
    value = "?" if measured is None else f"{measured:.2f}"
    return f"{case}{value} times faster than {target.peer} (target {target.ratio:g})"


def _targets(
    suite: str, op: str, contender: str, peer: str, ratios: dict[int, float], ranks: int = 2
) -> tuple[Target, ...]:
    return tuple(
        Target(suite=suite, op=op, ranks=ranks, nbytes=nbytes, contender=contender, peer=peer, ratio=ratio)
        for nbytes, ratio in ratios.items()
    )


_TO_TORCH = {4: 4.0, 64 * KB: 15.0, MB: 5.0, 16 * MB: 5.0, 64 * MB: 5.0}
_TO_MPICH = {MB: 2.5, 16 * MB: 2.5, 64 * MB: 2.5}
_TCP_TO_XOSCAR = {4: 1.0, 64 * KB: 2.0, MB: 2.0, 16 * MB: 1.3, 64 * MB: 1.3}
_STEP = {ranks: {4: least, 64 * KB: 6.0, MB: 5.0, 16 * MB: 2.6} for ranks, least in ((2, 8.0), (4, 6.0))}
"""How much faster a step is than `ray.util.collective` inside the method, by ranks and bytes."""
_EAGER = {ranks: {4: 0.9, 64 * KB: 1.1, MB: least, 16 * MB: 2.0} for ranks, least in ((2, 1.5), (4, 1.3))}
"""The same of a call on fresh refs."""
_MANY = 200 * 4 * KB
_NEARLY_ONE = 1 / 1.3
"""How much faster many tensors have to be than one of the same bytes: at most 1.3 times slower."""
_RECORDED = 0.98
"""Recording a timeline may take 2 % of the time of a collective."""
_EVERY_SIZE = dict.fromkeys((4, 64 * KB, MB, 16 * MB, 64 * MB), 4.0)

TARGETS: tuple[Target | Ceiling, ...] = (
    *_targets("kernel", "allreduce", names.SHM_ARENA, names.TORCH, _TO_TORCH),
    *_targets("kernel", "allreduce", names.SHM_ARENA, names.MPICH, _TO_MPICH),
    *_targets("kernel", "allreduce", names.SHM_ARENA, names.LIMIT, {64 * MB: 0.85}),
    *_targets("kernel", "allreduce", names.TCP, names.XOSCAR, _TCP_TO_XOSCAR),
    *_targets("ddp", "step", names.HOOK, names.TORCH, dict.fromkeys((4 * MB, 16 * MB, 64 * MB), 1.5)),
    *_targets("driver", "allreduce", names.ARENA, names.RAY, {4: 5.0, MB: 3.5, 64 * MB: 5.0}),
    *_targets("driver", "allreduce", names.ORDINARY, names.RAY, {64 * MB: 2.0}),
    *_targets("driver", "allreduce", names.ARENA, names.RAY, {4: 5.0, MB: 3.5, 64 * MB: 3.5}, ranks=4),
    *(
        target
        for ranks in (2, 4)
        for target in (
            *_targets("iteration", "methods of 0 ms", names.STEP, names.RAY_INSIDE, _STEP[ranks], ranks),
            *_targets("iteration", "methods of 0 ms", names.EAGER, names.RAY_INSIDE, _EAGER[ranks], ranks),
            *_targets("cold", "pauses of 10 ms", names.CAPTURED, names.PING, {4: 0.5}, ranks),
        )
    ),
    *_targets("captured", "allreduce", names.CAPTURED, names.RAY, {4: 12.0, MB: 10.0}),
    *_targets("captured", "allreduce", names.CAPTURED, names.RAY, {4: 13.0}, ranks=4),
    *_targets("captured", "allreduce", names.CAPTURED, names.GRAPH, {4: 40.0, MB: 40.0}),
    *_targets("timeline", "captured allreduce", names.RECORDED, names.UNRECORDED, {4: _RECORDED, MB: _RECORDED}),
    *_targets("timeline", "allreduce_refs", names.RECORDED, names.UNRECORDED, {MB: _RECORDED}),
    *_targets("p2p", "send", names.ORDINARY, names.RDT, _EVERY_SIZE),
    *_targets("p2p", "send", names.ARENA, names.RDT, _EVERY_SIZE),
    *_targets("p2p", "send", names.ARENA, names.STORE, {64 * MB: 4.0}),
    *_targets("batch", "200 broadcasts", names.BATCH, names.CALLS, {_MANY: 30.0}),
    *_targets("batch", "200 broadcasts", names.BATCH, names.RAY_CALLS, {_MANY: 30.0}),
    *_targets("batch", "200 broadcasts", names.BATCH, names.RAY, {_MANY: 4.0}),
    *_targets("batch", "allreduce of 200", names.NAMED, names.ONE, {_MANY: _NEARLY_ONE, 16 * _MANY: _NEARLY_ONE}),
    *_targets(
        "batch", "allreduce of 200", names.NAMED_ARENA, names.ONE_ARENA, {_MANY: _NEARLY_ONE, 16 * _MANY: _NEARLY_ONE}
    ),
    Ceiling(op="allreduce", nbytes=64 * MB, contender=names.ORDINARY, most_nbytes=16 * MB),
)


def judge(report: Report, targets: Sequence[Target | Ceiling] = TARGETS) -> list[Verdict]:
    """Compares the results with those targets whose case was measured, by any contender."""
    verdicts = []
    for target in targets:
        if isinstance(target, Ceiling):
            case: tuple[object, ...] = (target.op, target.nbytes)
            values = {
                peak.contender: float(max(peak.extra_nbytes))
                for peak in report.memory
                if (peak.op, peak.nbytes) == case
            }
            measured = values.get(target.contender)
        else:
            case = (target.suite, target.op, target.ranks, target.nbytes)
            values = {
                row.contender: row.median_ms
                for row in report.rows
                if (row.suite, row.op, row.ranks, row.nbytes) == case
            }
            ours, peer = values.get(target.contender), values.get(target.peer)
            measured = peer / ours if ours and peer else None
        if values:
            verdicts.append(Verdict(target=target, measured=measured))
    return verdicts
