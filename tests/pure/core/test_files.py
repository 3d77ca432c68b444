"""Files that the package writes: whole or not at all, and in place of nothing but a file."""

from __future__ import annotations

import os
import pickle
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import raycollect as col
from raycollect.core import files
from raycollect.group import link_costs
from raycollect.group.rank_table import RankTable
from raycollect.observe import chrome
from tests.pure.observe.recorded import two_ranks

WRITERS: dict[str, Callable[[Path], None]] = {
    "files": lambda path: files.write(path, b"data"),
    "timeline": partial(chrome.write, two_ranks()),
    "costs": lambda path: link_costs.write(path, []),
    "rank table": lambda path: RankTable.of_device_ids([[0, 1]]).write(path),
}
OTHERS = ["fifo", "folder", "socket", "link", "dangling", "device"]

writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())


def other(kind: str, path: Path) -> None:
    """Makes something that is no regular file."""
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(os.fspath(path))
    elif kind == "device":
        try:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")
    else:
        path.symlink_to(path.parent / ("victim" if kind == "link" else "nothing"))


@writers
def test_a_file_is_written_and_replaced_and_nothing_else_stays(tmp_path: Path, write: Callable[[Path], None]) -> None:
    path = tmp_path / "made"
    write(path)
    first = path.read_bytes()
    path.write_bytes(b"older, and longer" * 10_000)
    write(path)
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


@writers
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, write: Callable[[Path], None], kind: str) -> None:
    (tmp_path / "victim").write_text("precious")
    path = tmp_path / "t"
    other(kind, path)
    before = path.lstat()
    with pytest.raises(OSError) as caught:
        write(path)
    assert pickle.loads(pickle.dumps(caught.value)).filename == os.fspath(path)
    assert os.path.samestat(path.lstat(), before)
    assert (tmp_path / "victim").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t", "victim"]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_timeline_refuses_such_a_path_before_it_records(tmp_path: Path, kind: str) -> None:
    other(kind, tmp_path / "t.json")
    with pytest.raises(OSError):
        col.timeline(tmp_path / "t.json")
    with col.timeline(tmp_path / "u.json"):  # none is recorded yet
        pass
    assert (tmp_path / "u.json").is_file()


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"old")
    with pytest.raises(TypeError):
        files.write(path, "text")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
