"""Helpers around kernels that several backends share."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from raycollect.backends.arrays import Array, Flat
from raycollect.core.kernel_progress import here
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.operations import FOLDS
from raycollect.core.protocols import ARRIVAL_NBYTES
from raycollect.errors import (
    CollectiveTimeoutError,
    InternalError,
    KernelError,
    PlanAbortedError,
    RaycollectError,
    Violation,
    refusal,
)

_Result = TypeVar("_Result")

_MOVED = (OpKind.BROADCAST, OpKind.SEND, OpKind.RECV)


def check_arrival(arrival: bytes, group_name: str, rank: int) -> None:
    """Raises UnsupportedError if an arrival is too long for the agreement."""
    if len(arrival) > ARRIVAL_NBYTES:
        actual = f"of so many tensors that their description takes {len(arrival)} bytes"
        expected = f"at most {ARRIVAL_NBYTES}: several operands, one after the other"
        violation = Violation(kind="unsupported", rank=rank, field="operand", found=actual, expected=expected)
        raise refusal("", group_name, (violation,))


def late(group_name: str, launch: Launch, what: str = "end", hint: str = "") -> CollectiveTimeoutError:
    """Makes the error of a launch that timed out before it could do `what`."""
    detail = f"launch {launch.seq} did not {what} within {launch.timeout_s:g} s{hint}"
    return CollectiveTimeoutError(group_name=group_name, timeout_s=launch.timeout_s, detail=detail)


def absent(group_name: str, launch: Launch, missing: Sequence[int]) -> CollectiveTimeoutError:
    """Makes the error of a rank that timed out waiting for others."""
    detail = f"launch {launch.seq}: ranks {list(missing)} did not come within {launch.timeout_s:g} s"
    return CollectiveTimeoutError(
        group_name=group_name, missing=tuple(missing), timeout_s=launch.timeout_s, detail=detail
    )


def aborted(group_name: str, launch: Launch, rank: int) -> PlanAbortedError:
    """Makes the error of a rank on which a launch was aborted."""
    return PlanAbortedError(group_name=group_name, rank=rank, detail=f"launch {launch.seq} was aborted")


def recognized(brought: Sequence[bytes], expected: Sequence[bytes] | None) -> Sequence[bytes]:
    """Returns the arrivals of an agreement, as the object `expected` if they are equal; see `Communicator.agree`."""
    return brought if expected is None or list(map(bytes, brought)) != list(expected) else expected


def chunks(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Cuts `size` elements into ranges [lo, hi) of at most `step` elements."""
    step = max(1, step)
    for lo in range(0, size, step):
        yield lo, min(lo + step, size)


def metered(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Cuts like `chunks`, and updates this thread's progress meter when the next range is requested."""
    return chunks(size, step) if size <= step else metered_at(size, range(max(1, step), size, max(1, step)))


def metered_at(size: int, cuts: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Does the same, and cuts at these positions."""
    meter = here()
    base, each = meter.base, meter.span / size
    lo = 0
    for hi in cuts:
        yield lo, hi
        meter.part = base + hi * each
        lo = hi
    yield lo, size
    meter.part = base + size * each


def clipped(piece: Any, lo: int, hi: int) -> tuple[int, int]:
    """Clips a range of the largest piece to the `size` of this piece; may be empty."""
    hi = min(hi, piece.size)
    return min(lo, hi), hi


def remembered(kernels: Sequence[Kernel], name: str, find: Callable[[Sequence[Kernel]], _Result]) -> _Result:
    """Caches a result about kernels that run together, in the first one's memo, while it runs with the same others."""
    first, *rest = kernels
    cached: tuple[list[Kernel], _Result] | None = first.memo.get(name)
    if cached is not None and len(cached[0]) == len(rest) and all(map(operator.is_, cached[0], rest)):
        return cached[1]
    result = find(kernels)
    first.memo[name] = (rest, result)  # without `first`: a cycle would keep the tensors
    return result


def source(kernel: Kernel) -> Flat:
    """Returns the source of a kernel with one array per side, as a cached flat row."""
    flat: Flat | None = kernel.memo.get("source")
    if flat is None:
        flat = kernel.memo["source"] = row(kernel.src)
    return flat


def row(array: Array | Flat) -> Flat:
    """Returns an array as a flat row; a flat row stays as it is."""
    return array if isinstance(array, Flat) else Flat(array)


def reduction(kernel: Kernel) -> tuple[Flat, Flat]:
    """Returns source and target of a reduction, of equal size and dtype."""
    sides: tuple[Flat, Flat] | None = kernel.memo.get("reduction")
    if sides is None:
        src = source(kernel)
        sides = src, src if kernel.dst is kernel.src else row(kernel.dst)
        check_fit(kernel, *sides)
        kernel.memo["reduction"] = sides
    return sides


def scattered_reduction(kernel: Kernel, ranks: Sequence[int], rank: int) -> tuple[tuple[Flat, ...], Flat]:
    """Returns the pieces in rank order and the target of a REDUCESCATTER; the target may be this rank's own piece."""
    src, dst = pieces(kernel, kernel.src, ranks), Flat(kernel.dst)
    check_fit(kernel, src[ranks.index(rank)], dst)
    return src, dst


def transfers(kernel: Kernel, ranks: Sequence[int], rank: int) -> tuple[dict[int, Flat], dict[int, Flat]]:
    """Returns the arrays that a rank sends to and receives from each rank in an ALLGATHER, GATHER, SCATTER or ALLTOALL.

    Ranks with nothing to exchange are left out. The rank itself is included; see `keep_own`. Raises InternalError if
    the pieces do not match the ranks, or one is larger than `Kernel.most`.
    """
    is_root, root = rank == kernel.peer, (kernel.peer,)

    def same(array: Any, peers: Sequence[int]) -> dict[int, Flat]:
        return dict.fromkeys(peers, Flat(array))

    def each(side: Any) -> dict[int, Flat]:
        return dict(zip(ranks, pieces(kernel, side, ranks), strict=True))

    if kernel.kind is OpKind.ALLGATHER:
        give, take = same(kernel.src, ranks), each(kernel.dst)
    elif kernel.kind is OpKind.GATHER:
        give, take = same(kernel.src, root), each(kernel.dst) if is_root else {}
    elif kernel.kind is OpKind.SCATTER:
        give, take = each(kernel.src) if is_root else {}, same(kernel.dst, root)
    else:
        give, take = each(kernel.src), each(kernel.dst)
    if rank in give and rank in take:
        check_fit(kernel, give[rank], take[rank])
    for flats in (give, take):
        if any(flat.size > kernel.most for peer, flat in flats.items() if peer != rank):
            raise InternalError(detail=f"{kernel.kind.value} of a piece with more than {kernel.most} elements")
    return give, take


def pieces(kernel: Kernel, side: Any, ranks: Sequence[int]) -> tuple[Flat, ...]:
    """Returns a kernel's side that has one array per rank, all of one dtype."""
    flats = tuple(map(Flat, one_each(kernel, side, ranks)))
    if any(flat.dtype != flats[0].dtype for flat in flats):
        raise InternalError(detail=f"{kernel.kind.value} of pieces of several dtypes")
    return flats


def one_each(kernel: Kernel, side: Any, ranks: Sequence[int]) -> tuple[Any, ...]:
    """Returns a kernel's side that has one array per rank; raises InternalError for any other."""
    if type(side) is not tuple or len(side) != len(ranks):
        raise InternalError(detail=f"{kernel.kind.value} among {len(ranks)} ranks without a piece for each")
    return side


def keep_own(give: dict[int, Flat], take: dict[int, Flat], rank: int, step: int) -> None:
    """Copies a rank's own piece unless it is in place already, at most `step` elements at a time."""
    src, dst = give.get(rank), take.get(rank)
    if src is None or dst is None or src.address == dst.address:
        return
    for lo, hi in chunks(src.size, step):
        dst.write(lo, hi, src.read(lo, hi))


def movement(kernel: Kernel, *, is_root: bool) -> tuple[Flat | None, Flat | None, Flat]:
    """Returns `moved` as flat rows, and third, the row that is not None."""
    read, written = moved(kernel, is_root=is_root)
    if read is None:
        dst = row(written)
        return None, dst, dst
    src, other = row(read), None if written is None else row(written)
    if other is not None:
        check_fit(kernel, src, other)
    return src, other, src


def moved(kernel: Kernel, *, is_root: bool) -> tuple[Any, Any]:
    """Returns the arrays that a rank reads and writes in a broadcast, send or receive; None for none.

    The root reads `src` (or `dst`, if that is its only array), and writes `dst` only if it is another array. Raises
    NotImplementedError for any other kind: a backend names it in `Capabilities.ops`, and has no kernel of it.
    """
    if kernel.kind not in _MOVED:
        raise NotImplementedError(f"the backend has no kernel of {kernel.kind.value}")
    read = kernel.dst if kernel.src is None else kernel.src
    write = kernel.src if kernel.dst is None else kernel.dst
    if read is None or write is None:
        raise InternalError(detail=f"{kernel.kind.value} without an array")
    return (read, None if write is read else write) if is_root else (None, write)


def reduce_op(kernel: Kernel) -> ReduceOp:
    """Returns the reduce op of a reduction."""
    if kernel.op is None:
        raise InternalError(detail=f"{kernel.kind.value} without a reduce op")
    return kernel.op


def check_fit(kernel: Kernel, src: Flat, dst: Flat) -> None:
    """Raises InternalError unless two rows have one size and dtype."""
    if src.size != dst.size or src.dtype != dst.dtype:
        raise InternalError(detail=f"{kernel.kind.value} of {src.size} x {src.dtype} into {dst.size} x {dst.dtype}")


class translated:  # noqa: N801 - used like a function
    """Around a kernel: disables numpy's warnings where it folds, and turns foreign exceptions into KernelError.

    A class and not a generator: it is entered twice per plan, and this is several times faster.
    """

    __slots__ = ("_errstate", "_group_name", "_kind", "_rank")

    def __init__(self, kind: OpKind, group_name: str, rank: int, *, folds: bool = True) -> None:
        self._kind = kind
        self._group_name = group_name
        self._rank = rank
        self._errstate = np.errstate(all="ignore") if folds and kind in FOLDS else None

    def __enter__(self) -> None:
        if self._errstate is not None:
            self._errstate.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._errstate is not None:
            self._errstate.__exit__(kind, exc, trace)
        if isinstance(exc, Exception) and not isinstance(exc, RaycollectError):
            detail = f"{type(exc).__name__}: {exc}"
            raise KernelError(op=self._kind.value, group_name=self._group_name, rank=self._rank, detail=detail) from exc
