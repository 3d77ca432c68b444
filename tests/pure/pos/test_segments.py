"""Shared memory between processes: who finds it, who may not, and what is left when one of them is killed or forks."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raycollect.core.model import BufferRef, Segment
from raycollect.core.shared_memory import memory_domain
from raycollect.pos import arena as module
from raycollect.pos import segments as module_of_segments
from raycollect.pos.arena import GRAIN, Arena
from raycollect.pos.segments import Segments
from tests.pure.processes import Process
from tests.support.values import replace

NBYTES = 64 << 20

_held: dict[str, Any] = {}
"""What the functions below keep in the process that runs them."""


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[Process]]:
    """Two processes, and a folder for temporary files that is to stay empty."""
    both = [Process(), Process()]
    for process in both:
        process.call(use_temporary, str(tmp_path))
    yield both
    for process in both:
        process.close()
    assert not list(tmp_path.iterdir())
    assert not [file for file in Path("/dev/shm").iterdir() if module.NAME in file.name]


@pytest.fixture
def segments() -> Segments:
    return Segments()


# What the processes run ---------------------------------------------------------------------------------------


def make(nbytes: int, value: int) -> BufferRef | None:
    block = _held["block"] = Segments.current().allocate(nbytes)
    block[:] = value
    return Segments.current().locate(block.ctypes.data, block.nbytes)


def see(ref: BufferRef) -> tuple[int, int]:
    root = Segments.current().open(ref.segment)
    view = _held["view"] = root[ref.offset : ref.offset + ref.nbytes]
    return int(view.min()), int(view.max())


def look_again() -> tuple[int, int]:
    view = _held["view"]
    return int(view.min()), int(view.max())


def write(value: int) -> None:
    _held["view"][:] = value


def read_block() -> tuple[int, int]:
    block = _held["block"]
    return int(block.min()), int(block.max())


def make_plain(nbytes: int, value: int) -> BufferRef | None:
    block = _held["block"] = np.full(nbytes, value, np.uint8)
    return Segments.current().locate_in_process(block.ctypes.data, block.nbytes)


def read(ref: BufferRef) -> tuple[int, int]:
    into = np.zeros(ref.nbytes, np.uint8)
    Segments.current().read([(ref, memoryview(into))])
    return int(into.min()), int(into.max())


def read_as_nobody(ref: BufferRef) -> tuple[str, bool]:
    os.setuid(65534)
    try:
        read(ref)
    except OSError as exc:
        return type(exc).__name__, Segments.current().reads_processes
    return "", Segments.current().reads_processes


def let_go() -> None:
    _held.clear()
    gc.collect()


def mapped() -> tuple[int, int]:
    """How many arenas are in the list of mappings, and how many bytes of others' the statistics know."""
    lines = Path("/proc/self/maps").read_text().count(f"memfd:{module.NAME}")
    return lines, Segments.current().statistics().mapped


def blocks() -> int:
    return Segments.current().statistics().blocks


def use_temporary(path: str) -> None:
    os.environ["TMPDIR"] = path
    tempfile.tempdir = None


def temporary() -> str:
    return tempfile.gettempdir()


# ---------------------------------------------------------------------------------------------- two processes


def test_another_process_sees_what_one_writes_and_writes_what_it_sees(processes: list[Process]) -> None:
    owner, other = processes
    ref = owner.call(make, NBYTES, 7)
    assert other.call(see, ref) == (7, 7)
    other.call(write, 9)
    assert owner.call(read_block) == (9, 9)
    assert other.call(mapped) == (1, ref.segment.nbytes)
    other.call(let_go)
    assert other.call(mapped) == (0, 0)
    assert owner.call(read_block) == (9, 9)


def test_the_memory_of_one_who_is_killed_lasts_until_the_last_lets_go(processes: list[Process], tmp_path: Path) -> None:
    owner, other = processes
    assert owner.call(temporary) == str(tmp_path)
    ref = owner.call(make, NBYTES, 5)
    assert other.call(see, ref) == (5, 5)
    owner.kill()
    assert other.call(look_again) == (5, 5)
    other.call(write, 6)
    assert other.call(look_again) == (6, 6)
    other.call(let_go)
    assert other.call(mapped) == (0, 0)
    with pytest.raises(FileNotFoundError):
        other.call(see, ref)


def test_any_memory_of_a_process_is_read_while_it_lives(processes: list[Process]) -> None:
    owner, other = processes
    ref = owner.call(make_plain, NBYTES + 1, 7)
    assert other.call(read, ref) == (7, 7)
    another = replace(ref, segment=replace(ref.segment, token=b"1"))  # a process that got the id later
    for number, wrong in ((errno.ESRCH, another), (errno.EFAULT, replace(ref, offset=0))):
        with pytest.raises(OSError) as caught:
            other.call(read, wrong)
        assert caught.value.errno == number
    owner.kill()
    with pytest.raises(ProcessLookupError):
        other.call(read, ref)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_that_may_not_read_others_knows_after_the_first_refusal(processes: list[Process]) -> None:
    owner, other = processes
    assert other.call(read_as_nobody, owner.call(make_plain, 100, 7)) == ("PermissionError", False)


# ---------------------------------------------------------------------------------------------- one process


def test_a_segment_is_mapped_once_and_only_as_long_as_it_is_used(segments: Segments) -> None:
    theirs = Arena(2 * GRAIN)
    block = theirs.allocate(100)
    root = segments.open(theirs.segment)
    assert segments.open(theirs.segment) is root
    assert (root.shape, root.dtype, root.flags.writeable) == ((2 * GRAIN,), np.uint8, True)
    offset = block.ctypes.data - theirs.address
    view = root[offset : offset + 100]
    view[:] = 3
    assert (block == 3).all()
    del root
    assert segments.statistics().mapped == 2 * GRAIN, "a view is left"
    del view
    assert segments.statistics().mapped == 0


def test_bytes_of_any_arena_are_read_without_mapping_it(segments: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of_segments, "_READ_NBYTES", 1000)
    theirs = Arena(2 * GRAIN)
    for arena in (theirs, segments.arena):
        block = arena.allocate(4321)
        block[:] = np.arange(4321) % 251
        ref = BufferRef(arena.segment, int(block.ctypes.data) - arena.address + 1, 4320)
        into = np.zeros(4320, np.uint8)
        segments.read([(ref, memoryview(into))])
        assert (into == block[1:]).all()
    assert segments.statistics().mapped == 0
    beyond = BufferRef(theirs.segment, 2 * GRAIN - 10, 20)
    for wrong in (replace(ref, segment=replace(theirs.segment, token=bytes(32))), beyond):
        with pytest.raises(OSError, match=r"the memory of another process|ended early"):
            segments.read([(wrong, memoryview(np.zeros(wrong.nbytes, np.uint8)))])


def test_what_lies_in_the_arena_is_located_and_nothing_else(segments: Segments) -> None:
    elsewhere = np.zeros(100, np.uint8)
    assert segments.locate(elsewhere.ctypes.data, 100) is None
    assert segments.locate(0, 0) is None
    block = segments.allocate(1000)
    segment, start = segments.arena.segment, segments.arena.address
    address = block[10:].ctypes.data
    assert segments.locate(address, 990) == BufferRef(segment, address - start, 990)
    assert segments.locate(start, 5) == BufferRef(segment, 0, 5)
    assert segments.locate(start + segment.nbytes - 5, 5) == BufferRef(segment, segment.nbytes - 5, 5)
    for lo, nbytes in ((start - 1, 2), (start + segment.nbytes - 5, 6), (elsewhere.ctypes.data, 100), (0, 1)):
        assert segments.locate(lo, nbytes) is None


def test_memory_of_another_token_or_size_is_refused(segments: Segments) -> None:
    arena = Arena(2 * GRAIN)
    for wrong in (
        replace(arena.segment, token=bytes(32)),
        replace(arena.segment, token=b""),
        replace(arena.segment, nbytes=GRAIN),
        replace(arena.segment, nbytes=0),
    ):
        with pytest.raises(OSError, match=f"/proc/{os.getpid()}/fd/{arena.segment.fd}"):
            segments.open(wrong)
    assert segments.statistics().mapped == 0


def test_a_file_that_is_no_arena_is_not_even_opened(segments: Segments, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"t" * 4096)
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="no longer memory of the name"):
        segments.open(Segment(os.getpid(), file.fileno(), b"t" * 32, 4096))
    with pytest.raises(FileNotFoundError):
        segments.open(Segment(os.getpid(), 1_000_000, b"t" * 32, 4096))


def _domain_of(user: int) -> str:
    os.seteuid(user)
    try:
        return memory_domain()
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_processes_of_two_users_share_no_memory(processes: list[Process]) -> None:
    """/proc admits processes of the same user alone, so that such members need a backend that sends."""
    assert processes[0].call(_domain_of, 0) == memory_domain() != processes[1].call(_domain_of, 65534)


@pytest.mark.parametrize("seals", [(), ("F_SEAL_GROW",), ("F_SEAL_SHRINK", "F_SEAL_GROW")])
def test_memory_that_could_shrink_is_refused(segments: Segments, seals: tuple[str, ...]) -> None:
    fd = os.memfd_create(module.NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, b"t" * 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(getattr(fcntl, name) for name in seals))
        with pytest.raises(OSError, match="not sealed"):
            segments.open(Segment(os.getpid(), fd, b"t" * 32, 4096))
    finally:
        os.close(fd)


# ---------------------------------------------------------------------------------------------- no arena


def test_an_arena_that_is_switched_off_is_none(
    segments: Segments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAYCOLLECT_ARENA_LIMIT", "0")
    with pytest.raises(OSError, match="disabled"):
        segments.allocate(10)
    assert not caplog.records, "somebody wanted it so"


def refuse(*_: object) -> int:
    raise PermissionError("not here")


@pytest.mark.parametrize("cause", ["limit", "memfd", "system"])
def test_where_there_can_be_no_arena_one_warning_says_why(
    segments: Segments, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    if cause == "limit":
        monkeypatch.setenv("RAYCOLLECT_ARENA_LIMIT", "much")
    elif cause == "memfd":
        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.delattr(os, "memfd_create")
    reason = {"limit": "'much'", "memfd": "not here", "system": "lacks memfd_create"}[cause]
    with caplog.at_level(logging.WARNING, "raycollect"):
        for _ in range(3):
            with pytest.raises(OSError, match=reason):
                segments.allocate(10)
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert segments.locate(np.zeros(4).ctypes.data, 32) is None


# ---------------------------------------------------------------------------------------------- fork


def fork_and_look() -> list[str]:
    """Forks; gives what was wrong in the child, or in the parent afterwards."""
    segments = Segments.current()
    block = segments.allocate(4 * GRAIN)
    block[:] = 7
    arena = segments.arena
    before = segments.statistics()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            wrong = look_in_child(segments, arena, block)
        except BaseException as exc:
            wrong = [repr(exc)]
        os.write(writer, "\n".join(wrong).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        wrong = answers.read().split("\n")
    os.waitpid(child, 0)
    checks = {"data changed": (block == 7).all(), "statistics changed": segments.statistics() == before}
    return [fault for fault in wrong if fault] + [name for name, is_right in checks.items() if not is_right]


def look_in_child(segments: Segments, arena: Arena, block: np.ndarray) -> list[str]:
    fresh = segments.allocate(100)
    fresh[:] = 1
    ref = segments.locate(fresh.ctypes.data, 100)
    parents = segments.open(arena.segment)
    offset = block.ctypes.data - arena.address
    checks = {
        "another object": Segments.current() is segments,
        "the parent's block is located": segments.locate(block.ctypes.data, 100) is None,
        "the parent's block is unreadable": (block == 7).all(),
        "the parent's arena is not open to its child": (parents[offset : offset + 100] == 7).all(),
        "the arena is the parent's": ref is not None and ref.segment.pid == os.getpid(),
        "the limit": segments.statistics().blocks == 1,
    }
    del block
    try:
        arena.allocate(10)
        checks["the parent's arena gives blocks"] = False
    except OSError:
        pass
    return [name for name, is_right in checks.items() if not is_right]


def fork_and_free() -> bool:
    """A child lets go of a block that the parent uses, in an arena that keeps no free memory."""
    arena = Arena(8 * GRAIN, spare=0)
    held = [arena.allocate(2 * GRAIN)]
    held[0][:] = 7
    child = os.fork()
    if child == 0:
        held.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    return bool((held[0] == 7).all()) and arena.statistics().backed == 3 * GRAIN


def test_a_forked_child_has_an_arena_of_its_own(processes: list[Process]) -> None:
    assert processes[0].call(fork_and_look) == []


def test_a_forked_child_frees_nothing_of_its_parent(processes: list[Process]) -> None:
    assert processes[0].call(fork_and_free)
