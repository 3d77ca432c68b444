"""The agreement of all requests of a plan; a single call is a batch of one.

In each round a participant brings the arrivals (`agreement`) of all its requests of that round in one message; requests
that look alike share one arrival in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from raycollect.core.codec import Codec
from raycollect.engine.agreement import LONG_NBYTES, Verdict, judge, unreadable
from raycollect.errors import ProtocolError, Violation
from raycollect.planner import Program


def is_batch(program: Program) -> bool:
    """Whether a program is part of a plan of several requests."""
    return len(program.tasks) != 1 or bool(program.everyone)


class _Brought(NamedTuple):
    conflict: bool
    blobs: tuple[bytes, ...]  # distinct
    requests: tuple[int, ...]
    which: tuple[int, ...]  # for each of them the place of its blob


_BROUGHT = Codec[_Brought](_Brought, "arrivals", long_nbytes=LONG_NBYTES)


def encode_arrivals(arrivals: Mapping[int, bytes], *, conflict: bool) -> bytes:
    """Writes the arrivals by request of a participant of a batch, for one round; the inverse of `decode_arrivals`.

    `conflict`: requests overlap in memory here though the plan does not order them.
    """
    distinct = {blob: at for at, blob in enumerate(dict.fromkeys(arrivals.values()))}
    which = tuple([distinct[blob] for blob in arrivals.values()])
    return _BROUGHT.encode(_Brought(conflict, tuple(distinct), tuple(arrivals), which))


@lru_cache(maxsize=256)
def decode_arrivals(data: bytes) -> tuple[bool, Mapping[int, bytes]]:
    """Reads what a participant of a batch brought; raises ProtocolError on other bytes."""
    conflict, blobs, requests, which = _BROUGHT.decode(data)
    try:
        return conflict, dict(zip(requests, [blobs[at] for at in which], strict=True))
    except (LookupError, ValueError) as exc:
        raise ProtocolError(detail=f"malformed arrivals: {exc}") from exc


class BatchAgreement:
    """The arrivals of all participants of a plan so far.

    Attributes:
        conflict: Whether requests overlap in memory on any of them though the plan does not order them.
        verdicts: Request -> what follows from its last round.
    """

    def __init__(self, program: Program) -> None:
        self.conflict: bool = False
        self.verdicts: dict[int, Verdict] = {}
        self._program = program
        self._brought: list[dict[int, bytes]] = [{} for _ in program.agreement.ranks]

    def meet(self, blobs: Sequence[bytes]) -> tuple[Violation, ...]:
        """Judges one round of blobs, by place; returns every violation of all requests.

        Raises:
            ProtocolError: It is not what participants of this plan bring.
        """
        now = set[int]()
        for rank, known, blob in zip(self._program.agreement.ranks, self._brought, blobs, strict=True):
            try:
                conflict, arrivals = decode_arrivals(bytes(blob))
            except ProtocolError as exc:
                raise unreadable(rank, exc) from exc
            self.conflict |= conflict
            known.update(arrivals)
            now.update(arrivals)
        found, is_single = list[Violation](), not is_batch(self._program)
        for request in sorted(now):
            violations = self._judge(request).violations
            found += violations if is_single else (replace(violation, call=request) for violation in violations)
        return tuple(found)

    def _judge(self, request: int) -> Verdict:
        # A participant with nothing new on the request in this round stands by what it brought before.
        program, brought = self._program, self._brought
        try:
            if program.everyone:
                ranks, places = program.everyone[request]
                brought = [brought[place] for place in places]
            else:
                ranks = program.shares[program.tasks[request].share].ranks
            verdict = self.verdicts[request] = judge(ranks, tuple([known[request] for known in brought]))
            return verdict
        except LookupError as exc:
            raise ProtocolError(detail=f"request {request} was not brought by all of its ranks") from exc


def alone(arrival: bytes) -> bytes:
    """Writes the arrival of a plan's only request; the inverse of `of_alone`."""
    return encode_arrivals({0: arrival}, conflict=False)


def of_alone(data: bytes) -> bytes:
    """Reads the arrival of a plan's only request; raises ProtocolError on other bytes."""
    _, arrivals = decode_arrivals(bytes(data))
    try:
        return arrivals[0]
    except LookupError as exc:
        raise ProtocolError(detail="an agreement of another plan") from exc
