"""Objects between members: values that are no tensors, packed to bytes that the members' operations move.

By default only plain values travel, in msgpack (`engine.value_codec`): reading them runs no code. ``pickle=True``, the
same on all ranks, takes any object: who can write to the group can then run code in its members.
"""

from __future__ import annotations

import pickle as pickler
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from raycollect.core.model import GroupLike
from raycollect.engine.value_codec import pack_value, unpack_value
from raycollect.errors import RefusedError, Violation, refusal, wrong_flags
from raycollect.member import operations
from raycollect.member.init import get_group_handle

_FAILED = -1  # instead of a length: this rank has nothing that can travel


def broadcast_object(
    value: Any = None,
    src_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    pickle: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Gives every rank the value of one rank.

    Args:
        value: None, a bool, number, string or bytes, a numpy array or a tensor in CPU memory; a list, tuple or dict of
            these. Of ranks other than `src_rank` it is not looked at.
        src_rank: The rank that gives.
        group_name: The group.
        pickle: True: any object that can be pickled; only where all members are trusted.
        timeout_s: How long to wait for the others, in seconds; by default what the group was made with.

    Returns:
        The value; on `src_rank` the very object.

    Raises:
        NotATensorError: It can't travel; raised on all ranks.
        MismatchError: The ranks have different `pickle`.
        RaycollectError: As `raycollect.allreduce`.
    """
    mine = [value] if _is_here(src_rank, group_name) else []
    exchange = _Exchange("broadcast_object", mine, group_name, pickle, timeout_s)
    length = np.array(exchange.lengths[0] if mine else 0, np.int64)
    with exchange.agreed():
        operations.broadcast(
            exchange.told(length), src_rank, group_name, async_op=exchange.wrong_flag, timeout_s=timeout_s
        )
    exchange.check({src_rank: int(length)})
    data = exchange.packed if mine else np.empty(int(length), np.uint8)
    operations.broadcast(data, src_rank, group_name, timeout_s=timeout_s)
    return value if mine else exchange.read(data)


def allgather_object(
    value: Any, group_name: GroupLike = "default", *, pickle: bool = False, timeout_s: float | None = None
) -> list[Any]:
    """Gives every rank the values of all ranks, by rank. See `broadcast_object`."""
    exchange = _Exchange("allgather_object", [value], group_name, pickle, timeout_s)
    rooms = exchange.rooms()
    operations.allgather(rooms, exchange.packed, group_name, timeout_s=timeout_s)
    return [exchange.read(one) for one in rooms]


def gather_object(
    value: Any,
    dst_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    pickle: bool = False,
    timeout_s: float | None = None,
) -> list[Any] | None:
    """Gives one rank the values of all ranks, by rank; the others get None. See `broadcast_object`."""
    exchange = _Exchange("gather_object", [value], group_name, pickle, timeout_s)
    rooms = exchange.rooms()
    operations.gather(rooms, exchange.packed, dst_rank, group_name, timeout_s=timeout_s)
    return [exchange.read(one) for one in rooms] if _is_here(dst_rank, group_name) else None


def scatter_object(
    values: Sequence[Any] | None = None,
    src_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    pickle: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Gives each rank its item of one rank's list, which other ranks leave out. See `broadcast_object`."""
    mine = _is_here(src_rank, group_name)
    given = values if mine and values is not None else ()
    exchange = _Exchange("scatter_object", given, group_name, pickle, timeout_s)
    count = get_group_handle(group_name).world_size
    if mine and len(exchange.lengths) != count:
        if not exchange.why:
            exchange.why, exchange.expected = f"{len(exchange.lengths)} values for {count} ranks", "one value per rank"
        exchange.lengths = [_FAILED] * count
    length = np.zeros(1, np.int64)
    lengths = [np.array([one], np.int64) for one in exchange.lengths] if mine else None
    told = None if lengths is None else [exchange.told(one) for one in lengths]
    with exchange.agreed():
        operations.scatter(
            exchange.told(length), told, src_rank, group_name, async_op=exchange.wrong_flag, timeout_s=timeout_s
        )
    exchange.check({src_rank: int(length[0])})
    data = np.empty(int(length[0]), np.uint8)
    parts = np.split(exchange.packed, np.cumsum(exchange.lengths)[:-1]) if mine else None
    operations.scatter(data, parts, src_rank, group_name, timeout_s=timeout_s)
    return exchange.read(data)


def _is_here(rank: Any, group_name: GroupLike) -> bool:
    """Whether this process has that rank. What is no rank is refused by the operation, on all ranks."""
    return isinstance(rank, Integral) and bool(get_group_handle(group_name).rank == rank)


def _about_pickle(one: Violation) -> Violation:
    if one.field == "async_op":
        return replace(one, field="pickle")
    if {one.found, one.expected} != {"int64", "uint64"}:
        return one
    found, expected = (f"pickle={told == 'uint64'}" for told in (one.found, one.expected))
    return replace(one, field="form of values", found=found, expected=f"{expected} on all ranks")


class _Exchange:
    """What one rank packs and reads in one call; `lengths` are those of its values, in bytes."""

    def __init__(
        self, op: str, values: Sequence[Any], group_name: GroupLike, pickle: bool, timeout_s: float | None
    ) -> None:
        self.why = ""
        is_wrong = bool(wrong_flags(pickle=pickle))
        self.wrong_flag: Any = pickle if is_wrong else False  # in the place of `async_op`, which all ranks refuse
        self._pickle = not is_wrong and bool(pickle)
        self.expected = "a value that can be pickled" if self._pickle else "plain values, or pickle=True on all ranks"
        self._op = op
        self._group_name = group_name
        self._timeout_s = timeout_s
        parts: list[bytes] = []
        try:
            parts = [pickler.dumps(one) if self._pickle else pack_value(one) for one in values]
            self.lengths = [len(one) for one in parts]
        except Exception as exc:  # noqa: BLE001 - foreign code gives and pickles them; all ranks hear of it
            self.why = f"{type(exc).__name__}: {exc}"
            self.lengths = [_FAILED]
        self.packed = np.frombuffer(bytearray(b"".join(parts)), np.uint8)

    def rooms(self) -> list[Any]:
        """Memory for what each rank gives, by rank."""
        process_group = get_group_handle(self._group_name)
        lengths, mine = np.zeros(process_group.world_size, np.int64), np.array(self.lengths, np.int64)
        with self.agreed():
            told, flag = (self.told(lengths), self.told(mine)), self.wrong_flag
            operations.allgather(*told, self._group_name, async_op=flag, timeout_s=self._timeout_s)
        self.check(dict(enumerate(lengths.tolist())))
        return [np.empty(length, np.uint8) for length in lengths.tolist()]

    def told(self, lengths: Any) -> Any:
        """Lengths as they travel: unsigned where values are pickled, so that ranks that differ are refused."""
        return lengths.view(np.uint64) if self._pickle else lengths

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Says of lengths that were refused for their type, or for a flag that is none, what that means."""
        try:
            yield
        except RefusedError as exc:
            wrong = tuple([_about_pickle(one) for one in exc.violations])
            raise refusal(self._op, exc.group_name, wrong) from None

    def check(self, lengths: dict[int, int]) -> None:
        """Raises on all ranks where one of them has nothing that can travel."""
        process_group = get_group_handle(self._group_name)
        told = self.why or "refused by that rank, whose error says why"
        wrong = tuple(
            Violation(kind="not_tensor", rank=rank, field="value", found=told, expected=self.expected)
            for rank, length in lengths.items()
            if length < 0
        )
        if wrong:
            raise refusal(self._op, process_group.name, wrong)

    def read(self, data: Any) -> Any:
        """Reads a value."""
        return pickler.loads(data) if self._pickle else unpack_value(data.tobytes())
