"""The versions of weights in a frame: the newest ones, and those that receiver groups of this process see."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raycollect.errors import ProtocolError, VersionError
from raycollect.live_view.frame import PublicationFrame, ReceiverFrame
from raycollect.weights.directory import VersionDirectory
from raycollect.weights.protocol import Version
from raycollect.weights.side import OpenSide, open_sides


def publication_frames(timeout_s: float) -> tuple[PublicationFrame, ...]:
    """Returns the publications that this process makes or subscribes to, by name.

    `timeout_s` limits the wait for Ray's key-value store, for each of them.
    """
    by_name: dict[str, list[OpenSide]] = {}
    for side in open_sides():
        by_name.setdefault(side.name, []).append(side)
    return tuple(_publication_frame(name, sides, timeout_s) for name, sides in sorted(by_name.items()))


def _publication_frame(name: str, sides: Sequence[OpenSide], timeout_s: float) -> PublicationFrame:
    directory = VersionDirectory(name)
    latest, holders, error = None, 0, ""
    try:
        with directory.within(timeout_s, time.monotonic() + timeout_s):
            latest = directory.latest()
            if latest is not None:
                holders = sum(not holder.is_publisher for holder in directory.holders(latest))
    except (VersionError, ProtocolError) as exc:  # or another release has written the record
        error = exc.detail
    receivers = sorted((side for side in sides if side.receives), key=lambda side: side.actors)
    newest = latest or Version(0, 0)
    return PublicationFrame(
        name=name,
        is_here=len(receivers) < len(sides),
        publisher=newest.publisher,
        epoch=newest.epoch,
        number=newest.number,
        nbytes=newest.nbytes,
        holders=holders,
        receivers=tuple(_receiver_frame(side, newest) for side in receivers),
        error=error,
    )


def _receiver_frame(side: OpenSide, newest: Version) -> ReceiverFrame:
    version = side.version or Version(0, 0)
    behind = newest.count - (version.count if version.epoch == newest.epoch else 0)
    return ReceiverFrame(
        actors=side.actors,
        epoch=version.epoch,
        number=version.number,
        behind=max(behind, 0),
        skipped=side.skipped,
    )
