"""How far a collective is: what kernels tell, and what it comes to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from raycollect.backends.shm.direct import TOGETHER
from raycollect.core import kernel_progress
from raycollect.core.kernel_progress import LENT, KernelProgress
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.engine.progress import NOWHERE, ByteMap, BytesDone
from raycollect.engine.steps import Kernels, Packed, PreparedBundle, ReshardKernels, Step
from raycollect.pos import tensors
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import run_launch
from tests.pure.teams import Team

MB = 1 << 20


def run_metered(communicator: Communicator, launch: Launch, kernels: list[list[Kernel]]) -> list[float]:
    """Runs kernels, together where there are several; what the meter showed on the way, and at the end."""
    meter, mine = Recording(), kernels[communicator.rank]
    kernel_progress._local.kernel_progress = meter
    try:
        if len(mine) == 1:
            run_launch(communicator, launch, mine[0])
        else:
            communicator.agree(launch, b"")
            communicator.launch(launch, mine)
            communicator.end(launch, True)
    finally:
        del kernel_progress._local.kernel_progress
    return meter.shown


class Recording(KernelProgress):
    """A meter that remembers."""

    __slots__ = ("shown",)

    def __init__(self) -> None:
        object.__setattr__(self, "shown", [])
        super().__init__()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "part" and value:
            self.shown.append(value)


def allreduces(count: int, nbytes: int, make: Any) -> list[list[Kernel]]:
    arrays = [[make(nbytes // 4) for _ in range(count)] for _ in range(2)]
    return [[Kernel(kind=OpKind.ALLREDUCE, src=one, dst=one, op=ReduceOp.SUM) for one in some] for some in arrays]


def plain(size: int) -> Any:
    return np.ones(size, np.float32)


def shared(size: int) -> Any:
    return tensors.ones(size, np.float32)


@pytest.mark.parametrize(
    ("backend", "make", "count"),
    [("shm", plain, 1), ("shm", shared, 1), ("shm", plain, 3), ("shm", shared, 3), ("tcp", plain, 1)],
)
def test_kernels_report_their_progress(backend: str, make: Any, count: int) -> None:
    team = ThreadTeam(backend, 2)
    try:
        for shown in team.must(run_metered, team.launch(), allreduces(count, 8 * MB, make)):
            assert shown == sorted(shown)
            assert len(shown) >= 4
            assert count * 0.75 <= shown[-1] <= count
    finally:
        team.close()


@pytest.mark.parametrize("make", [plain, shared])
def test_progress_goes_on_over_more_kernels_than_run_together(make: Any) -> None:
    team, count = ThreadTeam("shm", 2), 3 * TOGETHER
    try:
        for shown in team.must(run_metered, team.launch(), allreduces(count, 128 << 10, make)):
            assert shown == sorted(shown)
            assert 2.5 * TOGETHER < shown[-1] <= count
    finally:
        team.close()


@pytest.mark.parametrize("make", [plain, shared])
def test_lent_array_is_reported(make: Any) -> None:
    team = ThreadTeam("shm", 2)
    arrays = [make(4 * MB) for _ in range(2)]
    kernels = [
        [Kernel(kind=OpKind.BROADCAST, src=arrays[0], peer=0)],
        [Kernel(kind=OpKind.BROADCAST, dst=arrays[1], peer=0)],
    ]
    try:
        root, other = team.must(run_metered, team.launch(), kernels)
    finally:
        team.close()
    assert (root == [LENT]) is (make is shared)
    assert other[-1] == 1.0


def move(*sizes: int) -> Kernels:
    kernels = tuple(Kernel(kind=OpKind.ALLREDUCE, src=np.zeros(size, np.uint8)) for size in sizes)
    return Kernels(0, "g", (0, 1), kernels)


def script(*bundles: tuple[int, tuple[Step, ...]]) -> list[PreparedBundle]:
    """Bundles, each of one call of so many bytes."""
    share = SimpleNamespace(op="allreduce", group_id="g", rank=0, ranks=(0, 1))
    stretches = []
    for nbytes, moves in bundles:
        gives = SimpleNamespace(tensors=(SimpleNamespace(nbytes=nbytes),))
        agreed = (SimpleNamespace(specs=(SimpleNamespace(gives=gives),)),)
        stretches.append(PreparedBundle(cast(Any, share), 1, moves, (), (), (), cast(Any, agreed), ()))
    return stretches


def test_a_bundle_counts_with_its_collectives_and_kernels_share_that() -> None:
    first, second, third = move(100), move(50, 150), move(60)
    extent = ByteMap(script((100, (first,)), (1000, (move(), second, third))))
    scale = 1000 / 260
    assert extent.total == 1100
    assert extent.at(None, 0, 0.0) == BytesDone(0, 1100)
    assert extent.at(first, 1, 0.25) == BytesDone(25, 1100)
    assert extent.at(first, 0, 0.0) == BytesDone(100, 1100)
    assert extent.at(second, 2, 0.5) == BytesDone(int(100 + 25 * scale), 1100)
    assert extent.at(second, 2, 1.5) == BytesDone(int(100 + 125 * scale), 1100), "a kernel, and half of the next"
    assert extent.at(second, 1, 0.5) == BytesDone(int(100 + 125 * scale), 1100)
    assert extent.at(third, 0, 0.0) == BytesDone(1100, 1100)
    assert extent.at(third, 1, 99.0) == BytesDone(1100, 1100)
    assert extent.at(second, 1, LENT) == BytesDone(int(100 + 50 * scale), 1100, int(150 * scale))
    assert extent.at(move(7), 1, 0.5) == BytesDone(0, 1100), "of another script"


def test_rounds_in_messages_count_for_the_exchange_and_a_barrier_has_no_bytes() -> None:
    rounds = [move(30), move(70)]
    packed = tuple(Packed(0, "g", (0, 1), one.kernels, cast(Any, None)) for one in rounds)
    exchange = ReshardKernels(0, "g", (0, 1), tuple(one.kernels[0] for one in rounds), packed, cast(Any, None))
    extent = ByteMap(script((100, (exchange,)), (50, (move(50),))))
    assert [extent.at(one, 1, 0.5).done for one in packed] == [15, 65]
    nothing = Kernels(0, "g", (0, 1), (Kernel(kind=OpKind.BARRIER),))
    assert ByteMap(script((0, (nothing,)))).at(nothing, 1, 0.5) == NOWHERE


def test_a_run_can_be_queried_at_every_point() -> None:
    team, found = Team(2), dict[tuple[str, int], BytesDone | None]()

    class Asks:
        def at(self, point: str, seq: int, rank: int) -> None:
            found[point, rank] = team.replays[rank].bytes_done(seq)

    team.faults.now = Asks()
    for part in team.scripts:
        part.call("make")
    for actor in team.actors:
        actor.methods = {"make": lambda: np.ones(100)}
    team.collective(OpKind.ALLREDUCE, {0: 0, 1: 0})
    try:
        team.run()
    finally:
        team.close()
    for rank in range(2):
        said = [found[point, rank] for point in ("before_check", "after_check", "before_kernel", "after_kernel", "end")]
        assert said == [NOWHERE, BytesDone(0, 800), BytesDone(0, 800), BytesDone(800, 800), BytesDone(800, 800)]


def test_a_run_knows_all_of_its_plans_from_the_second_on() -> None:
    one = Team(2)
    told: list[BytesDone | None] = []

    def look() -> None:
        replay = one.replays[0]
        told.append(replay.bytes_done(replay._seq))

    values = [[np.ones(100), np.ones(300)] for _ in range(2)]
    for rank, part in enumerate(one.scripts):
        one.actors[rank].methods = {
            "first": lambda rank=rank: values[rank][0],
            "second": lambda rank=rank: values[rank][1],
            "look": look if rank == 0 else lambda: None,
        }
        part.call("first")
        part.call("second")
    try:
        first = one.collective(OpKind.ALLREDUCE, {0: 0, 1: 0})
        assert first == [[], []]
        for part in one.scripts:
            part.call("look")
        one.collective(OpKind.ALLREDUCE, {0: 1, 1: 1})
        for _ in range(4):
            one.run()
        assert told == [BytesDone(800, 800), *[BytesDone(800, 3200)] * 3]
        assert [one.replays[0].bytes_done(seq) for seq in (0, 12345)] == [None, None]
    finally:
        one.close()
