"""Programs that are run again on the same memory do what an `Execution` does."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotYet
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.engine.execution import Execution
from raycollect.engine.fast_path import FastPath
from raycollect.engine.instruments import Instruments
from raycollect.engine.run_cache import RunCache, places_of
from raycollect.engine.step_program import decode_step_program, encode_step_program
from raycollect.engine.step_runner import StepRunner
from raycollect.errors import (
    CollectiveTimeoutError,
    GroupBrokenError,
    KernelError,
    MismatchError,
    PlanAbortedError,
    ReadOnlyError,
    TensorDirtyError,
    UnsupportedError,
    Violation,
    refusal,
)
from raycollect.observe import Recorder
from raycollect.pos import Container, Store, store, tensors
from tests.pure.communicators import ProcessTeam, ThreadTeam, Worker
from tests.pure.engine.test_execution_loops import Rebound
from tests.pure.meaning import meaning
from tests.pure.teams import Actor, Gate, Script, Team, pinned
from tests.pure.watched import WAIT_S, WatchedCondition

KINDS = (OpKind.ALLREDUCE, OpKind.REDUCE, OpKind.BROADCAST, OpKind.SEND)
SIZES = (1, 7, (64 << 10) + 1, (1 << 20) + 5)
"""In bytes: staged, in place where the arrays lie in shared memory, and more than one chunk."""


class Odd:
    """A communicator with hooks: what is done before a call of a name goes on."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.hooks: dict[str, Callable[[], object]] = {}

    def __getattr__(self, name: str) -> Any:
        value, hook = getattr(self._inner, name), self.hooks.get(name)
        return value if hook is None else lambda *args: (hook(), value(*args))[1]


class Ends(list[Any]):
    """Communicators by rank, with a hook for who looks one up."""

    looked_up: Callable[[], object] | None = None

    def __getitem__(self, rank: Any) -> Any:
        if self.looked_up is not None:
            self.looked_up()
        return super().__getitem__(rank)


class Loop:
    """A captured step of collectives in place on one tensor per rank; the groups are real."""

    def __init__(self, backend: str, values: list[Any], kind: OpKind = OpKind.ALLREDUCE, **arguments: Any) -> None:
        world = len(values)
        self.values, self.kind, self.world = values, kind, world
        self.team = Team(world, [Script(rank, [pinned(value)]) for rank, value in enumerate(values)])
        self.group = ThreadTeam(backend, world)
        self.odd = [Odd(one) for one in self.group.communicators]
        self.team.communicators = self.ends = Ends(self.odd)  # type: ignore[assignment]
        self.gates = [Gate() for _ in range(world)]
        for actor, gate in zip(self.team.actors, self.gates, strict=True):
            actor.methods = {"hold": gate}
        self.gave: dict[str, Any] = {"root": arguments.get("root", -1), "peer": arguments.get("peer", -1)}
        _write(self.team, kind, arguments)
        self.runs = 0

    def hold(self, rank: int) -> None:
        """Lets a rank come late: what it does first is a method that waits for its gate."""
        script = self.team.scripts[rank]
        script.call("hold")
        script.actions.insert(0, script.actions.pop())

    def run(self) -> list[BaseException | None]:
        self.runs += 1
        return self.team.fail()

    def must(self, runs: int = 4) -> None:
        """Runs, and compares with what is meant."""
        rng = np.random.default_rng(self.runs)
        for _ in range(runs):
            gives = [rng.integers(0, 50, np.shape(_array(value))).astype("float64") for value in self.values]
            for value, give in zip(self.values, gives, strict=True):
                _array(value)[...] = give
            assert self.run() == [None] * self.world
            op = ReduceOp.SUM if self.kind in (OpKind.ALLREDUCE, OpKind.REDUCE) else None
            takes = meaning(self.kind, gives, **self.gave, op=op)
            for value, give, take in zip(self.values, gives, takes, strict=True):
                np.testing.assert_array_equal(_array(value), give if take is None else take)

    @property
    def dirty(self) -> list[int]:
        return [one.statistics().dirty for one in self.team.stores]

    def clean(self) -> None:
        for one, value in zip(self.team.stores, self.values, strict=True):
            one.mark_written([arrays.byte_range(_array(value))])
            _array(value)[...] = 1

    def close(self) -> None:
        for gate in self.gates:
            gate.go.set()
        for replay in self.team.replays:
            replay.abort()
        self.team.close()
        self.group.close()


def _array(value: Any) -> Any:
    if isinstance(value, Rebound):
        return value.array
    return value if isinstance(value, np.ndarray) else value.numpy()  # one of torch


def _write(team: Team, kind: OpKind, arguments: dict[str, Any]) -> None:
    ranks = dict.fromkeys(range(team.world), 0)
    if kind in (OpKind.ALLREDUCE, OpKind.REDUCE):
        team.collective(kind, ranks, **arguments)
    else:
        root = arguments["root"]
        team.collective(kind, {root: 0}, {rank: 0 for rank in ranks if rank != root}, **arguments)


def _arguments(kind: OpKind, world: int) -> dict[str, Any]:
    if kind is OpKind.SEND:
        return {"root": 1, "peer": 0}
    return {} if kind is OpKind.ALLREDUCE else {"root": world - 1}


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of each run that was repeated."""
    found: list[int] = []
    run = FastPath.run

    def noted(self: FastPath, *args: Any) -> Any:
        found.append(self._seq)
        return run(self, *args)

    monkeypatch.setattr(FastPath, "run", noted)
    return found


MakeLoop = Callable[..., Loop]


@pytest.fixture
def loop() -> Iterator[MakeLoop]:
    made: list[Loop] = []

    def make(*args: Any, **arguments: Any) -> Loop:
        made.append(Loop(*args, **arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def told(error: Any) -> Any:
    """All that an error says."""
    if error is None:
        return None
    return type(error), str(error), *(getattr(error, name, None) for name in ("op", "group_name", "rank"))


def same(monkeypatch: pytest.MonkeyPatch, scenario: Callable[[], Any]) -> Any:
    """Plays a scenario with executions alone, and with repeats: the outcome is one."""
    with monkeypatch.context() as patch:
        patch.setattr(FastPath, "of", staticmethod(lambda *args: None))
        expected = scenario()
    found = scenario()
    assert found == expected
    return found


# ---------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("make", [np.zeros, tensors.zeros], ids=["plain", "shared"])
@pytest.mark.parametrize(
    ("kind", "world"), [(kind, world) for kind in KINDS for world in ((2,) if kind is OpKind.SEND else (1, 3))]
)
def test_every_run_gives_what_is_meant(
    loop: MakeLoop, repeats: list[int], kind: OpKind, world: int, make: Callable[..., Any]
) -> None:
    for nbytes, backend in itertools.product(SIZES, ("shm", "local")):
        if backend == "shm" or nbytes < 100:
            one = loop(backend, [make(-(-nbytes // 8)) for _ in range(world)], kind, **_arguments(kind, world))
            repeats.clear()
            one.must(5)
            assert len(repeats) == 4 * world, "all but the first"
            one.close()


@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64"])
def test_every_op_gives_the_bits_of_an_execution(
    loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, op: ReduceOp, dtype: str
) -> None:
    def scenario() -> Any:
        rng = np.random.default_rng(3)
        one = loop("shm", [rng.integers(0, 9, 4097).astype(dtype) for _ in range(3)], op=op)
        return [([told(error) for error in one.run()], [value.tobytes() for value in one.values]) for _ in range(4)]

    same(monkeypatch, scenario)


def body_loop(communicator: Communicator, step_program: bytes, size: int, shared: bool, first: int, runs: int) -> int:
    """Sums in a process; gives how many runs were repeated."""
    rank, world = communicator.rank, communicator.world_size
    tensor, repeated, run = (tensors if shared else np).zeros(size), [], FastPath.run
    FastPath.run = lambda self, *args: repeated.append(1) or run(self, *args)  # type: ignore[method-assign,assignment,return-value,func-returns-value]
    instruments = Instruments(store=Store(), recorder=Recorder(time.monotonic), clock=time.monotonic)
    try:
        script = decode_step_program(step_program)
        replay = StepRunner(script, [pinned(tensor)], Actor().invoke, instruments, lambda _: communicator)
        for at in range(runs):
            tensor[:] = np.arange(size) * (rank + 1) + at
            replay.run(first + at, b"", aborted=lambda: None)
            np.testing.assert_array_equal(tensor, np.arange(size) * (world * (world + 1) / 2) + world * at)
    finally:
        FastPath.run = run  # type: ignore[method-assign]
    return len(repeated)


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    made = [Worker() for _ in range(3)]
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_between_processes(workers: list[Worker], loop: MakeLoop, world: int, shared: bool) -> None:
    team = ProcessTeam("shm", world, workers)
    routines = [encode_step_program(one.step_program) for one in loop("local", [np.zeros(1)] * world).team.scripts]
    for turn, nbytes in enumerate(SIZES):
        args = (-(-nbytes // 8), shared, 1 + 100 * turn, 12)
        running = [team.start(rank, body_loop, routines[rank], *args) for rank in range(world)]
        assert [one.result(WAIT_S) for one in running] == [11] * world
    team.close()


# ---------------------------------------------------------------------------------------------- what changes


def _dirty(one: Loop) -> None:
    tensor = one.values[0]
    one.team.stores[0].mark_dirty([arrays.byte_range(tensor)], [tensor])


Change = Callable[[Loop], object]

CHANGES: dict[str, tuple[Callable[[], Any], Change, Change, type | None]] = {
    "resized": (
        lambda: np.zeros(3),
        lambda one: one.values[0].resize(40, refcheck=False),
        lambda one: one.values[0].resize(3, refcheck=False),
        MismatchError,
    ),
    "replaced": (
        lambda: Rebound(np.zeros(3)),
        lambda one: setattr(one.values[0], "array", np.ones(3)),
        lambda one: setattr(one.values[0], "array", np.ones(3)),
        None,
    ),
    "of another type": (
        lambda: Rebound(np.zeros(3)),
        lambda one: setattr(one.values[0], "array", np.ones(3, np.float32)),
        lambda one: setattr(one.values[0], "array", np.ones(3)),
        MismatchError,
    ),
    "read-only": (
        lambda: np.zeros(3),
        lambda one: one.values[0].setflags(write=False),
        lambda one: one.values[0].setflags(write=True),
        ReadOnlyError,
    ),
    "dirty": (lambda: np.zeros(3), _dirty, Loop.clean, TensorDirtyError),
    "without memory": (
        lambda: pytest.importorskip("torch").zeros(3).double(),
        lambda one: one.values[0].untyped_storage().resize_(0),
        lambda one: (one.values[0].untyped_storage().resize_(24), one.values[0].zero_()),
        Exception,
    ),
}
"""What happens to rank 0's tensor -> how it is made, what is done, what undoes it, and what all ranks then hear."""


def test_torch_is_told_of_each_run_that_writes_its_tensors(loop: MakeLoop, repeats: list[int]) -> None:
    torch = pytest.importorskip("torch")
    one = loop("shm", [torch.zeros(3).double() for _ in range(2)])
    for _ in range(6):
        versions = [value._version for value in one.values]
        assert one.run() == [None, None]
        assert all(value._version > version for value, version in zip(one.values, versions, strict=True))
    assert repeats


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize(("world", "backend"), [(1, "shm"), (3, "local"), (3, "shm")])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_on_one_rank_is_noticed_by_all(
    loop: MakeLoop,
    repeats: list[int],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    world: int,
    backend: str,
    forgotten: bool,
) -> None:
    """Also where other plans on these tensors have taken the place of what was remembered with them."""
    make, change, undo, error = CHANGES[name]
    if error is MismatchError and world == 1:
        error = None

    def scenario() -> Any:
        one, trace = loop(backend, [make(), *(np.zeros(3) for _ in range(world - 1))]), []
        for step in (None, None, None, change, undo, None, None):
            if forgotten and step is change:
                for script in one.team.scripts:
                    script.values[0].memo.clear()
            if step is not None:
                step(one)
            trace.append(([told(error) for error in one.run()], [str(_array(value)) for value in one.values[1:]]))
        one.close()
        return trace

    trace = same(monkeypatch, scenario)
    failed = [[found[0] if found else None for found in errors] for errors, _ in trace]
    assert failed[:3] + failed[4:] == [[None] * world] * 6
    assert all((found is None) if error is None else issubclass(found, error) for found in failed[3])
    assert repeats


def test_a_kernel_that_is_refused_now_is_told_to_all(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    violation = Violation(kind="unsupported", rank=-1, field="operand", found="this", expected="that")

    def refuse() -> None:
        raise refusal("", "", (violation,))

    def scenario(backend: str) -> Any:
        one = loop(backend, [np.ones(5) for _ in range(3)])
        one.must()
        one.odd[1].hooks = {"stage": refuse, "again": refuse}
        errors = one.run()
        assert all(type(error) is UnsupportedError for error in errors)
        assert one.dirty == [0, 0, 0]
        one.odd[1].hooks = {}
        one.must()
        return [told(error) for error in errors]

    for backend in ("local", "shm"):
        same(monkeypatch, lambda backend=backend: scenario(backend))


# ---------------------------------------------------------------------------------------------- aborts


@pytest.mark.parametrize(
    ("when", "backend"),
    [
        *((when, "shm") for when in ("before", "looking up", "entering", "at the door", "in the kernel", "after")),
        *((when, "local") for when in ("entering", "at the door", "in the kernel")),
    ],
)
def test_an_abort_whenever_it_comes(
    loop: MakeLoop, repeats: list[int], monkeypatch: pytest.MonkeyPatch, when: str, backend: str
) -> None:
    """Without a word of the ledger's, which only knows of the first."""

    def scenario() -> Any:
        one = loop(backend, [np.ones(140_001) for _ in range(2)])
        team = one.team
        one.must(2)
        seq = team._seq

        def abort() -> None:
            for replay in team.replays:
                replay.abort(seq)

        with monkeypatch.context() as patch:
            if when == "before":
                team.aborts[0][seq] = team.aborts[1][seq] = "no more"
            elif when == "looking up":
                one.ends.looked_up = abort
            elif when == "entering":
                for cls in (FastPath, Execution):
                    run = cls.run
                    patch.setattr(cls, "run", lambda self, *args, run=run: (self.abort(), run(self, *args))[1])
            elif when != "after":
                for name in ("again", "agree") if when == "at the door" else ("launch",):
                    one.odd[0].hooks[name] = one.odd[1].hooks[name] = abort
            errors = [type(error) for error in one.run()]
        one.odd[0].hooks, one.odd[1].hooks, one.ends.looked_up = {}, {}, None
        abort()
        dirty = one.dirty
        one.clean()
        one.must(2)
        return errors, max(dirty)  # who comes late is ended before its kernel

    errors, dirty = same(monkeypatch, scenario)
    assert errors == ([type(None)] if when == "after" else [PlanAbortedError]) * 2
    assert dirty == int(when == "in the kernel")
    assert repeats


def test_an_abort_before_what_is_done_in_full_has_begun(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One's Repeat has met the others, who brought something else; its Execution comes to know of the abort."""
    one = loop("shm", [np.ones(3), np.ones(3)])
    one.must()
    full = FastPath._in_full

    def aborted(self: FastPath, *args: Any) -> Execution:
        execution = full(self, *args)
        one.team.replays[1].abort()
        return execution

    monkeypatch.setattr(FastPath, "_in_full", aborted)
    begun: list[str | None] = []
    run = Execution.run
    monkeypatch.setattr(Execution, "run", lambda self: (begun.append(self._launches.reason), run(self))[1])
    one.values[0].resize(7, refcheck=False)
    assert all(error is not None for error in one.run())
    assert sorted(map(str, begun)) == ["None", "the plan was aborted"]
    one.values[0].resize(3, refcheck=False)
    one.must()


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_aborts_race_with_repeats(loop: MakeLoop, repeats: list[int], backend: str) -> None:
    """Those of runs that have ended do no harm; those of the run under way end it, and no rank hangs."""
    one, stop = loop(backend, [np.ones(9) for _ in range(2)]), threading.Event()
    one.must()
    old = one.team._seq - 1

    def abort(seqs: Callable[[], int]) -> None:
        while not stop.is_set():
            for replay in one.team.replays:
                replay.abort(seqs())

    for seqs, outcomes in ((lambda: old, {type(None)}), (lambda: 0, {type(None), PlanAbortedError})):
        thread = threading.Thread(target=abort, args=(seqs,))
        thread.start()
        try:
            for _ in range(40):
                assert {type(error) for error in one.run()} <= outcomes
                one.clean()
        finally:
            stop.set()
            thread.join(WAIT_S)
        stop.clear()
    one.must()
    assert len(repeats) > 80


def test_an_abort_that_is_slow_does_not_reach_the_next_run(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    one, gate = loop("local", [np.ones(3)]), Gate()
    one.hold(0)
    one.gates[0].go.set()
    one.must()
    one.gates[0].came.clear()
    hold, abort = Gate(), FastPath.abort
    one.odd[0].hooks["launch"] = hold
    monkeypatch.setattr(FastPath, "abort", lambda self: (gate(), abort(self)))
    _, (running,) = one.team.start()
    assert hold.came.wait(WAIT_S)
    aborting = threading.Thread(target=one.team.replays[0].abort)
    aborting.start()
    assert gate.came.wait(WAIT_S)
    hold.go.set()
    with pytest.raises(NotYet):  # its kernel is done: it waits until the abort is over
        running.exception(0.1)
    gate.go.set()
    aborting.join(WAIT_S)
    assert running.exception(WAIT_S) is None
    one.odd[0].hooks = {}
    monkeypatch.setattr(FastPath, "abort", abort)
    one.must()


# ---------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(("size", "backend"), [(5, "local"), (5, "shm"), (200_001, "shm")])
@pytest.mark.parametrize("error", [KernelError(detail="injected"), MemoryError("no more")], ids=["kernel", "memory"])
def test_a_kernel_that_fails_leaves_dirt(
    loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, error: Exception, backend: str, size: int
) -> None:
    def fail() -> None:
        raise type(error)(*error.args) if isinstance(error, MemoryError) else KernelError(detail="injected")

    def scenario() -> Any:
        one = loop(backend, [np.ones(size) for _ in range(2)])
        one.must()
        one.odd[1].hooks = {"launch": fail}
        errors = one.run()
        assert isinstance(errors[1], KernelError)
        assert (errors[1].op, errors[1].rank) == ("allreduce", 1)
        one.odd[1].hooks, dirty = {}, one.dirty
        assert dirty == [int(one is not None) for one in errors]
        assert all(isinstance(found, TensorDirtyError) for found in one.run())
        one.clean()
        one.must()
        return [told(found) for found in errors], dirty

    same(monkeypatch, scenario)


def test_a_group_that_is_gone(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """One's communicator is closed, or can't be found any more: it says so, the others hear that it left."""

    def gone() -> None:
        raise GroupBrokenError(group_name="team", detail="no more")

    def scenario(closed: bool) -> Any:
        one = loop("shm", [np.ones(5) for _ in range(2)])
        one.must()
        if closed:
            one.odd[0].close()
        else:
            one.odd[0].hooks = {"again": gone, "stage": gone, "agree": gone}
        errors = one.run()
        one.ends.looked_up = gone
        for replay in one.team.replays:
            replay.abort()  # which looks nothing up
        return [told(error) for error in errors], [told(error) for error in one.run()]

    for closed in (False, True):
        first, second = same(monkeypatch, lambda closed=closed: scenario(closed))
        assert [error[0] for error in first] == [GroupBrokenError, PlanAbortedError]
        assert [error[0] for error in second] == [GroupBrokenError] * 2


@pytest.mark.parametrize("how", ["an abort", "the ledger", "the limit", "the reader"])
def test_who_waits_for_a_reader(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def scenario() -> Any:
        one = loop("shm", [np.ones(5)], timeout_s=0.2 if how == "the limit" else WAIT_S)
        one.must()
        tidy, kept = one.team.stores[0], WatchedCondition()
        tidy._changed = tidy._lock = kept  # type: ignore[assignment]
        monkeypatch.setattr(store, "_LOOK_S", 0.05 if how == "the limit" else WAIT_S)
        with tidy.reading([arrays.byte_range(one.values[0])]):
            seq, (running,) = one.team.start()
            assert kept.someone_waits()
            if how == "an abort":
                one.team.replays[0].abort(seq)
            elif how == "the ledger":
                one.team.aborts[0][seq] = "no more"
                tidy.wake()
            error = running.exception(WAIT_S) if how != "the reader" else None
        error = error or running.exception(WAIT_S)
        assert one.dirty == [0], "it had not begun to write"
        one.must()
        return told(error)

    error = same(monkeypatch, scenario)
    ends = {"the limit": CollectiveTimeoutError, "the reader": None}
    assert (error and error[0]) is ends.get(how, PlanAbortedError)


@pytest.mark.parametrize("backend", ["local", "shm"])
def test_who_does_not_come_to_the_door_is_named(loop: MakeLoop, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    def scenario() -> Any:
        one = loop(backend, [np.ones(5) for _ in range(3)], timeout_s=2.0)
        one.hold(2)
        one.gates[2].go.set()
        one.must()
        one.gates[2].came.clear()
        one.gates[2].go.clear()
        _, futures = one.team.start()
        errors = [future.exception(WAIT_S) for future in futures[:2]]
        one.gates[2].go.set()
        late = futures[2].exception(WAIT_S)
        assert one.dirty == [0, 0, 0]
        one.must()
        named = [error.missing for error in errors if isinstance(error, CollectiveTimeoutError)]
        assert named
        assert isinstance(late, PlanAbortedError)
        return set(named)

    # Whoever gives up first is not there any more for the other, who is told so, or gives up too.
    assert same(monkeypatch, scenario) == {(2,)}


def test_a_run_whose_staging_was_kept_leaves_it_to_the_execution() -> None:
    """Else nobody would give it back."""
    taken: list[bool] = []
    block: Any = SimpleNamespace(take=lambda: taken.append(True) or True)
    container = Container.of(np.ones(3), arrays.is_tensor)
    assert container is not None
    program: Any = object()
    nothing: Any = None
    RunCache(
        program=program, places=places_of([container]), ranges=[], arrival=b"", first=None, blobs=(), schedule=nothing,
        block=block,
    ).remember([container])  # fmt: skip
    instruments = Instruments(store=Store(), recorder=Recorder(time.monotonic), clock=time.monotonic)
    assert FastPath.once(program, [container], instruments, nothing, given=False) is None
    assert taken == []
