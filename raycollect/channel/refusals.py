"""Logs refused clients: a line at once, then at most one line a minute."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from raycollect.core.timers import Timer

_log = logging.getLogger("raycollect")

EVERY_S = 60.0  # the log interval of the count, in seconds
MAX_REASONS = 8  # the most reasons that are counted separately; clients could produce any number
_OTHERS = "other reasons"


class Refusals:
    """The clients that one server has refused. Used on the server's thread only."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        self._call_later = call_later
        self._is_quiet = True
        self._reasons: Counter[str] = Counter()
        self._last = ""

    def add(self, peer: str, why: str) -> None:
        """Logs the first client after a quiet minute; counts the others. `why` contains no text of the client."""
        if self._is_quiet:
            _log.warning("refused a connection from %s: %s", peer, why)
            self._is_quiet = False
            self._call_later(EVERY_S, self._look_again)
            return
        self._last = peer
        self._reasons[why if why in self._reasons or len(self._reasons) < MAX_REASONS else _OTHERS] += 1

    def tell(self) -> None:
        """Logs the counted clients."""
        reasons, self._reasons = self._reasons, Counter()
        if reasons:
            said = "; ".join(f"{why} ({count})" for why, count in reasons.most_common())
            _log.warning("refused %d more connections, the last from %s: %s", reasons.total(), self._last, said)

    def _look_again(self) -> None:
        self._is_quiet = not self._reasons
        if not self._is_quiet:
            self.tell()
            self._call_later(EVERY_S, self._look_again)
