"""The actors of the contract, and what members call in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

import raycollect as col
from tests.contract.cases import NARROW, Case, Part, called, difference, leaves
from tests.contract.mismatches import Mismatch
from tests.support.waiting import wait_until

CALL_TIMEOUT_S = 20.0


class Told:
    """What a call raised.

    Attributes:
        error: The class of the error; None where nothing was raised.
        fields: Its fields.
        cause: The class of its cause.
        text: What it says, for reports.
    """

    def __init__(self, error: BaseException | None) -> None:
        self.error = None if error is None else type(error)
        self.fields = {} if error is None else {name: value for name, value in vars(error).items() if name != "reports"}
        self.cause = type(error.__cause__) if error is not None and error.__cause__ is not None else None
        self.text = repr(error)

    def __repr__(self) -> str:
        return self.text


class Member(col.CollectiveParticipant):
    """A rank: holds the operands of cases, calls what members call, and compares."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.cases: Sequence[Case | Mismatch] = ()
        self.parts: list[Part] = []
        self.made: dict[int, Any] = {}

    # ------------------------------------------------------------------------------------------ for the driver

    @col.by_value
    def begin(self, cases: Sequence[Case | Mismatch]) -> None:
        """Makes the operands of cases."""
        self.cases = cases
        self.parts = [case.part(self.rank) for case in cases]
        self.made = {}

    def tensor(self, at: int) -> Any:
        return self.parts[at].tensor

    def pieces(self, at: int) -> Any:
        return self.parts[at].pieces

    @col.by_value
    def take(self, at: int, value: Any) -> None:
        """Takes the output that a call has made."""
        self.made[at] = value

    @col.by_value
    def differences(self) -> dict[str, str]:
        """What is not as it must be, by case; everything is as it was at first afterwards."""
        found = {}
        for at, case in enumerate(self.cases):
            text = self._difference(at)
            if text:
                found[str(case)] = text
            _reset(self.parts[at], case.part(self.rank))
        self.made = {}
        return found

    @col.by_value
    def untouched(self) -> str:
        """Says which tensors were written, or ""."""
        fresh = [case.part(self.rank) for case in self.cases]
        pairs = zip(
            leaves([[part.tensor, part.pieces] for part in self.parts]),
            leaves([[part.tensor, part.pieces] for part in fresh]),
            strict=True,
        )
        wrong = [at for at, (one, other) in enumerate(pairs) if one.tobytes() != other.tobytes()]
        return f"tensors {wrong} were written" if wrong else ""

    def ones(self, dtype: str = "float64") -> Any:
        return np.ones(3, dtype)

    @col.by_value
    def copied(self) -> Any:
        return np.ones(7, np.float32)

    def echo(self, value: Any) -> Any:
        return value

    def stream(self) -> Iterator[Any]:
        yield np.ones(3)

    def fail(self) -> Any:
        raise ValueError("no tensor today")

    def die(self) -> Any:
        os._exit(1)

    @col.by_value
    def stay(self, path: str) -> None:
        """Keeps the actor busy until there is a file."""
        assert wait_until(Path(path).exists, 60)

    @col.by_value
    def pid(self) -> int:
        return os.getpid()

    # ------------------------------------------------------------------------------------------ as a member

    @col.by_value
    def join(self, world_size: int, backend: str, group: str) -> None:
        col.init_collective_group(world_size, self.rank, backend, group)

    @col.by_value
    def leave(self, group: str) -> None:
        col.destroy_collective_group(group)

    @col.by_value
    def join_torch(self, world_size: int, backend: str, store: str) -> None:
        import torch
        from torch import distributed as dist

        import raycollect.torch  # noqa: F401 - registers the backend

        torch.set_num_threads(1)
        options: Any = {"backend": backend}
        dist.init_process_group(
            "raycollect",
            init_method=store,
            rank=self.rank,
            world_size=world_size,
            timeout=timedelta(seconds=CALL_TIMEOUT_S),
            pg_options=options,
        )

    @col.by_value
    def leave_torch(self) -> None:
        from torch import distributed as dist

        dist.destroy_process_group()

    @col.by_value
    def run(self, group: str, cases: Sequence[Case]) -> dict[str, str]:
        """Makes the calls of cases, each twice on the same memory; returns what is not as it must be, by case."""
        self.begin(cases)
        found = {}
        for at, case in enumerate(cases):
            for _ in range(2):
                _reset(self.parts[at], case.part(self.rank))
                told = self._told(self.parts[at], group, CALL_TIMEOUT_S)
                text = told.text if told.error is not None else self._difference(at)
                if text:
                    found[str(case)] = text
        return found

    @col.by_value
    def refused(self, group: str, cases: Sequence[Mismatch]) -> list[tuple[Told, str]]:
        """Makes calls that are refused: what each is told, and what is wrong then with the tensors or the group."""
        self.begin(cases)
        found = []
        for part in self.parts:
            told = self._told(part, group, CALL_TIMEOUT_S)
            found.append((told, self.untouched() or self._sum(group)))
        return found

    @col.by_value
    def call(self, group: str, part: Part, timeout_s: float = CALL_TIMEOUT_S) -> Told:
        """Makes one call."""
        return self._told(part, group, timeout_s)

    def _told(self, part: Part, group: str, timeout_s: float) -> Told:
        if not part.operation:
            return Told(None)
        call = _by_torch if group == "torch" else _by_member
        try:
            call(part, group, timeout_s)
        except Exception as exc:
            return Told(exc)
        return Told(None)

    def _sum(self, group: str) -> str:
        """What is wrong with a collective that must work."""
        part = Part(operation="allreduce", tensor=np.full(3, self.rank + 1.0))
        told = self._told(part, group, CALL_TIMEOUT_S)
        return "" if list(part.tensor) == [6.0] * 3 else f"the next call gave {part.tensor}, {told}"

    def _difference(self, at: int) -> str:
        """What is not as it must be after a case."""
        case, part = self.cases[at], self.parts[at]
        assert isinstance(case, Case)
        after = case.after(self.rank)
        texts = [difference(case, part.tensor, after.tensor), difference(case, part.pieces, after.pieces)]
        if case.makes and case.made(self.rank) is not None:
            texts.append(difference(case, self.made.get(at), case.made(self.rank)))
        names = ("tensor: ", "pieces: ", "made: ")
        return ", ".join(name + text for name, text in zip(names, texts, strict=False) if text)


def _reset(part: Part, fresh: Part) -> None:
    for one, other in zip(leaves([part.tensor, part.pieces]), leaves([fresh.tensor, fresh.pieces]), strict=True):
        if one.flags.writeable:
            one[...] = other


def _by_member(part: Part, group: str, timeout_s: float) -> None:
    called(getattr(col, part.operation), {**part.arguments, "group_name": group, "timeout_s": timeout_s})


def _by_torch(part: Part, group: str, timeout_s: float) -> None:
    if _dist().group.WORLD is not None:
        _dist().group.WORLD.set_timeout(timedelta(seconds=timeout_s))
    BY_TORCH[part.operation](part)


def _tensor(value: Any) -> Any:
    """The tensors of torch on the memory of arrays."""
    import torch

    if value is None or isinstance(value, list):
        return value if value is None else [_tensor(one) for one in value]
    if isinstance(value, np.ndarray) and value.dtype.name in NARROW:
        return torch.from_numpy(value.view(f"uint{8 * value.itemsize}")).view(getattr(torch, value.dtype.name))
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _op(part: Part) -> Any:
    from torch import distributed as dist

    return getattr(dist.ReduceOp, part.op.upper())


def _dist() -> Any:
    from torch import distributed as dist

    return dist


BY_TORCH: dict[str, Callable[[Part], Any]] = {
    "allreduce": lambda p: _dist().all_reduce(_tensor(p.tensor), _op(p)),
    "reduce": lambda p: _dist().reduce(_tensor(p.tensor), p.root, _op(p)),
    "broadcast": lambda p: _dist().broadcast(_tensor(p.tensor), p.root),
    "allgather": lambda p: _dist().all_gather(_tensor(p.pieces), _tensor(p.tensor)),
    "reducescatter": lambda p: _dist().reduce_scatter(_tensor(p.tensor), _tensor(p.pieces), _op(p)),
    "gather": lambda p: _dist().gather(_tensor(p.tensor), _tensor(p.pieces), p.root),
    "scatter": lambda p: _dist().scatter(_tensor(p.tensor), _tensor(p.pieces), p.root),
    "alltoall": lambda p: _dist().all_to_all(_tensor(p.pieces), _tensor(p.tensor)),
    "send": lambda p: _dist().send(_tensor(p.tensor), p.root),
    "recv": lambda p: _dist().recv(_tensor(p.tensor), p.root),
    "barrier": lambda p: _dist().barrier(),
}
