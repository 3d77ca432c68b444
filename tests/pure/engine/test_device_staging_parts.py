"""Staging: how it is known where a backend works, stand-ins, and what kernels see."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 by it
import numpy as np
import pytest

import raycollect as col
from raycollect import backends
from raycollect.backends import arrays
from raycollect.core.model import GroupSpec, Kernel, OpKind, ReduceOp
from raycollect.engine import device_staging
from raycollect.engine.device_staging import StagingBuffers, StagingCopies, home_of, memory_of, transfer
from raycollect.member.init import get_group_handle
from raycollect.planner import Domain, Request, decode_program, encode_program, plan
from raycollect.pos import Container
from tests.fake_cupy import Fake
from tests.pure.fleet import launched
from tests.pure.memberships import membership
from tests.pure.mixed import DTYPES, WORLD, Mixed, same, seeds
from tests.support.values import replace

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


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_stand_ins_of_short_floats_need_no_torch(fake: Fake, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]  # as if it were not installed
    values = np.arange(6).astype(dtype)
    domain = Domain.of("g", 0, (0,), "cuda")
    stand_in = StagingBuffers({domain: "cuda:0"}).side(values, domain)
    assert (stand_in.library, stand_in.dtype) == ("cupy", values.dtype)
    transfer(stand_in, values, lambda: None)
    assert stand_in.tensor.get().tolist() == values.tolist()


@seeds
@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_brings_what_its_caller_has_enqueued_on_a_stream_of_its_own(
    async_op: bool, fake: Fake, tmp_path: Path
) -> None:
    name = "staging behind a stream"
    col.init_collective_group(1, 0, "auto", name, 20_000, rendezvous=f"file://{tmp_path}")
    stream = fake.cupy.cuda.Stream(non_blocking=True)
    try:
        with stream:
            tensor = fake.cupy.zeros(500)
            for turn in range(6):
                tensor += 1
                work = col.allreduce(tensor, name, async_op=async_op)
                if work is not None:
                    work.wait()
                same(tensor, np.full(500, turn + 1.0))
    finally:
        col.destroy_collective_group(name)


@pytest.mark.parametrize("memory", ["", "cpu", "cuda"])
def test_a_program_says_where_its_group_works(memory: str) -> None:
    there = membership([0, 0, 1, 1], backend="gloo", bitwise=False)
    there = replace(there, spec=replace(there.spec, memory=memory))
    operands = tuple((rank, rank, None) for rank in range(4))
    asked = Request(kind=OpKind.ALLREDUCE, group=there.spec, operands=operands, op=ReduceOp.SUM)
    planned = plan([asked], [there])
    for position in range(4):
        (share,) = decode_program(encode_program(planned.program(position))).shares
        assert share.domain.memory == memory


def test_a_group_works_in_a_memory_by_its_name() -> None:
    for wrong in (None, 3, ("cpu",)):
        with pytest.raises(TypeError, match="memory is a string"):
            GroupSpec(name="g", group_id="g", backend="shm", world_size=1, memory=wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- the parts


@pytest.mark.parametrize("name", sorted(backends.BACKENDS))
def test_where_each_backend_works(name: str) -> None:
    hosts = ("local", "shm", "tcp", "gloo", "torch:gloo", "torch:mpi")
    expected = {**dict.fromkeys(hosts, "cpu"), "nccl": "cuda"}
    if name in expected or name.startswith("torch:"):
        assert memory_of(name) == expected.get(name, "")


def test_a_home_is_what_the_communicator_says_or_the_current_device(fake: Fake) -> None:
    class Said:
        device = "cuda:2"

    assert home_of("cpu", Said()) == "cpu"
    assert home_of("", Said()) == ""
    assert home_of("cuda", Said()) == "cuda:2"
    with fake.cupy.cuda.Device(1):
        assert home_of("cuda", object()) == "cuda:1"


def _stand_ins(home: str) -> tuple[StagingBuffers, Domain]:
    domain = Domain.of("x", 0, (0, 1), home.partition(":")[0])
    return StagingBuffers({domain: home}), domain


def test_one_place_has_one_stand_in_and_what_is_at_home_has_none(fake: Fake) -> None:
    cupy = fake.cupy
    made, domain = _stand_ins("cpu")
    at_home = np.ones(3)
    assert made.side(at_home, domain) is at_home
    assert made.side((at_home, at_home), domain)[0] is at_home
    assert len(made) == 0
    row = cupy.arange(8, dtype="float32")
    first, again, other = (arrays.memory(one) for one in (row[:4], row[:4], row[4:]))
    stand_in = made.side(first, domain)
    assert type(stand_in) is np.ndarray
    assert (stand_in.shape, stand_in.dtype) == ((4,), np.float32)
    assert made.side(again, domain) is stand_in
    assert made.side(other, domain) is not stand_in
    sides = (first, other)
    assert made.side(sides, domain) is made.side(sides, domain)
    assert made.side(sides, domain)[0] is stand_in
    assert len(made) == 2
    assert made.side(None, domain) is None


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


def test_on_a_gpu_what_lies_in_the_host_or_on_another_gpu_has_a_stand_in_there(fake: Fake) -> None:
    made, domain = _stand_ins("cuda:1")
    with fake.cupy.cuda.Device(1):
        here = arrays.memory(fake.cupy.ones(3))
    with fake.cupy.cuda.Device(0):
        there = arrays.memory(fake.cupy.arange(4.0))
    swapped = np.arange(5, dtype=">i4")
    assert made.side(here, domain) is here
    for real, expected in ((there, [0, 1, 2, 3]), (swapped, [0, 1, 2, 3, 4])):
        stand_in = made.side(real, domain)
        assert stand_in.device == "cuda:1"
        assert stand_in.library == "cupy"
        staging_copies = made.staging_copies([(stand_in, stand_in)])
        staging_copies.load(lambda: None)
        with fake.cupy.cuda.Device(1):
            assert stand_in.tensor.get().tolist() == expected
            stand_in.tensor[...] = stand_in.tensor + stand_in.tensor
        staging_copies.unload(lambda: None)
    assert swapped.tolist() == [0, 2, 4, 6, 8]
    with fake.cupy.cuda.Device(0):
        assert there.tensor.get().tolist() == [0, 2, 4, 6]


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


def test_a_kernel_sees_no_array_of_another_device(mixed: Callable[[str], Mixed]) -> None:
    seen: list[Kernel] = []

    class Looking:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def stage(self, launch: Any, kernel: Kernel) -> None:
            seen.append(kernel)
            self._inner.stage(launch, kernel)

    one = mixed("local")
    one.fleet.communicators = [launched(Looking(inner), seen.append) for inner in one.fleet.communicators]
    values = [one.put(np.full(4, 2.0 + rank), rank) for rank in range(WORLD)]
    one.fleet.must(OpKind.ALLREDUCE, one.fleet.keep_all(values))
    assert len(seen) == 2 * WORLD
    assert all(type(array) is np.ndarray for kernel in seen for array in (kernel.src, kernel.dst))
    assert len({id(kernel) for kernel in seen}) == WORLD, "the kernel that was prepared is the one that runs"


def test_each_tensor_is_copied_there_once_and_back_once(
    monkeypatch: pytest.MonkeyPatch, mixed: Callable[[str], Mixed]
) -> None:
    for backend in ("local", "shm"):
        one = mixed(backend)
        copied: list[Any] = []

        def counting(target: Any, source: Any, check: Any, copied: list[Any] = copied) -> None:
            copied.append(target)
            transfer(target, source, check)

        monkeypatch.setattr(device_staging, "transfer", counting)
        for sizes in ([5], [10_000, 12_000, 9_000], [3, 4], [200_000, 300_000]):  # alone, offered, packed, large
            copied.clear()
            tensors = [
                [one.put(np.ones(size, "f4"), 1 if rank == 1 else None) for size in sizes] for rank in range(WORLD)
            ]
            one.fleet.must(OpKind.ALLREDUCE, one.fleet.keep_all(tensors))
            assert len(copied) == 2 * len(sizes)
            for value in tensors:
                same(value, [np.full(size, WORLD, "f4") for size in sizes])


def test_without_tensors_elsewhere_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, mixed: Callable[[str], Mixed]
) -> None:
    one = mixed("local")
    monkeypatch.setattr("raycollect.engine.program_operands.StagingBuffers", None)
    one.fleet.must(OpKind.ALLREDUCE, one.fleet.keep_all([[np.ones(3), np.ones(9)] for _ in range(WORLD)]))


def test_runs_with_stand_ins_are_not_remembered(mixed: Callable[[str], Mixed]) -> None:
    one = mixed("local")
    container = Container.of(one.put(np.ones(3), 0), arrays.is_tensor)
    assert container is not None
    key = one.fleet.new_key()
    one.fleet.stores[0].put(key, container)
    others = [one.fleet.keep(rank, np.ones(3)) for rank in (1, 2)]
    one.fleet.must(OpKind.ALLREDUCE, [key, *others])
    assert not container.memo
