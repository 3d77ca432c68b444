"""Reads the handles of refs, for a driver that has to know the tensors before it plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from raycollect.driver.operand_binding import stale
from raycollect.driver.work import absence
from raycollect.errors import CollectiveTimeoutError, Violation
from raycollect.pos.handle import Handle
from raycollect.ray_bridge import direct_transport

Place = TypeVar("Place")
"""A caller's name for a ref."""


def values_of(refs: Mapping[Place, Any], timeout_s: float) -> tuple[dict[Place, Any], list[Place]]:
    """Waits for the methods that make refs: (the handles, values or errors that they hold; the refs that are late)."""
    every = list(dict.fromkeys(refs.values()))
    late = set(ray.wait(every, num_returns=len(every), timeout=timeout_s)[1]) if every else set()
    if late:
        return {}, [place for place, ref in refs.items() if ref in late]
    return {place: _value(ref) for place, ref in refs.items()}, []


def _value(ref: Any) -> Any:
    try:
        return direct_transport.get(ref)
    except RayError as exc:
        return exc.with_traceback(None)


def _is_stale(ref: Any) -> bool:
    try:
        ray.wait([ref], timeout=0, fetch_local=False)
    except ValueError:
        return True
    return False


def late_error(
    op: str, group_name: str, count: int, ranks: tuple[int, ...], timeout_s: float
) -> CollectiveTimeoutError:
    """The error for methods that are late."""
    return CollectiveTimeoutError(
        op=op,
        group_name=group_name,
        detail=f"the methods that make {count} operands have not returned within {timeout_s:g} s",
        missing=ranks,
        timeout_s=timeout_s,
    )


def without_tensors(value: Any, rank: int) -> Violation:
    """The violation of a ref that holds no tensors."""
    kind, what, expected = absence(value)
    return Violation(kind=kind, rank=rank, field="operand", found=what, expected=expected)


def handles_of(
    refs: Mapping[int, Any], timeout_s: float, op: str, group_name: str
) -> tuple[dict[int, Handle], list[Violation]]:
    """The handles of refs, by rank, and the violations of refs without one.

    Raises:
        CollectiveTimeoutError: Their methods have not returned in time.
    """
    try:
        values, late = values_of(refs, timeout_s)
    except ValueError:  # Ray knows no owner of one of them
        return {}, [stale(ref.hex(), rank) for rank, ref in refs.items() if _is_stale(ref)]
    if late:
        raise late_error(op, group_name, len(late), tuple(late), timeout_s)
    handles = {rank: value for rank, value in values.items() if isinstance(value, Handle)}
    return handles, [without_tensors(value, rank) for rank, value in values.items() if rank not in handles]
