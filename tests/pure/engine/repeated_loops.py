"""Captured steps of one collective that is run again and again, with hooks in their communicators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from raycollect.backends import arrays
from raycollect.core.model import OpKind, ReduceOp
from raycollect.core.protocols import Communicator
from raycollect.engine.run_cache import RunCache
from tests.pure.closing import closing_all
from tests.pure.communicators import ThreadTeam
from tests.pure.meaning import meaning
from tests.pure.teams import Gate, Script, Team, pinned


class Odd:
    """A communicator with hooks: what comes before a call of a name; "kernel": before an agreement with a kernel."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.hooks: dict[str, Callable[[], object]] = {}

    def __getattr__(self, name: str) -> Any:
        value, hook = getattr(self._inner, name), self.hooks.get(name)
        return value if hook is None else lambda *args: (hook(), value(*args))[1]

    def agree(self, launch: Any, arrival: bytes, kernel: Any = None, expected: Any = None) -> Any:
        for name in ("agree", "kernel") if kernel is not None else ("agree",):
            self.hooks.get(name, lambda: None)()
        return self._inner.agree(launch, arrival, kernel, expected)


class Ends(list[Any]):
    """Communicators by rank, with a hook for who looks one up."""

    looked_up: Callable[[], object] | None = None

    def __getitem__(self, rank: Any) -> Any:
        if self.looked_up is not None:
            self.looked_up()
        return super().__getitem__(rank)


class Loop:
    """A captured step of collectives in place on one tensor per rank; the groups are real."""

    def __init__(
        self,
        backend: str,
        values: list[Any],
        kind: OpKind = OpKind.ALLREDUCE,
        *,
        cache: type[RunCache] = RunCache,
        **arguments: Any,
    ) -> None:
        world = len(values)
        self.values, self.kind, self.world = values, kind, world
        self.team = Team(world, [Script(rank, [pinned(value)]) for rank, value in enumerate(values)])
        self.team.caches = [cache() for _ in range(world)]
        self.group = ThreadTeam(backend, world)
        self.odd = [Odd(communicator) for communicator in self.group.communicators]
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
            gives = [rng.integers(0, 50, np.shape(array(value))).astype("float64") for value in self.values]
            for value, give in zip(self.values, gives, strict=True):
                array(value)[...] = give
            assert self.run() == [None] * self.world
            op = ReduceOp.SUM if self.kind in (OpKind.ALLREDUCE, OpKind.REDUCE) else None
            takes = meaning(self.kind, gives, **self.gave, op=op)
            for value, give, take in zip(self.values, gives, takes, strict=True):
                np.testing.assert_array_equal(array(value), give if take is None else take)

    @property
    def repeats(self) -> int:
        """How many runs repeated an earlier one."""
        return sum(sum(self.team.repeated(rank)) for rank in range(self.world))

    @property
    def dirty(self) -> list[int]:
        return [store.statistics().dirty for store in self.team.stores]

    def clean(self) -> None:
        for store, value in zip(self.team.stores, self.values, strict=True):
            store.mark_written([arrays.byte_range(array(value))])
            array(value)[...] = 1

    def close(self) -> None:
        for gate in self.gates:
            gate.go.set()
        for replay in self.team.replays:
            replay.abort()
        self.team.close()
        self.group.close()


def array(value: Any) -> Any:
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


class Forgetful(RunCache):
    """Finds nothing, so that each run prepares itself."""

    def find(self, *args: Any, **given: Any) -> None:
        """Finds nothing."""


MakeLoop = Callable[..., Loop]


@pytest.fixture
def loop() -> Iterator[MakeLoop]:
    with closing_all(Loop) as make:
        yield make


def fields_of(error: Any) -> Any:
    """All that an error says."""
    if error is None:
        return None
    return type(error), str(error), *(getattr(error, name, None) for name in ("op", "group_name", "rank"))


def same(loop: MakeLoop, scenario: Callable[[MakeLoop], Any]) -> Any:
    """Plays a scenario with loops whose runs all prepare themselves, and with repeated ones: the outcome is one."""
    expected = scenario(partial(loop, cache=Forgetful))
    loops: list[Loop] = []

    def make(*args: Any, **given: Any) -> Loop:
        loops.append(loop(*args, **given))
        return loops[-1]

    result = scenario(make)
    assert any(loop.repeats for loop in loops)
    assert result == expected
    return result


class Rebound:
    """A tensor of a library that can put other memory under it, as torch's ``t.data = ...`` does."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __array_interface__(self) -> Any:
        return self.array.__array_interface__
