"""Placeholder tensors of torch: tensors on the device meta, with the identities of their elements stored separately.

A view of a meta tensor has strides, which tell its elements. Only operations that write, or that make a new tensor
from elements of others, are repeated on the identities.
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
"""The operations of torch (of `aten`) that move elements into a new tensor without changing them."""

_ERASES = frozenset(("zero_", "fill_"))
"""The operations that overwrite a tensor with elements of no full tensor."""

_OF_VALUES = ("dtype", "device", "layout", "pin_memory", "non_blocking", "value")
"""The options of an operation that set the kind and value of new elements."""


class TorchRecorder:
    """Stores the identities of the elements of all meta tensors that a loader makes and fills."""

    def __init__(self, fulls: Mapping[str, Full], dtypes: Mapping[str, str]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._fulls = fulls
        self._dtypes = dtypes
        # The id of a storage -> (the storage, the identity of its first element, or those of all its elements)
        self._storages: dict[int, tuple[Any, Any]] = {}

    def full(self) -> dict[str, Any]:
        """Returns the full tensors by name."""
        return {name: self._full(full) for name, full in self._fulls.items()}

    def _full(self, full: Full) -> Any:
        dtype = getattr(self._torch, self._dtypes[full.name])
        tensor = self._torch.empty(full.shape, dtype=dtype, device="meta")
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage, full.base
        return tensor

    def local(self, tensor: Any) -> Any:
        """Returns an empty local tensor: the given one, if it is on the device meta, else one like it."""
        local = tensor if tensor.is_meta else self._torch.empty_like(tensor, device="meta")
        self._write(local, NOTHING)
        return local

    def identities(self, value: Any) -> Array | None:
        """Returns the identities in a local tensor; None if it is no meta tensor any more."""
        if not isinstance(value, self._torch.Tensor) or not value.is_meta:
            return None
        ids: Array = self._ids(value).contiguous().numpy()
        return ids

    def contexts(self) -> tuple[Any, ...]:
        """Returns the contexts of the loader: parameters may be written, and all operations are dispatched here."""
        modes: Any = import_module("torch.utils._python_dispatch")

        def done(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return self._done(func, args, kwargs or {})

        mode = type("RecordingMode", (modes.TorchDispatchMode,), {"__torch_dispatch__": done})
        return self._torch.no_grad(), mode()

    # ------------------------------------------------------------------------------------------ operations

    def _done(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        read = [tensor for tensor in self._tensors((args, kwargs)) if self._is_tracked(tensor)]
        result = func(*args, **kwargs)
        if not read:
            return result
        outputs = self._tensors(result)
        if name == "copy_":
            self._write(args[0], self._ids(args[1]))
        elif name in _ERASES and len(read) == 1 and read[0] is args[0]:  # not with an element of another tensor
            self._write(args[0], NOTHING)
        elif name in _MOVES:
            options = {key: value for key, value in kwargs.items() if key not in _OF_VALUES}
            places = args[:2] if name == "constant_pad_nd" else args  # the third argument is the value
            (output,) = outputs
            self._write(output, func(*self._as_ids(places), **self._as_ids(options)))
        elif func._schema.is_mutable or not all(map(self._is_tracked, outputs)):
            raise NotRecordedError(f"torch's {name}")
        elif any(output.dtype != read[0].dtype for output in outputs):
            raise NotRecordedError(f"torch's {name} as another dtype")
        return result

    def _tensors(self, value: Any) -> list[Any]:
        if isinstance(value, self._torch.Tensor):
            return [value]
        if isinstance(value, dict):
            value = tuple(value.values())
        return [tensor for item in value for tensor in self._tensors(item)] if isinstance(value, list | tuple) else []

    def _as_ids(self, value: Any) -> Any:
        """Replaces elements by identities in the arguments of an operation; indices stay as they are."""
        if isinstance(value, self._torch.Tensor):
            return self._ids(value) if value.is_meta else value
        if isinstance(value, dict):
            return {key: self._as_ids(item) for key, item in value.items()}
        return type(value)(map(self._as_ids, value)) if type(value) in (list, tuple) else value

    # ------------------------------------------------------------------------------------------ identities

    def _is_tracked(self, tensor: Any) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def _ids(self, tensor: Any) -> Any:
        torch = self._torch
        if not self._is_tracked(tensor):
            return torch.full(tensor.shape, NOTHING, dtype=torch.int64)
        _, ids = self._storages[tensor.untyped_storage()._cdata]
        if not isinstance(ids, int):
            return torch.as_strided(ids, tensor.size(), tensor.stride(), tensor.storage_offset())
        grid = torch.full((1,) * tensor.dim(), ids + tensor.storage_offset(), dtype=torch.int64)
        for d, (size, stride) in enumerate(zip(tensor.size(), tensor.stride(), strict=True)):
            line = torch.arange(size).reshape([size if axis == d else 1 for axis in range(tensor.dim())])
            grid = grid + line * stride
        return grid

    def _write(self, tensor: Any, ids: Any) -> None:
        torch, storage = self._torch, tensor.untyped_storage()
        elements = self._storages.get(storage._cdata, (storage, None))[1]
        size = storage.nbytes() // tensor.element_size()
        if elements is None:
            elements = torch.full((size,), NOTHING, dtype=torch.int64)
        elif isinstance(elements, int):
            elements = torch.arange(elements, elements + size)
        torch.as_strided(elements, tensor.size(), tensor.stride(), tensor.storage_offset()).copy_(torch.as_tensor(ids))
        self._storages[storage._cdata] = storage, elements


def is_refusal(error: Exception) -> bool:
    """Returns whether an error is torch's refusal of an operation on a meta tensor."""
    return isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower()
