"""torch's DTensors, recognized by their attributes: the local tensor of each, and its placement.

No array library is imported here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from raycollect.core.placement import UNKNOWN, Cut, Placement

_KNOWN = ("Shard", "_StridedShard", "Replicate", "Partial")


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor: spread over a mesh, with a local part in this process."""
    kind = type(value)
    return all(hasattr(kind, name) for name in ("to_local", "device_mesh", "placements"))


def local_of(dtensor: Any) -> Any:
    """The local tensor, which shares the memory of the DTensor."""
    local = getattr(dtensor, "_local_tensor", None)
    # `to_local` waits for a collective of torch that still fills the tensor
    return dtensor.to_local() if local is None or hasattr(local, "trigger_wait") else local


def placement_of(dtensor: Any) -> Placement | None:
    """The placement; None if this process is not in the mesh."""
    mesh = dtensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    sizes, ranks = _mesh(mesh)
    at = 0
    for size, index in zip(sizes, coordinate, strict=True):
        at = at * size + int(index)
    return Placement(
        shape=tuple(map(int, dtensor.shape)),
        dtype=str(dtensor.dtype).removeprefix("torch."),
        mesh=sizes,
        ranks=ranks,
        at=at,
        cuts=tuple(map(_cut, dtensor.placements)),
        order=_order(getattr(dtensor, "_spec", None)),
    )


def _order(spec: Any) -> tuple[int, ...]:
    """The order of the axes if torch stores it explicitly; empty: the placements determine it."""
    orders = [tuple(map(int, entry.mesh_dims)) for entry in getattr(spec, "shard_order", None) or ()]
    is_strided = any(type(placement).__name__ == "_StridedShard" for placement in getattr(spec, "placements", ()))
    if not is_strided and all(axes == tuple(sorted(axes)) for axes in orders):
        return ()
    return tuple(axis for axes in orders for axis in axes)


@lru_cache(maxsize=64)
def _mesh(mesh: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ranks = mesh.mesh
    return tuple(map(int, ranks.shape)), tuple(map(int, ranks.reshape(-1).tolist()))


def _cut(placement: Any) -> Cut:
    kind = type(placement).__name__
    if kind not in _KNOWN or (kind == "Partial" and placement.reduce_op != "sum"):
        return Cut(repr(placement), UNKNOWN, 1)
    return Cut(kind, int(getattr(placement, "dim", 0)), int(getattr(placement, "split_factor", 1)))
