"""The public constructors: numpy's signatures, any element type, both libraries, memory in the arena."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raycollect as col
from raycollect.backends import arrays
from raycollect.core.model import TensorInfo
from raycollect.errors import ArenaFullError, InvalidArgumentError
from raycollect.pos import tensors
from raycollect.pos.arena import Arena
from raycollect.pos.segments import Segments
from tests.fake_cupy import Fake

NAMES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("bfloat16", "float8_e4m3fn", "float8_e5m2"),
]
SHAPES: list[Any] = [(), 0, 7, (3,), (2, 0, 3), [2, 3], (1, 1, 5), np.int64(4), (np.int32(2), 2)]
BOTH = ["numpy", "torch"]
ROOT = Path(col.__file__).parents[1]


@pytest.fixture(params=BOTH)
def library(request: pytest.FixtureRequest) -> str:
    if request.param == "torch":
        pytest.importorskip("torch")
    return str(request.param)


def is_in_arena(tensor: object) -> bool:
    seen = arrays.memory(tensor)
    assert isinstance(seen, np.ndarray)
    return Segments.current().locate(int(seen.ctypes.data), seen.nbytes) is not None


def values(tensor: object) -> np.ndarray:
    """The elements, in a type that every other can be compared with."""
    seen = arrays.memory(tensor)
    assert isinstance(seen, np.ndarray)
    return np.asarray(seen).astype(np.complex128)


def _python(code: str, *options: str) -> tuple[str, str]:
    """Runs code in a fresh interpreter; gives what it printed and what it complained about."""
    command = [sys.executable, *options, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout.strip(), done.stderr


# ---------------------------------------------------------------------------------------------- what is made


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_type_and_shape(library: str, name: str, shape: Any) -> None:
    extents = np.empty(shape, np.uint8).shape
    makers: dict[str, Callable[[], Any]] = {
        "empty": lambda: tensors.empty(shape, name, library=library),
        "zeros": lambda: tensors.zeros(shape, name, library=library),
        "ones": lambda: tensors.ones(shape, name, library=library),
        "full": lambda: tensors.full(shape, 1, name, library=library),
        "array": lambda: tensors.array(np.ones(extents), name, library=library),
    }
    expected = {"zeros": 0, "ones": 1, "full": 1, "array": 1}
    for how, make in makers.items():
        tensor = make()
        info = arrays.describe(tensor)
        assert (info.shape, info.dtype, info.library, info.device) == (extents, name, library, "cpu")
        seen = arrays.memory(tensor)
        assert isinstance(seen, np.ndarray)
        assert seen.flags.c_contiguous
        assert seen.flags.writeable
        assert is_in_arena(tensor) or not seen.size
        if how in expected:
            assert (values(tensor) == expected[how]).all()


def test_zeros_are_zeros_where_something_else_was_before(library: str) -> None:
    tensors.full(100_000, 7.5).sum()
    assert not values(tensors.zeros(100_000, library=library)).any()


def test_the_defaults_are_those_of_numpy() -> None:
    for tensor, expected in (
        (tensors.empty(3), np.empty(3)),
        (tensors.zeros(3, None), np.zeros(3, None)),
        (tensors.ones((2, 2)), np.ones((2, 2))),
        (tensors.full(2, 7), np.full(2, 7)),
        (tensors.full(2, 7.5), np.full(2, 7.5)),
        (tensors.full((2, 3), [1, 2, 3]), np.full((2, 3), [1, 2, 3])),
        (tensors.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]])),
        (tensors.array(7), np.array(7)),
        (tensors.array([1.5, 2.5], "int32"), np.array([1.5, 2.5]).astype("int32")),
        (tensors.array(range(3), ">i2"), np.array(range(3), ">i2")),
    ):
        assert type(tensor) is np.ndarray
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        assert is_in_arena(tensor)
    assert tensors.full((2, 3), [1, 2, 3]).tolist() == [[1, 2, 3], [1, 2, 3]]
    assert tensors.array([1.5, 2.5], "int32").tolist() == [1, 2]
    assert tensors.array(range(3), ">i2").tolist() == [0, 1, 2]


def test_torch_goes_in_and_comes_out() -> None:
    torch = pytest.importorskip("torch")
    source = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    copy = tensors.array(source)
    assert (type(copy), copy.dtype, copy.is_contiguous()) == (torch.Tensor, torch.bfloat16, True)
    assert torch.equal(copy, source)
    source.zero_()
    assert copy.sum() == 15
    assert type(tensors.array(source, library="numpy")) is np.ndarray
    assert tensors.array(source, torch.float64, library="numpy").dtype == np.float64
    assert tensors.array(torch.ones(2, requires_grad=True)).requires_grad is False
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float8_e5m2):
        assert tensors.zeros(3, dtype, library="torch").dtype is dtype
        assert tensors.zeros(3, dtype).dtype.name == str(dtype).removeprefix("torch.")


def test_like_gives_the_library_and_nothing_else() -> None:
    torch = pytest.importorskip("torch")
    like = torch.zeros(5, dtype=torch.int8)
    for tensor in (tensors.empty(3, like=like), tensors.full(3, 2.5, like=like), tensors.array([1.0, 2, 3], like=like)):
        assert (type(tensor), tensor.dtype, tensor.shape) == (torch.Tensor, torch.float64, (3,))
    assert type(tensors.array(like, like=np.zeros(1))) is np.ndarray
    assert type(tensors.ones(2, like=like, library="numpy")) is np.ndarray


def test_torch_is_loaded_for_who_asks_for_it() -> None:
    pytest.importorskip("torch")
    code = """
import sys
import raycollect as col
col.zeros(3)
assert "torch" not in sys.modules and "ray" not in sys.modules
print(type(col.zeros(3, "bfloat16", library="torch")).__module__)
"""
    assert _python(code) == ("torch", "")


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: tensors.empty(-1), "shape"),
        (lambda: tensors.zeros((2, -3)), "shape"),
        (lambda: tensors.ones(2.5), "shape"),
        (lambda: tensors.full("ab", 1), "shape"),
        (lambda: tensors.empty(3, "float77"), "dtype"),
        (lambda: tensors.empty(3, object), "dtype"),
        (lambda: tensors.empty(3, "M8[s]"), "dtype"),
        (lambda: tensors.full(3, "text"), "dtype"),
        (lambda: tensors.array(["text"]), "dtype"),
        (lambda: tensors.empty(3, [("a", "f4")]), "dtype"),
        (lambda: tensors.empty(3, library="jax"), "library"),
    ],
)
def test_what_makes_no_sense_is_named(make: Callable[[], Any], field: str) -> None:
    before = tensors.arena_statistics()
    with pytest.raises(InvalidArgumentError, match=f"the call: {field} is ") as caught:
        make()
    assert isinstance(caught.value, ValueError)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert tensors.arena_statistics() == before


def test_shared_memory_takes_the_elements_of_cupy_but_has_no_array_of_it(fake: Fake) -> None:
    array = fake.cupy.asarray(np.arange(3.0))
    with pytest.raises(InvalidArgumentError, match="library is 'cupy', expected 'numpy' or 'torch'"):
        tensors.array(array)
    assert tensors.array(array, library="numpy").tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["float128", "complex256", ">f4", "float8_e3m4"])
def test_a_type_that_torch_lacks_is_refused_for_torch_alone(name: str) -> None:
    pytest.importorskip("torch")
    assert tensors.ones(3, name).dtype == np.dtype(name)
    with pytest.raises(InvalidArgumentError, match="a type of torch"):
        tensors.ones(3, name, library="torch")


def test_a_type_that_numpy_lacks_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgumentError, match="a number type of numpy or ml_dtypes"):
        tensors.ones(3, torch.complex32)


# ---------------------------------------------------------------------------------------------- memory


def test_a_full_arena_is_told_to_users_but_not_to_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = tensors.arena_statistics().limit
    with pytest.raises(ArenaFullError, match="RAYCOLLECT_ARENA_LIMIT"):
        tensors.zeros(nbytes + 1, np.uint8)
    segments = Segments()
    segments._arena = Arena(2 << 20)
    monkeypatch.setattr(Segments, "_current", segments)
    info = TensorInfo(shape=(3, 1 << 20), dtype="bfloat16", itemsize=2, library="numpy")
    tensor = tensors.allocate(info)
    assert arrays.describe(tensor) == info
    assert segments.statistics().blocks == 0


@pytest.mark.parametrize("text", ["3M", ""])
def test_the_limit_is_known_before_the_first_tensor(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RAYCOLLECT_ARENA_LIMIT", text)
    segments = Segments()
    before = segments.statistics()
    assert (before.limit > 0, before.backed) == (True, 0)
    assert segments.arena.statistics().limit == before.limit


@pytest.mark.parametrize("text", ["0", "nonsense"])
def test_without_an_arena_tensors_are_ordinary(monkeypatch: pytest.MonkeyPatch, library: str, text: str) -> None:
    monkeypatch.setenv("RAYCOLLECT_ARENA_LIMIT", text)
    monkeypatch.setattr(Segments, "_current", Segments())
    assert tensors.arena_statistics().limit == 0
    assert (values(tensors.ones((2, 3), np.int16, library=library)) == 1).all()
    assert values(tensors.array([1, 2, 3], library=library)).real.tolist() == [1, 2, 3]
    info = TensorInfo(shape=(2, 3), dtype="float32", itemsize=4, library=library)
    assert arrays.describe(tensors.allocate(info)) == info
    assert tensors.arena_statistics().limit == 0


def test_outputs_on_a_device_are_not_in_the_arena() -> None:
    torch = pytest.importorskip("torch")
    info = TensorInfo(shape=(3,), dtype="float32", itemsize=4, device="meta", library="torch")
    before = tensors.arena_statistics()
    assert tensors.allocate(info).device == torch.device("meta")
    assert tensors.arena_statistics() == before


def test_tensors_may_outlive_the_interpreter_quietly() -> None:
    code = """
import raycollect as col
class Cycle: pass
kept = col.ones(100)
cycle = Cycle()
cycle.me, cycle.tensor = cycle, col.ones(1 << 20)
Cycle.tensor = col.array([1, 2])
"""
    assert _python(code, "-X", "dev") == ("", "")


def test_what_can_not_fill_a_tensor_is_refused() -> None:
    for value in ([], np.ones(3)):
        with pytest.raises(InvalidArgumentError, match="fill_value is"):
            col.full(4, value)
    for library in (np.ones(2), "", 3):
        with pytest.raises(InvalidArgumentError, match="library is"):
            col.full(4, 1.0, library=library)  # type: ignore[arg-type]
