"""Backend `nccl` on real GPUs: the conformance suite on their tensors, numbers, and what goes wrong.

One rank runs everywhere; several where there are as many GPUs, or an NCCL that lets ranks share one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import cycle

import pytest

pytest.importorskip("ml_dtypes", reason="raycollect needs ml_dtypes")

import numpy as np

from raycollect import backends
from raycollect.backends.nccl.run import FOLD_NBYTES
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import Communicator, Joining
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    InvalidGroupError,
    PlanAbortedError,
    UnsupportedError,
)
from tests.pure.communicators import MemoryExchange, MemoryRendezvous, MemoryStar, Team
from tests.pure.conformance import DTYPES, KINDS, REDUCTIONS, Case, every_case, run_launch
from tests.pure.operands import NARROW
from tests.support.values import replace

from . import devices
from .again import body_again
from .cases import LIBRARIES, body_device_works, check, layouts_of, placed, seen, to_host

TeamOf = Callable[[int], Team]

SEVERAL = (2, 3)
SIZES = (0, 1, 7, 1024)
SUMS = ("float32", "float64")


# ------------------------------------------------------------------------------- the conformance suite


@pytest.mark.parametrize(("library", "layout"), [(one, how) for one in LIBRARIES for how in layouts_of(one)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_of_one_rank(team_of: TeamOf, library: str, dtype: str, layout: str) -> None:
    devices.need(library, dtype)
    check(team_of(1), library, [replace(case, layout=layout) for case in every_case(dtype, 1, SIZES, KINDS)])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", SEVERAL)
def test_every_kernel_of_several_ranks(team_of: TeamOf, world: int, dtype: str, library: str) -> None:
    """The layouts take turns; every kind has each of them, in place and not."""
    team = team_of(world)
    devices.need(library, dtype)
    turns = {kind: cycle(layouts_of(library)) for kind in KINDS}
    sizes = (1, 7, 1024) if devices.FAKE else (*SIZES, 4099)
    check(
        team, library, [replace(case, layout=next(turns[case.kind])) for case in every_case(dtype, world, sizes, KINDS)]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, *SEVERAL])
def test_many_elements(team_of: TeamOf, world: int, kind: OpKind) -> None:
    if kind is OpKind.SEND and world == 1:
        pytest.skip("a send needs two ranks")
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    root = world - 1
    peer = 0 if kind is OpKind.SEND else -1
    case = Case(kind=kind, dtype="float32", size=1_000_001, op=op, root=root, peer=peer, spread="uneven")
    check(team_of(world), "cupy", [case, replace(case, layout="every other"), replace(case, spread="even")])


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("world", [1, *SEVERAL])
def test_folds_go_by_chunks(team_of: TeamOf, world: int, kind: OpKind) -> None:
    """What NCCL can't reduce, where all that is gathered is more than one chunk."""
    size = FOLD_NBYTES // 2 + 3
    case = Case(kind=kind, dtype="int16", size=size, op=ReduceOp.SUM, root=world - 1, spread="uneven")
    check(team_of(world), "cupy", [case, replace(case, layout="column"), replace(case, op=ReduceOp.BXOR)])


@pytest.mark.parametrize("world", [1, *SEVERAL])
def test_the_first_kernel_may_be_staged(team_of: TeamOf, world: int) -> None:
    kinds = [kind for kind in KINDS if kind is not OpKind.SEND]
    ops = {kind: ReduceOp.SUM if kind in REDUCTIONS else None for kind in kinds}
    check(team_of(world), "cupy", [Case(kind=k, dtype="int32", size=105, op=ops[k]) for k in kinds], staged=True)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, *SEVERAL])
def test_a_kernel_that_comes_again(team_of: TeamOf, world: int, kind: OpKind, inplace: bool, library: str) -> None:
    """With other numbers in each run."""
    if kind is OpKind.SEND and (world == 1 or inplace):
        pytest.skip("a send needs two ranks, and has nothing in place")
    team = team_of(world)
    devices.need(library)
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    peer = 0 if kind is OpKind.SEND else -1
    case = Case(kind=kind, dtype="int32", size=60 * world, op=op, root=world - 1, peer=peer, inplace=inplace)
    ranks = (0, world - 1) if kind is OpKind.SEND else team.everyone
    for how in ("plain", "every other"):
        launches = [team.launch(ranks, 60.0) for _ in range(4)]
        found = team.must(body_again, launches, replace(case, layout=how), library, ranks=ranks)
        assert found == [[""] * 4] * len(ranks)


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one not in NARROW])
def test_bits_are_the_same_on_all_ranks(team_of: TeamOf, dtype: str) -> None:
    sizes = (1, 255, 65_537, 262_144)
    cases = [Case(kind=OpKind.ALLREDUCE, op=ReduceOp.SUM, dtype=dtype, size=size, seed=size) for size in sizes]
    check(team_of(2), "cupy", cases)


# ------------------------------------------------------------------------------- numbers


def body_reduced(
    communicator: Communicator, launch: Launch, library: str, values: Sequence[np.ndarray], op: ReduceOp
) -> np.ndarray:
    own = values[communicator.rank]
    src, dst = placed(own, "plain", library), placed(np.zeros_like(own), "plain", library)
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=seen(src), dst=seen(dst), op=op))
    return to_host(dst, own.dtype)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG])
@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("world", [1, *SEVERAL])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_numbers_beside_float64(
    team_of: TeamOf, world: int, dtype: str, op: ReduceOp, library: str, seed: int
) -> None:
    team = team_of(world)
    devices.need(library)
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(100_003).astype(dtype) for _ in range(world)]
    wide = [one.astype(np.float64) for one in values]
    expected = np.sum(wide, axis=0) / (world if op is ReduceOp.AVG else 1)
    # Each of the n - 1 additions, and the division, rounds once: by half a step of what was added up so far at most.
    most = world * np.finfo(dtype).eps * np.sum(np.abs(wide), axis=0)
    for found in team.must(body_reduced, team.launch(), library, values, op):
        assert (np.abs(found.astype(np.float64) - expected) <= most).all()


def body_several(communicator: Communicator, launch: Launch, sizes: Sequence[int]) -> list[np.ndarray]:
    """Kernels that share one group of NCCL."""
    given = [placed(np.arange(size, dtype=np.float32) + communicator.rank, "plain", "cupy") for size in sizes]
    kernels = [Kernel(kind=OpKind.ALLREDUCE, src=seen(one), dst=seen(one), op=ReduceOp.SUM) for one in given]
    communicator.agree(launch, b"")
    communicator.launch(launch, kernels)
    communicator.end(launch, True)
    return [to_host(one, np.dtype(np.float32)) for one in given]


@pytest.mark.parametrize("world", [1, *SEVERAL])
def test_kernels_that_run_together(team_of: TeamOf, world: int) -> None:
    team, sizes = team_of(world), (1, 0, 7, 1023, 40_001)
    for results in team.must(body_several, team.launch(), sizes):
        for size, found in zip(sizes, results, strict=True):
            np.testing.assert_array_equal(found, world * np.arange(size, dtype=np.float32) + sum(range(world)))


# ------------------------------------------------------------------------------- what is refused


def body_refused(communicator: Communicator, launch: Launch, where: str) -> str:
    array = np.ones(3, np.float32) if where == "host" else seen(placed(np.ones(3, np.float32), "plain", "cupy"))
    op = ReduceOp.BXOR if where == "device" else ReduceOp.SUM
    try:
        run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=op))
    except UnsupportedError as exc:
        return str(exc)
    return ""


def test_arrays_of_the_host_are_refused_and_the_next_call_works(team_of: TeamOf) -> None:
    team = team_of(1)
    assert "cpu" in team.must(body_refused, team.launch(), "host")[0]
    check(team, "cupy", [Case(kind=OpKind.ALLREDUCE, dtype="float32", size=7, op=ReduceOp.SUM)])


def test_a_device_that_is_not_there_is_refused(team_of: TeamOf) -> None:
    team, there = team_of(1), devices.count()
    create = backends.load("nccl")
    for options in ((("device", there),), (("device", "0"),), (("devices", 0),)):
        with pytest.raises(InvalidGroupError):
            create(Joining(replace(team.spec, options=options), 0, MemoryRendezvous(), MemoryExchange(MemoryStar(), 0)))


# ------------------------------------------------------------------------------- who does not come


def body_alone(communicator: Communicator, launch: Launch, abort_after: bool) -> tuple[str, str]:
    """Enters a kernel that nobody else enters: what ends it, and what the group says from then on."""
    mine = seen(placed(np.ones(1 << 16, np.float32), "plain", "cupy"))
    kernel = Kernel(kind=OpKind.ALLREDUCE, src=mine, dst=mine, op=ReduceOp.SUM)
    entered = threading.Event()

    def abort() -> None:
        entered.wait()
        communicator.abort(launch.seq)

    watcher = threading.Thread(target=abort)
    watcher.start()
    said = []
    for _ in range(2):
        try:
            if abort_after:
                entered.set()
            communicator.launch(launch, (kernel,))
            said.append("it ended")
        except (CollectiveTimeoutError, PlanAbortedError, GroupBrokenError) as exc:
            said.append(type(exc).__name__)
    entered.set()
    watcher.join()
    communicator.end(launch, False)
    return said[0], said[1]


def test_a_rank_that_does_not_come_to_the_kernel(fresh_team_of: TeamOf) -> None:
    """The deadline ends the kernel on the GPU, and the device goes on."""
    team = fresh_team_of(2)
    (found,) = team.must(body_alone, team.launch(timeout_s=1.0), False, ranks=(0,))
    assert found == ("CollectiveTimeoutError", "GroupBrokenError")
    assert team.must(body_device_works, ranks=(0,)) == [True]


def test_an_abort_ends_a_kernel(fresh_team_of: TeamOf) -> None:
    team = fresh_team_of(2)
    (found,) = team.must(body_alone, team.launch(timeout_s=30.0), True, ranks=(0,))
    assert found[0] == "PlanAbortedError"
    assert team.must(body_device_works, ranks=(0,)) == [True]


def body_arrive(communicator: Communicator, launch: Launch) -> list[bytes]:
    return run_launch(communicator, launch, arrival=b"here")


def test_a_rank_that_does_not_come_to_the_check_is_named_and_the_next_call_works(team_of: TeamOf) -> None:
    team = team_of(2)
    (found,) = team.run(body_arrive, team.launch(timeout_s=0.5), ranks=(1,))
    assert isinstance(found, CollectiveTimeoutError)
    assert found.missing == (0,)
    check(team, "cupy", [Case(kind=OpKind.ALLREDUCE, dtype="int64", size=1024, op=ReduceOp.MAX)])
