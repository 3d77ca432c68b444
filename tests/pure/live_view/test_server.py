"""Who may read the live view, and what they get."""

from __future__ import annotations

import http.client
import json
import os
import stat
from urllib.parse import urlsplit

import msgspec
import pytest

from raycollect.live_view import links
from raycollect.live_view.frame import Frame, last_rank, operation_frame
from raycollect.live_view.server import PageServer
from raycollect.observe.summary import SummaryRow

FRAME = Frame(at_s=1.5, host="h", pid=7, program="train.py", groups=(), operations=(), missing=("a: lost",))


@pytest.fixture
def server():
    server = PageServer(lambda: FRAME, lambda: {"traceEvents": []}, 0)
    yield server
    server.close()


def get(server, path, **headers):
    """The status, the headers and the body of an answer."""
    address = urlsplit(server.link)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.headers), body


def test_page_frame_and_timeline(server):
    root = urlsplit(server.link).path
    status, headers, body = get(server, root)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"frame.json" in body
    assert headers["Cache-Control"] == "no-store"
    status, _, body = get(server, root + "frame.json")
    assert (status, msgspec.json.decode(body, type=Frame)) == (200, FRAME)
    assert json.loads(get(server, root + "timeline.json")[2]) == {"traceEvents": []}


@pytest.mark.parametrize("path", ["/", "/frame.json", "/x/frame.json", "{}none", "{}../frame.json", "//frame.json"])
def test_no_token_no_answer(server, path):
    assert get(server, path.format(urlsplit(server.link).path))[0] == 404


def test_a_page_of_another_site_gets_no_answer(server):
    root = urlsplit(server.link).path
    assert get(server, root, Host="evil.example:80")[0] == 404
    assert get(server, root, Host="localhost:80")[0] == 200


def test_links_are_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert links.published() == {}
    file = links.publish("http://127.0.0.1:1/t/")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    (file.parent / "4194304").write_text("of a process that has ended")  # above the largest pid
    assert links.published() == {os.getpid(): "http://127.0.0.1:1/t/"}
    assert not (file.parent / "4194304").exists()
    links.withdraw(file)
    assert links.published() == {}
    file.parent.chmod(0o755)
    for use in (links.published, lambda: links.publish("")):
        with pytest.raises(PermissionError):
            use()


def row(**changed):
    given = {"group": "g", "op": "allreduce", "backend": "shm", "ranks": 4, "calls": 10, "nbytes": 40_000_000}
    rest = dict.fromkeys(("p99_s", "bus_bandwidth", "waiting", "skew_s", "worst_skew_s", "last_share"), 0.0)
    return SummaryRow(**{**given, **rest, "median_s": 1e-3, "algorithm_bandwidth": 4e9, "last_rank": 2, **changed})


def test_operations_beside_their_predictions():
    shown = operation_frame(row(), 2.0, hosts=1)
    assert (shown.calls_per_s, shown.nbytes, shown.bandwidth, shown.last_rank) == (5, 4_000_000, 4e9, 2)
    assert shown.predicted_bandwidth > 0
    assert operation_frame(row(backend="tcp"), 2.0, hosts=2).predicted_bandwidth > 0
    for other in (row(op="batch"), row(backend="shm, tcp"), row(nbytes=0), row(backend="no such")):
        assert operation_frame(other, 2.0, hosts=1).predicted_bandwidth == 0
    assert operation_frame(row(), 2.0, hosts=2).predicted_bandwidth == 0  # shm is for one host


def test_last_rank():
    assert (last_rank([]), last_rank([0.0, 0.0]), last_rank([0.0, 2.0, 1.0])) == (-1, -1, 1)
