"""The picture of a timeline in a notebook."""

from __future__ import annotations

import random
import re

from raycollect.observe.picture import HEIGHT, MOST, WIDTH, picture
from raycollect.observe.trace import CHECK, KERNEL, METHOD, PLAN, WAIT
from tests.pure.driver.shown_html import read
from tests.pure.observe.recorded import a_process, a_span, a_trace, two_ranks

LINE = re.compile(r"M(\d+) [\d.]+H(\d+)")


def lines_of(*spans):
    """For each color of the row of one process: the pixels from and to which it is drawn. A timeline takes 1 s."""
    drawn = picture(a_trace(a_process("W", 1, list(spans))))
    return [[tuple(map(int, line)) for line in LINE.findall(path)] for path in re.findall(r'<path d="([^"]*)"', drawn)]


def test_a_row_per_process_that_runs_something():
    drawn = picture(two_ranks())
    text = read(drawn)
    assert "W0: rank 0 of default" in text
    assert "driver" not in text  # its plans are drawn where they run
    assert drawn.count(f'height="{HEIGHT}"') == 2
    assert picture(a_trace(a_process("driver", 1, [a_span(PLAN, 0, 30)]))) == ""


def test_spans_are_drawn_where_they_are():
    assert lines_of(a_span(METHOD, 0, 500), a_span(KERNEL, 250, 500)) == [[(0, 241)], [(120, 241)]]
    assert lines_of(a_span(CHECK, 0, 0.001), a_span(CHECK, 1, 1.5)) == [[(0, 1)]]  # within a pixel
    assert lines_of(a_span(WAIT, -100, -50)) == []
    assert lines_of(a_span(WAIT, -100, 2000)) == [[(0, WIDTH)]]


def test_the_picture_of_a_long_timeline_is_small():
    chance = random.Random(0)
    spans = [a_span(chance.choice([METHOD, CHECK, KERNEL]), at / 10, at / 10 + 0.01) for at in range(0, 10_000, 7)]
    drawn = picture(a_trace(*(a_process(f"W{at}", at, spans) for at in range(3 * MOST))))
    assert len(drawn) < 300_000
    assert f"{2 * MOST} more" in read(drawn)
