"""Collectives of Python objects between members: values packed to bytes, which the members' operations move.

By default only plain values are accepted, in msgpack (`engine.value_codec`): reading them runs no code. With
``pickle=True`` on all ranks, any object is accepted: a process that can write to the group can then run code in its
members. Before the values, all ranks exchange headers: whether a rank's values are pickled, and their length.
"""

from __future__ import annotations

import pickle as pickler
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np

from raycollect.core.model import GroupLike, OpKind
from raycollect.engine.value_codec import pack_value, unpack_value
from raycollect.errors import RefusedError, Violation, refusal, wrong_flags
from raycollect.member import operations
from raycollect.member.call import MemberCall
from raycollect.member.init import get_group_handle

_MOST_TOLD = 2000
"""The longest reason that is sent to the other ranks, in characters."""


def broadcast_object(
    value: Any = None,
    src_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    pickle: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Sends the value of one rank to all ranks.

    Args:
        value: None, a bool, number, string or bytes, a numpy array or a tensor in CPU memory; a list, tuple or dict of
            these. Ranks other than `src_rank` ignore it.
        src_rank: The rank whose value is sent.
        group_name: The group.
        pickle: True: any object that can be pickled; only if all members are trusted.
        timeout_s: How long to wait for the other ranks, in seconds; None: the timeout of the group.

    Returns:
        The value; on `src_rank` the same object.

    Raises:
        NotATensorError: The value can't be sent. Raised on all ranks.
        MismatchError: `pickle` differs between ranks.
        RaycollectError: As `raycollect.allreduce`.
    """
    mine = [value] if _is_here(src_rank, group_name) else []
    exchange = _Exchange("broadcast_object", mine, group_name, pickle, timeout_s)
    data = exchange.parts[0] if mine else exchange.room(src_rank)
    operations.broadcast(data, src_rank, group_name, timeout_s=timeout_s)
    return value if mine else exchange.read(data)


def allgather_object(
    value: Any, group_name: GroupLike = "default", *, pickle: bool = False, timeout_s: float | None = None
) -> list[Any]:
    """Gathers the values of all ranks on every rank, by rank. See `broadcast_object`."""
    exchange = _Exchange("allgather_object", [value], group_name, pickle, timeout_s)
    rooms = list(map(exchange.room, range(len(exchange.lengths))))
    operations.allgather(rooms, exchange.parts[0], group_name, timeout_s=timeout_s)
    return list(map(exchange.read, rooms))


def gather_object(
    value: Any,
    dst_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    pickle: bool = False,
    timeout_s: float | None = None,
) -> list[Any] | None:
    """Gathers the values of all ranks on `dst_rank`, by rank; other ranks get None. See `broadcast_object`."""
    exchange = _Exchange("gather_object", [value], group_name, pickle, timeout_s)
    rooms = list(map(exchange.room, range(len(exchange.lengths))))
    operations.gather(rooms, exchange.parts[0], dst_rank, group_name, timeout_s=timeout_s)
    return list(map(exchange.read, rooms)) if _is_here(dst_rank, group_name) else None


def scatter_object(
    values: Sequence[Any] | None = None,
    src_rank: int = 0,
    group_name: GroupLike = "default",
    *,
    pickle: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Scatters the values of `src_rank`, one to each rank; other ranks ignore `values`. See `broadcast_object`."""
    mine = _is_here(src_rank, group_name)
    given = values if mine and values is not None else ()
    count = get_group_handle(group_name).world_size if mine else None
    exchange = _Exchange("scatter_object", given, group_name, pickle, timeout_s, count)
    length = np.zeros(1, np.int64)
    lengths = [np.array([len(part)]) for part in exchange.parts] if mine else None
    operations.scatter(length, lengths, src_rank, group_name, timeout_s=timeout_s)
    data = np.empty(int(length[0]), np.uint8)
    operations.scatter(data, exchange.parts if mine else None, src_rank, group_name, timeout_s=timeout_s)
    return exchange.read(data)


def _is_here(rank: Any, group_name: GroupLike) -> bool:
    """Whether this process has that rank. The operation refuses invalid ranks, on all ranks."""
    return isinstance(rank, Integral) and bool(get_group_handle(group_name).rank == rank)


class _Exchange:
    """The values that one rank packs and reads in one call.

    Attributes:
        parts: The bytes of each of this rank's values, as arrays.
        lengths: The lengths of all ranks' values, in bytes.

    Raises:
        RefusedError: A rank's value can't be sent, or `pickle` is not a bool or differs between ranks.
    """

    def __init__(
        self,
        op: str,
        values: Any,
        group_name: GroupLike,
        pickle: bool,
        timeout_s: float | None,
        count: int | None = None,
    ) -> None:
        group = get_group_handle(group_name)
        wrong = list(wrong_flags(pickle=pickle))
        self._pickle = not wrong and bool(pickle)
        expected = "a value that can be pickled" if self._pickle else "plain values, or pickle=True on all ranks"
        packed: list[bytes] = []
        try:
            packed = [pickler.dumps(value) if self._pickle else pack_value(value) for value in values]
            if count is not None and len(packed) != count:
                actual = f"{len(packed)} values for {count} ranks"
                wrong.append(Violation(kind="not_tensor", field="value", found=actual, expected="one value per rank"))
        except Exception as exc:  # noqa: BLE001 - foreign code yields and pickles values; all ranks get the error
            actual = f"{type(exc).__name__}: {exc}"[:_MOST_TOLD]
            wrong.append(Violation(kind="not_tensor", field="value", found=actual, expected=expected))
        self.parts = [np.frombuffer(bytearray(data), np.uint8) for data in packed]
        header = np.array([self._pickle, sum(map(len, packed))])
        headers = np.empty((group.world_size, 2), header.dtype)
        kind = OpKind.ALLGATHER
        call = MemberCall.refused(group, kind, wrong) if wrong else MemberCall.of(kind, group_name)
        try:
            call.run([("value", header), ("headers", headers)], async_op=False, timeout_s=timeout_s)
        except RefusedError as exc:
            raise refusal(op, group.name, exc.violations) from None
        self.lengths: Sequence[int] = headers[:, 1].tolist()
        forms = [f"pickle={bool(form)}" for form in headers[:, 0]]
        odd = [
            Violation(
                kind="mismatch", rank=rank, field="form of values", found=form, expected=f"{forms[0]} on all ranks"
            )
            for rank, form in enumerate(forms)
            if form != forms[0]
        ]
        if odd:
            raise refusal(op, group.name, tuple(odd))

    def room(self, rank: Any) -> Any:
        """Memory for the value of a rank; the operation refuses invalid ranks."""
        at = int(rank) if isinstance(rank, Integral) else -1
        return np.empty(self.lengths[at] if 0 <= at < len(self.lengths) else 0, np.uint8)

    def read(self, data: Any) -> Any:
        """Reads a value."""
        return pickler.loads(data) if self._pickle else unpack_value(data.tobytes())
