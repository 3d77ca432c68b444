"""A frame with one of everything, and names that are long or look like markup."""

from __future__ import annotations

from raycollect.live_view.frame import Frame, GroupFrame, OperationFrame, PublicationFrame, RankFrame, ReceiverFrame
from raycollect.live_view.stream import SLOTS

STACK = ('  File "train.py", line 31, in backward', "    self.gate.wait()")


def rank_frame(rank: int, last: int) -> RankFrame:
    is_last = rank == last
    busy = (0.5, 0.0, 0.0, 0.0) if is_last else (0.2, 0.0, 0.3, 0.5)
    return RankFrame(
        rank=rank,
        actor=f"Trainer(0123{rank})",
        host="10.0.0.1",
        pid=4711 + rank,
        device="cpu",
        state="runs Trainer.backward() for 2.1 s" if is_last else "waits in allreduce",
        collectives="" if is_last else "allreduce 17: consistency check",
        awaited_s=2.0 if is_last else 0.0,
        is_last=is_last,
        stack=STACK if is_last else (),
        stream=[busy if slot % 8 < 5 else (0.0, 0.0, 0.0, 0.0) for slot in range(SLOTS)],
    )


def group_frame(name: str, state: str, detail: str, ranks: int) -> GroupFrame:
    frames = tuple(rank_frame(rank, last=2) for rank in range(ranks))
    return GroupFrame(name=name, backend="shm", state=state, detail=detail, epoch=1, ranks=frames)


FRAME = Frame(
    at_s=1.5,
    host="10.0.0.1",
    pid=4711,
    program="train.py",
    groups=(
        group_frame("data-parallel", "alive", "", 4),
        group_frame("<b>pipeline</b>", "broken", "rank 1: its process has ended (exit code 137)", 2),
    ),
    operations=(
        OperationFrame(
            group="data-parallel",
            op="allreduce",
            backend="shm",
            ranks=4,
            calls_per_s=12.5,
            nbytes=268_435_456,
            median_s=0.034,
            bandwidth=7.9e9,
            predicted_bandwidth=9.1e9,
            waiting=0.31,
            last_rank=2,
        ),
    ),
    publications=(
        PublicationFrame(
            name="policy",
            is_here=True,
            publisher="process 4711 on 10.0.0.1",
            epoch=2,
            number=1207,
            nbytes=16_100_000_000,
            holders=8,
            receivers=(
                ReceiverFrame(actors=("Rollout(aa01)", "Rollout(aa02)"), epoch=2, number=1206, behind=1, skipped=3),
                ReceiverFrame(actors=("Evaluator(bb01)",), epoch=0, number=0, behind=1207, skipped=0),
            ),
            error="",
        ),
    ),
    missing=("Trainer(01233): late",),
)
