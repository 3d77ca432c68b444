"""Values that members publish while they join a group, and the error that names the missing ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

from raycollect.core.codec import Codec
from raycollect.core.model import GroupSpec
from raycollect.core.protocols import Rendezvous
from raycollect.errors import CollectiveTimeoutError

_Value = TypeVar("_Value")


def gathered(
    codec: Codec[_Value], rendezvous: Rendezvous, spec: GroupSpec, name: str, ranks: Iterable[int], timeout_s: float
) -> dict[int, _Value]:
    """Returns the value that each rank has published under a name; CollectiveTimeoutError names the missing ranks."""
    until_s = time.monotonic() + timeout_s
    values, missing = {}, []
    for rank in ranks:
        try:
            values[rank] = codec.decode(rendezvous.get(f"{name}.{rank}", max(until_s - time.monotonic(), 0.001)))
        except CollectiveTimeoutError:
            missing.append(rank)
    if missing:
        raise not_joined(spec, missing, timeout_s)
    return values


def not_joined(spec: GroupSpec, missing: Sequence[int], timeout_s: float, trouble: str = "") -> CollectiveTimeoutError:
    """Makes the error of a rank that timed out waiting for others to join; `trouble`: its last failure."""
    what = f"ranks {list(missing)} did not come, or could not be reached, within {timeout_s:g} s"
    last = f"; the last that failed here: {trouble}" if trouble else ""
    return CollectiveTimeoutError(
        op="join",
        group_name=spec.name,
        missing=tuple(missing),
        timeout_s=timeout_s,
        detail=f"backend {spec.backend!r}: {what}{last}",
    )
