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
    "index": lambda subject: [1, 2][subject],
    "range": range,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "format": lambda subject: f"{subject:.2f}",
    "equal": lambda subject: subject == 1,
    "equal, the other way": lambda subject: operator.eq(1, subject),
    "unequal": lambda subject: subject != 1,
    "in a list": lambda subject: subject in [1, 2],
    "less": lambda subject: subject < 1,
    "greater, the other way": lambda subject: operator.gt(1, subject),
    "sorted": lambda subject: sorted([subject, subject]),
    "add": lambda subject: subject + 1,
    "add, the other way": lambda subject: 1 + subject,
    "add in place": lambda subject: operator.iadd(subject, 1),
    "divmod": lambda subject: divmod(subject, 2),
    "shift": lambda subject: 1 << subject,
    "matmul": lambda subject: subject @ ARRAY,
    "negative": operator.neg,
    "sum": lambda subject: sum([subject, subject]),
    "item": lambda subject: subject[0],
    "set an item": lambda subject: operator.setitem(subject, 0, 1),
    "delete an item": lambda subject: operator.delitem(subject, 0),
    "slice": lambda subject: subject[1:],
    "len": len,
    "iterate": list,
    "reversed": reversed,
    "unpack": lambda subject: (*subject,),
    "contains": lambda subject: 1 in subject,
    "call": lambda subject: subject(),
    "to an array": lambda subject: ARRAY + subject,
    "to an array in place": lambda subject: operator.iadd(ARRAY.copy(), subject),
    "array matmul": lambda subject: ARRAY @ subject,
    "equal to an array": lambda subject: operator.eq(ARRAY, subject),
    "less than an array": lambda subject: operator.gt(ARRAY, subject),
    "to a scalar": lambda subject: np.float32(2) * subject,
    "equal to a scalar": lambda subject: operator.eq(np.int64(2), subject),
    "less than a scalar": lambda subject: np.float64(2) > subject,
    "index of an array": lambda subject: ARRAY[subject],
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", [name for name in MADE if name != "handle of several"])
def test_to_use_it_as_a_value_is_refused(name: str, use: str) -> None:
    make, error, hint = MADE[name]
    subject = make()
    if name == "handle" and use == "index of an array":  # numpy's own functions fetch it, see below
        return
    with pytest.raises(error, match=hint):
        USES[use](subject)


@pytest.mark.parametrize("name", MADE)
def test_an_unknown_attribute_is_none_and_says_what_to_do(name: str) -> None:
    make, _, _ = MADE[name]
    subject: Any = make()
    hint = r"col\.get" if name in ("handle", "handle of several", "of a batch") else "in a method"
    with pytest.raises(AttributeError, match=f"'item'.*{hint}"):
        subject.item()
    for probed in ("item", "sum", "__array_interface__", "__dlpack__", "_repr_png_", "__deepcopy__"):
        assert not hasattr(subject, probed)
        assert getattr(subject, probed, None) is None


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
    subject, other = make(), make()
    assert subject == subject
    assert subject != other
    assert subject != a_handle()
    assert subject != None  # noqa: E711
    assert {subject: 1}[subject] == 1
    assert other not in {subject}
    assert subject in [other, subject]
    assert f"{subject}" == str(subject) == repr(subject)
    assert not is_tensor(subject)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda subject: pickle.loads(pickle.dumps(subject)),
    "cloudpickle": lambda subject: pickle.loads(cloudpickle.dumps(subject)),
    "replace": dataclasses.replace,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("count", [1, 2])
def test_a_handle_can_be_copied(way: str, count: int) -> None:
    subject = a_handle(count)
    two = COPIES[way](subject)
    assert type(two) is Handle
    assert dataclasses.astuple(two) == dataclasses.astuple(subject)
    assert repr(two) == repr(subject)


def test_an_error_of_a_handle_survives_pickling() -> None:
    for use in (bool, lambda subject: subject.item()):
        with pytest.raises(HandleError) as caught:
            use(a_handle())
        error = pickle.loads(pickle.dumps(caught.value))
        assert type(error) is type(caught.value)
        assert str(error) == str(caught.value)
        assert isinstance(error, TypeError)


@pytest.fixture
def handle(request: pytest.FixtureRequest) -> Any:
    """A handle whose tensor is here; by default an array of numpy."""
    store, handle = Store(), a_handle()
    make = getattr(request, "param", lambda: np.arange(3, dtype=np.float32))
    container = Container.of(make(), is_tensor)
    assert container is not None
    store.put(KEY, container)
    fetch.register_local(handle.address.secret, store)
    yield handle
    del fetch._clients.local[handle.address.secret]


def test_numpys_functions_fetch_a_handle(handle: Any) -> None:
    assert np.asarray(handle).tolist() == [0, 1, 2]
    assert np.add(handle, 1).tolist() == [1, 2, 3]
    assert np.sum(handle) == 3
    np.testing.assert_array_equal(handle, [0, 1, 2])
    with pytest.raises(HandleError):
        handle + ARRAY


def weights() -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.Parameter(torch.arange(3.0))


def narrow() -> Any:
    torch = pytest.importorskip("torch")
    return torch.arange(3).to(torch.bfloat16)


@pytest.mark.parametrize("handle", [weights, narrow], indirect=True)
def test_numpys_functions_fetch_what_torch_does_not_give_to_numpy(handle: Any) -> None:
    assert np.asarray(handle, np.float32).tolist() == [0, 1, 2]
    assert np.asarray(handle).dtype in ("float32", "bfloat16")


@pytest.mark.parametrize("name", ["of a batch", "of a captured step", "argument"])
def test_numpys_functions_are_refused_what_is_not_there(name: str) -> None:
    make, error, hint = MADE[name]
    for use in (np.asarray, np.sum, lambda subject: np.add(subject, ARRAY)):
        with pytest.raises(error, match=hint):
            use(make())
