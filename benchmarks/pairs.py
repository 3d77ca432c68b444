"""The contenders between two actors, A and B: what A sends has to arrive at B, and to come back in a round trip."""

from __future__ import annotations

from typing import Any

import ray

import raycollect as col
from benchmarks.crew import Contestant, Joined, Plain, needs_torch
from benchmarks.report import Skipped

SEND, ROUND_TRIP = "send", "round trip"
_SENT, _BLANK = 1.0, 2.0


class Pair(Contestant):
    """Two actors with two buffers each: A sends its first, B receives in its first, A receives in its second.

    Args:
        name: What it is called.
        op: `SEND` or `ROUND_TRIP`.
        arena: Whether the buffers lie in the shared arena.
    """

    def __init__(self, name: str, op: str, *, arena: bool = False) -> None:
        super().__init__(name, 2, arena=arena)
        self.op = op
        self.a, self.b = self.actors
        self.back = f"{name}, back"

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers."""
        made = [(actor, name) for actor in self.actors for name in (self.name, self.back)]
        ray.get([actor.allocate.remote(name, nbytes, self._arena) for actor, name in made])

    def fill(self) -> None:
        """Sets what is sent, and blanks what is received; what came through the object store is replaced anyway."""
        ray.get([self.a.fill.remote(self.name, _SENT), *self._blank()])

    def check(self, runs: int) -> None:
        """Raises unless it has arrived."""
        places = [(self.b, self.name), (self.a, self.back)]
        taken = places if self.op == ROUND_TRIP else places[:1]
        if not all(ray.get([actor.holds.remote(name, _SENT) for actor, name in taken])):
            raise AssertionError(f"{self.name}: what was sent has not arrived")

    def _blank(self) -> list[Any]:
        return [self.b.fill.remote(self.name, _BLANK), self.a.fill.remote(self.back, _BLANK)]


class SendRef(Pair):
    """`raycollect.send_ref` from the driver, from ref to ref; in a round trip both sends are under way at once."""

    def __init__(self, name: str, op: str, *, arena: bool = False) -> None:
        super().__init__(name, op, arena=arena)
        self._refs: list[Any] = []
        col.declare_collective_group(self.actors, group_name=self.group)

    def prepare(self, nbytes: int) -> None:
        """Makes the buffers, and a ref to each that is used."""
        self._refs = []
        super().prepare(nbytes)
        places = [(self.a, self.name), (self.b, self.name), (self.a, self.back)]
        self._refs = [actor.get_array.remote(name) for actor, name in places]

    def operate(self) -> None:
        """One call, or two."""
        sent, taken, back = self._refs
        if self.op == SEND:
            col.send_ref(sent, taken, group_name=self.group)
            return
        there = col.send_ref(sent, taken, group_name=self.group, async_op=True)
        col.send_ref(taken, back, group_name=self.group)
        there.wait()

    def close(self) -> None:
        """Lets go of refs and group, and ends the actors."""
        self._refs = []
        col.destroy_collective_group(self.group)
        super().close()


class Imperative(Joined, Pair):
    """One method of each actor, which calls ``send`` and ``recv`` of a library."""

    def operate(self) -> None:
        """One call of each actor."""
        library, name, group = self._library, self.name, self.group
        if self.op == SEND:
            ray.get([self.a.send.remote(library, name, 1, group), self.b.recv.remote(library, name, 0, group)])
        else:
            ray.get([actor.bounce.remote(library, name, self.back, group) for actor in self.actors])


class Store(Pair):
    """A method returns the array, and the ref goes to a method of the other actor, which keeps what it gets, read-only.

    Args:
        name: What it is called.
        op: `SEND` or `ROUND_TRIP`.
        copied: Whether the receiver copies it into its own buffer, where `send_ref` leaves it.
    """

    ACTOR = Plain

    def __init__(self, name: str, op: str, *, copied: bool = False) -> None:
        super().__init__(name, op)
        self._take = "write" if copied else "keep"

    def operate(self) -> None:
        """Two calls, or three."""
        sent = self.a.read.remote(self.name)
        if self.op == SEND:
            ray.get(getattr(self.b, self._take).remote(self.name, sent))
        else:
            back = self.b.echo.remote(self.name, sent, self._take)
            ray.get(getattr(self.a, self._take).remote(self.back, back))

    def _blank(self) -> list[Any]:
        """What was kept lies in the object store, read-only: small buffers in its place."""
        if self._take == "keep":
            places = [(self.b, self.name), (self.a, self.back)]
            ray.get([actor.allocate.remote(name, 4, False) for actor, name in places])
        return super()._blank()


class Transporter:
    """An actor for Ray Direct Transport: it returns torch tensors that travel by gloo."""

    def __init__(self, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch = torch
        self._held: dict[str, Any] = {}

    def allocate(self, name: str, nbytes: int, arena: bool) -> None:
        """Makes a tensor."""
        self._held[name] = self._torch.empty(max(1, nbytes // 4), dtype=self._torch.float32)

    def fill(self, name: str, value: float) -> None:
        """Makes a tensor of the same size with that value: one that was sent or received may be shared."""
        self._held[name] = self._torch.full_like(self._held[name], value)

    def holds(self, name: str, value: float) -> bool:
        """Tells whether all elements are that."""
        return bool((self._held[name] == value).all())

    def drop(self, name: str) -> None:
        """Lets go of a tensor."""
        self._held.pop(name, None)

    @ray.method(tensor_transport="gloo")
    def give(self, name: str) -> Any:
        """Sends a tensor to whoever gets the ref."""
        return self._held[name]

    def keep(self, name: str, value: Any) -> None:
        """Keeps what came."""
        self._held[name] = value

    @ray.method(tensor_transport="gloo")
    def echo(self, name: str, value: Any) -> Any:
        """Keeps what came, and sends it back."""
        self._held[name] = value
        return value


class DirectTransport(Pair):
    """Ray Direct Transport over gloo.

    Raises:
        Skipped: This Ray has none, or there is no torch.
    """

    ACTOR = Transporter

    def __init__(self, name: str, op: str) -> None:
        needs_torch()
        try:
            from ray.experimental.collective import create_collective_group
        except ImportError as exc:
            raise Skipped(f"this Ray has no Ray Direct Transport: {exc}") from exc
        super().__init__(name, op)
        create_collective_group(self.actors, backend="gloo")

    def operate(self) -> None:
        """Two calls, or three."""
        sent = self.a.give.remote(self.name)
        if self.op == SEND:
            ray.get(self.b.keep.remote(self.name, sent))
        else:
            ray.get(self.a.keep.remote(self.back, self.b.echo.remote(self.name, sent)))
