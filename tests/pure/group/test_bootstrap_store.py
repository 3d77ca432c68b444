"""Records of rank 0 in a directory: what counts as one, and what others can do there."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path
from typing import Any

import msgpack
import pytest

from raycollect.core.model import Address
from raycollect.errors import InvalidGroupError
from raycollect.group import bootstrap_store
from raycollect.group.bootstrap_store import MOST_RECORD_NBYTES, DirectoryBulletin, LeaderRecord

RECORD = LeaderRecord.of(Address(host="127.0.0.1", port=9, secret=bytes(range(32))), "process 5")
NAMES = ("g", "a/b", "..", "group-g", "ü" * 20, "x" * 1000, "x" * 999 + "y", "ü" * 300)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "job"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def board(path: Path) -> DirectoryBulletin:
    return DirectoryBulletin(path)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_has_a_record_of_its_own(board: DirectoryBulletin, path: Path, name: str) -> None:
    """Also those that no file system takes: they are told apart by a hash."""
    assert board.post(name, name.encode())
    assert {other: board.read(other) for other in NAMES if board.read(other) is not None} == {name: name.encode()}
    (file,) = path.iterdir()
    assert len(os.fsencode(file.name)) <= 143


def test_another_process_opens_the_directory_for_itself(board: DirectoryBulletin) -> None:
    board.post("g", b"one")
    again = pickle.loads(pickle.dumps(board))
    assert (again.read("g"), again.host) == (b"one", board.host)


def test_no_descriptor_stays_open(path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        board = DirectoryBulletin(path)
        board.post("g", b"one")
        board.read("g")
        assert board.post("g", b"two", replace=True)
        assert not board.post("g", b"three")
        assert board.read("g") == b"two"
        board.remove("g")
    del board
    path.chmod(0o755)
    for _ in range(5):
        with pytest.raises(InvalidGroupError, match="chmod 700"):
            DirectoryBulletin(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---------------------------------------------------------------------------------------------- others


def test_a_directory_that_is_a_link_or_none_is_refused(board: DirectoryBulletin, path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    (path / "file").write_bytes(b"")
    for place in (link, path / "file", path / "file" / "under"):
        with pytest.raises(InvalidGroupError, match="can't be used"):
            DirectoryBulletin(place)


def test_system_errors_become_invalid_group_error(board: DirectoryBulletin, path: Path) -> None:
    path.rmdir()
    for replace in (False, True):
        with pytest.raises(InvalidGroupError, match="No such file") as caught:
            board.post("g", b"one", replace=replace)
        assert str(path) in str(caught.value)


def _link(path: Path) -> None:
    (path / "elsewhere").write_bytes(RECORD.to_bytes())
    (path / "group-g").symlink_to(path / "elsewhere")


def _fifo(path: Path) -> None:
    os.mkfifo(path / "group-g")


@pytest.mark.parametrize("make", [_link, _fifo, lambda path: (path / "group-g").mkdir()], ids=["link", "fifo", "dir"])
def test_irregular_file_is_no_record(board: DirectoryBulletin, path: Path, make: Any) -> None:
    make(path)
    with pytest.raises(InvalidGroupError, match="record of rank 0 is malformed"):
        board.read("g")


def test_a_file_of_another_user_is_no_record(
    board: DirectoryBulletin, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is judged by its descriptor: what lies under its name may change meanwhile."""
    board.post("g", b"one")
    fstat = os.fstat

    def of_another(fd: int) -> os.stat_result:
        values = list(fstat(fd))
        values[stat.ST_UID] += 1
        return os.stat_result(values)

    monkeypatch.setattr(bootstrap_store.os, "fstat", of_another)
    with pytest.raises(InvalidGroupError, match=f"a file of user {os.geteuid() + 1}"):
        board.read("g")


# ---------------------------------------------------------------------------------------------- what is a record


def _packed(*more: Any, host: Any = "h", port: Any = 9, secret: Any = bytes(32), who: Any = "w") -> bytes:
    packed: bytes = msgpack.packb([host, port, secret, who, *more])
    return b"\x02" + packed


MALFORMED = {
    "empty": b"",
    "cut": RECORD.to_bytes()[:-1],
    "text": b'{"host": "h"}',
    "deep": b"\x91" * 4000,
    "long": RECORD.to_bytes() + b" " * MOST_RECORD_NBYTES,
    "nothing in it": b"\x02\x90",
    "another version": b"\x01" + _packed()[1:],
    "a field is missing": b"\x02" + msgpack.packb(["h", 9, bytes(32)]),
    "a field too many": _packed(1),
    "no host": _packed(host=""),
    "host is long": _packed(host="h" * 256),
    "port is 0": _packed(port=0),
    "port is beyond": _packed(port=1 << 16),
    "secret is short": _packed(secret=bytes(31)),
    "who is long": _packed(who="w" * 201),
}


def test_what_is_changed_below_is_a_record() -> None:
    assert LeaderRecord.from_bytes(_packed()) == LeaderRecord.of(Address(host="h", port=9, secret=bytes(32)), "w")


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_record_raises_invalid_group_error(case: str) -> None:
    with pytest.raises(InvalidGroupError, match="record of rank 0 is malformed") as caught:
        LeaderRecord.from_bytes(MALFORMED[case])
    assert len(str(caught.value)) < 300
