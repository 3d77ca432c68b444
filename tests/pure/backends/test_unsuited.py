"""What looks like a tensor and is none is told by what is in the way, with what to give instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind
from raycollect.engine.value_codec import pack_value, unpack_value
from raycollect.pos import Container, tensors, unkept
from tests.pure.fleet import MakeFleet
from tests.pure.unsuited import ALL, OF_SEVERAL

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of quantized, nested, half complex tensors


@pytest.mark.parametrize("name", [*ALL, *OF_SEVERAL])
def test_it_is_told_why_it_is_no_tensor_and_the_cure_gives_one(name: str) -> None:
    kind = {**ALL, **OF_SEVERAL}[name]
    value = kind.make(torch)
    assert arrays.view(value) is None
    for text in (
        arrays.describe_value(value),
        unkept(value, arrays.is_tensor, arrays.describe_value),
        unkept({"a": [np.ones(2), value]}, arrays.is_tensor, arrays.describe_value),
    ):
        assert [word for word in kind.words if word not in text] == [], text
    assert Container.of(kind.cure(value), arrays.is_tensor) is not None


def test_nothing_is_made_up_about_what_is_a_tensor_or_does_not_look_like_one() -> None:
    assert arrays.describe_value(torch.ones(2)) == "a torch.Tensor"
    assert arrays.describe_value(np.ones(2)) == "a numpy.ndarray"
    assert arrays.describe_value("text") == "a str"
    assert arrays.describe_value(torch.float32) == "a torch.dtype"


def test_a_tensor_that_has_become_another_kind_is_told(fleet: MakeFleet) -> None:
    started = fleet(2)
    tensor = torch.ones(3, dtype=torch.complex64)
    keys = [started.keep(0, tensor), started.keep(1, np.ones(3, "complex64"))]
    tensor.data = tensor.conj()
    for outcome in started.run(OpKind.ALLREDUCE, keys):
        assert "resolve_conj()" in str(outcome.error)
    started.works_on()


@pytest.mark.parametrize("lazy", [lambda x: x.conj(), lambda x: x.conj().imag, lambda x: torch._neg_view(x.conj())])
def test_what_only_copies_takes_elements_as_they_are_to_be(lazy: Callable[[Any], Any]) -> None:
    given = lazy(torch.tensor([1 + 2j, 3j]))
    assert given.is_conj() or given.is_neg()
    right = given.resolve_conj().resolve_neg()
    assert torch.equal(unpack_value(pack_value(given)), right)
    assert torch.equal(tensors.array(given), right)


def test_what_can_not_travel_with_a_run_is_told_why() -> None:
    with pytest.raises(TypeError, match=r"torch\.sparse_coo.*can't travel as a plain value"):
        pack_value(torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"objects of Python.*can't travel as a plain value"):
        pack_value(np.array([object()]))
