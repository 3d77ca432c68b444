"""The live view of a running program: its frames, its link, and `raycollect top`."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from raycollect.weights.directory import VersionDirectory
from raycollect.weights.protocol import Version
from tests.support.actors import Worker, block, buffers
from tests.support.waiting import wait_until

ROOT = Path(col.__file__).parents[1]
TOP = [sys.executable, "-m", "raycollect", "top"]


@pytest.fixture
def view(actors, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    workers = actors(Worker, 3)
    col.declare_collective_group(workers)
    with col.live() as view:
        view.workers = workers
        yield view


def frame_of(view):
    with urllib.request.urlopen(view.link + "frame.json", timeout=60) as answer:
        return json.load(answer)


def test_frame_shows_what_the_ranks_have_done(view):
    # The share of a time slot is rounded to 0.25 ms.
    ray.get([worker.set_buffer.remote(np.ones(1_000_001, np.float32)) for worker in view.workers])
    for _ in range(20):
        col.allreduce_refs(buffers(view.workers))
    frame = frame_of(view)
    (group,) = frame["groups"]
    assert (group["name"], group["state"], [rank["rank"] for rank in group["ranks"]]) == ("default", "alive", [0, 1, 2])
    assert frame["pid"] == os.getpid()
    assert frame["missing"] == []
    for rank in group["ranks"]:
        seconds = np.sum(rank["stream"], axis=0)
        assert dict(zip(frame["activities"], seconds, strict=True))["kernel"] > 0
        assert not rank["is_last"]
    (row,) = [row for row in frame["operations"] if row["op"] == "allreduce"]
    assert (row["ranks"], row["nbytes"], row["backend"]) == (3, 4_000_004, "shm")
    assert row["calls_per_s"] > 0


def test_frame_names_the_rank_that_others_wait_for(view, gate):
    block(view.workers[1], gate)
    work = col.allreduce_refs(buffers(view.workers), async_op=True)
    seen = {}

    def is_blocked():
        seen["ranks"] = frame_of(view)["groups"][0]["ranks"]
        rank = seen["ranks"][1]
        # A method that has just begun reads its arguments.
        return rank["is_last"] and any("gate.wait" in line for line in rank["stack"])

    assert wait_until(is_blocked)
    assert [rank["is_last"] for rank in seen["ranks"]] == [False, True, False]
    rank = seen["ranks"][1]
    assert "Worker" in rank["state"] or "Buffers" in rank["state"]
    assert rank["awaited_s"] > 0
    gate.open.remote()
    work.wait()


def test_frame_shows_the_versions_of_weights(view, name):
    def is_shown(**expected):
        (shown,) = frame_of(view)["publications"]
        shown.update({f"group_{key}": value for group in shown["receivers"] for key, value in group.items()})
        return expected.items() <= shown.items()

    refs = buffers(view.workers)
    with col.publish(refs[:1], name) as publication, col.subscribe(name, refs[1:]) as subscription:
        assert wait_until(lambda: is_shown(name=name, is_here=True, number=0, group_number=0))
        for _ in range(2):
            publication.put()
            subscription.update()
        for _ in range(3):
            publication.put()
        expected = {"number": 5, "holders": 0, "group_number": 2, "group_behind": 3, "group_skipped": 0}
        assert wait_until(lambda: is_shown(**expected))
        subscription.update()
        expected = {"holders": 2, "group_number": 5, "group_behind": 0, "group_skipped": 2}
        assert wait_until(lambda: is_shown(**expected))
    assert wait_until(lambda: not frame_of(view)["publications"])


def test_a_record_of_another_release_is_an_error_in_the_frame(view, name):
    directory = VersionDirectory(name)
    strange = Version(99, 1)
    with col.publish(buffers(view.workers)[:1], name):
        directory._put(f"versions/{strange.epoch:08d}.{strange.number:019d}", b"strange", overwrite=True)
        assert wait_until(lambda: frame_of(view)["publications"][0]["error"])
        assert frame_of(view)["publications"][0]["number"] == 0
        directory.forget(strange)
        assert wait_until(lambda: not frame_of(view)["publications"][0]["error"])


def test_a_process_has_one_view_and_one_recording(view):
    assert col.live() is view
    with pytest.raises(errors.TimelineError):
        col.timeline()
    assert view.link in col.declare_collective_group(view.workers[:2], group_name="pair")._repr_html_()
    view.close()
    assert not view.is_open
    with pytest.raises(OSError):
        frame_of(view)
    with col.timeline():
        pass
    with pytest.raises(ValueError):
        col.live(port=1 << 16)
    with pytest.raises(errors.BoundToProcessError):
        __import__("pickle").dumps(view)


def test_top_prints_a_frame_as_json(view):
    done = subprocess.run([*TOP, "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["groups"][0]["name"] == "default"
    view.close()
    for arguments in ([], [view.link], ["ftp://x/"]):
        assert subprocess.run([*TOP, *arguments], capture_output=True, timeout=60, check=False).returncode in (1, 2)


def test_top_draws_writes_the_timeline_and_quits(view, tmp_path):
    col.allreduce_refs(buffers(view.workers))
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [*TOP, "--every", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT)},
    )
    os.close(theirs)
    screen = b""
    while b"over shm" not in screen:
        screen += os.read(ours, 1 << 16)
    os.write(ours, b"t")
    while not re.search(rb"written to timeline-[\d-]+\.json", screen):
        screen += os.read(ours, 1 << 16)
    os.write(ours, b"q")
    try:
        while os.read(ours, 1 << 16):
            pass
    except OSError:  # the program has ended
        pass
    assert program.wait(60) == 0
    os.close(ours)
    (file,) = tmp_path.glob("timeline-*.json")
    assert json.loads(file.read_bytes())["traceEvents"]


def test_any_process_of_the_cluster_finds_the_view(actors, monkeypatch):
    """An actor, and `raycollect top` as another driver, read the view of this process."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)  # Ray's tasks have none
    reader, *workers = actors(Worker, 3)
    col.declare_collective_group(workers)
    with col.live():
        key = f"{ray.util.get_node_ip_address()}:{os.getpid()}"
        frame = ray.get(reader.call.remote(frame_of_process, os.getpid()))
        assert (frame["pid"], [group["name"] for group in frame["groups"]]) == (os.getpid(), ["default"])
        command = [*TOP, "--json", "--cluster", key, "--address", ray.get_runtime_context().gcs_address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
        assert json.loads(done.stdout)["pid"] == os.getpid()
        (found,) = [view for view in col.live_views() if view.pid == os.getpid()]
        with pytest.raises(ValueError):
            found.read("frame.json?\n")
    with pytest.raises(ConnectionError):
        found.frame()
    assert os.getpid() not in [view.pid for view in col.live_views()]


def frame_of_process(_, pid):
    (found,) = [view for view in col.live_views() if view.pid == pid]
    return found.frame()
