"""The Python Object Store (POS): the tensors that an actor's methods returned, kept in that actor."""

from __future__ import annotations

from raycollect.pos.container import Container, Structure
from raycollect.pos.store import Absence, State, Store, StoreStatistics

__all__ = ["Absence", "Container", "State", "Store", "StoreStatistics", "Structure"]
