"""Who may read the live view, and what they get."""

from __future__ import annotations

import http.client
import json
import os
import stat
import tempfile
from urllib.parse import urlsplit

import msgspec
import pytest

from raycollect.group.link_costs import Costs
from raycollect.live_view import links
from raycollect.live_view.frame import Frame, last_rank, operation_frame
from raycollect.live_view.server import PageServer
from raycollect.observe.summary import SummaryRow
from raycollect.planner.topology import Link

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


def test_a_closed_page_answers_nobody():
    server = PageServer(lambda: FRAME, dict, 0)
    address = urlsplit(server.link)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
    connection.request("GET", address.path + "frame.json", headers={"Connection": "keep-alive"})
    assert connection.getresponse().read()
    server.close()
    with pytest.raises(OSError):
        connection.request("GET", address.path + "frame.json")
        connection.getresponse()
    connection.close()


def test_links_are_the_users_alone(tmp_path, monkeypatch):
    runtime, temporary = tmp_path / "runtime", tmp_path / "temporary"
    for folder in (runtime, temporary):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert os.getpid() not in links.published()
    file = links.publish("http://127.0.0.1:1/t/")
    assert file.is_relative_to(runtime)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    elsewhere = file.with_suffix(".another-machine")
    others = [file.with_stem(stem) for stem in ("4194304", str(os.getppid()), "else")]
    for other in (elsewhere, *others):  # above the largest pid; of a process with the pid of one before; of nobody
        other.write_text("http://127.0.0.1:2/t/\n1")
    assert links.published()[os.getpid()] == "http://127.0.0.1:1/t/"
    assert elsewhere.exists()
    assert not any(other.exists() for other in others)
    links.withdraw(file)
    assert os.getpid() not in links.published()


def test_a_folder_of_links_that_others_can_read_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime" / "raycollect").mkdir(parents=True, mode=0o755)
    file = links.publish("http://127.0.0.1:1/t/")
    assert file.parent.parent == tmp_path
    assert links.published()[os.getpid()] == "http://127.0.0.1:1/t/"
    links.withdraw(file)
    file.parent.chmod(0o755)
    assert os.getpid() not in links.published()
    with pytest.raises(PermissionError):
        links.publish("")


def row(**changed):
    given = {"group": "g", "op": "allreduce", "backend": "shm", "ranks": 4, "calls": 10, "nbytes": 40_000_000}
    rest = dict.fromkeys(("p99_s", "bus_bandwidth", "waiting", "skew_s", "worst_skew_s", "last_share"), 0.0)
    return SummaryRow(**{**given, **rest, "median_s": 1e-3, "algorithm_bandwidth": 4e9, "last_rank": 2, **changed})


def test_operations_beside_their_predictions():
    shown = operation_frame(row(), 2.0, hosts=1, costs=Costs())
    assert (shown.calls_per_s, shown.nbytes, shown.bandwidth, shown.last_rank) == (5, 4_000_000, 4e9, 2)
    assert shown.predicted_bandwidth > 0
    assert operation_frame(row(backend="tcp"), 2.0, hosts=2, costs=Costs()).predicted_bandwidth > 0
    fast = Costs(inside=Link(latency_s=0, bandwidth=1e15))
    assert operation_frame(row(), 2.0, hosts=1, costs=fast).predicted_bandwidth > 10 * shown.predicted_bandwidth
    assert (
        operation_frame(row(), 2.0, hosts=0, costs=Costs()).predicted_bandwidth == 0
    )  # of a group that is not declared
    for other in (row(op="batch"), row(backend="shm, tcp"), row(nbytes=0), row(backend="no such")):
        assert operation_frame(other, 2.0, hosts=1, costs=Costs()).predicted_bandwidth == 0
    assert operation_frame(row(), 2.0, hosts=2, costs=Costs()).predicted_bandwidth == 0  # shm is for one host


def test_last_rank():
    assert (last_rank([]), last_rank([0.0, 0.0]), last_rank([0.0, 2.0, 1.0])) == (-1, -1, 1)


def test_a_link_that_vanishes_hides_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = links.publish("http://x/")
    (file.parent / f"0{file.suffix}").symlink_to("removed")
    assert links.published()[os.getpid()] == "http://x/"
    links.withdraw(file)


def test_an_unknown_file_is_refused_without_a_request(server):
    assert json.loads(links.read(server.link, "timeline.json")) == {"traceEvents": []}
    for name in ("", "none", "../frame.json", "a b\n"):
        with pytest.raises(ValueError) as raised:
            links.read(server.link, name)
        assert urlsplit(server.link).path.strip("/") not in str(raised.value)
