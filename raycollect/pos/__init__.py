"""The Python Object Store (POS): tensors that an actor's methods returned, stored in that actor."""

from __future__ import annotations

from raycollect.pos.container import Container, obstacle, unkept
from raycollect.pos.store import Absence, Range, State, Store

__all__ = ["Absence", "Container", "Range", "State", "Store", "obstacle", "unkept"]
