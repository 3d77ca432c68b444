"""Scripts: copies, calls of NCCL and folds on one stream, and the memory that they use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

from raycollect.backends.device_arrays import DeviceArray, bits_view
from raycollect.backends.nccl.ops import BYTES


@dataclass(slots=True)
class Script:
    """The work of one kernel on its stream."""

    before: list[Callable[[], object]] = field(default_factory=list)  # copies of sources
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)  # calls of NCCL: methods and arguments
    after: list[Callable[[], object]] = field(default_factory=list)  # copies and folds of received data
    workspace: list[Any] = field(default_factory=list)  # memory in use until the end
    is_bare: bool = True  # whether `workspace` is the kernel's arrays only, and enqueueing allocates nothing


def enqueue(scripts: Sequence[Script], communicator: Any, stream: int) -> None:
    """Enqueues scripts on the current stream, whose pointer is `stream`: their NCCL calls in one group."""
    nccl = import_module("cupy.cuda.nccl")
    for script in scripts:
        for copy in script.before:
            copy()
    nccl.groupStart()
    try:
        for script in scripts:
            for name, arguments in script.calls:
                getattr(communicator, name)(*arguments, stream)
    finally:
        nccl.groupEnd()
    for script in scripts:
        for copy in script.after:
            copy()


class ScriptBuilder:
    """Fills the script of a kernel; finds or allocates memory with the layout that NCCL needs."""

    def __init__(self) -> None:
        self._cupy = import_module("cupy")
        self.script: Script = Script()

    def swap(self, peer: int, give: tuple[int, int], take: tuple[int, int]) -> None:
        """Sends bytes to a rank and receives some: (pointer, count) each; both ranks know where the count is 0."""
        if give[1]:
            self.call("send", give[0], give[1], BYTES, peer)
        if take[1]:
            self.call("recv", take[0], take[1], BYTES, peer)

    def copy_own(self, src: DeviceArray, dst: DeviceArray) -> None:
        """Copies a rank's own piece."""
        if not src.size or src.address == dst.address:
            return
        self.script.before.append(partial(assign, bits_view(dst), bits_view(src)))
        if not (src.shadow.flags.c_contiguous and dst.shadow.flags.c_contiguous):
            self.script.is_bare = False  # cupy may allocate memory to convert the layout

    def read(self, array: DeviceArray) -> int:
        """Returns the address at which NCCL reads an array: in place, or in a contiguous copy."""
        return int(self.line(array).data.ptr)

    def written(self, array: DeviceArray) -> int:
        """Returns the address at which NCCL writes an array: in place, or in temporary memory."""
        if array.shadow.flags.c_contiguous:
            return array.address
        return self.room(array)

    def both(self, src: DeviceArray, dst: DeviceArray) -> tuple[int, int]:
        """Returns the addresses of a source and of a target that may be the same array."""
        read = self.read(src)
        if src.address == dst.address and not src.shadow.flags.c_contiguous:  # in place: both are the copy
            line, target = self.script.workspace[-1], bits_view(dst)
            self.script.after.append(lambda: assign(target, line))
            return read, read
        return read, self.written(dst)

    def room(self, array: DeviceArray) -> int:
        """Returns temporary memory that is copied to the array after the calls."""
        target = bits_view(array)
        room = self.temporary(self._cupy.empty(array.size, target.dtype))
        self.script.after.append(lambda: assign(target, room))
        return int(room.data.ptr)

    def row(self, pieces: Sequence[DeviceArray], *, is_read: bool) -> int:
        """Returns pieces of one size as one row: the memory itself where they are consecutive, else a copy."""
        ends = [(piece.address, piece.address + piece.nbytes) for piece in pieces]
        whole = all(piece.shadow.flags.c_contiguous for piece in pieces)
        if whole and all(before[1] == behind[0] for before, behind in pairwise(ends)):
            return pieces[0].address
        size, views = pieces[0].size, [bits_view(piece) for piece in pieces]
        row = self.temporary(self._cupy.empty(size * len(pieces), views[0].dtype))
        for at, view in enumerate(views):
            part = row[at * size : (at + 1) * size]
            if is_read:
                self.script.before.append(partial(assign, part.reshape(view.shape), view))
            else:
                self.script.after.append(partial(assign, view, part))
        return int(row.data.ptr)

    def line(self, array: DeviceArray) -> Any:
        """Returns the bits of an array as one contiguous row: a view if possible, else a copy."""
        view = bits_view(array)
        if array.shadow.flags.c_contiguous:
            return self._keep(view.reshape(-1))
        line = self.temporary(self._cupy.empty(array.size, view.dtype))
        self.script.before.append(partial(assign, line.reshape(view.shape), view))
        return line

    def temporary(self, memory: Any) -> Any:
        """Holds memory that is not the kernel's."""
        self.script.is_bare = False
        return self._keep(memory)

    def _keep(self, memory: Any) -> Any:
        self.script.workspace.append(memory)
        return memory

    def call(self, name: str, *arguments: int) -> None:
        """Adds a call of NCCL."""
        self.script.calls.append((name, arguments))


def assign(target: Any, source: Any) -> None:
    """Copies to an array of another shape."""
    target[...] = source.reshape(target.shape)
