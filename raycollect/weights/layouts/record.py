"""`record_layout`: runs a loader on placeholders, and reads the layouts from the local tensors that it fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from raycollect.backends.elements import Array
from raycollect.errors import Violation, refusal, wrong_argument, wrong_layout
from raycollect.errors.text import a_type, listed
from raycollect.planner.boxes import Point
from raycollect.planner.layout import Layout, Region, Regions, unfolded
from raycollect.planner.layout_arguments import dtype_name, whole
from raycollect.planner.wording import counted
from raycollect.weights.layouts import of_numpy, of_torch
from raycollect.weights.layouts.identities import (
    MOST_BOXES,
    Full,
    NotRecordedError,
    agreed,
    axes_of,
    boxes,
    numbered,
    pieces,
)

__all__ = ["record_layout"]

Loader = Callable[[Mapping[str, Any], Mapping[str, Any]], object]
"""Fills local tensors, its second argument, from full tensors, both by name."""


def record_layout(loader: Loader, local: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Layout]:
    """Records the layout of one rank's tensors from the function that loads them.

    The loader runs once, on placeholders: ``loader(full, local)``. It may use operations that move elements: slice,
    narrow, chunk, split, view, reshape, transpose, cat, stack, copy, and conversions of dtypes. Operations that compute
    with elements are refused. If `local` has torch tensors, the placeholders are tensors on the device meta; tensors of
    `local` on that device are used themselves, so that the loader of a module on meta may fill the module. Otherwise
    the placeholders are numpy arrays of an opaque dtype. Recording needs 8 bytes for each element of the local tensors,
    and of the full tensors that are in use at a time.

    Args:
        loader: Fills the tensors of `local` in place, or replaces them in the dict, from the full tensors.
        local: The tensors of this rank by name; only their shapes and dtypes are used.
        names: The full tensors by name: shapes, or objects with a shape and a dtype.

    Returns:
        Name of a full tensor -> its layout on this rank. Full tensors that the rank does not use are left out.
        `join_layouts` joins the layouts of all ranks.

    Raises:
        LayoutError: The loader uses an operation that can't be recorded; names the operation. Or local tensors are not
            filled with boxes of full tensors; lists them. Other errors of the loader are raised unchanged.
        InvalidArgumentError: An invalid argument.
    """
    recorded = _LoaderRecording(loader, local, names)
    filled = recorded.run(loader)
    layouts: dict[str, Layout] = {}
    wrong: list[Violation] = []
    for key, ids in filled.items():
        try:
            laid = _laid(key, ids, list(recorded.fulls.values()), recorded.dtypes[key])
        except _UnfitError as exc:
            wrong.append(wrong_layout(f"local tensor {key!r}", exc.actual, exc.expected))
            continue
        for name in layouts.keys() & laid.keys():
            what = f"in {layouts[name].key or name!r} and in {key!r}"
            wrong.append(wrong_layout(repr(name), what, "one local tensor for each full tensor"))
        layouts |= laid
    if wrong:
        raise refusal("record_layout", "", tuple(wrong))
    return {name: layouts[name] for name in recorded.fulls if name in layouts}


class _UnfitError(Exception):
    def __init__(self, actual: str, expected: str) -> None:
        super().__init__(actual, expected)
        self.actual = actual
        self.expected = expected


class _LoaderRecording:
    """The placeholders of a loader."""

    def __init__(self, loader: Loader, local: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        if not callable(loader):
            raise refusal("record_layout", "", (wrong_argument("loader", a_type(loader), "a function"),))
        for field, value in (("local", local), ("names", names)):
            if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
                raise refusal("record_layout", "", (wrong_argument(field, a_type(value), "a dict of tensors by name"),))
        wrong = [
            wrong_argument(f"local[{key!r}]", a_type(tensor), "a tensor, or anything with a shape and a dtype")
            for key, tensor in local.items()
            if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype")
        ]
        if not local or not names:
            wrong.append(wrong_argument("local and names", "empty", "at least one tensor each"))
        shapes: dict[str, Point] = {}
        for name, full in names.items():
            try:
                shapes[name] = tuple(map(whole, getattr(full, "shape", full)))
            except (TypeError, ValueError):
                wrong.append(wrong_argument(f"names[{name!r}]", a_type(full), "a shape, or anything with one"))
        if wrong:
            raise refusal("record_layout", "", tuple(wrong))
        self.fulls: dict[str, Full] = numbered(shapes)
        self.dtypes = {key: dtype_name(tensor.dtype) for key, tensor in local.items()}
        self._shapes = {key: tuple(map(int, tensor.shape)) for key, tensor in local.items()}
        self._is_torch = any(type(tensor.dtype).__module__ == "torch" for tensor in local.values())
        self._local = local
        self._names = names

    def run(self, loader: Loader) -> dict[str, Array]:
        """Runs the loader; returns the identities in each local tensor."""
        with ExitStack() as stack:
            if self._is_torch:
                any_dtype = next(iter(self.dtypes.values()))
                dtypes = {name: dtype_name(getattr(full, "dtype", any_dtype)) for name, full in self._names.items()}
                recorder = of_torch.TorchRecorder(self.fulls, dtypes)
                full: Mapping[str, Any] = recorder.full()
                local = {key: recorder.local(tensor) for key, tensor in self._local.items()}
                read, is_refusal = recorder.identities, of_torch.is_refusal
                for context in recorder.contexts():
                    stack.enter_context(context)
            else:
                full = of_numpy.FullArrays(self.fulls)
                local = {key: of_numpy.local_array(shape) for key, shape in self._shapes.items()}
                read, is_refusal = of_numpy.identities, of_numpy.is_refusal
            try:
                loader(full, local)
            except NotRecordedError as exc:
                raise _refused(str(exc)) from None
            except Exception as exc:
                if is_refusal(exc):
                    raise _refused(f"{type(exc).__name__}: {exc}") from exc
                raise
        return {key: self._checked(key, read(local.get(key))) for key in self._shapes}

    def _checked(self, key: str, ids: Array | None) -> Array:
        if ids is None or ids.shape != self._shapes[key]:
            what = "no placeholder any more" if ids is None else f"of shape {list(ids.shape)}"
            expected = f"shape {list(self._shapes[key])}, filled in place or replaced by what is made of full tensors"
            raise refusal("record_layout", "", (wrong_layout(f"local tensor {key!r}", what, expected),))
        return ids


def _refused(what: str) -> Exception:
    expected = "what moves elements and changes none, such as views, copies, cat and stack"
    return refusal("record_layout", "", (wrong_layout("loader", f"doing what can't be recorded: {what}", expected),))


def _laid(key: str, ids: Array, fulls: list[Full], dtype: str) -> dict[str, Layout]:
    """Returns the layouts of the full tensors in one local tensor, by name."""
    try:
        by_name = pieces(ids, fulls)
    except ValueError as exc:
        expected = f"boxes, at most {MOST_BOXES} of them: slices without steps, and no single elements"
        raise _UnfitError(f"filled with scattered elements of {str(exc)!r}", expected) from None
    if not by_name:
        return {}
    if len({len(some[0].full.shape) for some in by_name.values()}) > 1:
        what = f"filled from tensors of different numbers of dimensions: {listed(map(repr, by_name))}"
        raise _UnfitError(what, "those of one number")
    agreeing = agreed([piece for some in by_name.values() for piece in some])
    axes = axes_of(ids.shape, agreeing) if agreeing else None
    if agreeing is None or axes is None:
        what = f"filled with {listed(map(repr, by_name))} so that no view of it has their dimensions"
        raise _UnfitError(what, "whole dimensions, in any order, and slots in front of them")

    laid = {name: boxes(axes, [piece for piece in agreeing if piece.full.name == name]) for name in by_name}
    ends = [
        tuple(a + hi - lo for a, lo, hi in zip(at, *box, strict=True)) for some in laid.values() for box, at in some
    ]
    end = unfolded(axes, ids.shape)

    layouts: dict[str, Layout] = {}
    for name, some in laid.items():
        rows = [Region(rank=0, box=tuple(zip(*box, strict=True)), at=at) for box, at in some]
        if not layouts and tuple(map(max, *ends, ends[0])) != end:
            rows.append(Region(rank=0, box=((0, 0),) * len(end), at=end))  # gives the size of the local tensor
        layouts[name] = Layout(
            shape=by_name[name][0].full.shape,
            dtype=dtype,
            regions=Regions(1, 1, tuple(sorted(rows, key=lambda region: (region.box, region.at)))),
            key="" if name == key else key,
            axes=axes,
            converts=True,
            said=f"recorded, {counted(len(some), 'box')}",
        )
    return layouts
