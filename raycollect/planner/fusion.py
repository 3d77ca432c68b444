"""Which tensors of a bundle travel together, by facts that all ranks have agreed on: so all decide alike.

Small ones are packed: copied into one staging array, moved by one kernel, copied out. Of the larger ones several are
offered to the backend at once, which may run them with one meeting of the ranks; those of them that are not too large
are packed where it does not.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["PACKED_UP_TO_NBYTES", "TOGETHER_FROM_NBYTES", "buckets", "offered"]

PACKED_UP_TO_NBYTES = 128 << 10
"""The largest tensor (in pieces: all of them together) that is packed: copying it in and out takes about as long as
the start of a kernel, some 20 us within a machine; above, two more copies cost more than they save."""

TOGETHER_FROM_NBYTES = 32 << 10
"""The smallest tensor that is offered to the backend together with others: below, packing is cheaper than whatever a
backend does for each."""

_NONE: list[int] = []


def offered(sizes: Sequence[int]) -> list[int]:
    """Which tensors the backend is offered at once: none, or several.

    Args:
        sizes: The bytes of staging that each takes; -1: it can't be packed.
    """
    large = [at for at, nbytes in enumerate(sizes) if nbytes >= TOGETHER_FROM_NBYTES]
    return large if len(large) > 1 else []


def buckets(sizes: Sequence[tuple[Hashable, int]], staging: int) -> list[list[int]]:
    """Puts together the tensors that travel packed.

    Args:
        sizes: For each tensor its dtype, and the bytes of staging that it takes; -1: it can't be packed.
        staging: The bytes that one bucket may take; 0: every tensor goes by itself.

    Returns:
        Which tensors each kernel moves, in the order of the kernels; one alone is not packed.
    """
    found: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for at, (dtype, nbytes) in enumerate(sizes):
        if not 0 <= nbytes <= min(staging, PACKED_UP_TO_NBYTES) or not staging:
            found.append([at])
            continue
        bucket, filled = filling.get(dtype, (_NONE, 0))
        if bucket is _NONE or filled + nbytes > staging:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(at)
        filling[dtype] = bucket, filled + nbytes
    return found
