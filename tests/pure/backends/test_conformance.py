"""The conformance suite: what every backend must do, run on each of them by one fixture.

Of the product kernel x dtype x reduce op x world x elements x root x layout x pieces x in place, a selection in which
every two values meet, but for large arrays on many ranks; `tests/full` has the product. Local and shm live in threads
here (each rank with a communicator of its own); `test_chunks.py` runs them in processes too.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends import folds
from raycollect.core.model import GroupSpec, Kernel, Launch, OpKind, ReduceOp
from raycollect.core.protocols import ARRIVAL_NBYTES, Communicator, Joining
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError, UnsupportedError
from tests.pure.communicators import (
    MemoryExchange,
    MemoryRendezvous,
    MemoryStar,
    ProcessTeam,
    Team,
    ThreadTeam,
    Workers,
)
from tests.pure.conformance import (
    ALL_KINDS,
    BACKENDS,
    CASE_RULES,
    DTYPES,
    FOLDING,
    IN_THREADS,
    LAYOUTS,
    SIZES,
    SPREADS,
    WORLDS,
    Case,
    allowed,
    arrival_of,
    bits,
    body_arrive,
    body_sum_of_ones,
    check_allreduce,
    check_cases,
    is_absent,
    run_launch,
    sum_of,
)
from tests.pure.covering import pairwise
from tests.pure.operands import NARROW, left_fold, operand

TeamOf = Callable[[int], Team]

PARAMETERS = {
    "kind": ALL_KINDS,
    "dtype": (*DTYPES, "longdouble", "clongdouble"),
    "op": (None, *ReduceOp),
    "world": WORLDS,
    "size": SIZES,
    "root": range(max(WORLDS)),
    "layout": LAYOUTS,
    "spread": SPREADS,
    "inplace": (False, True),
    "staged": (False, True),
}
MOST_BROUGHT = 1 << 20
"""The longest arrival of any backend, in bytes."""

MOST_OF_LARGE = 3
"""The largest world of the largest arrays."""

RULES = {
    **CASE_RULES,
    ("kind", "op"): lambda kind, op: (kind in FOLDING) == (op is not None),
    # Large arrays cost per rank: `test_all_ranks_have_the_same_bits_whatever_the_chunks` has some on all ranks.
    ("world", "size"): lambda world, size: world <= MOST_OF_LARGE or size < max(SIZES),
    ("root", "size"): lambda root, size: root < MOST_OF_LARGE or size < max(SIZES),
}
SELECTED = pairwise(PARAMETERS, RULES)


@pytest.fixture(scope="module", params=BACKENDS)
def team_of(request: pytest.FixtureRequest, workers: Workers) -> Iterator[TeamOf]:
    """Gives the team of a world size on the backend under test."""
    backend, teams = request.param, {}
    if absent := is_absent(backend):
        pytest.skip(absent)

    def team(world_size: int) -> Team:
        if world_size not in teams:
            teams[world_size] = (
                ThreadTeam(backend, world_size)
                if backend in IN_THREADS
                else ProcessTeam(backend, world_size, workers(world_size))
            )
        return teams[world_size]

    yield team
    for team in teams.values():
        team.close()


# ------------------------------------------------------------------------------- the product


MOST_NBYTES = 5_000_000
"""About how much the largest arrays take: several chunks of each backend. Most of the time is numpy's."""


def case_of(chosen: dict) -> Case:
    values = {name: value for name, value in chosen.items() if name not in ("world", "staged")}
    values["size"] = min(values["size"], MOST_NBYTES // np.dtype(chosen["dtype"]).itemsize | 1)
    return Case(**values, peer=(chosen["root"] + 1) % chosen["world"] if chosen["kind"] is OpKind.SEND else -1)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_every_two_values_meet(team_of: TeamOf, world: int, staged: bool) -> None:
    chosen = [case_of(values) for values in SELECTED if (values["world"], values["staged"]) == (world, staged)]
    check_cases(team_of(world), chosen, staged=staged)


CHUNKED = 1_500_001
"""So many elements of 8 bytes that each uneven piece takes several chunks in every backend, the last of them shorter.

shm moves plain arrays through its slots, and shared ones in place, where the ranks other than 0 have the large pieces.
"""


@pytest.mark.parametrize(
    ("how", "inplace", "staged"), [("plain", False, False), ("plain", True, True), ("shared", False, False)]
)
@pytest.mark.parametrize("world", [2, 3])
def test_every_kernel_of_several_chunks(team_of: TeamOf, world: int, how: str, inplace: bool, staged: bool) -> None:
    cases = [
        Case(
            kind=kind,
            dtype="int64",
            size=CHUNKED,
            op=ReduceOp.SUM if kind in FOLDING else None,
            peer=world - 1 if kind is OpKind.SEND else -1,
            inplace=inplace and kind is not OpKind.SEND,
            spread="uneven",
            layout=how,
        )
        for kind in ALL_KINDS
    ]
    check_cases(team_of(world), cases, staged=staged)


def test_the_selection_has_every_reduction_of_every_dtype() -> None:
    tested = {(chosen["op"], chosen["dtype"]) for chosen in SELECTED if chosen["op"] is not None}
    assert tested == {(op, dtype) for op, dtype in product(ReduceOp, PARAMETERS["dtype"]) if allowed(op, dtype)}
    for op, dtype in product(ReduceOp, PARAMETERS["dtype"]):
        assert (folds.refusal_reason(op, dtype) is None) == allowed(op, dtype), (op, dtype)


# ------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("world", [2, 3, pytest.param(5, marks=pytest.mark.full), 8])
def test_all_ranks_have_the_same_bits_whatever_the_chunks(team_of: TeamOf, world: int) -> None:
    sizes = (1, 255, 262_143, 262_144, 524_289)
    check_cases(
        team_of(world),
        [
            Case(kind=OpKind.ALLREDUCE, op=ReduceOp.SUM, dtype="float32", size=size, inplace=bool(size % 2), seed=seed)
            for size, seed in product(sizes, (1, 2))
        ],
    )


@pytest.mark.parametrize("dtype", ["float16", *NARROW])
def test_short_floats_are_summed_in_float32(team_of: TeamOf, dtype: str) -> None:
    """One step of the short type from 1 on, and then halves of it: they would each be rounded away."""
    team = team_of(5)
    for result in team.must(body_sum_of_halves, team.launch(), dtype):
        unit, halves = np.ones(1, dtype).astype(np.float32), _half_step(dtype).astype(np.float32)
        assert result == np.asarray(unit + 4 * halves, dtype).astype(np.float64).item()
        assert result > 1


def _half_step(dtype: str) -> np.ndarray:
    unit = np.ones(1, dtype)
    bits = unit.view(f"u{unit.itemsize}") + 1
    return ((bits.view(dtype).astype(np.float64) - 1) / 2).astype(dtype)


def body_sum_of_halves(communicator: Communicator, launch: Launch, dtype: str) -> float:
    src = np.ones(1, dtype) if communicator.rank == 0 else _half_step(dtype)
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=src, dst=src, op=ReduceOp.SUM))
    return src.astype(np.float64).item()


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0], np.float32)


def special_values(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, size]).choice(SPECIAL, size)


def body_special_values(communicator: Communicator, launch: Launch, op: ReduceOp, size: int) -> np.ndarray:
    array = special_values(communicator.rank, size)
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=op))
    return array


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("world", [2, 5])
def test_zeros_infinities_and_nans_are_those_of_the_left_fold(team_of: TeamOf, op: ReduceOp, world: int) -> None:
    """Whatever the algorithm, and wherever a chunk or a slice begins."""
    team = team_of(world)
    is_bitwise = backends.get(team.backend).bitwise
    for size in (7, 600_001):
        results = team.must(body_special_values, team.launch(timeout_s=60), op, size)
        expected = left_fold(op, [special_values(rank, size) for rank in team.everyone])
        number = ~np.isnan(expected)
        for result in results:
            np.testing.assert_array_equal(result, expected)
            assert bits(result) == bits(results[0])
            assert not is_bitwise or bits(result[number]) == bits(expected[number])


# ------------------------------------------------------------------------------- subsets, several kernels


def body_several(
    communicator: Communicator, launch: Launch, size: int, staged: bool, ops: frozenset[OpKind]
) -> list[np.ndarray]:
    """Two agreements and several kernels, of those that the backend has, in one launch; the first may be staged."""
    first, second = (operand(communicator.rank, "int32", size, seed).copy() for seed in (1, 2))
    rank, world = communicator.rank, communicator.world_size
    rows = tuple(np.full(size, -1, np.int32) for _ in range(world))
    sums = [Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM) for array in (first, second)]
    ok = False
    try:
        communicator.agree(launch, b"a" * (rank + 1))
        learned = communicator.agree(launch, b"b" * (rank + 1), sums[0] if staged else None)
        assert [bytes(arrival) for arrival in learned] == [b"b" * (of + 1) for of in launch.ranks]
        for kernel in sums:
            communicator.launch(launch, (kernel,))
            if OpKind.BARRIER in ops:
                communicator.launch(launch, (Kernel(kind=OpKind.BARRIER),))
        own = np.full(size, rank, np.int32)
        for kernel in (
            Kernel(kind=OpKind.BROADCAST, src=first, dst=first, peer=0),
            Kernel(kind=OpKind.ALLGATHER, src=own, dst=rows, most=size),
            Kernel(kind=OpKind.ALLTOALL, src=rows, dst=rows, most=size),
        ):
            if kernel.kind in ops:
                communicator.launch(launch, (kernel,))
        ok = True
    finally:
        communicator.end(launch, ok)
    if OpKind.ALLGATHER in ops and OpKind.ALLTOALL in ops:
        assert all((row == rank).all() for row in rows)
    return [first, second]


def body_refuse(communicator: Communicator, launch: Launch) -> list[bytes]:
    """Agrees, and goes home: what all ranks do when one brought a violation."""
    arrivals = communicator.agree(launch, b"no")
    communicator.end(launch, False)
    return list(arrivals)


@pytest.mark.parametrize("size", SIZES)
def test_send_between_all_pairs_while_others_idle(team_of: TeamOf, size: int) -> None:
    team = team_of(3)
    pairs = ((0, 1), (1, 0), (2, 0), (1, 2))
    check_cases(
        team,
        [Case(kind=OpKind.SEND, dtype="float32", size=size, root=sender, peer=receiver) for sender, receiver in pairs],
    )
    check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


def test_everyone_gets_all_arrivals_in_rank_order(team_of: TeamOf) -> None:
    for world in WORLDS:
        team = team_of(world)
        for arrivals in team.must(body_arrive, team.launch()):
            assert [bytes(arrival) for arrival in arrivals] == [arrival_of(rank, world) for rank in team.everyone]


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_too_long_an_arrival_is_refused_before_it_is_sent(backend: str) -> None:
    team = ThreadTeam(backend, 1)
    (communicator,), launch = team.communicators, team.launch()
    with pytest.raises(UnsupportedError) as caught:
        communicator.agree(launch, bytes(ARRIVAL_NBYTES + 1))
    (violation,) = caught.value.violations
    assert (violation.kind, violation.rank, violation.field) == ("unsupported", 0, "operand")
    assert [*communicator.agree(launch, b"shorter")] == [b"shorter"]
    communicator.end(launch, True)
    team.close()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("size", [0, 1, 700_000])
def test_several_agreements_and_kernels_in_one_launch(team_of: TeamOf, size: int, staged: bool) -> None:
    team = team_of(3)
    for _ in range(3):
        results = team.must(body_several, team.launch(), size, staged, backends.get(team.backend).ops)
        for seed, got in ((1, [first for first, _ in results]), (2, [second for _, second in results])):
            expected = left_fold(ReduceOp.SUM, [operand(rank, "int32", size, seed) for rank in team.everyone])
            for array in got:
                np.testing.assert_array_equal(array, expected)


def body_without_root(communicator: Communicator, launch: Launch, kind: OpKind) -> None:
    """All but rank 0 pass their kernel before a further agreement; then rank 0 leaves."""
    ranks, is_root = launch.ranks, communicator.rank == 0
    array = np.ones(10)
    kernel = sum_of(array)
    if kind is OpKind.SCATTER:
        kernel = Kernel(kind=kind, src=tuple(array for _ in ranks) if is_root else None, dst=array, peer=0, most=10)
    try:
        communicator.agree(launch, b"first", None if is_root else kernel)
        communicator.agree(launch, b"second")
        if not is_root:
            communicator.launch(launch, (kernel,))
    finally:
        communicator.end(launch, False)


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.SCATTER])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_kernel_that_some_ranks_passed_before_a_further_agreement_needs_the_others(
    backend: str, kind: OpKind
) -> None:
    team = ThreadTeam(backend, 3)
    left, *others = team.run(body_without_root, team.launch(), kind)
    assert left is None
    assert [type(error) for error in others] == [PlanAbortedError, PlanAbortedError]
    check_allreduce(team, ReduceOp.SUM, "int64", 1000, "plain", True)
    team.close()


def body_at_once(communicator: Communicator, launch: Launch, size: int, count: int) -> list[np.ndarray]:
    """Several kernels of one kind in one call of `launch`."""
    arrays = [operand(communicator.rank, "int32", size + at, at).copy() for at in range(count)]
    run_launch(communicator, launch, *map(sum_of, arrays), at_once=True)
    return arrays


@pytest.mark.parametrize("size", [0, 10_000])
def test_several_kernels_at_once(team_of: TeamOf, size: int) -> None:
    team = team_of(3)
    for count in (1, 2, 40):
        results = team.must(body_at_once, team.launch(), size, count)
        for at in range(count):
            expected = left_fold(ReduceOp.SUM, [operand(rank, "int32", size + at, at) for rank in team.everyone])
            for arrays in results:
                np.testing.assert_array_equal(arrays[at], expected)


# ------------------------------------------------------------------------------- what comes again


def body_loop(
    communicator: Communicator, launches: Sequence[Launch], size: int, expecting: Sequence[int], odd: int
) -> list[Any]:
    """Sums again and again; the ranks `expecting` expect what was brought first, and in the end one brings another."""
    rank, results, expected = communicator.rank, [], None
    array = np.ones(size, np.int64)
    kernel = sum_of(array)
    for turn, launch in enumerate(launches):
        array[:] = turn
        arrival, ok = b"another" if (turn, rank) == (len(launches) - 1, odd) else b"as ever", False
        try:
            brought = communicator.agree(launch, arrival, kernel, expected if rank in expecting else None)
            communicator.launch(launch, (kernel,))
            ok = True
        finally:
            communicator.end(launch, ok)
        results.append((brought is expected, list(map(bytes, brought)), set(array.tolist())))
        expected = expected or brought
    return results


@pytest.mark.parametrize("size", [1, 5000, 70_000])
@pytest.mark.parametrize("expecting", [(0, 1, 2), (1,)], ids=["all expect it", "one expects it"])
def test_what_all_bring_again_is_given_as_the_very_object_that_is_expected(
    team_of: TeamOf, expecting: tuple[int, ...], size: int
) -> None:
    team = team_of(3)
    launches = [team.launch() for _ in range(5)]
    for rank, results in enumerate(team.must(body_loop, launches, size, expecting, 1)):
        assert [is_expected for is_expected, _, _ in results] == [False, *[rank in expecting] * 3, False]
        assert [brought for _, brought, _ in results] == [[b"as ever"] * 3] * 4 + [[b"as ever", b"another", b"as ever"]]
        assert [sums for _, _, sums in results] == [{3 * turn} for turn in range(5)]


# ------------------------------------------------------------------------------- the check, and what is wrong


def test_a_refused_launch_gives_everyone_the_arrivals_and_the_next_one_works(team_of: TeamOf) -> None:
    team = team_of(3)
    for _ in range(50):
        assert team.must(body_refuse, team.launch()) == [[b"no"] * 3] * 3
    check_allreduce(team, ReduceOp.MAX, "int32", 1024, "plain", True)


def body_bring_much(communicator: Communicator, launch: Launch) -> None:
    run_launch(communicator, launch, arrival=b"x" * (MOST_BROUGHT + 1) * (communicator.rank == 1))


def test_an_arrival_that_is_too_long_is_refused_and_the_others_go_on(team_of: TeamOf) -> None:
    team = team_of(3)
    if team.backend == "local":
        pytest.skip("the test double of several local ranks has no limit")
    results = team.run(body_bring_much, team.launch())
    assert isinstance(results[1], UnsupportedError)
    assert all(isinstance(results[rank], PlanAbortedError) and results[rank].rank != rank for rank in (0, 2))
    check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


def test_a_missing_rank_is_named_and_the_next_launch_works(team_of: TeamOf) -> None:
    team = team_of(3)
    launch = team.launch(timeout_s=1.0)
    for result in team.run(body_arrive, launch, ranks=(0, 2)):
        # One of the two may find the other gone already.
        assert isinstance(result, CollectiveTimeoutError | PlanAbortedError)
        if isinstance(result, CollectiveTimeoutError):
            assert result.missing == (1,)
            assert result.timeout_s == 1.0
    check_allreduce(team, ReduceOp.SUM, "float64", 1024, "plain", True)


def test_a_subset_works_while_a_rank_that_was_missed_is_still_away(team_of: TeamOf) -> None:
    team = team_of(3)
    team.run(body_arrive, team.launch(timeout_s=0.1), ranks=(0, 1))
    launch = team.launch(ranks=(0, 1))
    assert len(team.must(body_arrive, launch, ranks=(0, 1))) == 2
    check_allreduce(team, ReduceOp.SUM, "float64", 7, "plain", False)


def body_leave_or_sum(communicator: Communicator, launch: Launch, quitter: int, size: int) -> None:
    """A rank leaves after the agreement, with which it may have sent its part of a sum, and got those of others."""
    kernel, ok = sum_of(np.full(size, 7, np.int64)), False
    try:
        communicator.agree(launch, b"", kernel)
        if communicator.rank != quitter:
            communicator.launch(launch, (kernel,))
            ok = True
    finally:
        communicator.end(launch, ok, () if ok else (kernel,))


@pytest.mark.parametrize("size", [1, 70_000, 700_000])
def test_after_a_launch_that_failed_on_some_ranks_the_next_one_works_where_a_backend_resumes(
    team_of: TeamOf, size: int
) -> None:
    """And nothing of the failed one comes into it; see `Capabilities.resumes`."""
    team = team_of(3)
    if not backends.get(team.backend).resumes:
        pytest.skip(f"{team.backend} does not resume")
    for quitter in team.everyone:
        results = team.run(body_leave_or_sum, team.launch(), quitter, size)
        assert all(result is None or isinstance(result, PlanAbortedError) for result in results), results
        for _ in range(2):
            for result in team.must(body_sum_of_ones, team.launch(), size):
                np.testing.assert_array_equal(result, np.full(size, 3))


# ------------------------------------------------------------------------------- who never comes

WAITS = {
    "shm": "raycollect.backends.shm.segment",
    "tcp": "raycollect.backends.tcp.communicator",
    "gloo": "raycollect.backends.gloo.communicator",
    "torch:gloo": "raycollect.backends.tcp.communicator",
}
"""The module that says how long members of a backend wait for each other."""


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("backend", WAITS)
def test_members_that_never_join_are_named_and_nothing_stays(
    monkeypatch: pytest.MonkeyPatch, backend: str, rank: int
) -> None:
    if absent := is_absent(backend):
        pytest.skip(absent)

    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    create = backends.load(backend)
    monkeypatch.setattr(import_module(WAITS[backend]), "JOIN_TIMEOUT_S", 0.2)
    spec = GroupSpec(name="g", group_id="1", backend=backend, world_size=3)
    before = descriptors()
    with pytest.raises(CollectiveTimeoutError, match="did not come") as caught:
        create(Joining(spec, rank, MemoryRendezvous(), MemoryExchange(MemoryStar(), rank)))
    assert caught.value.op == "join"
    assert caught.value.missing
    assert set(caught.value.missing) <= {0, 1, 2} - {rank}
    del caught
    assert descriptors() == before
