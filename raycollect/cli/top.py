"""``raycollect top``: the live view of a running program, in this terminal."""

from __future__ import annotations

import logging
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from raycollect.cli.options import ADDRESS_HELP, Finite
from raycollect.live_view import links

if TYPE_CHECKING:
    from raycollect.live_view.frame import Frame

_Program = TypeVar("_Program")
_Read = Callable[[str], bytes]  # returns a file of a view

_EXAMPLES = """\b
Examples:
  raycollect top
  raycollect top --json | jq '.groups[0].ranks[].state'
  raycollect top --cluster 10.0.0.2:4711
"""

_KEYS = "q: quit   t: write the timeline for Perfetto"


@click.command("top", short_help="What each rank of a running program does.", epilog=_EXAMPLES)
@click.argument("link", required=False)
@click.option("--every", "every_s", metavar="SECONDS", default=1.0, type=Finite(min=0.2, max=3600), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one frame as JSON.")
@click.option("--cluster", "in_cluster", is_flag=True, help="Look on all nodes of a Ray cluster, as a driver there.")
@click.option("--address", metavar="HOST:PORT", help=f"With --cluster: {ADDRESS_HELP}.")
def top(link: str | None, every_s: float, as_json: bool, in_cluster: bool, address: str | None) -> None:
    """Shows what each rank of a running program does, as the program's live view: raycollect.live().

    LINK is the address that live() has returned. Without it, the live view of this user's program on this machine is
    shown. With --cluster, it is HOST:PID of the program, or nothing if only one program of the cluster has a live view.
    """
    if address and not in_cluster:
        raise click.UsageError("give --cluster with --address")
    read = _of_cluster(link, address) if in_cluster else partial(_read, link or _only_link())
    if as_json:
        click.echo(read("frame.json"))
        return
    try:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text

        from raycollect.live_view.terminal import draw
    except ImportError as exc:
        raise click.ClickException("raycollect top needs rich: pip install 'raycollect[top]'") from exc
    console, note = Console(), _KEYS
    with _keys() as read_key, Live(console=console, screen=console.is_terminal, auto_refresh=False) as shown:
        while True:
            shown.update(Group(draw(_frame(read), console.width), Text(note, style="dim")), refresh=True)
            key = read_key(every_s)
            if key == "q":
                return
            if key == "t":
                note = _write_timeline(read)


def _only_link() -> str:
    programs = {f"pid {pid}: {link}": link for pid, link in links.published().items()}
    return _only(programs, "of this user has a live view here")


def _of_cluster(name: str | None, address: str | None) -> _Read:
    import ray  # takes a second

    from raycollect.group import cluster_registry  # with Ray, as the next one
    from raycollect.live_view.cluster import live_views

    cluster = cluster_registry.find_cluster(address)
    cluster_registry.ClusterReader(cluster)  # `ray.init` would wait long where none answers
    try:
        ray.init(cluster, log_to_driver=False, logging_level=logging.ERROR)
    except RuntimeError as exc:
        raise click.ClickException(f"the cluster at {cluster} takes no driver from here: {exc}") from exc
    programs = {f"{view.host}:{view.pid}": view for view in live_views()}
    if name is not None:
        programs = {key: view for key, view in programs.items() if key == name}
    view = _only(programs, f"{f'{name} ' if name else ''}of the cluster at {cluster} has a live view")
    return view.read


def _only(programs: Mapping[str, _Program], which: str) -> _Program:
    if not programs:
        raise click.ClickException(f"no program {which}: it has to call raycollect.live()")
    if len(programs) > 1:
        listing = "\n".join(f"  {program}" for program in programs)
        raise click.UsageError(f"several programs have a live view; name one:\n{listing}")
    return next(iter(programs.values()))


def _read(link: str, name: str) -> bytes:
    if not link.startswith("http://"):
        raise click.BadParameter("a live view's link begins with http://", param_hint="LINK")
    try:
        return links.read(link, name)
    except (OSError, HTTPException) as exc:
        raise click.ClickException(f"the program's live view gives no answer: {exc}") from exc


def _frame(read: _Read) -> Frame:
    from raycollect.live_view.frame import Frame  # with the planner

    try:
        return msgspec.json.decode(read("frame.json"), type=Frame)
    except msgspec.MsgspecError as exc:
        problem = f"the program has another version of raycollect, or is none: {exc}"
        raise click.ClickException(problem) from exc


def _write_timeline(read: _Read) -> str:
    path = Path(f"timeline-{datetime.now():%Y%m%d-%H%M%S}.json")
    try:
        path.write_bytes(read("timeline.json"))
    except OSError as exc:
        return f"the timeline can't be written: {exc}"
    return f"written to {path}"


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Reads single keys; without a terminal there are none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    before = termios.tcgetattr(sys.stdin)

    def read_key(wait_s: float) -> str:
        return sys.stdin.read(1) if select.select([sys.stdin], [], [], wait_s)[0] else ""

    tty.setcbreak(sys.stdin)
    try:
        yield read_key
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""
