"""Explanations of plans in notebooks: each message is an arrow, and the picture stays short."""

from __future__ import annotations

import re

import pytest

from raycollect.core.model import OpKind
from raycollect.planner.picture import MOST_BUNDLES, MOST_COLUMNS, MOST_MOVES
from tests.pure.driver.shown_html import read
from tests.pure.planner.test_render import SHOWN, broadcast, gathering, info, membership, send, told


@pytest.mark.parametrize("name", SHOWN)
def test_explanations_read_on_any_page(name):
    read(SHOWN[name]()._repr_html_())


def arrows(shown):
    """The titles of what is drawn of who sends to whom, of each the dots and the heads."""
    found = re.findall(r"<g><title>(.*?)</title>(.*?)</g>", shown)
    return [(title, drawn.count("<circle"), len(re.findall("l-?8 ", drawn))) for title, drawn in found]


@pytest.mark.parametrize("world", range(2, 8))
def test_each_message_is_an_arrow(world):
    there = membership([0] * world, backend="sends_only", ops=[OpKind.SEND, OpKind.RECV])
    drawn = arrows(told([gathering(OpKind.ALLTOALL, there)], there, {"x": info(world * 10)})._repr_html_())
    messages = world * (world - 1)
    assert len(drawn) == min(messages, MOST_MOVES)
    assert {one[1:] for one in drawn} == {(1, 1)}
    assert len(set(drawn)) > 1
    launches = [int(launch) for title, *_ in drawn for launch in re.findall(r"launch (\d+)", title)]
    assert launches == sorted(launches)


def test_a_message_goes_from_its_sender_to_its_receiver_with_its_bytes():
    there = membership([0] * 4)
    shown = told([send(there, 3, 1)], there, {"x": info(1 << 18)})._repr_html_()
    ((_, drawn),) = re.findall(r"<g><title>(.*?)</title>(.*?)</g>", shown)
    columns = dict(zip("13", re.findall(r'<text x="(\d+)" y="15" text-anchor="middle">', shown), strict=True))
    assert f'<circle cx="{columns["3"]}"' in drawn
    assert f'd="M{columns["1"]} ' in drawn
    assert "l8 -4" in drawn  # it comes from the right
    assert ">1 MiB</text>" in drawn


@pytest.mark.parametrize("root", range(3))
def test_broadcast_is_drawn_as_one_line_with_a_head_per_receiver(root):
    there = membership([0] * 3)
    shown = told([broadcast(there, root)], there, {"x": info(100)})._repr_html_()
    assert arrows(shown) == [(f"broadcast from rank {root}", 1, 2)]


def test_a_thousand_ranks_and_many_calls_are_a_picture_of_a_page():
    there = membership([host for host in range(128) for _ in range(8)], backend="tcp")
    shown = told([broadcast(there)], there, {"x": info(1 << 20)})._repr_html_()
    read(shown)
    assert f"and {1024 - MOST_COLUMNS} more ranks" in shown
    assert len(shown) < 60_000
    there = membership([0] * 2, backend="tcp")
    requests = [broadcast(there, at % 2, at) for at in range(60)]
    many = told(requests, there, {at: info(1 << 20) for at in range(60)}, staging=0)
    bundles = {row.bundle for row in many.rows}
    shown = many._repr_html_()
    assert (f"and {len(bundles) - MOST_BUNDLES} more" in shown) == (len(bundles) > MOST_BUNDLES)
    assert len(arrows(shown)) <= MOST_BUNDLES * MOST_MOVES
