"""The position of a torch DTensor's local tensor in the global one, as plain values without torch."""

from __future__ import annotations

from raycollect.core.codec import Wire

UNKNOWN = -1
"""The dimension of an unsupported `Cut`."""


class Cut(Wire, frozen=True):
    """The placement along one axis of the mesh: ``Shard``, ``_StridedShard``, ``Replicate`` or ``Partial``."""

    kind: str  # the name of torch's class; torch's text if unsupported
    dim: int  # the sharded dimension, of the first two; `UNKNOWN` if unsupported
    factor: int  # the number of parts into which the dimension is split before each is cut over the axis


class Placement(Wire, frozen=True, kw_only=True):
    """The placement of a DTensor, and the position of this process in its mesh.

    Attributes:
        shape: Of the global tensor.
        dtype: numpy's name of the element type.
        mesh: The size of each axis of the mesh.
        ranks: torch's rank at each position of the mesh, the last axis fastest.
        at: The index of this process in `ranks`.
        cuts: The cut of each axis.
        order: The axes in cutting order; empty: the order of the split factors of `cuts`, else from the first axis to
            the last.
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    cuts: tuple[Cut, ...]
    order: tuple[int, ...] = ()
    at: int

    def __post_init__(self) -> None:
        is_order = len({*self.order}) == len(self.order) and all(0 <= axis < len(self.mesh) for axis in self.order)
        if len(self.cuts) != len(self.mesh) or not 0 <= self.at < len(self.ranks) or not is_order:
            raise ValueError(f"no such placement: {self!r}")
