"""Random functions of plain driver code, and what they do as steps and through Ray: the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from hypothesis import strategies as st

import raycollect as col
from raycollect.errors import RaycollectError
from tests.support.waiting import wait_until

WORKERS = 3
GROUPS = {"all": (0, 1, 2), "left": (0, 1), "right": (1, 2), "default": (2, 0)}
"""Groups that overlap; the last one is derived."""

SIZE = 4


class Node(col.CollectiveParticipant):
    """Has an array and a list of what it was told; whole numbers, so that sums are exact."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reset()

    def reset(self):
        self.array = np.arange(SIZE, dtype=np.float64) + self.number
        self.heard: list[str] = []

    def own(self):
        return self.array

    def fresh(self, factor=1):
        return self.array * _number(factor)

    def add(self, value, /, times=1):
        self.array += _number(value) * times

    def take(self, tensor):
        self.array = np.array(tensor, np.float64) + 1
        return float(self.array.sum())

    def hear(self, *args, **kwargs):
        self.heard.append(_words((args, kwargs)))
        return len(self.heard)

    def echo(self, value):
        return value

    def change(self, values):
        """Changes a list that it gets."""
        if isinstance(values, list):
            values.append(self.number)
        return values

    def fail_at(self, count):
        self.heard.append("called")
        if len(self.heard) >= count:
            raise ValueError(f"call {len(self.heard)}")
        return len(self.heard)

    @col.by_value
    def state(self):
        return self.array.tolist(), list(self.heard)


def _number(value: Any) -> int:
    """A whole number of any value."""
    if isinstance(value, (bool, int, float)):
        return int(value) % 7
    if isinstance(value, np.ndarray):
        return int(value.sum()) % 7
    return len(value) if hasattr(value, "__len__") else 0


def _words(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.tolist()}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} {list(map(_words, value))}"
    if isinstance(value, dict):
        return f"dict {[(key, _words(one)) for key, one in value.items()]}"
    return f"{type(value).__name__} {value!r}"


# ---------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Call:
    """A method of a worker. Arguments are expressions, see `_value`; one of a tensor is a tensor of the same worker."""

    worker: int
    method: str
    args: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Collective:
    """A collective of a group on what its workers' methods give, called now or before."""

    kind: str
    group: str
    root: int
    fresh: bool
    in_batch: bool = False


@dataclass(frozen=True)
class Program:
    """A function: its body, what it returns, and the calls of it, with what happens between them."""

    body: tuple[Call | Collective, ...]
    returned: tuple[Any, ...]
    calls: tuple[tuple[Any, ...], ...]
    between: tuple[tuple[str, int], ...] = field(default=())


SCALARS = (
    st.booleans() | st.integers(-9, 9) | st.sampled_from([0.5, 2.0, -0.0]) | st.text("ab", max_size=2) | st.binary()
)
KINDS = st.sampled_from(["scalar", "number", "list", "dict", "array", "none"])


def values_of(kind: str) -> st.SearchStrategy[Any]:
    """Values of one structure, mostly."""
    return {
        "scalar": SCALARS,
        "number": st.integers(-9, 9),
        "list": st.lists(st.integers(0, 9), min_size=2, max_size=2) | st.lists(SCALARS, max_size=2),
        "dict": st.fixed_dictionaries({"a": st.integers(0, 9), "b": st.tuples(SCALARS)}),
        "array": st.integers(0, 9).map(lambda n: np.full(3, n, np.float32)),
        "none": st.none() | st.integers(0, 3),
    }[kind]


PLAIN = st.one_of(
    st.just("value"),
    st.just("value"),
    st.just(("in", ["value", 1, "x"])),
    st.just(("in", {"key": ("value", None)})),
    st.sampled_from([3, "text", (1, [2.5]), {"a": b"x"}]).map(lambda one: ("is", one)),
)
EXPRESSIONS = PLAIN | st.just(("object", frozenset({1, 2})))
"""What methods get; a value of any type may go there, but only a plain one comes back."""

CALLS = st.one_of(
    st.builds(Call, st.integers(0, 2), st.just("add"), st.tuples(EXPRESSIONS)),
    st.builds(Call, st.integers(0, 2), st.just("hear"), st.lists(EXPRESSIONS, max_size=3).map(tuple)),
    st.builds(Call, st.integers(0, 2), st.sampled_from(["echo", "change"]), st.tuples(PLAIN)),
    st.builds(Call, st.integers(0, 2), st.just("take"), st.just(("tensor",))),
    st.builds(Call, st.integers(0, 2), st.sampled_from(["own", "fresh"])),
    st.builds(Call, st.integers(0, 2), st.just("fail_at"), st.tuples(st.integers(3, 9).map(lambda n: ("is", n)))),
)
COLLECTIVES = st.builds(
    Collective,
    st.sampled_from(["allreduce", "broadcast", "reduce", "allgather", "barrier", "scan"]),
    st.sampled_from(sorted(GROUPS)),
    st.integers(0, 1),
    st.booleans(),
    st.booleans(),
)
RETURNED = st.lists(st.sampled_from(["value", "last", "tensor", "kept", "constant", "all"]), max_size=4).map(tuple)
BETWEEN = st.tuples(st.sampled_from(["nothing", "nothing", "call", "group", "start"]), st.integers(0, 2))


@st.composite
def programs(draw: st.DrawFn, *, replaces: bool = False) -> Program:
    """Programs of up to eight calls, called three times."""
    kind = draw(KINDS)
    between = BETWEEN | st.tuples(st.just("replace"), st.integers(0, 2)) if replaces else BETWEEN
    body = draw(st.lists(CALLS | COLLECTIVES, max_size=8))
    return Program(
        body=tuple(body),
        returned=draw(RETURNED),
        calls=tuple((draw(values_of(kind)), draw(st.integers(1, 2))) for _ in range(3)),
        between=draw(st.tuples(between, between, between)),
    )


# ---------------------------------------------------------------------------------------------- what they do


class Crew:
    """Workers, in groups, and a way to run a program with them."""

    def __init__(self, make: Any, name: str) -> None:
        self._make = make
        self._name = name
        self.workers = [make(number) for number in range(WORKERS)]
        self.groups = {name: self._declare(name) for name in GROUPS if name != "default"}

    def _declare(self, name: str) -> Any:
        members = [self.workers[at] for at in GROUPS[name]]
        return col.declare_collective_group(members, group_name=f"{self._name} {name}")

    def happen(self, what: str, at: int) -> None:
        """Something happens between two calls."""
        if what == "call":
            self.workers[at].hear.remote("between")
        elif what == "group":
            name = ("all", "left", "right")[at]
            self.groups[name].destroy()
            self.groups[name] = self._declare(name)
        elif what == "replace":
            self._replace(at)

    def _replace(self, at: int) -> None:
        old, new = self.workers[at], self._make(at)
        ray.kill(old)

        def replaced(name: str) -> bool:
            try:
                self.groups[name].replace(old, new)
            except RaycollectError:
                return False
            return True

        for name in self.groups:
            if at in GROUPS[name]:
                assert wait_until(lambda name=name: replaced(name), 30.0)
        self.workers[at] = new

    def function(self, program: Program) -> Any:
        """The function of a program."""

        def step(value, depth):
            made = _Made(self.workers, self._name)
            for _ in range(depth):
                for one in program.body:
                    made.do(one, value)
            return [made.returned(what, value) for what in program.returned]

        return step

    def states(self) -> list[Any]:
        return ray.get([one.state.remote() for one in self.workers])

    def reset(self) -> None:
        ray.get([one.reset.remote() for one in self.workers])


class _Made:
    """What a run of a function has called."""

    def __init__(self, workers: Sequence[Any], name: str) -> None:
        self.workers = workers
        self.name = name
        self.tensors: dict[int, Any] = {}
        self.last: Any = None

    def do(self, one: Call | Collective, value: Any) -> None:
        if isinstance(one, Collective):
            if one.in_batch:
                refs = self._operands(one)
                with col.batch():
                    self._collective(one, refs)
            else:
                self._collective(one, self._operands(one))
            return
        worker = self.workers[one.worker]
        args = [self._tensor(one.worker) if arg == "tensor" else _value(arg, value) for arg in one.args]
        made = getattr(worker, one.method).remote(*args)
        if one.method in ("own", "fresh"):
            self.tensors[one.worker] = made
        else:
            self.last = made

    def _tensor(self, at: int) -> Any:
        if at not in self.tensors:
            self.tensors[at] = self.workers[at].own.remote()
        return self.tensors[at]

    def _operands(self, one: Collective) -> list[Any]:
        if one.kind == "barrier":
            return []
        if one.fresh:
            self.tensors.update({at: self.workers[at].fresh.remote(2) for at in GROUPS[one.group]})
        return [self._tensor(at) for at in GROUPS[one.group]]

    def _collective(self, one: Collective, refs: list[Any]) -> None:
        group = "default" if one.group == "default" else f"{self.name} {one.group}"
        if one.kind == "barrier":
            if group != "default":
                col.barrier(group)
        elif one.kind == "allreduce":
            col.allreduce_refs(refs, group)
        elif one.kind == "broadcast":
            col.broadcast_refs(refs, one.root, group)
        elif one.kind == "reduce":
            col.reduce_refs(refs, one.root, group)
        elif one.kind == "scan":
            col.scan_refs(refs, group)
        else:
            self.last = col.allgather_refs(None, refs, group)[one.root]

    def returned(self, what: str, value: Any) -> Any:
        if what == "value":
            return value
        if what == "last":
            return self.last
        if what == "tensor":
            return self._tensor(1)
        if what == "kept":
            return {"kept": col.keep(self._tensor(0))}
        return "constant" if what == "constant" else dict(self.tensors)


def _value(expression: Any, value: Any) -> Any:
    """What an expression means, for an argument of the function."""
    if expression == "value" and isinstance(expression, str):
        return value
    if isinstance(expression, tuple) and len(expression) == 2 and expression[0] in ("is", "object"):
        return expression[1]
    if isinstance(expression, tuple) and len(expression) == 2 and expression[0] == "in":
        return _value(expression[1], value)
    if isinstance(expression, (list, tuple)):
        return type(expression)(_value(one, value) for one in expression)
    if isinstance(expression, dict):
        return {name: _value(one, value) for name, one in expression.items()}
    return expression


def plain(value: Any) -> Any:
    """A result in a form that compares; refs as what they stand for."""
    if isinstance(value, ray.ObjectRef):
        return "ref", plain(col.get(value))
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.tolist()
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(one) for one in value]
    if isinstance(value, dict):
        return "dict", [(name, plain(one)) for name, one in value.items()]
    return type(value).__name__, repr(value)


def outcome(step: Any, args: tuple[Any, ...], *, starts: bool) -> Any:
    """What a call returns, in a form that compares, or that it failed."""
    try:
        return plain(step.start(*args).wait() if starts else step(*args))
    except (RaycollectError, ray.exceptions.RayError, ValueError):
        return "failed"


def check(crews: Sequence[Crew], program: Program) -> None:
    """Runs a program as a step with the first crew, and through Ray with the other: it does the same."""
    for crew in crews:
        crew.reset()
    captured, eager = crews
    step = col.step(static=("depth",))(captured.function(program))
    other = col.step(static=("depth",), eager=True)(eager.function(program))
    for args, (what, at) in zip(program.calls, program.between, strict=True):
        starts = what == "start"
        found, expected = outcome(step, args, starts=starts), outcome(other, args, starts=starts)
        assert found == expected, program
        if found == "failed":  # who has done what by then, is not the same
            for crew in crews:
                crew.reset()
        assert captured.states() == eager.states(), program
        for crew in crews:
            crew.happen(what, at)
    assert captured.states() == eager.states(), program
    step.close()
