"""Logs clients that are refused: a line at once, then a line a minute, however many there are."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from raycollect.core.timers import Timer

_log = logging.getLogger("raycollect")

EVERY_S = 60.0  # how often the count is logged, in seconds
MAX_REASONS = 8  # how many reasons are told apart; a client can make up any number of them
_OTHERS = "other reasons"


class Refusals:
    """The clients that one server has refused. All of it runs on the server's thread."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        self._call_later = call_later
        self._is_quiet = True
        self._reasons: Counter[str] = Counter()
        self._last = ""

    def add(self, peer: str, why: str) -> None:
        """Logs the first after a quiet minute; counts the others. `why` holds nothing that the client said."""
        if self._is_quiet:
            _log.warning("refused a connection from %s: %s", peer, why)
            self._is_quiet = False
            self._call_later(EVERY_S, self._look_again)
            return
        self._last = peer
        self._reasons[why if why in self._reasons or len(self._reasons) < MAX_REASONS else _OTHERS] += 1

    def tell(self) -> None:
        """Logs those that were only counted."""
        reasons, self._reasons = self._reasons, Counter()
        if reasons:
            said = "; ".join(f"{why} ({count})" for why, count in reasons.most_common())
            _log.warning("refused %d more connections, the last from %s: %s", reasons.total(), self._last, said)

    def _look_again(self) -> None:
        self._is_quiet = not self._reasons
        if not self._is_quiet:
            self.tell()
            self._call_later(EVERY_S, self._look_again)
