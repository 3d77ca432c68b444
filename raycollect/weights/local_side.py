"""One rank's tensors of a publication or of a subscription, by its layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.arrays import Array, DeviceArray, box_of
from raycollect.backends.elements import name_of
from raycollect.core.model import TensorInfo
from raycollect.engine.packed_boxes import unfold
from raycollect.errors import Violation, refusal, wrong_layout
from raycollect.planner.reshard.request import faults_of, local_tensors, places_of
from raycollect.pos import Container, Range
from raycollect.pos.tensors import allocate
from raycollect.weights.atoms import AtomPart, Layouts
from raycollect.weights.modules import ModuleTensors
from raycollect.weights.protocol import Atom

_LINE_NBYTES = 64


class LocalSide:
    """The tensors of one rank, each with the dimensions of the global one.

    Args:
        op: The operation, for messages.
        container: The tensors.
        layouts: The layouts of the side.
        rank: The rank in the side.

    Raises:
        LayoutError: The tensors don't fit the layouts.
        UnsupportedError: A tensor is on a GPU.
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
        infos = tuple(map(arrays.describe, container.tensors))
        faults = faults_of(container.structure, infos, self._tensors)
        violations = [wrong_layout(*fault, rank) for fault in faults]
        if not faults:
            self._places = places_of(container.structure, self._tensors)
            violations += self._unfit()
        if violations:
            raise refusal(op, "", tuple(violations))
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
            if isinstance(array, DeviceArray):
                violations.append(Violation(kind="unsupported", rank=self.rank, field=where, found="on a GPU"))
            elif is_written and not array.flags.writeable:
                violations.append(Violation(kind="read_only", rank=self.rank, field=where, found="read-only"))
            elif is_written and arrays.overlaps_itself(array):
                what, expected = "overlapping itself (broadcast strides)", "one element per address"
                violations.append(Violation(kind="alias", rank=self.rank, field=where, found=what, expected=expected))
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
            if unfit := self._unfit():
                self._container = before
                raise refusal(self._op, "", tuple(unfit))
        if self._modules is not None and (replaced := self._modules.replaced(self.owners())):
            what = "no longer a parameter of its module, which got another one, as by load_state_dict(assign=True)"
            keys = [f"tensor {self._tensors[at].key!r}" for at in replaced]
            wrong = [Violation(kind="replaced", rank=self.rank, field=key, found=what) for key in keys]
            raise refusal(self._op, "", tuple(wrong))
        held = self._arrays()
        self._ranges = None
        others = [
            wrong_layout(
                f"tensor {tensor.key!r}", str(info), f"{tensor.dtype}{list(tensor.shape)} on cpu, as before", self.rank
            )
            for info, tensor in zip(map(arrays.info, held), self._tensors, strict=True)
            if (info.shape, info.dtype, info.device) != (tensor.shape, tensor.dtype, "cpu")
        ]
        if others:
            raise refusal(self._op, "", tuple(others))
        return [unfold(array, tensor.axes) for array, tensor in zip(held, self._tensors, strict=True)]

    def ranges(self) -> list[Range]:
        """Returns the memory ranges of the tensors, as of the last `live`."""
        if self._ranges is None:
            self._ranges = list(map(arrays.byte_range, self._arrays()))
        return self._ranges

    def owners(self) -> list[Any]:
        """Returns the tensors as objects of the actor."""
        return [self._container.tensors[place] for place in self._places]

    def raise_versions(self, names: Iterable[str] | None = None) -> None:
        """Raises torch's version counters of written tensors, so that a backward pass over their old values fails.

        `names` are those of global tensors; None stands for all.
        """
        owners = self.owners()
        written = owners if names is None else [owners[at] for at in sorted({self._at[name] for name in names})]
        counted = [tensor for tensor in written if arrays.has_version(tensor)]
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

    def replace(self, held: list[Array], key: object, tensor: object) -> str:
        """Replaces a local tensor by another one; returns why that can't be done, empty if it was done."""
        if fault := self.fault_of(key):
            return fault
        at = self._keys[str(key)]
        given, mine = arrays.view(tensor), self._arrays()[at]
        if given is None or isinstance(given, DeviceArray):
            return "no tensor in host memory"
        if (given.shape, given.dtype) != (mine.shape, mine.dtype):
            actual = f"{name_of(given.dtype)}{list(given.shape)}"
            return f"{actual}, where {name_of(mine.dtype)}{list(mine.shape)} is published"
        held[at] = unfold(given, self._tensors[at].axes)
        return ""

    def box(self, held: list[Array], place: AtomPart) -> Array:
        """Returns the box of a local tensor that an atom part covers."""
        array = held[self._at[place.name]]
        return array if array.shape == place.size else box_of(array, place.at, place.size)

    def whole(
        self, held: list[Array], parts: Mapping[Atom, Sequence[AtomPart]], dtypes: Mapping[str, str]
    ) -> dict[Atom, Array]:
        """Returns the atoms that lie in the local tensors in one piece, and in the element types of `dtypes`."""
        boxes = {
            atom: self.box(held, some[0]) for atom, some in parts.items() if len(some) == 1 and some[0].box == atom[1]
        }
        return {atom: box for atom, box in boxes.items() if box.dtype == np.dtype(dtypes[atom[0]])}
