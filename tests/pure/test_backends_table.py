"""The capability table, and what the backends know about arrays."""

from __future__ import annotations

import builtins
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from raycollect import backends
from raycollect.backends import arrays
from raycollect.errors import BackendNotInstalledError, BackendUnavailableError, UnknownBackendError
from raycollect.model import GroupSpec, ReduceOp

from .communicators import MemoryExchange, MemoryRendezvous, MemoryStar


def test_an_unknown_backend_lists_those_that_exist() -> None:
    for look in (backends.get, backends.load):
        with pytest.raises(UnknownBackendError, match="no backend 'nlcc'; there are local, shm, gloo"):
            look("nlcc", "g")


def test_a_missing_library_comes_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_gloo(name: str, *args: Any, **kwargs: Any) -> Any:
        if "gloo" in name or name.startswith("xoscar"):
            raise ImportError(f"no {name} here")
        return real(name, *args, **kwargs)

    def no_module(name: str, package: str | None = None) -> Any:
        return without_gloo(name)

    monkeypatch.setattr(backends, "import_module", no_module)
    assert not backends.is_available("gloo")
    with pytest.raises(BackendNotInstalledError, match=r"pip install (xoscar|pygloo)") as caught:
        backends.load("gloo", "g")
    assert "no pygloo here" in str(caught.value)
    assert caught.value.group_name == "g"


@pytest.mark.parametrize("name", ["local", "shm"])
def test_backends_without_libraries_are_always_there(name: str) -> None:
    assert backends.is_available(name)
    assert callable(backends.load(name))


def test_importing_the_table_loads_no_library() -> None:
    code = "import sys, raycollect.backends; print(sorted({'ray', 'xoscar', 'pygloo', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("machines", "chosen"), [(["a"], "local"), (["a", "a"], "shm"), (["a", "b"], "gloo"), (["a", "b", "a"], "gloo")]
)
def test_auto(machines: list[str], chosen: str) -> None:
    assert backends.choose(machines) == chosen
    backends.check_placement(chosen, machines)


@pytest.mark.parametrize(("name", "machines"), [("local", ["a", "a"]), ("shm", ["a", "b"])])
def test_members_that_are_too_far_apart_are_refused(name: str, machines: list[str]) -> None:
    with pytest.raises(BackendUnavailableError, match="auto"):
        backends.check_placement(name, machines, "g")


def test_local_is_for_one_process() -> None:
    create = backends.load("local")
    exchange = MemoryExchange(MemoryStar(), 0)
    spec = GroupSpec(name="g", group_id="1", backend="local", world_size=2)
    with pytest.raises(BackendUnavailableError):
        create(spec, 0, MemoryRendezvous(), exchange)


# ------------------------------------------------------------------------------- arrays


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.ones(2), True),
        (np.ones((), np.complex64), True),
        (np.zeros(0, bool), True),
        (np.float32(1), False),
        (np.ma.masked_array([1.0]), False),
        (np.array(["a"]), False),
        (np.array([None]), False),
        (np.zeros(1, [("a", int)]), False),
        (np.zeros(1, "datetime64[s]"), False),
        ([1.0], False),
    ],
)
def test_is_tensor(value: object, expected: bool) -> None:
    assert arrays.is_tensor(value) is expected


def test_info_names_the_native_dtype_and_round_trips() -> None:
    found = arrays.info(np.zeros((2, 3), ">f4"))
    assert (found.shape, found.dtype, found.itemsize) == ((2, 3), "float32", 4)
    made = arrays.empty(found)
    assert (made.shape, made.dtype) == ((2, 3), np.float32)


@pytest.mark.parametrize(
    ("op", "dtype", "refused"),
    [
        (ReduceOp.AVG, "int64", True),
        (ReduceOp.AVG, "bool", True),
        (ReduceOp.AVG, "complex64", False),
        (ReduceOp.MIN, "complex64", True),
        (ReduceOp.MAX, "complex128", True),
        (ReduceOp.MIN, "bool", False),
        (ReduceOp.SUM, "bool", False),
        (ReduceOp.SUM, "object", True),
    ],
)
def test_refusals_name_op_and_dtype(op: ReduceOp, dtype: str, refused: bool) -> None:
    reason = arrays.refusal_reason(op, dtype)
    assert (reason is not None) == refused
    assert not reason or (op.name in reason and dtype in reason)


def test_storage_ranges() -> None:
    whole = np.zeros((4, 6), np.int16)
    start, stop = arrays.byte_range(whole)
    assert stop - start == whole.nbytes
    assert arrays.byte_range(whole[::-1, ::-1]) == (start, stop)
    assert arrays.byte_range(whole[1:2]) == (start + 12, start + 24)
    assert len(set(arrays.byte_range(whole[:0]))) == 1
    assert not arrays.overlap(whole[:2], whole[2:])
    assert arrays.overlap(whole[:3], whole[2:])
    assert not arrays.overlap(whole, whole[:0])
    assert not arrays.overlap(whole[:, ::2], whole[:, 1::2])


def test_self_overlap_and_owner() -> None:
    base = np.zeros(10)
    assert not arrays.overlaps_itself(base.reshape(2, 5).T[::-1])
    assert arrays.overlaps_itself(np.broadcast_to(base, (3, 10)))
    assert arrays.overlaps_itself(np.lib.stride_tricks.sliding_window_view(base, 3))
    assert not arrays.overlaps_itself(np.broadcast_to(base[:0], (3, 0)))
    assert arrays.owner(base[2:].reshape(2, 4)[0]) is base


@pytest.mark.parametrize("seed", range(20))
def test_flat_reads_and_writes_what_reshape_would(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(extent) for extent in rng.integers(1, 6, rng.integers(0, 4)))
    array = rng.integers(0, 100, shape).astype(rng.choice(["<i4", ">i4", "<f8", ">f2"]))
    array = array[(..., *(slice(None, None, int(rng.choice([1, -1, 2]))) for _ in shape))]
    array = array.T if seed % 2 else array
    flat, expected = arrays.Flat(array), np.array(array).reshape(-1)
    lo = int(rng.integers(0, flat.size + 1))
    hi = int(rng.integers(lo, flat.size + 1))
    chunk = flat.read(lo, hi)
    assert chunk.dtype == flat.dtype == array.dtype.newbyteorder("=")
    assert chunk.flags.c_contiguous
    np.testing.assert_array_equal(chunk, expected[lo:hi])
    assert np.shares_memory(chunk, array) == (flat.direct and hi > lo)
    target = flat.target(lo, hi)
    target[...] = 7
    flat.commit(lo, hi, target)
    expected[lo:hi] = 7
    np.testing.assert_array_equal(np.array(array).reshape(-1), expected)
    flat.write(0, lo, np.full(lo, 3, flat.dtype))
    expected[:lo] = 3
    np.testing.assert_array_equal(np.array(array).reshape(-1), expected)


def test_flat_reads_a_read_only_array() -> None:
    array = np.arange(6.0)
    array.flags.writeable = False
    np.testing.assert_array_equal(arrays.Flat(array).read(2, 5), [2, 3, 4])
    with pytest.raises(ValueError, match="read-only"):
        arrays.Flat(array).write(0, 1, np.zeros(1))
