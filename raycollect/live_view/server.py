"""Serves the live view on the loopback interface: the page, its frames as JSON, and the timeline as a file.

Who has the link may read; the link's path begins with a random token. A browser that another site directs here sends
that site's name as `Host`, and is refused, too.
"""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

import msgspec

from raycollect.core import threads
from raycollect.live_view.frame import Frame

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline'",
    "Referrer-Policy": "no-referrer",  # the token stays here
    "X-Content-Type-Options": "nosniff",
}


class PageServer:
    """A running server.

    Args:
        take: Returns the frame of now.
        trace: Returns the timeline so far, in the Trace Event Format.
        port: The port; 0: any free one.

    Attributes:
        link: The address of the page.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, take: Callable[[], Frame], trace: Callable[[], dict[str, Any]], port: int) -> None:
        token = secrets.token_urlsafe(16)
        self._server = _HTTPServer((HOST, port), partial(_PageRequest, token, take, trace))
        self.link: str = f"http://{HOST}:{self._server.server_port}/{token}/"
        self._thread = threads.start("raycollect-live", self._server.serve_forever)

    def close(self) -> None:
        """Ends it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _HTTPServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: a viewer has closed its connection."""


class _PageRequest(BaseHTTPRequestHandler):
    def __init__(
        self, token: str, take: Callable[[], Frame], trace: Callable[[], dict[str, Any]], *args: Any, **kwargs: Any
    ) -> None:
        self._token = token
        self._answers: dict[str, Callable[[], tuple[str, bytes]]] = {
            "": lambda: ("text/html; charset=utf-8", files(__package__).joinpath("page.html").read_bytes()),
            "frame.json": lambda: ("application/json", msgspec.json.encode(take())),
            "timeline.json": lambda: ("application/json", json.dumps(trace()).encode()),
        }
        super().__init__(*args, **kwargs)

    def do_GET(self) -> None:
        token, _, name = self.path.partition("?")[0].removeprefix("/").partition("/")
        host = self.headers.get("Host", "").rpartition(":")[0]
        is_allowed = hmac.compare_digest(token.encode(), self._token.encode()) and host in (HOST, "localhost")
        answer = self._answers.get(name) if is_allowed else None
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            kind, body = answer()
        except Exception as exc:  # noqa: BLE001 - the viewer gets an answer, the log the traceback
            threads.failed("a frame of the live view", exc)
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self.send_response(HTTPStatus.OK)
        for header, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: the paths of requests have the token."""
