"""What looks like a tensor and is none: how it is made, what is said of it, and what the cure that is told gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Unsuited(NamedTuple):
    """One kind.

    Attributes:
        make: Makes one, given torch.
        words: What is said of it.
        cure: Does what is told.
    """

    make: Callable[[Any], Any]
    words: tuple[str, ...]
    cure: Callable[[Any], Any]


class Pair(NamedTuple):
    a: Any
    b: Any


OF_TORCH = {
    "sparse": Unsuited(
        lambda torch: torch.eye(2).to_sparse(), ("torch.sparse_coo", "to_dense()"), lambda x: x.to_dense()
    ),
    "meta": Unsuited(lambda torch: torch.ones(2, device="meta"), ("device meta", "empty_like"), lambda x: _like(x)),
    "quantized": Unsuited(
        lambda torch: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        ("torch.qint8", "int_repr()"),
        lambda x: x.int_repr(),
    ),
    "conjugated": Unsuited(
        lambda torch: torch.ones(2, dtype=torch.complex64).conj(),
        ("conjugated", "x.resolve_conj().resolve_neg()", "a copy"),
        lambda x: x.resolve_conj().resolve_neg(),
    ),
    "nested": Unsuited(
        lambda torch: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        ("nested", "unbind()"),
        lambda x: list(x.unbind()),
    ),
    "subclass": Unsuited(
        lambda torch: torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})),
        ("Own", "subclass of torch.Tensor"),
        lambda x: x.as_subclass(x.__class__.__mro__[1]),
    ),
}

OF_NUMPY = {
    "text": Unsuited(lambda _: np.array(["1", "2.5"]), ("<U3", "text", "astype(float)"), lambda x: x.astype(float)),
    "objects": Unsuited(lambda _: np.array([1, None])[:1], ("object", "astype(float)"), lambda x: x.astype(float)),
    "dates": Unsuited(lambda _: np.zeros(2, "M8[s]"), ("datetime64[s]", "int64"), lambda x: x.view("int64")),
    "records": Unsuited(
        lambda _: np.zeros(2, "f4,i4"), ("('f0', '<f4')", "fields"), lambda x: {name: x[name] for name in x.dtype.names}
    ),
    "masked": Unsuited(lambda _: np.ma.masked_array([1.0]), ("MaskedArray", "filled()"), lambda x: x.filled()),
    "matrix": Unsuited(lambda _: np.eye(2).view(np.matrix), ("matrix", "numpy.asarray"), np.asarray),
}

OF_SEVERAL = {
    "named tuple": Unsuited(
        lambda _: Pair(np.ones(2), np.ones(3)), ("Pair", "named tuple", "tuple(x)", "x._asdict()"), Pair._asdict
    ),
    "subclass of list": Unsuited(
        lambda _: type("Own", (list,), {})([np.ones(2)]), ("Own", "subclass of list", "list(x)"), list
    ),
    "module": Unsuited(
        lambda torch: torch.nn.Linear(2, 3), ("Linear", "module of torch", "state_dict()"), lambda x: x.state_dict()
    ),
}
"""What holds several tensors."""

ALL = {**OF_TORCH, **OF_NUMPY}


def _like(tensor: Any) -> Any:
    import torch

    return torch.empty_like(tensor, device="cpu")
