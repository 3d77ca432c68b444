"""`live`: the live view of this process's groups."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from raycollect.core import html
from raycollect.core.bound_to_process import BoundToProcess
from raycollect.driver.controller import Controller
from raycollect.errors import refuse, wrong_argument
from raycollect.live_view import links
from raycollect.live_view.sampler import Sampler
from raycollect.live_view.server import PageServer
from raycollect.member.runtime import this_runtime
from raycollect.observe import chrome
from raycollect.ray_bridge import ray_session

_log = logging.getLogger("raycollect")

LIMIT = 8192
"""How many entries each process records: those of a second of a loop of the fastest collectives."""


class LiveView(BoundToProcess):
    """A live view, returned by `live`. A context manager; leaving the block closes it.

    Attributes:
        link: The address of the page. Whoever has it, on this machine, may read.
    """

    _INSTEAD = "call live() there"

    def __init__(self, controller: Controller, port: int) -> None:
        timelines = this_runtime().timelines
        self._controller = controller
        self._recording = timelines.begin("live()", limit=LIMIT, is_live=True)
        self._undo: list[Callable[[], object]] = []  # in reverse order
        try:
            self._undo.append(lambda: self._recording.end(0.0))
            controller.observed(self._recording)
            self._undo.append(lambda: controller.observed(None))
            self._recording.begun()
            server = PageServer(Sampler(controller, self._recording).frame, self._document, port)
            self._undo.append(server.close)
            self.link: str = server.link
            self._publish()
            self._undo.append(ray_session.before_shutdown(self.close))
        except BaseException:
            self.close()
            raise

    def _publish(self) -> None:
        self._controller.live_link = self.link
        self._undo.append(lambda: setattr(self._controller, "live_link", ""))
        try:
            withdraw = partial(links.withdraw, links.publish(self.link))
        except OSError as exc:
            _log.warning("raycollect top won't find the live view by itself: %s", exc)
            return
        atexit.register(withdraw)
        self._undo += [partial(atexit.unregister, withdraw), withdraw]

    def _document(self) -> dict[str, Any]:
        return chrome.document(self._recording.peek())

    @property
    def is_open(self) -> bool:
        """Whether it is served."""
        return bool(self._undo)

    def close(self) -> None:
        """Closes the page and ends the recording. May be called twice."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> LiveView:  # noqa: PYI034 - Python 3.10 has no `Self`
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @html.shown
    def _repr_html_(self) -> str:
        if not self.is_open:
            return html.block("live", "live view: closed")
        return html.block("live", "live view", html.link(self.link))

    def __repr__(self) -> str:
        return f"<LiveView {self.link if self.is_open else 'closed'}>"


_opening = threading.Lock()
_open: LiveView | None = None


def live(port: int = 0) -> LiveView:
    """Opens a live view of the groups that this process has declared, now and later.

    It is a page with a row per rank: what the rank does, and how its time divides into methods, waits, consistency
    checks and kernels. ``raycollect top`` shows the same in a terminal of this machine, and ``frame.json`` beside the
    page has it for scripts. The page is served on the loopback interface; from another machine, forward the port by
    ``ssh -L``.

    Participants record their newest spans as in `timeline`. They are asked only while somebody looks.

    Args:
        port: The TCP port of the page; 0: any free one.

    Returns:
        The view; a process has one, which a second call returns.

    Raises:
        TimelineError: This process records a timeline.
        InvalidArgumentError: `port` is no port.
        OSError: The port is in use.
    """
    global _open
    if type(port) is not int or not 0 <= port < 1 << 16:
        refuse("live", [wrong_argument("port", repr(port), "a port, from 0 to 65535")])
    with _opening:
        if _open is None or not _open.is_open:
            _open = LiveView(Controller.current(), port)
        return _open
