"""Staging: how it is known where a backend works, stand-ins, and what kernels see."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

import raycollect as col
from raycollect import backends
from raycollect.backends import arrays, streams
from raycollect.engine.device_staging import StagingBuffers, StagingCopies, transfer
from raycollect.member.init import get_group_handle
from raycollect.planner import Domain
from tests.fake_cupy import Fake
from tests.pure.fleet import WAIT_S
from tests.pure.mixed import DTYPES, same, seeds

# ---------------------------------------------------------------------------------------------- how it is known


def test_a_group_that_its_members_made_knows_where_its_backend_works(fake: Fake, tmp_path: Path) -> None:
    name = "staging in a group of one"
    col.init_collective_group(1, 0, "auto", name, 20_000, rendezvous=f"file://{tmp_path}")
    try:
        assert get_group_handle(name).spec.memory == "cpu"
        tensor = fake.cupy.arange(5.0)
        col.allreduce(tensor, name)
        col.broadcast(tensor, 0, name)
        same(tensor, np.arange(5.0))
    finally:
        col.destroy_collective_group(name)


@seeds
def test_a_call_that_another_thread_makes_for_its_caller_follows_the_callers_streams(
    fake: Fake, tmp_path: Path
) -> None:
    """As the threads of torch's process group do."""
    name = "a call for another thread"
    col.init_collective_group(1, 0, "local", name, 20_000, rendezvous=f"file://{tmp_path}")

    def call(mark: streams.Mark | None, tensor: Any, output: Any) -> None:
        with streams.after(mark):
            col.allgather([output], tensor, name)

    try:
        with fake.cupy.cuda.Stream(non_blocking=True), ThreadPoolExecutor(1) as thread:
            tensor, output = fake.cupy.zeros(300), np.zeros(300)
            for turn in range(6):
                tensor += 1
                mark = streams.mark([arrays.describe(tensor)])
                thread.submit(call, mark, tensor, output).result(WAIT_S)
                same(output, np.full(300, turn + 1.0))
    finally:
        col.destroy_collective_group(name)


# ---------------------------------------------------------------------------------------------- the parts


@pytest.mark.parametrize("name", sorted(backends.BACKENDS))
def test_where_each_backend_works(name: str) -> None:
    hosts = ("local", "shm", "tcp", "gloo", "torch:gloo", "torch:mpi")
    expected = {**dict.fromkeys(hosts, "cpu"), "nccl": "cuda"}
    if name in expected or name.startswith("torch:"):
        assert backends.get(name).memory == expected.get(name, "")


def _stand_ins(home: str) -> tuple[StagingBuffers, Domain]:
    domain = Domain.of("x", 0, (0, 1), home.partition(":")[0])
    return StagingBuffers({domain: home}), domain


def test_what_is_only_written_is_not_loaded_and_what_is_only_read_not_unloaded(fake: Fake) -> None:
    made, domain = _stand_ins("cpu")
    src, dst, both = (arrays.memory(fake.cupy.zeros(size)) for size in (3, 4, 5))
    sides = [(made.side(a, domain), made.side(b, domain)) for a, b in ((src, dst), (both, both), (np.ones(2), None))]
    staging_copies = made.staging_copies(sides)
    assert isinstance(staging_copies, StagingCopies)
    assert [real for _, real in staging_copies.loads] == [src, both]
    assert [real for real, _ in staging_copies.unloads] == [dst, both]
    assert staging_copies.is_whole
    mixed = made.staging_copies([*sides, (None, np.ones(1))])
    assert mixed is not None
    assert not mixed.is_whole
    assert made.staging_copies([(np.ones(1), np.ones(1))]) is None
    made, domain = _stand_ins("cuda:0")
    assert made.side(src, domain) is src
    assert made.side(pair := (src, dst), domain) is pair
    assert len(made) == 0, "they lie where the backend works"


@seeds
@pytest.mark.parametrize("dtype", [*DTYPES, "complex128", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3), (7, 2, 3)])
def test_copies_keep_every_bit_whatever_the_layout(fake: Fake, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    values = np.asarray(rng.integers(0, 2 if dtype == "bool" else 99, shape)).astype(dtype)
    cupy = fake.cupy
    wide = tuple(2 * extent for extent in shape)
    steps = (*(slice(None, None, 2) for _ in shape), ...)
    targets = [cupy.zeros(shape, dtype), cupy.zeros(wide, dtype)[steps]]
    for target in targets:
        seen = arrays.memory(target)
        transfer(seen, values, lambda: None)
        for back in (np.zeros(shape, dtype), np.zeros(wide, dtype)[steps]):
            transfer(back, seen, lambda: None)
            np.testing.assert_array_equal(back, values)
    backwards = np.asarray(values[::-1] if shape else values)
    transfer(arrays.memory(targets[0]), backwards, lambda: None)
    np.testing.assert_array_equal(targets[0].get(), backwards)
