"""Kernels that work in place: which do, what they give, and what happens to arrays that others may still write."""

from __future__ import annotations

import gc
import mmap
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raycollect.backends import loans
from raycollect.backends.shm import direct, in_place
from raycollect.backends.shm.directory import GIVES, TAKES, Directory, Places, directory_nbytes
from raycollect.backends.shm.joined import Joined
from raycollect.backends.shm.meeting import Meeting, control_nbytes, prepare
from raycollect.backends.shm.staged import Staged
from raycollect.core.model import BufferRef, Kernel, Launch, OpKind, ReduceOp, Segment
from raycollect.core.protocols import Communicator, SegmentSource, Together
from raycollect.errors import CollectiveTimeoutError, KernelError, PlanAbortedError
from raycollect.pos import tensors
from raycollect.pos.segments import Segments
from tests.pure.communicators import ThreadTeam
from tests.pure.conformance import KINDS, REDUCTIONS, Case, check_cases, every_case, run_case, run_launch
from tests.pure.watched import WAIT_S

Body = Callable[..., Any]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of any size are worked on in place, in blocks much smaller than most."""
    monkeypatch.setattr(direct, "DIRECT_FROM_NBYTES", 1)
    for name, nbytes in (("FOLD_NBYTES", 256), ("COPY_NBYTES", 512)):
        monkeypatch.setattr(in_place, name, nbytes)


@pytest.fixture
def trio() -> Iterator[ThreadTeam]:
    made = ThreadTeam("shm", 3)
    yield made
    made.close()


def shared(cases: Iterable[Case]) -> list[Case]:
    return [replace(case, layout="shared") for case in cases]


def one_of_each(size: int = 200_001) -> list[Case]:
    """A case per kernel, with a root in the middle."""
    return [
        Case(
            kind=kind,
            dtype="float32",
            size=size,
            op=ReduceOp.SUM if kind in REDUCTIONS else None,
            root=1,
            peer=2 if kind is OpKind.SEND else -1,
            layout="shared",
        )
        for kind in KINDS
    ]


def by_name(case: Case) -> str:
    return case.kind.value


# ---------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.usefixtures("small_blocks")
def test_every_kernel_in_place(world: int, staged: bool) -> None:
    team = ThreadTeam("shm", world)
    for dtype in ("int16", "float64", "complex128", "bfloat16"):
        check_cases(team, shared(every_case(dtype, world, (7, 1024))), staged=staged)
    team.close()


def body_mixed(communicator: Communicator, launch: Launch, case: Case, rank: int, there: str, here: str) -> str:
    """One rank has its arrays elsewhere than the others."""
    if communicator.rank not in launch.ranks:
        return ""
    layout = here if communicator.rank == rank else there
    return run_case(communicator, launch, replace(case, layout=layout), True, True)[0]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(("there", "here"), [("shared", "plain"), ("plain", "shared"), ("shared", "every other")])
@pytest.mark.parametrize("inplace", [False, True])
def test_arrays_of_one_rank_lie_elsewhere(trio: ThreadTeam, rank: int, there: str, here: str, inplace: bool) -> None:
    for case in one_of_each():
        chosen = replace(case, inplace=inplace and case.kind is not OpKind.SEND)
        launch = trio.launch((1, 2) if case.kind is OpKind.SEND else None)
        wrong = [text for text in trio.must(body_mixed, launch, chosen, rank, there, here) if text]
        assert not wrong, f"{case.kind}: {wrong}"


@pytest.mark.parametrize("case", one_of_each(), ids=by_name)
def test_nothing_is_staged(monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam, case: Case) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a kernel was staged")

    monkeypatch.setattr(Staged, "run", refuse)
    check_cases(trio, [case])
    monkeypatch.setattr(Staged, "stage", lambda self, launch, kernel: self._outgoing(launch, kernel) and refuse())
    check_cases(trio, [case], staged=True)


@pytest.mark.parametrize(("kind", "rank"), [(OpKind.SEND, 2), (OpKind.GATHER, 1)])
def test_a_giver_writes_where_only_the_taker_has_shared_memory(
    monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam, kind: OpKind, rank: int
) -> None:
    monkeypatch.setattr(Staged, "run", None)
    (case,) = (case for case in one_of_each() if case.kind is kind)
    launch = trio.launch((1, 2) if kind is OpKind.SEND else None)
    assert not any(trio.must(body_mixed, launch, case, rank, "plain", "shared"))


def test_small_arrays_are_staged(monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam) -> None:
    """They need one barrier less so."""
    monkeypatch.setattr(direct.Direct, "run", None)
    check_cases(trio, one_of_each(1000))


@pytest.mark.parametrize(
    "kind", [OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.GATHER, OpKind.SEND], ids=lambda kind: kind.value
)
def test_nobody_writes_into_an_array_before_its_owner_runs_the_kernel(kind: OpKind) -> None:
    """Past the door, the owner may wait yet for those who read the array."""
    team = ThreadTeam("shm", 2)
    size = 20_001
    taken = [tensors.full(size, -1.0) for _ in range(2)]
    given = (np if kind is OpKind.SEND else tensors).full(size, 1.0)
    kernels = {
        OpKind.ALLREDUCE: [Kernel(kind=kind, src=array, dst=array, op=ReduceOp.SUM) for array in (taken[0], given)],
        OpKind.REDUCE: [
            Kernel(kind=kind, src=array, dst=array if array is not given else None, op=ReduceOp.SUM, peer=0)
            for array in (taken[0], given)
        ],
        OpKind.GATHER: [
            Kernel(kind=kind, src=taken[0].copy(), dst=tuple(taken), peer=0, most=size),
            Kernel(kind=kind, src=given, peer=0, most=size),
        ],
        OpKind.SEND: [Kernel(kind=OpKind.RECV, dst=taken[0], peer=1), Kernel(kind=kind, src=given, peer=0)],
    }[kind]
    first = team.launch()
    team.must(lambda communicator: run_launch(communicator, first, kernels[communicator.rank]))  # maps the arrays
    assert (taken[kind is OpKind.GATHER] != -1).all()
    for array, value in ((given, 5), (taken[0], -1), (taken[1], -1)):
        array[:] = value
    launch, given_up = team.launch(timeout_s=1), threading.Event()

    def body(communicator: Communicator) -> None:
        kernel = kernels[communicator.rank]
        communicator.stage(launch, kernel)
        communicator.agree(launch, b"")
        try:
            if communicator.rank == 0:
                assert given_up.wait(WAIT_S)
                return
            with pytest.raises(CollectiveTimeoutError):
                communicator.launch(launch, kernel).wait(launch.timeout_s)
        finally:
            given_up.set()
            communicator.end(launch, False)

    team.must(body)
    team.close()
    for array in taken:
        assert (array == -1).all()


def test_many_kernels_of_one_launch(trio: ThreadTeam) -> None:
    """In place and staged in turn; listings alternate between two areas."""
    arrays = {
        rank: [(tensors if i % 3 else np).full(20_001, rank + i, "float64") for i in range(7)] for rank in trio.everyone
    }
    launch = trio.launch()

    def body(communicator: Communicator) -> None:
        mine = arrays[communicator.rank]
        run_launch(communicator, launch, *(Kernel(kind=OpKind.ALLREDUCE, src=a, dst=a, op=ReduceOp.SUM) for a in mine))

    trio.must(body)
    for mine in arrays.values():
        for i, array in enumerate(mine):
            np.testing.assert_array_equal(array, np.full(20_001, 3.0 + 3 * i))


# ---------------------------------------------------------------------------------------------- mapping


class Blind(SegmentSource):
    """A process whose memory others can see, and which can't see theirs."""

    def __init__(self) -> None:
        self.asked = 0

    def locate(self, address: int, nbytes: int) -> BufferRef | None:
        return Segments.current().locate(address, nbytes)

    def open(self, segment: Segment) -> Any:
        self.asked += 1
        raise OSError(13, "Permission denied")


@pytest.mark.parametrize("staged", [False, True])
def test_where_one_rank_can_not_map_all_stage_and_it_is_not_asked_again(staged: bool) -> None:
    blind = Blind()
    team = ThreadTeam("shm", 3, lambda rank: blind if rank == 2 else Segments.current())
    for _ in range(2):
        check_cases(team, [case for case in one_of_each() if case.kind is not OpKind.SEND], staged=staged)
    assert blind.asked == 1
    team.close()


def test_ranks_that_see_each_other_work_in_place_beside_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    team = ThreadTeam("shm", 3, lambda rank: Blind() if rank == 0 else Segments.current())
    monkeypatch.setattr(Staged, "run", None)
    (send,) = (case for case in one_of_each() if case.kind is OpKind.SEND)
    check_cases(team, [send, send])
    team.close()


# ---------------------------------------------------------------------------------------------- failures


class Stop:
    """Holds one rank up in the middle of its part of a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, part: Callable[..., bool]) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        original = getattr(in_place.Work, name)

        def held_up(work: Any, *args: Any) -> Any:
            if part(work) and not self.reached.is_set():
                self.reached.set()
                assert self.go_on.wait(WAIT_S)
            return original(work, *args)

        monkeypatch.setattr(in_place.Work, name, held_up)


def assert_aborted(future: Any) -> None:
    """Its rank has ended so; the frames of the error, which hold arrays, are let go of, as the executor does."""
    error = future.result(WAIT_S)
    assert isinstance(error, PlanAbortedError)
    error.with_traceback(None)


def body_allreduce(communicator: Communicator, launch: Launch, arrays: list[Any]) -> None:
    array = arrays[communicator.rank]
    run_launch(communicator, launch, Kernel(kind=OpKind.ALLREDUCE, src=array, dst=array, op=ReduceOp.SUM))


def test_an_array_is_kept_until_nobody_can_write_it_any_more(monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam) -> None:
    """The other ranks give up on one that is held up in mid-kernel; then it goes on, and must hit nothing new."""
    arrays: list[Any] = [tensors.zeros(100_000) for _ in trio.everyone]
    root = weakref.ref(arrays[0].base)
    stop = Stop(monkeypatch, "_reduce", lambda work: work._rank == 2)
    launch = trio.launch()
    futures = [trio.start(rank, body_allreduce, launch, arrays) for rank in trio.everyone]
    assert stop.reached.wait(WAIT_S)
    for rank in (0, 1):
        trio.communicators[rank].abort(launch.seq)
        assert_aborted(futures[rank])
    arrays[0] = None
    gc.collect()
    assert root() is not None
    stop.go_on.set()
    assert_aborted(futures[2])  # it sees that the others have left
    arrays[0] = np.zeros(100_000)
    trio.must(body_allreduce, trio.launch(), arrays)
    gc.collect()
    assert root() is None


def test_an_array_that_may_yet_be_written_outlives_its_communicator(
    monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam
) -> None:
    monkeypatch.setattr(loans, "_forsaken", kept := [])
    arrays: list[Any] = [tensors.zeros(100_000) for _ in trio.everyone]
    stop = Stop(monkeypatch, "_reduce", lambda work: work._rank == 2)
    launch = trio.launch()
    futures = [trio.start(rank, body_allreduce, launch, arrays) for rank in trio.everyone]
    assert stop.reached.wait(WAIT_S)
    trio.communicators[0].close()
    futures[0].result(WAIT_S)
    assert [one is arrays[0] for lent, *_ in kept for one in lent] == [True]
    trio.communicators[1].abort(launch.seq)
    assert_aborted(futures[1])
    stop.go_on.set()
    assert_aborted(futures[2])
    assert len(kept) == 1
    trio.communicators[1].close()  # looks again: all have left that launch
    assert kept == []


@pytest.mark.parametrize("kind", [OpKind.BROADCAST, OpKind.SCATTER, OpKind.ALLGATHER, OpKind.ALLTOALL])
def test_what_was_read_of_a_rank_that_has_left_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam, kind: OpKind
) -> None:
    """Its arrays are its own again, and may hold anything."""
    (case,) = (case for case in one_of_each() if case.kind is kind)
    stop = Stop(monkeypatch, "_copy", lambda work: work._rank == 2)
    launch = trio.launch()

    def body(communicator: Communicator) -> Any:
        return run_case(communicator, launch, case, True, False)

    futures = [trio.start(rank, body) for rank in trio.everyone]
    assert stop.reached.wait(WAIT_S)
    trio.communicators[1].abort(launch.seq)
    assert_aborted(futures[1])
    stop.go_on.set()
    if isinstance(futures[0].result(WAIT_S), BaseException):  # a root may have given all it has, and left
        assert_aborted(futures[0])
    assert_aborted(futures[2])
    check_cases(trio, [case])


def test_an_abort_is_seen_between_two_blocks(monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam) -> None:
    arrays = [tensors.zeros(1_000_000) for _ in trio.everyone]
    folded = []
    original = in_place.fold

    def slow(op: ReduceOp, parts: Any, out: Any) -> None:
        if threading.get_ident() == held[0]:
            trio.communicators[1].abort(launch.seq)
            folded.append(out.size)
        original(op, parts, out)

    monkeypatch.setattr(in_place, "fold", slow)
    held, launch = [0], trio.launch()

    def body(communicator: Communicator) -> None:
        if communicator.rank == 1:
            held[0] = threading.get_ident()
        body_allreduce(communicator, launch, arrays)

    results = trio.run(body)
    assert isinstance(results[1], PlanAbortedError)
    assert 0 < len(folded) < in_place.FOLDS_PER_LOOK


def test_a_listing_beyond_its_segment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(Blind):
        def locate(self, address: int, nbytes: int) -> BufferRef | None:
            ref = super().locate(address, nbytes)
            return ref and replace(ref, offset=ref.segment.nbytes - 8)

        def open(self, segment: Segment) -> Any:
            return Segments.current().open(segment)

    team = ThreadTeam("shm", 2, lambda rank: Liar() if rank else Segments.current())
    arrays = [tensors.zeros(100_000) for _ in team.everyone]
    results = team.run(body_allreduce, team.launch(), arrays)
    assert all(isinstance(result, (KernelError, PlanAbortedError)) or "beyond" in str(result) for result in results)
    assert any("beyond the end" in str(result) for result in results)
    team.close()


def test_the_answer_to_a_new_segment_leaves_the_listing_alone() -> None:
    """Others may be reading it at that moment: a rank that saw no listing would stage where the others do not."""
    memory = bytearray(directory_nbytes(2))
    first, second = (Directory(memoryview(memory), rank, 2, Segments.current()) for rank in (0, 1))
    array = tensors.zeros(10_000)
    ref = Segments.current().locate(array.ctypes.data, array.nbytes)
    assert ref is not None
    for directory in (first, second):
        directory.write(GIVES | TAKES, Places.of([ref, ref]), (0, 1))
    before = bytes(memory)

    def meet() -> None:
        changed = [at for at in range(0, len(memory), 8) if memory[at : at + 8] != before[at : at + 8]]
        assert len(changed) == 1  # one word, which said nothing before
        assert not any(before[changed[0] : changed[0] + 8])
        listings = second.read((0, 1), lambda: None)
        assert [listing.flags for listing in listings] == [GIVES | TAKES] * 2

    listings = first.read((0, 1), meet)
    assert [listing.flags for listing in listings] == [GIVES | TAKES] * 2


def test_a_segment_counts_as_shown_only_when_it_was_mapped() -> None:
    """A launch that is refused at the door reads no listing: the next one says once more that the segment is new."""
    memory = bytearray(directory_nbytes(2))
    segments = (Segments.current(), Blind())
    first, second = (Directory(memoryview(memory), rank, 2, segments[rank]) for rank in (0, 1))
    array = tensors.zeros(10_000)
    ref = Segments.current().locate(array.ctypes.data, array.nbytes)
    assert ref is not None
    for _ in range(2):  # of which nobody reads the first
        for directory in (first, second):
            directory.restart()
            directory.write(GIVES | TAKES, Places.of([ref, ref]), (0, 1))
    met = []
    flags = [listing.flags for listing in second.read((0, 1), lambda: met.append("barrier"))]
    assert (met, flags, second.is_open) == (["barrier"], [0, 0], False)


def test_what_was_lent_to_a_process_that_is_dead_comes_back() -> None:
    memory = mmap.mmap(-1, control_nbytes(2))
    prepare(memory, 2)
    first, _ = (Meeting(memory, rank, 2, "team") for rank in (0, 1))
    dead = subprocess.Popen(["true"])
    dead.wait()
    owed = {1: 1 << 62}
    assert first.owing(owed)
    first._words[8 + 2] = dead.pid
    assert not first.owing(owed)


# ---------------------------------------------------------------------------------------------- together


def together(communicator: Communicator, launch: Launch, kernels: list[Kernel]) -> list[int]:
    """Runs kernels as many at a time as the backend likes; gives how many each time."""
    assert isinstance(communicator, Together)
    ran, ok = [], False
    try:
        communicator.agree(launch, b"")
        while kernels:
            done = communicator.launch_together(launch, kernels)
            ran.append(done)
            for kernel in () if done else kernels[:1]:
                communicator.launch(launch, kernel).wait(launch.timeout_s)
            kernels = kernels[done or 1 :]
        ok = True
    finally:
        communicator.end(launch, ok)
    return ran


def kernels_of(kind: OpKind, rank: int, arrays: list[Any], peer: int = -1) -> list[Kernel]:
    """One kernel per array, in place."""
    op = ReduceOp.SUM if kind in REDUCTIONS else None
    gives = kind in REDUCTIONS or rank == peer
    takes = kind is OpKind.ALLREDUCE or (rank == peer) == (kind is OpKind.REDUCE)
    return [Kernel(kind=kind, src=a if gives else None, dst=a if takes else None, op=op, peer=peer) for a in arrays]


def must_hold(kind: OpKind, root: int, arrays: list[list[Any]], given: list[list[Any]]) -> None:
    """Each rank's arrays are what the kernels, in place, make of what all have given."""
    for at in range(len(given[0])):
        expected = given[root][at].copy() if kind is OpKind.BROADCAST else given[0][at].copy()
        for other in given[1:] if kind in REDUCTIONS else ():
            expected += other[at]
        for rank, mine in enumerate(arrays):
            alone = kind is OpKind.REDUCE and rank != root
            np.testing.assert_array_equal(mine[at], given[rank][at] if alone else expected)


SIZES_TOGETHER = [5, 0, 100_001, 1, 4096, 17] * 3


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST])
def test_many_kernels_with_one_meeting(kind: OpKind, world: int) -> None:
    team = ThreadTeam("shm", world)
    rng = np.random.default_rng(world)
    root = world // 2 if kind is not OpKind.ALLREDUCE else -1
    given = [[rng.standard_normal(n).astype("f8" if n % 2 else "f4") for n in SIZES_TOGETHER] for _ in team.everyone]
    arrays = [[tensors.array(one) for one in mine] for mine in given]

    def body(communicator: Communicator, launch: Launch) -> list[int]:
        return together(communicator, launch, kernels_of(kind, communicator.rank, arrays[communicator.rank], root))

    for _ in range(2):  # the second time by what was remembered
        for mine, before in zip(arrays, given, strict=True):
            for array, values in zip(mine, before, strict=True):
                array[...] = values
        assert team.must(body, team.launch()) == [[len(SIZES_TOGETHER)]] * world
        must_hold(kind, root, arrays, given)
    team.close()


def strided(values: Any) -> Any:
    """An ordinary array with gaps."""
    array = np.zeros((values.size, 2), values.dtype)[:, 1]
    array[:] = values
    return array


ORDINARY: dict[str, Callable[[Any], Any]] = {
    "plain": np.array,
    "strided": strided,
    "swapped": lambda values: values.astype(values.dtype.newbyteorder()),
    "shared": tensors.array,
}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST])
def test_many_kernels_on_ordinary_arrays_are_staged_as_one(kind: OpKind, world: int) -> None:
    """Of several types, layouts and sizes, which end anywhere in a chunk; some in shared memory."""
    team = ThreadTeam("shm", world)
    rng = np.random.default_rng(world)
    root = world - 1 if kind is not OpKind.ALLREDUCE else -1
    sizes = [200_001, 3, 0, 70_000, 1, 300_000, 64]
    given = [[rng.standard_normal(n).astype("f8" if n % 2 else "f4") for n in sizes] for _ in team.everyone]
    make = [ORDINARY[name] for name in ("plain", "strided", "shared", "swapped", "plain", "plain", "strided")]
    arrays = [[lay(one) for lay, one in zip(make, mine, strict=True)] for mine in given]

    def body(communicator: Communicator, launch: Launch) -> list[int]:
        rank = communicator.rank
        return together(communicator, launch, kernels_of(kind, rank, arrays[rank], root))

    assert team.must(body, team.launch()) == [[len(sizes)]] * world
    must_hold(kind, root, arrays, given)
    team.close()


def test_one_ordinary_array_anywhere_has_all_of_them_staged(trio: ThreadTeam) -> None:
    arrays = [[tensors.full(40_000, rank + 1.0) for _ in range(3)] for rank in trio.everyone]
    arrays[1][2] = np.full(40_000, 2.0)

    def body(communicator: Communicator) -> list[int]:
        kernels = kernels_of(OpKind.ALLREDUCE, communicator.rank, arrays[communicator.rank])
        return together(communicator, launch, kernels)

    for turn in range(3):
        launch = trio.launch()
        assert trio.must(body) == [[3]] * 3
        assert all((array == 6 * 3**turn).all() for mine in arrays for array in mine)


@pytest.mark.parametrize("size", [1, 7, 131_072, 131_073, 300_000])
def test_a_joined_row_is_read_and_written_at_any_place(size: int) -> None:
    rng = np.random.default_rng(size)
    ends = np.unique(rng.integers(0, size + 1, 9))
    whole = rng.standard_normal(size)
    parts = [part.copy() if at % 2 else strided(part) for at, part in enumerate(np.split(whole, ends))]
    row = Joined(parts)
    assert (row.size, row.nbytes, row.dtype) == (size, 8 * size, np.dtype("f8"))
    for lo, hi in [(0, size), (0, 0), *np.sort(rng.integers(0, size + 1, (20, 2)), axis=1).tolist()]:
        np.testing.assert_array_equal(row.read(lo, hi), whole[lo:hi])
        whole[lo:hi] += 1
        row.write(lo, hi, whole[lo:hi])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_more_kernels_than_a_listing_has_room_for(trio: ThreadTeam) -> None:
    count = 2 * direct.TOGETHER + 3
    arrays = [[tensors.full(40, rank + 1.0) for _ in range(count)] for rank in trio.everyone]

    def body(communicator: Communicator, launch: Launch) -> list[int]:
        kernels = kernels_of(OpKind.ALLREDUCE, communicator.rank, arrays[communicator.rank])
        return together(communicator, launch, kernels)

    ran = trio.must(body, trio.launch())
    assert ran == [[direct.TOGETHER, direct.TOGETHER, 0, 0, 0]] * 3, "the last three are too small to be worth it"
    assert all((array == 6).all() for mine in arrays for array in mine)


def test_small_kernels_are_not_run_together(trio: ThreadTeam) -> None:
    arrays = [[tensors.zeros(8) for _ in range(3)] for _ in trio.everyone]

    def body(communicator: Communicator, launch: Launch) -> list[int]:
        kernels = kernels_of(OpKind.ALLREDUCE, communicator.rank, arrays[communicator.rank])
        return together(communicator, launch, kernels)

    assert trio.must(body, trio.launch()) == [[0, 0, 0]] * 3


def test_all_arrays_lent_together_are_kept_until_nobody_can_write_them(
    monkeypatch: pytest.MonkeyPatch, trio: ThreadTeam
) -> None:
    arrays: list[Any] = [[tensors.zeros(50_000) for _ in range(4)] for _ in trio.everyone]
    roots = [weakref.ref(array.base) for array in arrays[0]]
    stop = Stop(monkeypatch, "_reduce", lambda work: work._rank == 2)
    launch = trio.launch()

    def body(communicator: Communicator) -> list[int]:
        kernels = kernels_of(OpKind.ALLREDUCE, communicator.rank, arrays[communicator.rank])
        return together(communicator, launch, kernels)

    futures = [trio.start(rank, body) for rank in trio.everyone]
    assert stop.reached.wait(WAIT_S)
    for rank in (0, 1):
        trio.communicators[rank].abort(launch.seq)
        assert_aborted(futures[rank])
    arrays[0] = None
    gc.collect()
    assert all(root() is not None for root in roots)
    stop.go_on.set()
    assert_aborted(futures[2])
    arrays[0] = [np.zeros(100_000)]
    trio.must(
        body_allreduce, trio.launch(), [mine[0] if rank == 0 else np.zeros(100_000) for rank, mine in enumerate(arrays)]
    )
    gc.collect()
    assert all(root() is None for root in roots)
