"""Where the local tensor of a torch DTensor lies in the global one; plain values, which travel without torch."""

from __future__ import annotations

from raycollect.core.codec import Wire

UNKNOWN = -1
"""The dimension of a `Cut` that nobody understands."""


class Cut(Wire, frozen=True):
    """What one axis of the mesh does to the tensor: ``Shard``, ``_StridedShard``, ``Replicate`` or ``Partial``."""

    kind: str  # the name of torch's class; as torch prints it where it is not understood
    dim: int  # the dimension that is cut, of the first two; `UNKNOWN`: it is not understood
    factor: int  # into how many parts the dimension is cut first, of which each is cut over the axis


class Placement(Wire, frozen=True, kw_only=True):
    """The placement of a DTensor, and the place of who holds the local tensor.

    Attributes:
        shape: Of the global tensor.
        dtype: numpy's name of the element type.
        mesh: The size of each axis of the mesh.
        ranks: torch's rank of each place of the mesh, the last axis fastest.
        at: The place of this process in `ranks`.
        cuts: What each axis does.
        order: The axes, in the order in which they cut; empty: as the split factors of `cuts` say, else from the first
            axis to the last.
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
