"""Kernels that are run again and again on the same tensors of GPUs, with other numbers each time."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from raycollect.backends.device_arrays import DeviceArray
from raycollect.core.model import Kernel, Launch, OpKind
from raycollect.core.protocols import Communicator
from tests.pure.conformance import Case, as_read, listed, other_values, put_in_place, run_launch, sides, what_is_wrong
from tests.support.values import replace

from .cases import LAYOUTS, seen, to_host


class Again:
    """One rank's kernel of a case, and the tensors that it is kept with.

    Args:
        communicator: This rank's end.
        case: What is done.
        library: Whose tensors.
    """

    def __init__(self, communicator: Communicator, case: Case, library: str = "cupy") -> None:
        self._communicator, self._case = communicator, case
        given, taken, most = sides(case, communicator.rank, communicator.world_size)
        self._src, self._dst = (_empty(side, case.layout, library) for side in (given, taken))
        self._shared: tuple[Any, ...] = ()
        if case.inplace:
            self._dst, self._shared = put_in_place(case.kind, communicator.rank, self._src, self._dst)
        kind, peer = case.kind, case.root
        if kind is OpKind.SEND:
            sends = communicator.rank == case.root
            kind, peer = (OpKind.SEND, case.peer) if sends else (OpKind.RECV, case.root)
        self.kernel = Kernel(kind=kind, src=self._src, dst=self._dst, op=case.op, peer=peer, most=most)

    def run(self, launch: Launch, turn: int) -> str:
        """Runs it with numbers of its own; says what is wrong, or ""."""
        case = replace(self._case, seed=turn)
        given, expected, _ = sides(case, self._communicator.rank, self._communicator.world_size)
        for made, values in zip(listed(self._dst), listed(expected) if self._dst is not None else [], strict=True):
            _fill(made, other_values(values))  # type: ignore[arg-type]
        for made, values in zip(listed(self._src), listed(given), strict=True):
            _fill(made, values)  # type: ignore[arg-type]
        run_launch(self._communicator, launch, self.kernel)
        dtype = np.dtype(case.dtype)
        host = {
            id(one): to_host(one.tensor, dtype)  # type: ignore[attr-defined]
            for one in (*listed(self._src), *listed(self._dst))
        }
        src, dst, shared = (as_read(side, host) for side in (self._src, self._dst, self._shared))
        return what_is_wrong(case, given, src, expected, dst, shared, is_bitwise=False)


def body_again(communicator: Communicator, launches: Sequence[Launch], case: Case, library: str = "cupy") -> list[str]:
    """Runs a kernel once for each launch; what was wrong each time."""
    one = Again(communicator, case, library)
    return [one.run(launch, turn) for turn, launch in enumerate(launches)]


def _empty(side: Any, how: str, library: str) -> Any:
    """Tensors for as many elements; pieces lie one behind the other where they have no gaps."""
    if side is None:
        return None
    if type(side) is not tuple:
        return seen(_tensor(LAYOUTS[how], side.size, side.dtype, library))
    if how != "plain":
        return tuple(_empty(one, how, library) for one in side)
    row, made, at = _tensor(LAYOUTS[how], sum(one.size for one in side), side[0].dtype, library), [], 0
    for one in side:
        made.append(seen(row[at : at + one.size]))
        at += one.size
    return tuple(made)


def _tensor(layout: Any, size: int, dtype: np.dtype[Any], library: str) -> Any:
    if library == "cupy":
        return layout(lambda shape: import_module("cupy").zeros(shape, dtype), size)
    torch = import_module("torch")
    return layout(lambda shape: torch.zeros(shape, dtype=getattr(torch, dtype.name), device="cuda"), size)


def _fill(made: DeviceArray, values: np.ndarray) -> None:
    """Enqueues the writing of elements on the caller's stream."""
    given = np.ascontiguousarray(values).reshape(made.shape)
    if made.library == "cupy":
        made.tensor[...] = import_module("cupy").asarray(given)
    else:
        made.tensor.copy_(import_module("torch").from_numpy(given))
