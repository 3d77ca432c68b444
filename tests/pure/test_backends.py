"""The conformance suite: what every backend must do, run on each of them by one fixture.

Local and shm live in threads here (each rank with a communicator of its own); gloo holds the GIL while it blocks, so
its ranks are processes. `test_backends_shm.py` runs shm in processes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends import arrays
from raycollect.errors import CollectiveTimeoutError, PlanAbortedError
from raycollect.model import Communicator, Kernel, Launch, OpKind, ReduceOp

from .communicators import ProcessTeam, Team, ThreadTeam, Worker

WORLDS = (1, 2, 3, 5)
SIZES = (0, 1, 7, 1024, 300_001)
DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "longdouble",
    "complex64",
    "complex128",
)
BACKENDS = tuple(backends.BACKENDS)
TOLERANCE = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-12}

TeamOf = Callable[[int], Team]


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    made = [Worker() for _ in range(max(WORLDS))]
    yield made
    for worker in made:
        worker.close()


@pytest.fixture(scope="module", params=BACKENDS)
def team_of(request: pytest.FixtureRequest) -> Iterator[TeamOf]:
    """Gives the team of a world size on the backend under test."""
    backend, teams = request.param, {}
    if not backends.is_available(backend):
        pytest.skip(f"{backend} is not installed: {backends.get(backend).install}")

    def team(world_size: int) -> Team:
        if world_size not in teams:
            in_threads = backend != "gloo"
            teams[world_size] = (
                ThreadTeam(backend, world_size)
                if in_threads
                else ProcessTeam(backend, world_size, request.getfixturevalue("workers"))
            )
        return teams[world_size]

    yield team
    for made in teams.values():
        made.close()


# ------------------------------------------------------------------------------- operands, and what must come out


def operand(rank: int, dtype: str, size: int, seed: int) -> np.ndarray:
    """A rank's operand: any bits for whole numbers, values around 1 for the others."""
    rng = np.random.default_rng([seed, rank])
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, size).astype(bool)
    if kind in "iu":
        return rng.integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8).view(dtype)
    if kind == "c":
        return (rng.uniform(0.5, 1.5, size) + 1j * rng.uniform(-1, 1, size)).astype(dtype)
    return (rng.uniform(0.5, 1.5, size) * rng.choice([-1, 1], size)).astype(dtype)


def left_fold(op: ReduceOp, parts: list[np.ndarray]) -> np.ndarray:
    """The meaning of a reduction, written independently of the backends."""
    ufunc = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "AVG": np.add}[op.name]
    result = parts[0].copy()
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            result = ufunc(result, part)
        return np.asarray(result / len(parts) if op is ReduceOp.AVG else result, parts[0].dtype)


def layout(name: str, values: np.ndarray) -> np.ndarray:
    """Puts values into an array of some memory layout; its C order is that of `values`."""
    size = values.size
    made = {
        "plain": lambda: np.empty(size, values.dtype),
        "every other": lambda: np.zeros(2 * size, values.dtype)[::2],
        "reversed": lambda: np.zeros(size, values.dtype)[::-1],
        "transposed": lambda: np.zeros((4, size // 4), values.dtype).T,
        "column": lambda: np.zeros((size, 3), values.dtype)[:, 1],
        "big-endian": lambda: np.zeros(size, values.dtype.newbyteorder(">")),
        "unaligned": lambda: np.zeros(size * values.itemsize + 1, np.uint8)[1:].view(values.dtype),
        "0-d": lambda: np.zeros((), values.dtype),
    }[name]()
    made[...] = values.reshape(made.shape)
    return made


# ------------------------------------------------------------------------------- bodies: what each rank does


def run_launch(communicator: Communicator, launch: Launch, *kernels: Kernel, arrival: bytes = b"") -> list[bytes]:
    """One whole launch, as the executor does it."""
    ok = False
    try:
        arrivals = communicator.agree(launch, arrival)
        for kernel in kernels:
            communicator.launch(launch, kernel).wait(launch.timeout_s)
        ok = True
        return list(arrivals)
    finally:
        communicator.end(launch, ok)


def body_allreduce(
    communicator: Communicator, launch: Launch, op: ReduceOp, dtype: str, size: int, how: str, inplace: bool, seed: int
) -> tuple[np.ndarray, bool]:
    """Gives the result, and whether the source is as it must be."""
    values = operand(communicator.rank, dtype, size, seed)
    src = layout(how, values)
    dst = src if inplace else layout(how, np.zeros_like(values))
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=src, dst=dst, op=op))
    same = inplace or np.array_equal(np.asarray(src, values.dtype).reshape(-1), values)
    return np.array(dst, values.dtype).reshape(-1), same


def body_broadcast(
    communicator: Communicator, launch: Launch, root: int, dtype: str, size: int, how: str, in_dst: bool
) -> np.ndarray:
    values = operand(communicator.rank, dtype, size, 3)
    mine = layout(how, values)
    if in_dst:  # every rank gives one array
        kernel = Kernel(kind=OpKind.BROADCAST, src=mine, dst=mine, peer=root)
    else:
        out = layout(how, np.zeros_like(values))
        kernel = Kernel(kind=OpKind.BROADCAST, src=mine if communicator.rank == root else None, dst=out, peer=root)
    run_launch(communicator, launch, kernel)
    return np.array(kernel.dst, values.dtype).reshape(-1)


def body_send(communicator: Communicator, launch: Launch, src: int, dst: int, size: int, how: str) -> np.ndarray:
    values = operand(src, "float32", size, 5)
    if communicator.rank == src:
        run_launch(communicator, launch, Kernel(kind=OpKind.SEND, src=layout(how, values), peer=dst))
        return values
    out = layout(how, np.zeros_like(values))
    run_launch(communicator, launch, Kernel(kind=OpKind.RECV, dst=out, peer=src))
    return np.array(out).reshape(-1)


def body_several(communicator: Communicator, launch: Launch, size: int) -> list[np.ndarray]:
    """Two agreements and several kernels in one launch."""
    first, second = (operand(communicator.rank, "int32", size, seed) for seed in (1, 2))
    ok = False
    try:
        communicator.agree(launch, b"a" * (communicator.rank + 1))
        learned = communicator.agree(launch, b"b" * (communicator.rank + 1))
        assert [bytes(arrival) for arrival in learned] == [b"b" * (rank + 1) for rank in launch.ranks]
        for array in (first, second):
            kernel = Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
            communicator.launch(launch, kernel).wait(5)
            communicator.launch(launch, Kernel(kind=OpKind.BARRIER)).wait(5)
        communicator.launch(launch, Kernel(kind=OpKind.BROADCAST, src=first, dst=first, peer=0)).wait(5)
        ok = True
    finally:
        communicator.end(launch, ok)
    return [first, second]


def body_refuse(communicator: Communicator, launch: Launch) -> list[bytes]:
    """Agrees, and goes home: what all ranks do when one brought a violation."""
    arrivals = communicator.agree(launch, b"no")
    communicator.end(launch, False)
    return list(arrivals)


def body_arrive(communicator: Communicator, launch: Launch) -> list[bytes]:
    return run_launch(communicator, launch, arrival=bytes([communicator.rank]) * (communicator.rank * 1000))


def bits(array: np.ndarray) -> bytes:
    """The bits that count: a long double has padding, which is left out."""
    if array.dtype.name != "longdouble" and array.dtype.char != "g":
        return array.tobytes()
    used = np.finfo(array.dtype).bits // 8 if np.finfo(array.dtype).nmant != 63 else 10
    return array.view(np.uint8).reshape(-1, array.itemsize)[:, :used].tobytes() if array.size else b""


def check_allreduce(team: Team, op: ReduceOp, dtype: str, size: int, how: str, inplace: bool, seed: int = 0) -> None:
    """Runs it and compares with the left fold over ranks."""
    launch = team.launch()
    results = team.must(body_allreduce, launch, op, dtype, size, how, inplace, seed)
    expected = left_fold(op, [operand(rank, dtype, size, seed) for rank in team.everyone])
    first = results[0][0]
    assert all(bits(result) == bits(first) for result, _ in results), "ranks differ"
    assert all(same for _, same in results), "the source was written"
    if backends.get(team.backend).bitwise or dtype not in TOLERANCE:
        np.testing.assert_array_equal(first, expected)
        assert bits(first) == bits(expected)
    else:
        np.testing.assert_allclose(first, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def allreduce_cases() -> Iterator[tuple[ReduceOp, str, int, int, bool]]:
    """Every op and dtype that go together, with world sizes and element counts in turn."""
    allowed = [pair for pair in product(ReduceOp, DTYPES) if arrays.refusal_reason(*pair) is None]
    for i, (op, dtype) in enumerate(allowed):
        yield op, dtype, WORLDS[i % 4], SIZES[(i + i // 4) % 5], bool(i % 2)


# ------------------------------------------------------------------------------- the suite


@pytest.mark.parametrize(("op", "dtype", "world", "size", "inplace"), list(allreduce_cases()))
def test_allreduce_by_op_and_dtype(
    team_of: TeamOf, op: ReduceOp, dtype: str, world: int, size: int, inplace: bool
) -> None:
    check_allreduce(team_of(world), op, dtype, size, "plain", inplace)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("world", WORLDS)
def test_allreduce_by_world_and_size(team_of: TeamOf, world: int, size: int, seed: int) -> None:
    check_allreduce(team_of(world), ReduceOp.SUM, "float32", size, "plain", bool((seed + size) % 2), seed)


@pytest.mark.parametrize("how", ["every other", "reversed", "transposed", "column", "big-endian", "unaligned"])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
@pytest.mark.parametrize("inplace", [True, False])
def test_allreduce_by_layout(team_of: TeamOf, how: str, dtype: str, inplace: bool) -> None:
    check_allreduce(team_of(3), ReduceOp.SUM, dtype, 600_000, how, inplace)


@pytest.mark.parametrize("inplace", [True, False])
def test_allreduce_of_a_0d_array(team_of: TeamOf, inplace: bool) -> None:
    check_allreduce(team_of(3), ReduceOp.PRODUCT, "float64", 1, "0-d", inplace)


@pytest.mark.parametrize("in_dst", [True, False])
@pytest.mark.parametrize(("world", "root"), [(world, root) for world in WORLDS for root in range(world)])
def test_broadcast_from_every_root(team_of: TeamOf, world: int, root: int, in_dst: bool) -> None:
    team = team_of(world)
    dtype, size = DTYPES[(world + root) % len(DTYPES)], SIZES[(root + in_dst) % 5]
    for result in team.must(body_broadcast, team.launch(), root, dtype, size, "plain", in_dst):
        assert result.tobytes() == operand(root, dtype, size, 3).tobytes()


@pytest.mark.parametrize("how", ["every other", "big-endian", "transposed"])
def test_broadcast_by_layout(team_of: TeamOf, how: str) -> None:
    team = team_of(3)
    for result in team.must(body_broadcast, team.launch(), 1, "float64", 300_000, how, False):
        assert result.tobytes() == operand(1, "float64", 300_000, 3).tobytes()


@pytest.mark.parametrize("size", SIZES)
def test_send_between_all_pairs_while_others_idle(team_of: TeamOf, size: int) -> None:
    team = team_of(3)
    for src, dst in ((0, 1), (1, 0), (2, 0), (1, 2)):
        launch = team.launch(ranks=sorted((src, dst)))
        for result in team.must(body_send, launch, src, dst, size, "plain", ranks=launch.ranks):
            np.testing.assert_array_equal(result, operand(src, "float32", size, 5))
    check_allreduce(team, ReduceOp.SUM, "int64", 1024, "plain", True)


def test_send_between_layouts(team_of: TeamOf) -> None:
    team = team_of(2)
    for how in ("every other", "reversed", "big-endian"):
        for result in team.must(body_send, team.launch(), 1, 0, 300_000, how):
            np.testing.assert_array_equal(result, operand(1, "float32", 300_000, 5))


def test_everyone_gets_all_arrivals_in_rank_order(team_of: TeamOf) -> None:
    for world in WORLDS:
        team = team_of(world)
        for arrivals in team.must(body_arrive, team.launch()):
            assert [bytes(arrival) for arrival in arrivals] == [bytes([rank]) * (rank * 1000) for rank in team.everyone]


@pytest.mark.parametrize("size", [0, 1, 700_000])
def test_several_agreements_and_kernels_in_one_launch(team_of: TeamOf, size: int) -> None:
    team = team_of(3)
    for _ in range(3):
        results = team.must(body_several, team.launch(), size)
        for seed, got in ((1, [first for first, _ in results]), (2, [second for _, second in results])):
            expected = left_fold(ReduceOp.SUM, [operand(rank, "int32", size, seed) for rank in team.everyone])
            for array in got:
                np.testing.assert_array_equal(array, expected)


def test_a_refused_launch_gives_everyone_the_arrivals_and_the_next_one_works(team_of: TeamOf) -> None:
    team = team_of(3)
    for _ in range(50):
        assert team.must(body_refuse, team.launch()) == [[b"no"] * 3] * 3
    check_allreduce(team, ReduceOp.MAX, "int32", 1024, "plain", True)


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
