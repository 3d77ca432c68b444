"""What looks like torch's DTensors, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Replicate: ...


@dataclass
class Shard:
    dim: int


@dataclass
class _StridedShard:
    dim: int
    split_factor: int


class Partial:
    def __init__(self, reduce_op: str) -> None:
        self.reduce_op = reduce_op

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reduce_op})"


class _MaskPartial(Partial): ...


class FakeMesh:
    """A device mesh: the ranks as an array, and where this process is in it."""

    def __init__(self, mesh: Any, coordinate: Any) -> None:
        self.mesh = mesh
        self._coordinate = coordinate

    def get_coordinate(self) -> Any:
        return self._coordinate


class FakeDTensor:
    """A tensor that is spread over a mesh."""

    def __init__(self, local: Any, shape: tuple[int, ...], mesh: FakeMesh, placements: Any) -> None:
        self._local_tensor = local
        self.shape = shape
        self.dtype = local.dtype
        self._mesh = mesh
        self._placements = placements

    @property
    def device_mesh(self) -> FakeMesh:
        return self._mesh

    @property
    def placements(self) -> Any:
        return self._placements

    def to_local(self) -> Any:
        return self._local_tensor
