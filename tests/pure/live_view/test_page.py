"""The page in a real browser, on a desk and on a phone, and the same frame in a terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from raycollect.live_view.server import PageServer
from tests.pure.live_view.frames import FRAME
from tests.support import browser

FACTS = """{
    text: document.body.innerText,
    canvases: [...document.querySelectorAll("canvas")].map((canvas) =>
        canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value > 0)),
    red: [...document.querySelectorAll(".rank.last > :first-child")].map((rank) => rank.textContent),
    markup: document.querySelectorAll("h2 b").length,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    loaded: performance.getEntriesByType("resource").map((entry) => new URL(entry.name).pathname.split("/").pop()),
}"""


@pytest.mark.full
@pytest.mark.skipif(find_spec("PyQt6") is None, reason="needs PyQt6-WebEngine, of the extra test-full")
@pytest.mark.parametrize("width", [1280, 390])
def test_page_in_a_browser(width):
    server = PageServer(lambda: FRAME, dict, 0)
    ready = "document.querySelectorAll('canvas').length > 0"
    command = [sys.executable, "-m", browser.__name__, server.link, str(width), "844", ready, FACTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    server.close()
    if done.returncode == browser.CANT:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    facts = seen["facts"]
    assert seen["console"] == []
    assert facts["canvases"] == [True] * 6
    assert (facts["red"], facts["markup"], facts["overflow"]) == (["2"], 0, 0)
    assert set(facts["loaded"]) <= {"frame.json", "favicon.ico"}
    for text in (
        "train.py, pid 4711",
        "allreduce",
        "1206 of epoch 2",
        "Rollout(aa01) and 1 more",
        "its process has ended",
    ):
        assert text in facts["text"]


def test_frame_in_a_terminal():
    console = pytest.importorskip("rich.console")
    from raycollect.live_view.terminal import draw

    screen = io.StringIO()
    console.Console(file=screen, width=140).print(draw(FRAME, 140))
    for text in ("train.py, pid 4711", "<b>pipeline</b>", "1206 of epoch 2", "Rollout(aa01) and 1 more", "line 31"):
        assert text in screen.getvalue()
