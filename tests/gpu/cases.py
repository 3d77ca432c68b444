"""The cases of `tests.pure.conformance` on tensors of a GPU: where they lie, one run of one rank, what came out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from raycollect.backends import arrays
from raycollect.backends.nccl.ops import folds, reduction_of
from raycollect.core.model import Launch
from raycollect.core.protocols import Communicator
from raycollect.errors import UnsupportedError
from tests.pure.communicators import Team
from tests.pure.conformance import (
    REDUCTIONS,
    Case,
    as_read,
    body_cases,
    check_outcomes,
    checksum_of,
    how_far,
    listed,
    made,
    put_in_place,
    ranks_of,
    run_kernel,
    sides,
    what_is_wrong,
)
from tests.pure.operands import NARROW

from . import devices

LIBRARIES = ("cupy", "torch")

Make = Callable[[tuple[int, ...]], Any]

LAYOUTS: dict[str, Callable[[Make, int], Any]] = {
    "plain": lambda make, size: make((size,)),
    "offset": lambda make, size: make((size + 1,))[1:],
    "every other": lambda make, size: make((2 * size,))[::2],
    "column": lambda make, size: make((size, 3))[:, 1],
    "transposed": lambda make, size: make((_rows(size), size // _rows(size))).T,
    "reversed": lambda make, size: make((size,))[::-1],
}
"""How elements lie in memory -> a tensor of so many; of torch there is none in reverse."""

_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def _rows(size: int) -> int:
    return next((rows for rows in (4, 7, 101) if size and size % rows == 0), 1)


def layouts_of(library: str) -> tuple[str, ...]:
    return tuple(name for name in LAYOUTS if library != "torch" or name != "reversed")


# ------------------------------------------------------------------------------- tensors


def placed(values: np.ndarray, how: str, library: str) -> Any:
    """Puts values into a tensor of a GPU; its C order is that of `values`, [n]."""
    dtype = values.dtype
    bits = dtype if dtype.kind == "c" else np.dtype(_BITS[dtype.itemsize])
    plain = np.ascontiguousarray(values).view(bits)
    if library == "cupy":
        cupy = import_module("cupy")
        made = LAYOUTS[how](lambda shape: cupy.zeros(shape, bits), values.size)
        made[...] = cupy.asarray(plain).reshape(made.shape)
        return made if bits == dtype else made.view(dtype)
    torch = import_module("torch")
    given = torch.from_numpy(plain.copy()).cuda()
    made = LAYOUTS[how](lambda shape: torch.zeros(shape, dtype=given.dtype, device="cuda"), values.size)
    made.copy_(given.reshape(made.shape))
    return made if bits == dtype else made.view(getattr(torch, dtype.name))


def to_host(tensor: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """The elements of a tensor of a GPU, [n], C order, after all that the caller has enqueued."""
    bits = dtype if dtype.kind == "c" else np.dtype(_BITS[dtype.itemsize])
    if type(tensor).__module__.partition(".")[0] == "torch":
        plain = tensor if bits == dtype else tensor.view(getattr(import_module("torch"), bits.name))
        host = plain.cpu().numpy()
    else:
        host = (tensor if bits == dtype else tensor.view(bits)).get()
    return np.ascontiguousarray(host).reshape(-1).view(dtype)


def seen(tensor: Any) -> arrays.DeviceArray:
    """A tensor as kernels take it."""
    found = arrays.view(tensor)
    assert isinstance(found, arrays.DeviceArray), type(tensor)
    return found


# ------------------------------------------------------------------------------- what each rank does


@dataclass(frozen=True, slots=True)
class Ran:
    """What one rank's run of a case was: sides as `conformance.sides` has them, and what tensors hold, copied.

    Attributes:
        given: What it was to give.
        expected: What it must hold, after the left fold in rank order.
        src: What it then has where it gave from.
        dst: What it holds; None: it takes nothing.
        shared: Which of `src` are in `dst`, too.
    """

    given: Any
    expected: Any
    src: Any
    dst: Any
    shared: tuple[np.ndarray, ...]


def run_case(communicator: Communicator, launch: Launch, case: Case, library: str, staged: bool) -> tuple[str, int]:
    """Runs one case on one rank, and compares."""
    refused, world = is_refused(case), communicator.world_size
    try:
        ran = run_once(communicator, launch, case, library, staged)
    except UnsupportedError as exc:
        return ("" if refused else str(exc)), 0
    if refused:
        return "neither NCCL nor cupy has that reduction, and it was not refused", 0
    if case.kind in REDUCTIONS and case.dtype in NARROW and world > 1:
        return how_far(case, ran.expected, ran.dst, world), checksum_of(ran.dst)
    wrong = what_is_wrong(case, ran.given, ran.src, ran.expected, ran.dst, ran.shared, is_bitwise=False)
    return wrong, checksum_of(ran.dst)


def run_once(
    communicator: Communicator, launch: Launch, case: Case, library: str = "cupy", staged: bool = False
) -> Ran:
    """Runs one case on one rank."""
    rank, world = communicator.rank, communicator.world_size
    given, expected, most = sides(case, rank, world)

    def make(values: np.ndarray) -> arrays.DeviceArray:
        return seen(placed(values, case.layout, library))

    src, dst = made(given, make), made(expected, make, blank=True)
    shared: tuple[Any, ...] = ()
    if case.inplace:
        dst, shared = put_in_place(case.kind, rank, src, dst)
    run_kernel(communicator, launch, case, (src, dst, most), staged=staged)
    host = {id(one): to_host(one.tensor, np.dtype(case.dtype)) for one in (*listed(src), *listed(dst))}
    return Ran(given, expected, *(as_read(side, host) for side in (src, dst, shared)))


def is_refused(case: Case) -> bool:
    """Whether nobody can reduce these elements."""
    if case.op is None:
        return False
    return reduction_of(case.op, case.dtype, devices.nccl_version()) is None and not folds(case.op, case.dtype)


def check(team: Team, library: str, cases: Sequence[Case], *, staged: bool = False, timeout_s: float = 60.0) -> None:
    """Runs cases on all ranks, compares their results and names every case that failed."""
    assert cases
    launches = [team.launch(ranks_of(case, team), timeout_s) for case in cases]
    try:
        results = team.must(body_cases, launches, list(cases), run_case, library, staged)
    except BaseException:
        team.spoiled = True  # type: ignore[attr-defined]  # its communicators have ended: the next test needs another
        raise
    check_outcomes(cases, [case.kind for case in cases], results, f"of {library}, {team.world_size} ranks")


def body_device_works(_: Any) -> bool:
    """Whether the rank's GPU computes."""
    cupy = import_module("cupy")
    return bool((cupy.arange(1000).get() == np.arange(1000)).all())
