"""What the library has to reach, as a table, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import names
from benchmarks.report import Judged, Report, Row, size

KB, MB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How many times faster than a peer the library has to be; beside the limit: what share of it it has to reach.

    Attributes:
        suite: The suite that measures both.
        op: The operation.
        ranks: How many processes take part.
        nbytes: Bytes per rank.
        contender: Who has to be faster.
        peer: Than whom.
        ratio: The peer's median over the contender's, at least.
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
        contender: Whose.
        most_nbytes: At most.
    """

    op: str
    nbytes: int
    contender: str
    most_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """How long something may take.

    Attributes:
        suite: The suite that measures it.
        op: The operation.
        ranks: How many ranks.
        contender: Whose.
        most_ms: At most, in milliseconds.
    """

    suite: str
    op: str
    ranks: int
    contender: str
    most_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How much of a contender's time one part of its work may take.

    Attributes:
        suite: The suite that measures it.
        op: The operation, which names the part.
        ranks: How many processes take part.
        nbytes: Bytes per rank.
        contender: Who does all of the work.
        without: Who does the same but for that part.
        most: The share of the contender's median by which it is longer, at most.
    """

    suite: str
    op: str
    ranks: int
    nbytes: int
    contender: str
    without: str
    most: float


Goal = Target | Ceiling | Deadline | Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A target beside what was measured.

    Attributes:
        target: The target.
        found: The ratio, the most bytes on any rank, the milliseconds, or the share; None where somebody was not
            measured.
    """

    target: Goal
    found: float | None

    @property
    def reached(self) -> bool:
        """Whether it was measured, and is good enough: what was not measured does not pass."""
        if self.found is None:
            return False
        if isinstance(self.target, Ceiling):
            return self.found <= self.target.most_nbytes
        if isinstance(self.target, Deadline):
            return self.found <= self.target.most_ms
        if isinstance(self.target, Share):
            return self.found <= self.target.most
        return self.found >= self.target.ratio

    def in_words(self) -> Judged:
        """What a reader is told."""
        return Judged(said=_said(self.target, self.found), reached=self.reached)


def _said(target: Goal, found: float | None) -> str:
    if isinstance(target, Ceiling):
        what = "?" if found is None else f"{found / 2**20:.1f}"
        limit = f"target at most {target.most_nbytes / 2**20:g}"
        return f"{target.op}, {size(target.nbytes)}, {target.contender}: {what} MB extra ({limit})"
    if isinstance(target, Deadline):
        what = "?" if found is None else f"{found:.3g}"
        limit = f"target at most {target.most_ms:g}"
        return f"{target.suite} {target.op}, {target.ranks} ranks, {target.contender}: {what} ms ({limit})"
    case = f"{target.suite} {target.op}, {target.ranks} ranks, {size(target.nbytes)}, {target.contender}: "
    if isinstance(target, Share):
        what = "?" if found is None else f"{found:.0%}"
        return f"{case}{what} of the time (target at most {target.most:.0%})"
    if target.peer == names.LIMIT:
        what = "?" if found is None else f"{found:.0%}"
        return f"{case}{what} of the limit (target {target.ratio:.0%})"
    if target.ratio < 1:
        what = "?" if not found else f"{1 / found:.2f}"
        return f"{case}{what} times as long as {target.peer} (target at most {1 / target.ratio:.3g})"
    what = "?" if found is None else f"{found:.2f}"
    return f"{case}{what} times faster than {target.peer} (target {target.ratio:g})"


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
_RECORDED = 0.02
"""What recording a timeline may cost, as a share of the time of a collective."""
_TRAINED_NBYTES = 650 * 8
"""The gradient of the training on digits: 65 x 10 float64."""
_EVERY_SIZE = dict.fromkeys((4, 64 * KB, MB, 16 * MB, 64 * MB), 4.0)

TARGETS: tuple[Goal, ...] = (
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
    *(
        Share(
            suite="timeline",
            op=op,
            ranks=2,
            nbytes=nbytes,
            contender=names.RECORDED,
            without=names.UNRECORDED,
            most=_RECORDED,
        )
        for op, nbytes in (("captured allreduce", 4), ("captured allreduce", MB), ("allreduce_refs", MB))
    ),
    *_targets("training", "iteration", names.STEP, names.RAY, {_TRAINED_NBYTES: 4.0}),
    *_targets("training", "iteration", names.STEP, names.RAY, {_TRAINED_NBYTES: 4.0}, ranks=4),
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
    Deadline(suite="plan", op="200 allreduces", ranks=1024, contender=names.PLANNED, most_ms=2000.0),
    Deadline(suite="plan", op="allreduce", ranks=8, contender=names.REMEMBERED, most_ms=0.2),
    Deadline(suite="plan", op="200 allreduces", ranks=8, contender=names.REMEMBERED, most_ms=0.2),
    Ceiling(op="allreduce", nbytes=64 * MB, contender=names.ORDINARY, most_nbytes=16 * MB),
)


def judge(report: Report, targets: Sequence[Goal] = TARGETS) -> list[Verdict]:
    """Compares what was measured with those targets whose case was measured, by whomever."""
    verdicts = []
    for target in targets:
        if isinstance(target, Ceiling):
            verdicts += _judge_memory(report, target)
        elif isinstance(target, Deadline):
            case = (target.suite, target.op, target.ranks)
            rows = [row for row in report.rows if (row.suite, row.op, row.ranks) == case]
            found = [row.median_ms for row in rows if row.contender == target.contender]
            verdicts += [Verdict(target=target, found=found[0] if found else None)] if rows else []
        else:
            verdicts += _judge_time(report.rows, target)
    return verdicts


def _judge_time(rows: Sequence[Row], target: Target | Share) -> list[Verdict]:
    case = (target.suite, target.op, target.ranks, target.nbytes)
    medians = {row.contender: row.median_ms for row in rows if (row.suite, row.op, row.ranks, row.nbytes) == case}
    if not medians:
        return []
    is_share = isinstance(target, Share)
    ours, other = medians.get(target.contender), medians.get(target.without if is_share else target.peer)
    if not ours or not other:
        return [Verdict(target=target, found=None)]
    return [Verdict(target=target, found=(ours - other) / ours if is_share else other / ours)]


def _judge_memory(report: Report, target: Ceiling) -> list[Verdict]:
    peaks = [peak for peak in report.memory if (peak.op, peak.nbytes) == (target.op, target.nbytes)]
    if not peaks:
        return []
    found = [max(peak.extra_nbytes) for peak in peaks if peak.contender == target.contender]
    return [Verdict(target=target, found=max(found) if found else None)]
