"""Explains why collectives don't accept a value that looks like a tensor, and suggests a replacement.

This runs only when a value is refused or is sent by value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from raycollect.backends.elements import TORCH_DTYPES, is_number, torch_name
from raycollect.errors.text import a_type

# Kind of a numpy type that is not a number -> the problem
_KINDS = {
    **dict.fromkeys("UST", "whose elements are text (give numbers: x.astype(float), or a code for each text)"),
    "O": "whose elements are objects of Python (give numbers: x.astype(float), or a list of arrays)",
    "M": "whose elements are dates (give x.view('int64'))",
    "m": "whose elements are times (give x.view('int64'))",
    "V": "whose elements are records (give a dict of its fields)",
}


def describe_value(value: object) -> str:
    """Describes a value that is not a tensor: its type, and the reason if it looks like a tensor."""
    what = a_type(value, in_full=True)
    if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
        plain = "x.filled()" if isinstance(value, np.ma.MaskedArray) else "numpy.asarray(x)"
        return f"{what}, a subclass of numpy.ndarray (give {plain})"
    if isinstance(value, np.ndarray) and not is_number(value.dtype):
        return f"{what} of dtype {value.dtype}, {_KINDS.get(value.dtype.kind, 'no numbers')}"
    if isinstance(value, (list, tuple)) and hasattr(type(value), "_fields"):
        return f"{what}, a named tuple (give a plain one, tuple(x), or a dict of its fields, x._asdict())"
    if isinstance(value, (list, tuple)) and type(value) not in (list, tuple):
        plain = "list" if isinstance(value, list) else "tuple"
        return f"{what}, a subclass of {plain} (give a plain one, {plain}(x))"
    if isinstance(value, _torch_type("nn", "Module")):
        return f"{what}, a module of torch (give x.state_dict(), the dict of its tensors)"
    torch: Any = sys.modules.get("torch")
    words = (words.format(x=value) for is_so, words in _TORCH if is_so(torch, value)) if _is_torch(value) else ()
    return what + next(iter(words), "")


def resolved(value: Any) -> Any:
    """Returns a copy of a lazily conjugated or negated torch tensor with real elements; else the value itself.

    A collective does not take such copies: a copy misses later changes of the tensor, and can't be its output.
    """
    is_lazy = _is_torch(value) and (value.is_conj() or value.is_neg())
    return value.resolve_conj().resolve_neg() if is_lazy else value


def _is_torch(value: object) -> bool:
    return isinstance(value, _torch_type("Tensor"))


def _torch_type(*names: str) -> Any:
    """A type of torch by its path, for `isinstance`; () if torch was not imported."""
    result: Any = sys.modules.get("torch")
    for name in names:
        result = getattr(result, name, ())
    return result or ()


# (condition, description) of a torch tensor x; the first that holds counts
_TORCH: tuple[tuple[Callable[[Any, Any], bool], str], ...] = (
    (
        lambda torch, x: type(x) not in (torch.Tensor, torch.nn.Parameter),
        ", a subclass of torch.Tensor (give the plain tensors that it is made of)",
    ),
    (lambda torch, x: x.is_nested, " that is nested (give a list of its parts: list(x.unbind()))"),
    (lambda torch, x: x.layout is not torch.strided, " of layout {x.layout} (give x.to_dense())"),
    (
        lambda torch, x: x.is_meta,
        " on the device meta, where there are no elements (give torch.empty_like(x, device='cpu'))",
    ),
    (lambda torch, x: x.is_quantized, " of the quantized dtype {x.dtype} (give x.int_repr() or x.dequantize())"),
    (
        lambda torch, x: torch_name(x.dtype) not in TORCH_DTYPES,
        " of dtype {x.dtype}, which numpy does not have (give x.to() of another dtype)",
    ),
    (
        lambda torch, x: x.is_conj() or x.is_neg(),
        " that is a view still to be conjugated or negated (give x.resolve_conj().resolve_neg(), which is a copy)",
    ),
    (lambda torch, x: x.numel() > 0 and not x.untyped_storage().nbytes(), " whose storage was freed"),
)
