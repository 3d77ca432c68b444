"""Decides which tensors of a bundle travel together, by facts that all ranks have agreed on: all decide the same.

Small tensors are packed: copied into one staging array, moved by one kernel, copied out. Several larger ones are
launched at once where the backend coalesces kernels, and so are very many small ones; elsewhere those that are small
enough are packed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from raycollect.core.model import OpKind
from raycollect.core.operations import PARTIAL_FOLDS, PIECEWISE
from raycollect.core.protocols import SMALL_KERNEL_NBYTES

PACKED_UP_TO_NBYTES = 128 << 10
"""The largest tensor (all its pieces together) that is packed: copying it in and out takes about as long as the start
of a kernel, some 20 us within a machine. Above that, two more copies cost more than they save."""

TOGETHER_IN_ALL_NBYTES = 1 << 20
"""The smallest sum of small tensors that are launched together: below it, packing is cheaper."""

_NONE: list[int] = []


def coalesced(kind: OpKind, sizes: Sequence[int], *, coalesces: bool) -> list[list[int]]:
    """Selects the groups of tensors that are launched at once: the large ones, and the small ones.

    Args:
        kind: The operation.
        sizes: For each tensor the staging bytes that it takes; -1: it can't be packed.
        coalesces: Whether the backend runs several kernels with fewer synchronizations.
    """
    if not coalesces or kind in PIECEWISE or kind in PARTIAL_FOLDS:
        return []
    large = [at for at, nbytes in enumerate(sizes) if nbytes >= SMALL_KERNEL_NBYTES]
    small = [at for at, nbytes in enumerate(sizes) if 0 <= nbytes < SMALL_KERNEL_NBYTES]
    groups = [large] if len(large) > 1 else []
    return [*groups, small] if sum(sizes[at] for at in small) >= TOGETHER_IN_ALL_NBYTES else groups


def buckets(sizes: Sequence[tuple[Hashable, int]], staging: int) -> list[list[int]]:
    """Groups the tensors that travel packed.

    Args:
        sizes: For each tensor its dtype and the staging bytes that it takes; -1: it can't be packed.
        staging: The bytes that one bucket may take; 0: no tensor is packed.

    Returns:
        The tensors that each kernel moves, in the order of the kernels; a single one is not packed.
    """
    kernels: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for at, (dtype, nbytes) in enumerate(sizes):
        if not 0 <= nbytes <= min(staging, PACKED_UP_TO_NBYTES) or not staging:
            kernels.append([at])
            continue
        bucket, filled = filling.get(dtype, (_NONE, 0))
        if bucket is _NONE or filled + nbytes > staging:
            bucket, filled = [], 0
            kernels.append(bucket)
        bucket.append(at)
        filling[dtype] = bucket, filled + nbytes
    return kernels
