"""The fake has nothing that the real cupy does not have; what the backend uses of it is what runs on the fake."""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import cupy
import pytest
from cupy.cuda import nccl, runtime

from raycollect.backends.folds import FOLDS
from tests import fake_cupy
from tests.fake_cupy import _errors

from .signatures import parameters_of

VERSION = cupy.__version__
FAKE = fake_cupy._modules(VERSION)
REAL = {"cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.nccl": nccl, "cupy.cuda.runtime": runtime}
REAL |= {f"cupy.cuda.{name}": getattr(cupy.cuda, name) for name in ("memory",)}

SPECIAL = ("__enter__", "__exit__", "__init__")


def is_of(module: str, name: str, value: Any) -> bool:
    """Whether something in one of the fake's modules stands for something of cupy's."""
    home = getattr(value, "__module__", "") or ""
    if name.startswith("_") or isinstance(value, types.ModuleType) or not callable(value):
        return not name.startswith("_") and type(value) in (int, bool)
    if module in ("cupy.cuda.nccl", "cupy.cuda.runtime"):  # these are files of the fake, with imports of their own
        return (home == FAKE[module].__name__ and name != "EventState") or name == {"cupy.cuda.nccl": "NcclError"}.get(
            module, "CUDARuntimeError"
        )
    return True


def everything() -> Iterator[tuple[str, str, Any]]:
    for module, fake in FAKE.items():
        for name, value in vars(fake).items():
            if is_of(module, name, value):
                yield module, name, value


def check_parameters(told: str, fake: Any, real: Any) -> None:
    mine, theirs = parameters_of(fake), parameters_of(real)
    if mine is None or theirs in (None, ["args", "kwargs"]):
        return  # one of them takes any number
    assert mine == theirs[: len(mine)], told


@pytest.mark.parametrize(("module", "name", "fake"), list(everything()), ids=lambda one: str(one)[:40])
def test_the_real_one_has_what_the_fake_has(module: str, name: str, fake: Any) -> None:
    assert hasattr(REAL[module], name)
    real = getattr(REAL[module], name)
    if type(fake) in (int, bool):
        assert real == fake
    elif isinstance(fake, type):
        for key, value in vars(fake).items():
            if key.startswith("_") and key not in SPECIAL:
                continue
            own = {"shape", "dtype", "size"}  # attributes of instances, in both
            assert hasattr(real, key) or key in own, f"{name}.{key}"
            if callable(value) and key != "__init__":
                check_parameters(f"{name}.{key}", value, getattr(real, key))
    else:
        check_parameters(name, fake, real)


def test_the_real_one_has_the_functions_of_all_folds() -> None:
    assert not [one.__name__ for one in FOLDS.values() if not callable(getattr(cupy, one.__name__, None))]
    assert cupy.ndarray.real.__set__
    assert cupy.ndarray.imag.__set__


# ------------------------------------------------------------------------------- errors, ids, memory


@pytest.mark.parametrize("status", sorted(_errors._NAMES))
def test_errors_of_the_runtime_say_the_same(status: int) -> None:
    real, fake = runtime.CUDARuntimeError(status), _errors.CUDARuntimeError(status)
    assert (str(real), real.status, isinstance(real, RuntimeError)) == (str(fake), fake.status, True)


@pytest.mark.parametrize("status", range(9))
def test_errors_of_nccl_say_the_same(status: int) -> None:
    def told(kind: Any) -> Any:
        try:
            made = kind(status)
        except KeyError as exc:
            return exc.args
        return str(made), made.status, isinstance(made, RuntimeError)

    assert told(nccl.NcclError) == told(_errors.NcclError)


def test_ids_and_what_takes_them_are_of_the_same_types() -> None:
    from raycollect.backends.nccl.group import unique_id

    real = nccl.get_unique_id()
    with fake_cupy.installed(1, cupy_version=VERSION) as fake:
        other = fake.cupy.cuda.nccl.get_unique_id()
        assert type(real) is type(other)
        assert len(real) == len(other) == len(unique_id(nccl)) == 128
        wrong = tuple(range(128)) if isinstance(real, bytes) else bytes(128)
        said = []
        for kind in (nccl.NcclCommunicator, fake.cupy.cuda.nccl.NcclCommunicator):
            with pytest.raises(TypeError) as caught:
                kind(ndev=2, commId=wrong, rank=0)
            said.append(str(caught.value))
        assert said[0] == said[1]


def test_a_communicator_takes_an_id_of_this_cupy() -> None:
    """Without a GPU it gets as far as NCCL itself, which then finds none."""
    from raycollect.backends.nccl.group import connected, unique_id

    with pytest.raises(nccl.NcclError) as caught:
        connected(nccl, 2, unique_id(nccl), 0)
    assert caught.value.status == 1


def test_memory_of_others_is_shown_with_all_element_types() -> None:
    import ml_dtypes
    import numpy as np

    from raycollect.backends.elements import NARROW

    assert np.dtype(ml_dtypes.bfloat16) in NARROW
    for dtype in (*map(np.dtype, "?bhilBHILefdFD"), *NARROW):
        memory = cupy.cuda.UnownedMemory(ptr=512, size=64, owner=None, device_id=0)
        pointer = cupy.cuda.MemoryPointer(mem=memory, offset=0)
        if dtype not in NARROW or dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            made = cupy.ndarray((3,), dtype, memptr=pointer, strides=(dtype.itemsize,))
            assert (made.dtype, made.data.ptr, made.device.id) == (dtype, 512, 0)
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)


def test_memory_takes_as_little_as_the_fakes() -> None:
    """Neither takes weak references, and only that of the pool takes attributes."""
    with fake_cupy.installed(1, cupy_version=VERSION) as fake:
        pooled = type(fake.cupy.zeros(1).data.mem), cupy.cuda.memory.PooledMemory
        for both in (pooled, (fake.cupy.cuda.UnownedMemory, cupy.cuda.UnownedMemory)):
            takes = [(_takes_attributes(kind), _takes_weak_references(kind)) for kind in both]
            assert takes[0] == takes[1], both
            assert not takes[0][1], both


def _takes_attributes(kind: type[Any]) -> bool:
    try:
        kind.__new__(kind).anything = 1
    except AttributeError:
        return False
    return True


def _takes_weak_references(kind: type[Any]) -> bool:
    try:
        weakref.ref(kind.__new__(kind))
    except TypeError:
        return False
    return True


def test_an_owner_can_be_referred_to_weakly_and_goes_with_the_memory() -> None:
    """Or a plan that fails would keep the memory of its tensors on the GPU."""
    import numpy as np

    from raycollect.backends import arrays
    from raycollect.pos.store import weak

    class Owner:
        pass

    kind = cupy.cuda.memory.PooledMemory
    for make in (lambda: kind.__new__(kind), *(partial(_unowned, one) for one in (Owner, lambda: None))):
        memory = make()
        array = cupy.ndarray((4,), np.float32, memptr=cupy.cuda.MemoryPointer(memory, 0))
        views = [array, array[:2], array[:2][:1]]
        owners = [weak(arrays.owner(one)) for one in views]
        assert owners[0]() is owners[1]() is owners[2]() is not None
        del array, memory, views[:2]
        assert owners[0]() is not None
        views.clear()
        assert owners[0]() is None


def _unowned(owner: Any) -> Any:
    return cupy.cuda.UnownedMemory(512, 64, owner(), 0)
