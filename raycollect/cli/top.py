"""``raycollect top``: the live view of a running program, in this terminal."""

from __future__ import annotations

import select
import sys
import termios
import time
import tty
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from raycollect.cli.options import Finite
from raycollect.live_view import links

if TYPE_CHECKING:
    from raycollect.live_view.frame import Frame

_EXAMPLES = """\b
Examples:
  raycollect top
  raycollect top --json | jq '.groups[0].ranks[].state'
"""

_LONGEST_S = 30.0  # how long a program may take to answer
_KEYS = "q: quit   t: write the timeline for Perfetto"


@click.command("top", short_help="What each rank of a running program does.", epilog=_EXAMPLES)
@click.argument("link", required=False)
@click.option("--every", "every_s", metavar="SECONDS", default=1.0, type=Finite(min=0.2, max=3600), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one frame as JSON.")
def top(link: str | None, every_s: float, as_json: bool) -> None:
    """Shows what each rank of a running program does, as the program's live view: raycollect.live().

    LINK is the address that live() has returned. Without it, the live view of this user's program on this machine is
    shown.
    """
    link = link or _only_link()
    if as_json:
        click.echo(_read(link, "frame.json"))
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
            shown.update(Group(draw(_frame(link), console.width), Text(note, style="dim")), refresh=True)
            key = read_key(every_s)
            if key == "q":
                return
            if key == "t":
                note = _write_timeline(link)


def _only_link() -> str:
    programs = links.published()
    if not programs:
        raise click.ClickException("no program of this user has a live view here: it has to call raycollect.live()")
    if len(programs) > 1:
        listing = "\n".join(f"  pid {pid}: {link}" for pid, link in programs.items())
        raise click.UsageError(f"several programs have a live view; give the link of one:\n{listing}")
    return next(iter(programs.values()))


def _read(link: str, name: str) -> bytes:
    if not link.startswith("http://"):
        raise click.BadParameter("a live view's link begins with http://", param_hint="LINK")
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy would get the token
    try:
        with directly.open(link.rstrip("/") + "/" + name, timeout=_LONGEST_S) as answer:
            body: bytes = answer.read()
            return body
    except (OSError, HTTPException) as exc:
        raise click.ClickException(f"the program's live view gives no answer: {exc}") from exc


def _frame(link: str) -> Frame:
    from raycollect.live_view.frame import Frame

    try:
        return msgspec.json.decode(_read(link, "frame.json"), type=Frame)
    except msgspec.MsgspecError as exc:
        problem = f"the link is none of a live view of this version of raycollect: {exc}"
        raise click.ClickException(problem) from exc


def _write_timeline(link: str) -> str:
    path = Path(f"timeline-{datetime.now():%Y%m%d-%H%M%S}.json")
    try:
        path.write_bytes(_read(link, "timeline.json"))
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
