"""What backends know about tensors: in whose memory a value lies, pieces, storage, access by chunks."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import TensorInfo
from tests.pure.conformance import DTYPES

try:
    import torch
except ImportError:
    torch = None


with_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


class Foreign:
    """Somebody else's tensor on numpy's memory."""

    def __init__(self, array: np.ndarray, **changes: Any) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **changes}


class Capsule:
    """Somebody else's tensor, by DLPack; as new or as old as its `__dlpack__` accepts arguments."""

    def __init__(self, array: np.ndarray, device: int = 1) -> None:
        self.array = array
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


class OldCapsule(Capsule):
    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()


class Failing(Capsule):
    def __dlpack__(self, **options: Any) -> Any:
        raise RuntimeError("not now")


class Nosy:
    """Answers to any name, as mocks and lazy proxies do."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"was asked for {name}")


# ------------------------------------------------------------------------------- whose memory


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1),
        ml_dtypes.bfloat16(1),
        np.ma.masked_array([1.0]),
        np.array([1.0]).view(np.recarray),
        np.array(["a"]),
        np.array([None]),
        np.zeros(1, [("a", int)]),
        np.zeros(1, "datetime64[s]"),
        np.zeros(1, "V2"),
        [1.0],
        1.0,
        b"bytes",
        memoryview(b"bytes"),
        np.ndarray,
        Capsule,
        Nosy(),
        Foreign(np.zeros(1, "datetime64[s]")),
        Foreign(np.ones(2), data=b"0" * 16),
        Foreign(np.ones(2), data=None),
        Foreign(np.ones(2), typestr="nonsense"),
        Capsule(np.ones(2), device=2),
        Failing(np.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_tensor(value: object) -> None:
    assert arrays.view(value) is None
    assert not arrays.is_tensor(value)
    for function in (arrays.memory, arrays.describe):
        with pytest.raises(TypeError, match=type(value).__name__):
            function(value)
    assert arrays.library(value) == "numpy"


@pytest.mark.parametrize("kind", [Foreign, Capsule, OldCapsule])
def test_a_foreign_tensor_is_seen_where_it_is_and_kept_alive(kind: Callable[..., Any]) -> None:
    memory = np.arange(12.0).reshape(3, 4)[:, ::2]
    tensor = kind(memory)
    seen = arrays.view(tensor)
    np.testing.assert_array_equal(seen, memory)
    assert arrays.place(seen)[:4] == arrays.place(memory)[:4]
    # An old capsule does not say whether it may be written, and an old numpy does not ask.
    silent = kind is OldCapsule or (kind is Capsule and np.lib.NumpyVersion(np.__version__) < "2.1.0")
    assert arrays.is_writeable(seen) != silent
    if not silent:
        seen[0, 0] = 5
        assert memory[0, 0] == 5
    alive = weakref.ref(memory)
    del tensor, memory
    assert alive() is not None
    del seen
    assert alive() is None


def test_torch_is_never_imported_for_a_look() -> None:
    code = (
        "import sys, numpy as np\n"
        "from raycollect.backends import arrays\n"
        "from raycollect.core.model import TensorInfo\n"
        "assert arrays.view(np.ones(1)) is not None and arrays.view('text') is None\n"
        "info = TensorInfo(shape=(2,), dtype='float32', itemsize=4, library='torch')\n"
        "assert type(arrays.empty(info)) is np.ndarray\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@with_torch
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of quantized and half complex tensors
def test_which_torch_tensors_are_tensors() -> None:
    leaf = torch.ones(3, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(2))
    for tensor in (leaf, parameter, torch.ones(()), torch.ones(0), torch.ones(1).expand(4), torch.ones(2).bfloat16()):
        assert isinstance(arrays.view(tensor), np.ndarray)
    arrays.view(parameter)[0] = 3
    assert parameter.tolist() == [3, 1]
    lazy = torch.ones(2, dtype=torch.complex64).conj()

    class Wrapped(torch.Tensor):
        pass

    emptied = torch.ones(4)
    emptied.untyped_storage().resize_(0)
    for tensor in (
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
        lazy,
        lazy.imag,  # negated
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.ones(2, dtype=torch.complex32) if hasattr(torch, "complex32") else lazy,
        torch.ones(2).as_subclass(Wrapped),
        emptied,
        torch.float32,
    ):
        assert arrays.view(tensor) is None, tensor


# ------------------------------------------------------------------------------- descriptions, and tensors made by them


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=with_torch)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 5)])
def test_empty_makes_what_describes_itself_so(library: str, dtype: str, shape: tuple[int, ...]) -> None:
    wanted = TensorInfo(shape=shape, dtype=dtype, itemsize=np.dtype(dtype).itemsize, library=library)
    array = arrays.empty(wanted)
    assert arrays.library(array) == library
    assert arrays.describe(array) == wanted
    assert arrays.view(array).flags.c_contiguous


def test_too_much_memory_is_a_memory_error() -> None:
    for library in ("numpy", "torch"):
        with pytest.raises(MemoryError):
            arrays.empty(TensorInfo(shape=(1 << 60,), dtype="int8", itemsize=1, library=library))


# ------------------------------------------------------------------------------- pieces


@pytest.mark.parametrize(
    ("shape", "count", "piece"),
    [
        ((3,), 3, (1,)),
        ((6,), 3, (2,)),
        ((3, 4), 3, (4,)),
        ((6, 4), 3, (2, 4)),
        ((0, 4), 3, (0, 4)),
        ((3, 0), 3, (0,)),
        ((5,), 1, (5,)),
        ((1, 5), 1, (5,)),
        ((), 1, None),
        ((7,), 3, None),
        ((2,), 3, None),
    ],
)
def test_split(shape: tuple[int, ...], count: int, piece: tuple[int, ...] | None) -> None:
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    pieces = arrays.split(whole, count)
    if piece is None:
        assert pieces is None
        return
    assert [part.shape for part in pieces] == [piece] * count
    np.testing.assert_array_equal(np.concatenate([part.reshape(-1) for part in pieces]), whole.reshape(-1))
    assert all(np.shares_memory(part, whole) for part in pieces if part.size)
    if count > 1 and whole.ndim > 1 and whole.size:
        assert arrays.split(np.asfortranarray(whole), count) is None


# ------------------------------------------------------------------------------- storage, and chunks


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
