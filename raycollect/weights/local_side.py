"""One rank's tensors of a publication or of a subscription, by its layouts.

Tensors on devices are staged: versions are sealed, verified and served in host memory. A publisher copies a tensor
there when it seals it. A receiver keeps a copy of each, which it reads before it compares, and writes back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import addressof, c_char
from operator import attrgetter, eq
from typing import Any, cast

import numpy as np
from msgspec.structs import replace

from raycollect.backends import arrays
from raycollect.backends.arrays import Array, DeviceArray, box_of
from raycollect.backends.elements import name_of, native
from raycollect.core.model import TensorInfo
from raycollect.engine.device_staging import CPU, Patience, transfer
from raycollect.engine.packed_boxes import unfold
from raycollect.errors import Violation, refusal, wrong_layout
from raycollect.planner.reshard.request import faults_of, local_tensors, tensor_indices
from raycollect.pos import Container, Range, Store
from raycollect.pos.tensors import allocate
from raycollect.weights.atoms import AtomPart, Layouts
from raycollect.weights.cut import Atom
from raycollect.weights.modules import ModuleTensors

_LINE_NBYTES = 64

_KEPT_NBYTES = 64 << 10
"""The most bytes of a publisher's tensor whose array is kept for the next version: making it takes some us."""

_DEVICE_S = 60.0
"""How long to wait for the work on a device before a copy, in seconds."""


class LocalSide:
    """The tensors of one rank, each with the dimensions of the global one.

    Args:
        op: The operation, for messages.
        container: The tensors.
        layouts: The layouts of the side.
        rank: The rank in the side.

    Attributes:
        is_staged: Whether any tensor is on a device.
        bucket_views: What `flat` has returned for the buckets of one cut, with the parts; cleared with another cut.

    Raises:
        LayoutError: The tensors don't fit the layouts.
        ReadOnlyError: A tensor that is written is read-only.
        AliasError: Tensors that are written overlap.
    """

    def __init__(self, op: str, container: Container, layouts: Layouts, rank: int, *, is_written: bool) -> None:
        self._op = op
        self._is_written = is_written
        self.layouts = layouts
        self.rank = rank
        self._tensors = local_tensors(tuple(layouts.items())).get(rank, ())
        self._container = container
        self._modules: ModuleTensors | None = None
        self._ranges: list[Range] | None = None
        self._addresses: _Addresses | None = None  # where the tensors were in the last `live`
        self._views: list[Any] = []  # its result
        self.bucket_views: dict[Atom, tuple[Sequence[AtomPart], list[Array] | None]] = {}
        self._copies: dict[int, Array] = {}  # of tensors on devices that are written, by tensor
        infos = tuple(map(arrays.describe, container.tensors))
        faults = faults_of(container.structure, infos, self._tensors)
        violations = [wrong_layout(*fault, rank) for fault in faults]
        if not faults:
            self._places = tensor_indices(container.structure, self._tensors)
            self._devices = [infos[place].device for place in self._places]
            violations += self._unfit()
        if violations:
            raise refusal(op, "", tuple(violations))
        self.is_staged: bool = any(device != CPU for device in self._devices)
        keys = self._keys = {tensor.key: at for at, tensor in enumerate(self._tensors)}
        self._at = {name: keys[key] for name, layout in layouts.items() if (key := layout.key or name) in keys}

    @property
    def count(self) -> int:
        """The number of local tensors."""
        return len(self._tensors)

    def follow(self, actor: Any) -> None:
        """Makes `live` also check whether modules of the actor have replaced these parameters."""
        self._modules = ModuleTensors(actor, self.owners())

    def _unfit(self) -> list[Violation]:
        violations, is_written = [], self._is_written
        for tensor, array in zip(self._tensors, self._arrays(), strict=True):
            where = f"tensor {tensor.key!r}"
            if is_written and not arrays.is_writeable(array):
                violations.append(Violation(kind="read_only", rank=self.rank, field=where, found="read-only"))
            elif is_written and arrays.overlaps_itself(array):
                what, expected = "overlapping itself (broadcast strides)", "one element per address"
                violations.append(Violation(kind="alias", rank=self.rank, field=where, found=what, expected=expected))
            elif type(array) is DeviceArray:  # its copy in host memory has no gaps
                continue
            elif tensor.axes and array.size and not np.may_share_memory(unfold(array, tensor.axes), array):
                violations.append(
                    wrong_layout(where, "with gaps", "without gaps, as its layout folds dimensions", self.rank)
                )
        return violations or (list(self._overlapping()) if is_written else [])

    def _overlapping(self) -> Iterator[Violation]:
        held = self._arrays()
        spans = sorted((*arrays.byte_range(array), at) for at, array in enumerate(held))
        for i, (_, stop, at) in enumerate(spans):
            for later in range(i + 1, len(spans)):
                start, _, other = spans[later]
                if start >= stop:
                    break
                if arrays.overlap(held[at], held[other]):
                    what, which = (f"tensor {self._tensors[index].key!r}" for index in (at, other))
                    actual, expected = f"overlapping {which} (tied weights?)", "separate memory, or one name for it"
                    yield Violation(kind="alias", rank=self.rank, field=what, found=actual, expected=expected)

    def _arrays(self) -> list[Any]:
        return [arrays.memory(self._container.tensors[place]) for place in self._places]

    def live(self) -> list[Array]:
        """Returns the tensors that the ref's list or dict has now.

        In a receiver this is the same list as before if they lie where they did.

        Raises:
            TensorReplacedError: The dict has other names, or tensors of other shapes or types; or a module of the actor
                has replaced a parameter.
            LayoutError: A tensor has another dtype, as after `half()` of a module.
            RefusedError: A new tensor does not fit; see the class.
        """
        now = self._container.current()
        if isinstance(now, str):
            changed = Violation(kind="replaced", rank=self.rank, field="dict of tensors", found=f"changed: {now}")
            raise refusal(self._op, "", (changed,))
        if now is not self._container:
            before, self._container = self._container, now
            self._addresses = None
            if unfit := self._unfit():
                self._container = before
                raise refusal(self._op, "", tuple(unfit))
        if self._modules is not None and (replaced := self._modules.replaced(self.owners())):
            what = (
                "no longer that of its module, which got another one, as by load_state_dict(assign=True) or to_empty()"
            )
            keys = [f"tensor {self._tensors[at].key!r}" for at in replaced]
            wrong = [Violation(kind="replaced", rank=self.rank, field=key, found=what) for key in keys]
            raise refusal(self._op, "", tuple(wrong))
        if self._addresses is not None and self._addresses.are_same():
            views = self._views
            return views if self._is_written else [self._view(at) if it is None else it for at, it in enumerate(views)]
        self._addresses = None
        held = self._arrays()
        self._ranges = None
        others = [
            wrong_layout(
                f"tensor {tensor.key!r}",
                str(info),
                f"{tensor.dtype}{list(tensor.shape)} on {device}, as before",
                self.rank,
            )
            for info, tensor, device in zip(map(arrays.info, held), self._tensors, self._devices, strict=True)
            if (info.shape, info.dtype, info.device) != (tensor.shape, tensor.dtype, device)
        ]
        if others:
            raise refusal(self._op, "", tuple(others))
        live = [
            unfold(array, tensor.axes) if type(array) is not DeviceArray else self._staged(at, array)
            for at, (array, tensor) in enumerate(zip(held, self._tensors, strict=True))
        ]
        # A publisher keeps no large tensor alive that its actor replaces; a receiver serves them anyway
        self._views = live if self._is_written else [it if it.nbytes <= _KEPT_NBYTES else None for it in live]
        self._addresses = None if self.is_staged else _Addresses(self.owners())
        self.bucket_views.clear()
        return live

    def _view(self, at: int) -> Array:
        array = cast("Array", arrays.memory(self._container.tensors[self._places[at]]))
        return unfold(array, self._tensors[at].axes)

    def _staged(self, at: int, array: DeviceArray) -> Any:
        """Returns the copy of a tensor on a device; of a publisher the tensor itself, see `on_host`."""
        if not self._is_written:
            return array
        if at not in self._copies:
            self._copies[at] = allocate(replace(arrays.info(array), device=CPU))
        return unfold(self._copies[at], self._tensors[at].axes)

    def flat(self, bucket: Atom, parts: Sequence[AtomPart]) -> list[Array] | None:
        """Returns parts of a bucket in the tensors of the last `live` as arrays with one dimension.

        None: one of them has gaps, is on a device, or is not kept.
        """
        of, flat = self.bucket_views.get(bucket, ((), None))
        if of is not parts:
            views = self._views
            is_here = not self.is_staged and all(views[self._at[part.name]] is not None for part in parts)
            boxes = [self.box(views, part) for part in parts] if is_here else []
            flat = [box.reshape(-1) for box in boxes] if all(box.flags.c_contiguous for box in boxes) else None
            self.bucket_views[bucket] = parts, flat or None
        return flat or None

    def read(self, live: list[Array]) -> list[Array]:
        """Reads the tensors on devices into their copies in `live`, and returns it."""
        for at, copy in self._copies.items():
            _transfer(copy, arrays.memory(self._container.tensors[self._places[at]]))
        return live

    def wrote(self, store: Store, names: Iterable[str]) -> None:
        """Writes back copies after others of `live` were written, and raises the version counters.

        `names` are those of the written global tensors. What a failure may have half-written is dirty.
        """
        if not self._copies and set(map(type, self.owners())) == {np.ndarray}:
            return
        written = sorted({self._at[name] for name in names})
        staged, owners = [at for at in written if at in self._copies], self.owners()
        try:
            for at in staged:
                _transfer(arrays.memory(owners[at]), self._copies[at])
        except BaseException:
            store.mark_dirty([self.ranges()[at] for at in staged], [arrays.owner(owners[at]) for at in staged])
            raise
        finally:
            self._raise_versions(written)

    def on_host(self, at: int, array: Array | DeviceArray) -> Array:
        """Returns a tensor of `live`, or a copy in host memory of one on a device."""
        if type(array) is not DeviceArray:
            return cast("Array", array)
        copy: Array = np.empty(array.shape, native(array.dtype))
        _transfer(copy, array)
        return unfold(copy, self._tensors[at].axes)

    def ranges(self) -> list[Range]:
        """Returns the memory ranges of the tensors, as of the last `live`."""
        if self._ranges is None:
            self._ranges = list(map(arrays.byte_range, self._arrays()))
        return self._ranges

    def memory(self) -> list[Range]:
        """Returns the ranges, and those of the copies of tensors on devices."""
        return [*self.ranges(), *map(arrays.byte_range, self._copies.values())] if self._copies else self.ranges()

    def owners(self) -> list[Any]:
        """Returns the tensors as objects of the actor."""
        return [self._container.tensors[place] for place in self._places]

    def raise_versions(self) -> None:
        """Raises torch's version counters of all tensors, so that a backward pass over their old values fails."""
        self._raise_versions(range(self.count))

    def _raise_versions(self, written: Iterable[int]) -> None:
        owners = self.owners()
        counted = [tensor for at in written if arrays.has_version(tensor := owners[at])]
        if counted:
            arrays.raise_versions(counted)

    def wholes(self) -> list[Range]:
        """Returns the memory ranges of the tensors that the layouts cover completely."""
        return [span for span, tensor in zip(self.ranges(), self._tensors, strict=True) if tensor.is_whole]

    @staticmethod
    def allocate_array(like: Array, dtype: np.dtype[Any]) -> Array:
        """Allocates an array of the same shape, in shared memory if available.

        It begins as far behind a cache line as `like` does: elements that lie up to a line further in the target than
        in the source take 1.4 times as long to copy, as each load waits for a store that only looks like its own.
        """
        nbytes = like.size * dtype.itemsize
        info = TensorInfo(shape=(nbytes + _LINE_NBYTES,), dtype="uint8", itemsize=1)
        memory: Array = allocate(info)
        at = (like.ctypes.data - memory.ctypes.data) % _LINE_NBYTES
        return memory[at : at + nbytes].view(dtype).reshape(like.shape)

    def tensor(self, name: str) -> int:
        """Returns the index of the local tensor that holds a global one."""
        return self._at[name]

    def key_of(self, name: str) -> str:
        """Returns the name of the local tensor that holds a global one."""
        return self.layouts[name].key or name

    def fault_of(self, key: object) -> str:
        """Returns why a name is not that of a local tensor; empty if it is."""
        return "" if key in self._keys else "no name of a tensor here"

    def replace(self, held: list[Any], key: object, tensor: object) -> str:
        """Replaces a local tensor by another one; returns why that can't be done, empty if it was done."""
        if fault := self.fault_of(key):
            return fault
        at = self._keys[str(key)]
        given, mine = arrays.view(tensor), self._arrays()[at]
        if given is None:
            return "no tensor"
        if (given.shape, given.dtype) != (mine.shape, mine.dtype):
            actual = f"{name_of(given.dtype)}{list(given.shape)}"
            return f"{actual}, where {name_of(mine.dtype)}{list(mine.shape)} is published"
        held[at] = given if isinstance(given, DeviceArray) else unfold(given, self._tensors[at].axes)
        return ""

    def box(self, held: list[Array] | Mapping[int, Array], place: AtomPart) -> Array:
        """Returns the box of a local tensor that an atom part covers."""
        array = held[self._at[place.name]]
        return array if array.shape == place.size else box_of(array, place.at, place.size)


class _Addresses:
    """Where tensors lie, in the terms of `arrays.place_of`, which takes several times as long for many of them.

    Looking creates no lasting objects, as the collector of garbage would walk through all of them.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = tensors
        self._look = self._looks_at_any
        torch, kinds = sys.modules.get("torch"), set(map(type, tensors))
        if kinds == {np.ndarray}:
            self._look = self._looks_at_numpy
        elif torch is not None and kinds <= {torch.Tensor, torch.nn.Parameter}:
            dtypes = {tensor.dtype for tensor in tensors}
            is_real = not any(dtype.is_complex for dtype in dtypes)  # others may be conjugated where they lie
            self._look = self._looks_at_torch if is_real else self._looks_at_any
        try:
            self._seen = list(map(list, self._look()))
        except (TypeError, ValueError):  # read-only, empty, with gaps, or of a type without a buffer format
            self._look = self._looks_at_any
            self._seen = list(map(list, self._look()))

    def _looks_at_numpy(self) -> tuple[Iterator[Any], ...]:
        return map(addressof, map(c_char.from_buffer, self._tensors)), map(_FORM, self._tensors)

    def _looks_at_torch(self) -> tuple[Iterator[Any], ...]:
        tensor = sys.modules["torch"].Tensor
        of_each = tensor.data_ptr, tensor.stride, tensor.numel, attrgetter("dtype")
        return tuple(map(function, self._tensors) for function in of_each)

    def _looks_at_any(self) -> tuple[Iterator[Any], ...]:
        return (map(arrays.place_of, self._tensors),)

    def are_same(self) -> bool:
        """Returns whether the tensors lie where they did."""
        try:
            return all(all(map(eq, before, now)) for before, now in zip(self._seen, self._look(), strict=True))
        except (TypeError, ValueError):
            return False


_FORM = attrgetter("shape", "dtype")


def _transfer(target: Array | DeviceArray, source: Array | DeviceArray) -> None:
    transfer(target, source, Patience(lambda: None, _DEVICE_S))
