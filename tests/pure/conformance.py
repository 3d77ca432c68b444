"""What every kernel of every backend must do, said once more and independently: cases and expected results.

A `Case` is one launch. Each rank makes its own operands, runs the kernel, and compares what it holds afterwards, bit
for bit, with what numpy makes of all ranks' operands.
"""

from __future__ import annotations

import os
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise, product
from typing import Any

import ml_dtypes
import numpy as np

from raycollect import backends
from raycollect.backends import arrays
from raycollect.core.model import Kernel, Launch, OpKind, ReduceOp
from raycollect.core.operations import ALL_KERNELS, FOLDS, OPERATIONS, PARTIAL_FOLDS, USUAL
from raycollect.core.protocols import ARRIVAL_NBYTES, Communicator
from raycollect.pos import tensors
from tests.pure.communicators import Team
from tests.pure.operands import LOCK, NARROW, left_fold, operand
from tests.support.values import replace

BACKENDS = tuple(os.environ.get("RAYCOLLECT_TEST_BACKENDS", "local shm tcp gloo torch:gloo").split())
"""Which backends the suite runs on; the environment names others, which `RAYCOLLECT_TEST_MODULES` register."""

IN_THREADS = frozenset({"local", "shm", "tcp"})
"""Whose ranks can be threads of one process; the libraries of the others hold the GIL while they block."""

WORLDS = (1, 2, 3, 5, 8)
SIZES = (0, 1, 7, 1024, 1_000_001)
DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")),
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    *NARROW,
)
SPREADS = ("even", "uneven", "one has all")
LAYOUTS = ("plain", "shared", "read-only", "every other", "reversed", "transposed", "column", "big-endian", "unaligned")

FOLDING = FOLDS
ROOTED = tuple(kind for kind, spec in OPERATIONS.items() if spec.root)
ALL_KINDS = tuple(kind for kind in OPERATIONS if kind in ALL_KERNELS and kind is not OpKind.BARRIER)
KINDS, REDUCTIONS = (tuple(kind for kind in kinds if kind in USUAL) for kinds in (ALL_KINDS, FOLDS))
"""The same without the kinds that no library for GPUs has."""

TOLERANCE = {"float16": 2e-2, "float32": 1e-5, "float64": 1e-12, "complex64": 1e-5, "complex128": 1e-12}
"""How far a backend that does not promise the left fold may be from it; whatever is not here is exact everywhere."""


FAR = {"bfloat16": 0.02, "float8_e4m3fn": 0.15, "float8_e5m2": 0.3}
"""How far a sum of short floats may be off, per rank, where the library rounds behind each step, as NCCL does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch of one kernel.

    Attributes:
        kind: What is done; SEND has RECV at its other end.
        dtype: Of all arrays.
        size: Elements of the whole; of all pieces together where there are pieces.
        op: For reductions.
        root: The root, or the sender.
        peer: The receiver, for SEND.
        inplace: Whether `dst` is the memory of `src` where the kernel allows it.
        spread: How the whole is cut into pieces.
        layout: How arrays lie in memory.
        seed: Other values.
    """

    kind: OpKind
    dtype: str
    size: int
    op: ReduceOp | None = None
    root: int = 0
    peer: int = -1
    inplace: bool = False
    spread: str = "even"
    layout: str = "plain"
    seed: int = 0


def allowed(op: ReduceOp, dtype: str) -> bool:
    """Whether numpy has a meaning for it."""
    kind = "f" if dtype in NARROW else np.dtype(dtype).kind
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        return kind in "biu"
    return kind not in {ReduceOp.AVG: "biu", ReduceOp.MIN: "c", ReduceOp.MAX: "c"}.get(op, "")


CASE_RULES: dict[tuple[str, str], Callable[..., bool]] = {
    ("kind", "op"): lambda kind, op: (kind in REDUCTIONS) == (op is not None),
    ("kind", "root"): lambda kind, root: kind in ROOTED or root == 0,
    ("kind", "world"): lambda kind, world: kind is not OpKind.SEND or world > 1,
    ("kind", "inplace"): lambda kind, inplace: kind is not OpKind.SEND or not inplace,
    ("op", "dtype"): lambda op, dtype: op is None or allowed(op, dtype),
    ("world", "root"): lambda world, root: root < world,
    ("layout", "dtype"): lambda layout, dtype: layout != "big-endian" or dtype not in NARROW,
}
"""Which two values of a `Case`, and of its world, go together."""


# ------------------------------------------------------------------------------- what must come out


@lru_cache(maxsize=10)
def _folded(op: ReduceOp, dtype: str, size: int, world: int, seed: int) -> np.ndarray:
    return left_fold(op, [operand(rank, dtype, size, seed) for rank in range(world)])


def sizes_of(size: int, world: int, spread: str) -> tuple[int, ...]:
    """How many elements each rank's piece has; never more than `size` together."""
    if spread == "even":
        return (size // world,) * world
    if spread == "uneven":  # piece r in proportion to 2 r + 1
        ends = [size * end * end // world**2 for end in range(world + 1)]
        return tuple(hi - lo for lo, hi in pairwise(ends))
    return tuple(size if rank == world // 2 else 0 for rank in range(world))


def cut(values: np.ndarray, sizes: Sequence[int]) -> tuple[np.ndarray, ...]:
    """The first elements, in pieces of these sizes."""
    ends = np.cumsum([0, *sizes])
    return tuple(values[lo:hi] for lo, hi in pairwise(ends))


def sides(case: Case, rank: int, world: int) -> tuple[Any, Any, int]:  # noqa: C901 - a table
    """What a rank gives, what it must hold afterwards, and the size of the largest piece: arrays, pieces or None."""
    sizes, is_root = sizes_of(case.size, world, case.spread), rank == case.root
    largest = max(sizes)

    def whole(of: int) -> np.ndarray:
        return operand(of, case.dtype, case.size, case.seed)

    def fold(ranks: int = world) -> np.ndarray:
        assert case.op is not None
        with LOCK:
            return _folded(case.op, case.dtype, case.size, ranks, case.seed)

    def exchanged(giver: int) -> tuple[np.ndarray, ...]:
        # What i gives j has the size of what j gives i, so that all of it can be in place.
        return cut(whole(giver), [sizes[(giver + taker) % world] for taker in range(world)])

    match case.kind:
        case OpKind.ALLREDUCE:
            return whole(rank), fold(), 0
        case OpKind.REDUCE:
            return whole(rank), fold() if is_root else None, 0
        case OpKind.REDUCESCATTER:
            return cut(whole(rank), sizes), cut(fold(), sizes)[rank], largest
        case OpKind.SCAN:
            return whole(rank), fold(rank + 1), 0
        case OpKind.EXSCAN:
            return whole(rank), fold(rank) if rank else whole(0), 0
        case OpKind.BROADCAST:
            return whole(case.root) if is_root else None, whole(case.root), 0
        case OpKind.ALLGATHER:
            return whole(rank)[: sizes[rank]], tuple(whole(of)[: sizes[of]] for of in range(world)), largest
        case OpKind.GATHER:
            taken = tuple(whole(of)[: sizes[of]] for of in range(world)) if is_root else None
            return whole(rank)[: sizes[rank]], taken, largest
        case OpKind.SCATTER:
            given = cut(whole(case.root), sizes)
            return given if is_root else None, given[rank], largest
        case OpKind.ALLTOALL:
            return exchanged(rank), tuple(exchanged(giver)[rank] for giver in range(world)), largest
        case OpKind.SEND:
            return (whole(case.root), None, 0) if is_root else (None, whole(case.root), 0)
    raise AssertionError(f"tests/pure/conformance.py says nothing of {case.kind.value}")


# ------------------------------------------------------------------------------- arrays


def layout(name: str, values: np.ndarray) -> np.ndarray:
    """Puts values into an array of some memory layout; its C order is that of `values`."""
    size, dtype = values.size, values.dtype
    rows = next((rows for rows in (4, 7, 101) if size and size % rows == 0), 1)
    made = {
        "plain": lambda: np.empty(size, dtype),
        "shared": lambda: tensors.empty(size, dtype) if arrays.is_number(dtype) else np.empty(size, dtype),
        "read-only": lambda: np.empty(size, dtype),
        "every other": lambda: np.zeros(2 * size, dtype)[::2],
        "reversed": lambda: np.zeros(size, dtype)[::-1],
        "transposed": lambda: np.zeros((rows, size // rows), dtype).T,
        "column": lambda: np.zeros((size, 3), dtype)[:, 1],
        "big-endian": lambda: np.zeros(size, dtype.newbyteorder(">")),
        "unaligned": lambda: np.zeros(size * values.itemsize + 1, np.uint8)[1:].view(dtype),
        "0-d": lambda: np.zeros((), dtype),
    }[name]()
    made[...] = values.reshape(made.shape)
    return made


def flat(array: np.ndarray) -> np.ndarray:
    """The elements, native and in C order."""
    return np.array(array, array.dtype if array.dtype.isnative else array.dtype.newbyteorder("=")).reshape(-1)


def bits(array: np.ndarray) -> bytes:
    """The bits that count: a long double has padding, which is left out."""
    if array.dtype.char not in "gG":
        return array.tobytes()
    real = array.view(array.real.dtype).reshape(-1)
    used = real.itemsize if np.finfo(real.dtype).nmant != 63 else 10
    return real.view(np.uint8).reshape(-1, real.itemsize)[:, :used].tobytes() if real.size else b""


# ------------------------------------------------------------------------------- what each rank does


def run_launch(
    communicator: Communicator, launch: Launch, *kernels: Kernel, arrival: bytes = b"", at_once: bool = False
) -> list[bytes]:
    """One whole launch, as the executor does it."""
    ok = False
    try:
        arrivals = communicator.agree(launch, arrival)
        for some in (kernels,) if at_once else [(kernel,) for kernel in kernels]:
            communicator.launch(launch, some)
        ok = True
        return list(arrivals)
    finally:
        communicator.end(launch, ok)


def run_staged(communicator: Communicator, launch: Launch, kernel: Kernel, most: int) -> None:
    """The same with the first chunk brought before the consistency check, where nobody knows the sizes of others."""
    ok = False
    try:
        communicator.agree(launch, b"", kernel)
        told = replace(kernel, most=most)
        communicator.launch(launch, (told,))
        ok = True
    finally:
        communicator.end(launch, ok)


def run_kernel(
    communicator: Communicator, launch: Launch, case: Case, given: tuple[Any, Any, int], *, staged: bool
) -> None:
    """One whole launch of a case, with what its kernel reads, what it writes, and the size of the largest piece."""
    src, dst, most = given
    kind, peer = case.kind, case.root
    if kind is OpKind.SEND:
        kind, peer = (OpKind.SEND, case.peer) if communicator.rank == case.root else (OpKind.RECV, case.root)
    kernel = Kernel(kind=kind, src=src, dst=dst, op=case.op, peer=peer)
    if staged:
        run_staged(communicator, launch, kernel, most)
    else:
        run_launch(communicator, launch, replace(kernel, most=most))


def body_cases(
    communicator: Communicator,
    launches: Sequence[Launch],
    cases: Sequence[Any],
    run: Callable[..., tuple[str, int]],
    *how: Any,
) -> list[tuple[str, int]]:
    """Runs cases one after the other; per case, what is wrong with it ("" if nothing) and a checksum of the result."""
    return [
        run(communicator, launch, case, *how) if communicator.rank in launch.ranks else ("", 0)
        for launch, case in zip(launches, cases, strict=True)
    ]


def run_case(communicator: Communicator, launch: Launch, case: Case, is_bitwise: bool, staged: bool) -> tuple[str, int]:
    """Runs one case on one rank, and compares."""
    rank = communicator.rank
    given, expected, most = sides(case, rank, communicator.world_size)
    src = made(given, partial(layout, case.layout))
    dst = made(expected, partial(layout, case.layout if case.layout != "read-only" else "plain"), blank=True)
    shared = ()
    if case.inplace:
        dst, shared = put_in_place(case.kind, rank, src, dst)
    if case.layout == "read-only":
        for array in listed(src):
            array.flags.writeable = any(array is other for other in shared)
    run_kernel(communicator, launch, case, (src, dst, most), staged=staged)
    return what_is_wrong(case, given, src, expected, dst, shared, is_bitwise), checksum_of(dst)


def made(values: Any, make: Callable[[np.ndarray], Any], *, blank: bool = False) -> Any:
    """Fresh tensors with the values, or with others where they are to be written."""
    if values is None:
        return None
    if type(values) is tuple:
        return tuple(made(piece, make, blank=blank) for piece in values)
    return make(other_values(values) if blank else values)


def other_values(values: np.ndarray) -> np.ndarray:
    """As many values of which none is the same."""
    return ~values if values.dtype.kind == "b" else (values.view(np.uint8) ^ 0x55).view(values.dtype)


def listed(side: Any) -> list[np.ndarray]:
    return [] if side is None else list(side) if type(side) is tuple else [side]


def put_in_place(kind: OpKind, rank: int, src: Any, dst: Any) -> tuple[Any, tuple[np.ndarray, ...]]:
    """What is written becomes what is read wherever the kernel allows it; second, the arrays in both places."""
    if dst is None:
        return None, ()
    if OPERATIONS[kind].in_place:
        return src, (src,)
    if kind is OpKind.BROADCAST:  # one array for the root, which need not be written
        return dst if src is None else None, ()
    if kind in (OpKind.ALLGATHER, OpKind.GATHER):
        return (*dst[:rank], src, *dst[rank + 1 :]), (src,)
    if kind is OpKind.REDUCESCATTER or (kind is OpKind.SCATTER and src is not None):
        return src[rank], (src[rank],)
    return (src, tuple(src)) if kind is OpKind.ALLTOALL else (dst, ())


def what_is_wrong(
    case: Case, given: Any, src: Any, expected: Any, dst: Any, shared: tuple[np.ndarray, ...], is_bitwise: bool
) -> str:
    """Says what is not as it must be."""
    for values, array in zip(listed(given), listed(src), strict=True):
        if not any(array is other for other in shared) and bits(flat(array)) != bits(values):
            return "what was only to be read was written"
    wanted = listed(expected) if dst is not None else []
    exact = is_bitwise or case.op in (None, ReduceOp.MIN, ReduceOp.MAX) or case.dtype not in TOLERANCE
    for piece, (values, array) in enumerate(zip(wanted, listed(dst), strict=True)):
        found = flat(array)
        if exact and bits(found) != bits(values):
            at = np.flatnonzero(found != values)
            return (
                f"piece {piece} differs in {at.size} elements, first at {at[:1]}: {found[at[:3]]}, not {values[at[:3]]}"
            )
        if not exact and not np.allclose(found, values, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype]):
            at = np.abs(found - values).argmax()
            return f"piece {piece} is far off: {found[at]} at {at}, not {values[at]}"
    return ""


def as_read(side: Any, host: dict[int, np.ndarray]) -> Any:
    """A side of device arrays as what was read of them, by their ids."""
    if side is None:
        return None
    return tuple(host[id(one)] for one in side) if type(side) is tuple else host[id(side)]


def how_far(case: Case, expected: Any, dst: Any, world: int) -> str:
    """Says how far a reduction of short floats is off which their library rounds behind each step."""
    if dst is None:
        return ""
    found, wanted = (values.astype(np.float32) for values in (dst, expected))
    most = FAR[case.dtype] * world
    if np.allclose(found, wanted, rtol=most, atol=most):
        return ""
    at = int(np.abs(found - wanted).argmax())
    return f"is far off: {found[at]} at {at}, not {wanted[at]}"


def checksum_of(side: Any) -> int:
    total = 0
    for array in listed(side):
        total = zlib.crc32(bits(flat(array)), total)
    return total


def check_cases(team: Team, cases: Sequence[Case], *, staged: bool = False, timeout_s: float = 60.0) -> None:
    """Runs cases on all ranks, compares their results and names every case that failed.

    Left out are operations and reduce ops that the backend says it does not have.
    """
    line = backends.get(team.backend)
    cases = [one for one in cases if one.kind in line.ops and (one.op is None or one.op in line.reduce_ops)]
    launches = [team.launch(ranks_of(case, team), timeout_s) for case in cases]
    results = team.must(body_cases, launches, cases, run_case, line.bitwise, staged)
    check_outcomes(cases, [case.kind for case in cases], results, f"on {team.backend} x {team.world_size}")


def check_outcomes(
    cases: Sequence[Any], kinds: Sequence[OpKind], results: Sequence[Sequence[tuple[str, int]]], where: str
) -> None:
    """Names every case that failed on some rank, or after which ranks have different bits.

    Args:
        cases: What was run.
        kinds: The kind of each.
        results: By rank, and by case: what is wrong, and a checksum of the result.
        where: For the message.
    """
    found = []
    for case, kind, *outcomes in zip(cases, kinds, *results, strict=True):
        said = {f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text}
        if kind is OpKind.ALLREDUCE and len({checksum for _, checksum in outcomes}) > 1:
            said.add("ranks have different bits")
        if said:
            found.append(f"{case}: {'; '.join(sorted(said))}")
    assert not found, "\n".join([f"{len(found)} of {len(cases)} cases {where}:", *found])


def ranks_of(case: Case, team: Team) -> tuple[int, ...]:
    return tuple(sorted((case.root, case.peer))) if case.kind is OpKind.SEND else team.everyone


def check_allreduce(team: Team, op: ReduceOp, dtype: str, size: int, how: str, inplace: bool, seed: int = 0) -> None:
    """Runs one allreduce and compares."""
    case = Case(kind=OpKind.ALLREDUCE, op=op, dtype=dtype, size=size, layout=how, inplace=inplace, seed=seed)
    check_cases(team, [case])


def every_case(
    dtype: str, world: int, sizes: Sequence[int] = SIZES, kinds: Sequence[OpKind] = ALL_KINDS
) -> Iterator[Case]:
    """The full product for one dtype and world size: every kind, root, size, in place or not.

    An allreduce and a reduce-scatter run with every reduce op that the dtype has; in a reduce they take turns from root
    to root, and so do everywhere the ways to cut into pieces.
    """
    ops = [op for op in ReduceOp if allowed(op, dtype)]
    turn = 0
    for size, kind in product(sizes, kinds):
        roots = range(world) if kind in ROOTED else (0,)
        peers = range(world) if kind is OpKind.SEND else (-1,)
        chosen: Sequence[ReduceOp | None] = ops if kind in FOLDING and kind not in ROOTED else (None,)
        for root, peer, op, inplace in product(roots, peers, chosen, (False, True)):
            if kind is OpKind.SEND and (inplace or root == peer):
                continue
            turn += 1
            yield Case(
                kind=kind,
                dtype=dtype,
                size=size,
                op=ops[turn // 2 % len(ops)] if kind is OpKind.REDUCE else op,
                root=root,
                peer=peer,
                inplace=inplace,
                spread=SPREADS[turn // 2 % len(SPREADS)],
            )


def is_absent(backend: str) -> str:
    """Why a backend can't be tested here, or ""."""
    if not backends.is_known(backend) or not backends.is_available(backend):
        return f"{backend} is not installed"
    return ""


assert {np.dtype(getattr(ml_dtypes, name)) for name in NARROW} <= arrays.NARROW


def body_arrive(communicator: Communicator, launch: Launch) -> list[bytes]:
    return run_launch(communicator, launch, arrival=arrival_of(communicator.rank, communicator.world_size))


def arrival_of(rank: int, world: int) -> bytes:
    """Arrivals of all lengths: none, and the longest."""
    return bytes([rank]) * (ARRIVAL_NBYTES if rank == world - 1 else rank * 1000)


def body_peak(communicator: Communicator, launch: Launch, kind: OpKind, nbytes: int, has_gaps: bool) -> int:
    """The memory that a kernel takes beside its arrays, at most."""
    world, rank, stride = communicator.world_size, communicator.rank, 1 + has_gaps
    whole, other = (np.ones(nbytes // 4 // world * world * stride, np.int32)[::stride] for _ in range(2))
    pieces = tuple(np.split(other, world))
    src, dst = {
        **dict.fromkeys((OpKind.ALLREDUCE, *PARTIAL_FOLDS), (whole, whole)),
        OpKind.REDUCE: (whole, whole if rank == 0 else None),
        OpKind.REDUCESCATTER: (pieces, pieces[rank]),
        OpKind.BROADCAST: (whole, whole),
        OpKind.ALLGATHER: (whole[: pieces[0].size], pieces),
        OpKind.GATHER: (whole[: pieces[0].size], pieces if rank == 0 else None),
        OpKind.SCATTER: (pieces if rank == 0 else None, whole[: pieces[0].size]),
        OpKind.ALLTOALL: (pieces, pieces),
    }[kind]
    kernel = Kernel(kind=kind, src=src, dst=dst, op=ReduceOp.SUM, peer=0, most=pieces[0].size)
    tracemalloc.start()
    try:
        run_launch(communicator, launch, kernel)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def body_sum_of_ones(communicator: Communicator, launch: Launch, size: int) -> np.ndarray:
    array = np.ones(size, np.int64)
    run_staged(communicator, launch, sum_of(array), size)
    return array


def sum_of(array: np.ndarray) -> Kernel:
    return Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM)
