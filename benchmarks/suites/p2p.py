"""From one actor to another: a send called from the driver, and the round trip of the documents of Ray's collectives.

==========  ==========================================================================================================
send        A's buffer arrives at B. `send_ref` writes into a buffer that B has; by Ray Direct Transport and through the
            object store B gets a new one, which it need not even copy; "copied" does, into B's buffer
round trip  B sends what it got back to A: called from the driver, or by one method of each actor
==========  ==========================================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import names
from benchmarks.pairs import ROUND_TRIP, SEND, DirectTransport, Imperative, SendRef, Store
from benchmarks.report import Record
from benchmarks.suite import BURST, Choice, Maker, entry, sweep
from benchmarks.targets import KB, MB

NAME = "p2p"
TITLE = "from one actor to another, float32"
REFERENCE = names.RAY
NEEDS_RAY = True

SIZES = (4, 64 * KB, MB, 16 * MB, 64 * MB)
QUICK_TRIPS = (4, MB, 64 * MB)


def _runs(nbytes: int) -> tuple[int, int]:
    return (30, 200) if nbytes < 16 * MB else (6, 24)


def measure(choice: Choice) -> Iterator[Record]:
    """Measures both operations between two actors."""
    for op in (SEND, ROUND_TRIP):
        choice.progress(f"{NAME}: {op}: the contenders join")
        makers: list[Maker] = [
            entry(names.ORDINARY, SendRef, op),
            entry(names.ARENA, SendRef, op, arena=True),
            entry(names.IMPERATIVE, Imperative, op, library="raycollect"),
            entry(names.IMPERATIVE_ARENA, Imperative, op, library="raycollect", arena=True),
            entry(names.RAY, Imperative, op, library="ray"),
            entry(names.RDT, DirectTransport, op),
            entry(names.STORE, Store, op),
            entry(names.STORE_COPIED, Store, op, copied=True),
        ]
        sizes = choice.sizes or (QUICK_TRIPS if choice.quick and op == ROUND_TRIP else SIZES)
        yield from sweep(NAME, choice, makers, op=op, ranks=2, sizes=sizes, runs=_runs, burst=BURST)
