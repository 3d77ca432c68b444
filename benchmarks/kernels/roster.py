"""Who plays in suite `kernel`: contender -> its player, and the operations that it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks import names
from benchmarks.kernels.operands import OPS
from benchmarks.kernels.player import Place, Player


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender.

    Attributes:
        module: Where its player is; loaded in the worker only.
        player: The name of the class there.
        arguments: What it is made with, beside its place.
        ops: What it does.
        by_mpiexec: Whether ``mpiexec`` starts its processes.
    """

    module: str
    player: str
    arguments: tuple[tuple[str, Any], ...] = ()
    ops: tuple[str, ...] = OPS
    by_mpiexec: bool = False

    def load(self) -> Callable[[Place], Player]:
        """Imports the player."""
        made: Callable[[Place], Player] = partial(
            getattr(import_module(self.module), self.player), **dict(self.arguments)
        )
        return made


_OURS, _PEERS, _LIMIT = (f"benchmarks.kernels.{name}" for name in ("ours", "peers", "limit"))

ROSTER: dict[str, Entry] = {
    names.SHM: Entry(_OURS, "RaycollectPlayer", (("backend", "shm"),)),
    names.SHM_ARENA: Entry(_OURS, "RaycollectPlayer", (("backend", "shm"), ("arena", True))),
    names.TCP: Entry(_OURS, "RaycollectPlayer", (("backend", "tcp"),)),
    names.GLOO: Entry(_OURS, "RaycollectPlayer", (("backend", "gloo"),)),
    names.TORCH: Entry(_PEERS, "TorchPlayer"),
    names.XOSCAR: Entry(_PEERS, "GlooPlayer", (("module", "xoscar.collective.xoscar_pygloo"),)),
    names.PYGLOO: Entry(_PEERS, "GlooPlayer", (("module", "pygloo"),), ops=("allreduce", "broadcast", "allgather")),
    names.MPICH: Entry(_PEERS, "MpiPlayer", by_mpiexec=True),
    names.LIMIT: Entry(_LIMIT, "LimitPlayer", ops=("allreduce",)),
}
"""Contender -> entry, in the order of the tables."""
