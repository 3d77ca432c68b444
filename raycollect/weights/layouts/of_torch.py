"""Stand-ins of torch: tensors without storage, whose elements' identities are kept beside them.

What torch does to a tensor without storage it does to its strides, so that a view of it says by itself which elements
it has. Only what writes, or makes a tensor with elements of others, is done to identities as well.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from raycollect.backends.elements import Array
from raycollect.weights.layouts.identities import NOTHING, Full, NotRecordedError

_MOVES = frozenset(
    (
        *("clone", "_to_copy", "cat", "stack", "index", "index_select", "repeat", "roll", "flip", "constant_pad_nd"),
        *("view_copy", "expand_copy", "permute_copy", "t_copy", "transpose_copy", "slice_copy", "select_copy"),
    )
)
"""The operations of torch (of `aten`) that move elements into a new tensor, and change none."""

_ERASES = frozenset(("zero_", "fill_"))
"""Those that overwrite a tensor with what comes from no full tensor."""

_OF_VALUES = ("dtype", "device", "layout", "pin_memory", "non_blocking", "value")
"""The options of an operation that say of what kind and value new elements are."""


class Recorder:
    """Keeps the identities of the elements of all tensors without storage that a loader makes and fills."""

    def __init__(self, fulls: Mapping[str, Full], dtypes: Mapping[str, str]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._fulls = fulls
        self._dtypes = dtypes
        # The id of a storage -> (the storage, the identity of its first element, or those of all its elements)
        self._known: dict[int, tuple[Any, Any]] = {}

    def full(self) -> dict[str, Any]:
        """The full tensors by name."""
        return {name: self._full(one) for name, one in self._fulls.items()}

    def _full(self, full: Full) -> Any:
        dtype = getattr(self._torch, self._dtypes[full.name])
        made = self._torch.empty(full.shape, dtype=dtype, device="meta")
        storage = made.untyped_storage()
        self._known[storage._cdata] = storage, full.base
        return made

    def local(self, tensor: Any) -> Any:
        """A local tensor into which nothing has come yet: the given one, if it has no storage, else one like it."""
        found = tensor if tensor.is_meta else self._torch.empty_like(tensor, device="meta")
        self._write(found, NOTHING)
        return found

    def identities(self, value: Any) -> Array | None:
        """The identities in a local tensor; None where it has become something else."""
        if not isinstance(value, self._torch.Tensor) or not value.is_meta:
            return None
        found: Array = self._ids(value).contiguous().numpy()
        return found

    def contexts(self) -> tuple[Any, ...]:
        """What the loader runs in: parameters may be written, and all operations come here."""
        modes: Any = import_module("torch.utils._python_dispatch")

        def done(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._done(func, args, kwargs or {})

        mode = type("RecordingMode", (modes.TorchDispatchMode,), {"__torch_dispatch__": done})
        return self._torch.no_grad(), mode()

    # ------------------------------------------------------------------------------------------ operations

    def _done(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        read = [one for one in self._tensors((args, kwargs)) if self._is_known(one)]
        found = func(*args, **kwargs)
        if not read:
            return found
        made = self._tensors(found)
        if name == "copy_":
            self._write(args[0], self._ids(args[1]))
        elif name in _ERASES and len(read) == 1 and read[0] is args[0]:  # not by an element of another
            self._write(args[0], NOTHING)
        elif name in _MOVES:
            options = {key: value for key, value in kwargs.items() if key not in _OF_VALUES}
            places = args[:2] if name == "constant_pad_nd" else args  # the third is the value
            (one,) = made
            self._write(one, func(*self._as_ids(places), **self._as_ids(options)))
        elif func._schema.is_mutable or not all(map(self._is_known, made)):
            raise NotRecordedError(f"torch's {name}")
        elif any(one.dtype != read[0].dtype for one in made):
            raise NotRecordedError(f"torch's {name} as another dtype")
        return found

    def _tensors(self, value: Any) -> list[Any]:
        if isinstance(value, self._torch.Tensor):
            return [value]
        if isinstance(value, dict):
            value = tuple(value.values())
        return [one for item in value for one in self._tensors(item)] if isinstance(value, list | tuple) else []

    def _as_ids(self, value: Any) -> Any:
        """Arguments of an operation, with identities in the place of elements; what says places is left as it is."""
        if isinstance(value, self._torch.Tensor):
            return self._ids(value) if value.is_meta else value
        if isinstance(value, dict):
            return {key: self._as_ids(item) for key, item in value.items()}
        return type(value)(map(self._as_ids, value)) if type(value) in (list, tuple) else value

    # ------------------------------------------------------------------------------------------ identities

    def _is_known(self, tensor: Any) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def _ids(self, tensor: Any) -> Any:
        torch = self._torch
        if not self._is_known(tensor):
            return torch.full(tensor.shape, NOTHING, dtype=torch.int64)
        _, ids = self._known[tensor.untyped_storage()._cdata]
        if not isinstance(ids, int):
            return torch.as_strided(ids, tensor.size(), tensor.stride(), tensor.storage_offset())
        found = torch.full((1,) * tensor.dim(), ids + tensor.storage_offset(), dtype=torch.int64)
        for d, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
            line = torch.arange(size).reshape([size if axis == d else 1 for axis in range(tensor.dim())])
            found = found + line * stride
        return found

    def _write(self, tensor: Any, ids: Any) -> None:
        torch, storage = self._torch, tensor.untyped_storage()
        known = self._known.get(storage._cdata, (storage, None))[1]
        size = storage.nbytes() // tensor.element_size()
        if known is None:
            known = torch.full((size,), NOTHING, dtype=torch.int64)
        elif isinstance(known, int):
            known = torch.arange(known, known + size)
        torch.as_strided(known, tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(torch.as_tensor(ids))
        self._known[storage._cdata] = storage, known


def is_refusal(error: Exception) -> bool:
    """Whether torch has refused to do something to a tensor that has no storage."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower()
