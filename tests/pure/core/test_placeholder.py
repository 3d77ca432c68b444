"""What stands for a value is no value: whatever would take it for one is refused, and libraries may look at it."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.backends.arrays import is_tensor
from raycollect.captured.step_values import MISSING, Parameters
from raycollect.core.model import TENSOR, Address, Key, Structure, TensorInfo
from raycollect.driver.pending import Pending
from raycollect.errors import BatchError, CaptureError, HandleAttributeError, HandleError, RaycollectError
from raycollect.pos import Container, Store, fetch
from raycollect.pos.handle import Handle

cloudpickle = pytest.importorskip("ray.cloudpickle")

KEY = Key(bytes(28))


def a_handle(count: int = 1) -> Handle:
    info = TensorInfo(shape=(3,), dtype="float32", itemsize=4)
    structure = TENSOR if count == 1 else Structure("list", (), (TENSOR,) * count)
    address = Address(host="127.0.0.1", port=1, secret=b"placeholder")
    return Handle(
        key=KEY, actor_id="a", actor="Worker(0a1b2c)", address=address, structure=structure, infos=(info,) * count
    )


MADE: dict[str, tuple[Callable[[], Any], type[RaycollectError], str]] = {
    "handle": (a_handle, HandleError, r"Worker\(0a1b2c\) was used as the value: fetch .* col\.get\(ref\)"),
    "handle of several": (lambda: a_handle(2), HandleError, r"list of .* col\.get\(ref\)"),
    "of a batch": (lambda: Pending(object(), 0, "a"), BatchError, r"col\.get"),
    "of a captured step": (lambda: Pending(object(), 0, "a", step=1), CaptureError, "in a method"),
    "argument": (lambda: Parameters().declare("rate", MISSING), CaptureError, "in a method"),
}

ARRAY = np.ones(3, np.float32)

USES: dict[str, Callable[[Any], Any]] = {
    "truth": bool,
    "not": operator.not_,
    "int": int,
    "float": float,
    "complex": complex,
    "bytes": bytes,
    "index": lambda one: [1, 2][one],
    "range": range,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "format": lambda one: f"{one:.2f}",
    "equal": lambda one: one == 1,
    "equal, the other way": lambda one: operator.eq(1, one),
    "unequal": lambda one: one != 1,
    "in a list": lambda one: one in [1, 2],
    "less": lambda one: one < 1,
    "greater, the other way": lambda one: operator.gt(1, one),
    "sorted": lambda one: sorted([one, one]),
    "add": lambda one: one + 1,
    "add, the other way": lambda one: 1 + one,
    "add in place": lambda one: operator.iadd(one, 1),
    "divmod": lambda one: divmod(one, 2),
    "shift": lambda one: 1 << one,
    "matmul": lambda one: one @ ARRAY,
    "negative": operator.neg,
    "sum": lambda one: sum([one, one]),
    "item": lambda one: one[0],
    "set an item": lambda one: operator.setitem(one, 0, 1),
    "delete an item": lambda one: operator.delitem(one, 0),
    "slice": lambda one: one[1:],
    "len": len,
    "iterate": list,
    "reversed": reversed,
    "unpack": lambda one: (*one,),
    "contains": lambda one: 1 in one,
    "call": lambda one: one(),
    "to an array": lambda one: ARRAY + one,
    "to an array in place": lambda one: operator.iadd(ARRAY.copy(), one),
    "array matmul": lambda one: ARRAY @ one,
    "equal to an array": lambda one: operator.eq(ARRAY, one),
    "less than an array": lambda one: operator.gt(ARRAY, one),
    "to a scalar": lambda one: np.float32(2) * one,
    "equal to a scalar": lambda one: operator.eq(np.int64(2), one),
    "less than a scalar": lambda one: np.float64(2) > one,
    "index of an array": lambda one: ARRAY[one],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", [name for name in MADE if name != "handle of several"])
def test_to_use_it_as_a_value_is_refused(name: str, use: str) -> None:
    make, error, hint = MADE[name]
    one = make()
    if name == "handle" and use == "index of an array":  # numpy's own functions fetch it, see below
        return
    with pytest.raises(error, match=hint):
        USES[use](one)


@pytest.mark.parametrize("name", MADE)
def test_an_unknown_attribute_is_none_and_says_what_to_do(name: str) -> None:
    make, _, _ = MADE[name]
    one: Any = make()
    hint = r"col\.get" if name in ("handle", "handle of several", "of a batch") else "in a method"
    with pytest.raises(AttributeError, match=f"'item'.*{hint}"):
        one.item()
    for probed in ("item", "sum", "__array_interface__", "__dlpack__", "_repr_png_", "__deepcopy__"):
        assert not hasattr(one, probed)
        assert getattr(one, probed, None) is None


def test_an_attribute_of_a_handle_that_several_tensors_have_not() -> None:
    several = a_handle(2)
    for name in ("shape", "dtype"):
        assert hasattr(a_handle(), name)
        assert not hasattr(several, name)
        with pytest.raises(HandleAttributeError, match=rf"list of .* has no attribute '{name}'.*col\.get"):
            getattr(several, name)


@pytest.mark.parametrize("name", MADE)
def test_it_is_itself_and_nothing_else(name: str) -> None:
    make, _, _ = MADE[name]
    one, other = make(), make()
    assert one == one
    assert one != other
    assert one != a_handle()
    assert one != None  # noqa: E711
    assert {one: 1}[one] == 1
    assert other not in {one}
    assert one in [other, one]
    assert f"{one}" == str(one) == repr(one)
    assert not is_tensor(one)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "cloudpickle": lambda one: pickle.loads(cloudpickle.dumps(one)),
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_handle_can_be_copied(way: str, count: int) -> None:
    one = a_handle(count)
    two = COPIES[way](one)
    assert type(two) is Handle
    assert dataclasses.astuple(two) == dataclasses.astuple(one)
    assert repr(two) == repr(one)


def test_an_error_of_a_handle_survives_pickling() -> None:
    for use in (bool, lambda one: one.item()):
        with pytest.raises(HandleError) as caught:
            use(a_handle())
        found = pickle.loads(pickle.dumps(caught.value))
        assert type(found) is type(caught.value)
        assert str(found) == str(caught.value)
        assert isinstance(found, TypeError)


@pytest.fixture
def kept(request: pytest.FixtureRequest) -> Any:
    """A handle whose tensor is here; by default an array of numpy."""
    store, handle = Store(), a_handle()
    made = getattr(request, "param", lambda: np.arange(3, dtype=np.float32))
    container = Container.of(made(), is_tensor)
    assert container is not None
    store.put(KEY, container)
    fetch.register_local(handle.address.secret, store)
    yield handle
    del fetch._clients.local[handle.address.secret]


def test_numpys_functions_fetch_a_handle(kept: Any) -> None:
    assert np.asarray(kept).tolist() == [0, 1, 2]
    assert np.add(kept, 1).tolist() == [1, 2, 3]
    assert np.sum(kept) == 3
    np.testing.assert_array_equal(kept, [0, 1, 2])
    with pytest.raises(HandleError):
        kept + ARRAY


def weights() -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.Parameter(torch.arange(3.0))


def narrow() -> Any:
    torch = pytest.importorskip("torch")
    return torch.arange(3).to(torch.bfloat16)


@pytest.mark.parametrize("kept", [weights, narrow], indirect=True)
def test_numpys_functions_fetch_what_torch_does_not_give_to_numpy(kept: Any) -> None:
    assert np.asarray(kept, np.float32).tolist() == [0, 1, 2]
    assert np.asarray(kept).dtype in ("float32", "bfloat16")


@pytest.mark.parametrize("name", ["of a batch", "of a captured step", "argument"])
def test_numpys_functions_are_refused_what_is_not_there(name: str) -> None:
    make, error, hint = MADE[name]
    for use in (np.asarray, np.sum, lambda one: np.add(one, ARRAY)):
        with pytest.raises(error, match=hint):
            use(make())
