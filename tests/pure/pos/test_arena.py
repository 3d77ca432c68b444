"""The arena: blocks that are as long in use as somebody sees them, and memory that is had and given back."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from raycollect.core import shared_memory
from raycollect.errors import ArenaFullError
from raycollect.pos import arena as module
from raycollect.pos.arena import ALIGN, GRAIN, Arena
from raycollect.pos.limit import SHARE, arena_limit, usable_nbytes

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.fixture
def arena() -> Arena:
    """Room for 16 grains; no memory is kept beyond what is in use."""
    return Arena(16 * GRAIN, spare=0)


def backed_nbytes(arena: Arena) -> int:
    """The memory that the kernel has given to the file."""
    return os.fstat(arena.segment.fd).st_blocks * 512


def offset_of(arena: Arena, block: np.ndarray) -> int:
    return int(block.ctypes.data) - arena.address


def mappings() -> int:
    """How many arenas this process has mapped."""
    return Path("/proc/self/maps").read_text().count(f"memfd:{module.NAME}")


# ---------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, GRAIN - 1, GRAIN, GRAIN + 1, 5 * GRAIN])
def test_a_block_is_writable_aligned_and_beside_the_others(arena: Arena, nbytes: int) -> None:
    before, block, after = arena.allocate(1), arena.allocate(nbytes), arena.allocate(1)
    before[:], block[:], after[:] = 1, 2, 3
    assert (block.shape, block.dtype, block.flags.writeable) == ((nbytes,), np.uint8, True)
    assert offset_of(arena, block) % (GRAIN if nbytes >= GRAIN else ALIGN) == 0
    assert (before == 1).all()
    assert (block == 2).all()
    assert (after == 3).all()
    assert arena.root[:32].tobytes() == arena.segment.token
    assert arena.statistics().in_use == 2 * ALIGN + max(ALIGN, -(-nbytes // ALIGN) * ALIGN)


def test_an_arena_lives_as_long_as_its_blocks_and_leaves_nothing() -> None:
    gc.collect()
    before = mappings()
    arena = Arena(GRAIN)
    fd, file = arena.segment.fd, os.fstat(arena.segment.fd).st_ino
    block = arena.allocate(100)
    del arena
    block[:] = 5
    assert mappings() == before + 1
    assert (block == 5).all()
    del block
    assert mappings() == before
    assert not (Path(f"/proc/self/fd/{fd}").exists() and os.fstat(fd).st_ino == file)


def test_the_file_can_never_change_its_size(arena: Arena) -> None:
    assert shared_memory.is_sealed(arena.segment.fd, arena.segment.nbytes)
    for nbytes in (GRAIN, 17 * GRAIN):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.segment.fd, nbytes)


# ---------------------------------------------------------------------------------------------- the limit


def test_a_full_arena_says_so_and_loses_nothing(arena: Arena) -> None:
    held = [arena.allocate(5 * GRAIN) for _ in range(3)]
    with pytest.raises(ArenaFullError) as caught:
        arena.allocate(GRAIN)
    assert isinstance(caught.value, MemoryError)
    assert (caught.value.nbytes, caught.value.in_use, caught.value.limit) == (GRAIN, 15 * GRAIN, 16 * GRAIN)
    assert arena.statistics().in_use == 15 * GRAIN
    held.pop(1)
    assert len(arena.allocate(5 * GRAIN)) == 5 * GRAIN


def test_room_in_pieces_is_no_room(arena: Arena) -> None:
    held = [arena.allocate(GRAIN) for _ in range(15)]
    del held[::2]
    with pytest.raises(ArenaFullError, match="in one piece"):
        arena.allocate(2 * GRAIN)
    held.clear()
    assert len(arena.allocate(15 * GRAIN)) == 15 * GRAIN


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("17", 17), ("3k", 3072), (" 2M ", 2 << 20), ("5g", 5 << 30), ("5G", 5 << 30)],
)
def test_the_environment_sets_the_limit(text: str, nbytes: int) -> None:
    assert arena_limit({"RAYCOLLECT_ARENA_LIMIT": text}) == nbytes


@pytest.mark.parametrize(
    "text", ["9" * 5000, "999999999999G", "131072G", str(1 << 47), "-1", "1.5G", "0x10", "5 G", "much"]
)
def test_a_limit_that_makes_no_sense_or_is_beyond_all_memory_is_refused(text: str) -> None:
    expected = r"expected a number of bytes below 2\*\*47" if text[:2].isdigit() and " " not in text else f"is '{text}'"
    with pytest.raises(OSError, match=f"RAYCOLLECT_ARENA_LIMIT.*{expected}") as caught:
        arena_limit({"RAYCOLLECT_ARENA_LIMIT": text})
    assert len(str(caught.value)) < 300


LIMITS: dict[str, tuple[str, dict[str, str], int]] = {
    "no control groups": ("", {}, MACHINE),
    "version 2": ("0::/a/b\n", {"a/b/memory.max": "1000\n"}, 1000),
    "version 2, from above": ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "900\n"}, 900),
    "version 2, the smallest": ("0::/a/b\n", {"a/b/memory.max": "1000\n", "memory.max": "800\n"}, 800),
    "version 1": ("9:x:/\n4:cpu,memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "700\n"}, 700),
    "version 1, a path of the host": ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "600\n"}, 600),
    "version 1, no limit": ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
    "not its own": ("0::/a\n", {"b/memory.max": "5\n"}, MACHINE),
}


@pytest.mark.parametrize(("groups", "files", "expected"), LIMITS.values(), ids=LIMITS)
def test_the_memory_of_a_process_is_that_of_its_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    written = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {"proc/self/cgroup": groups, **written}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_nbytes(tmp_path) == expected
    assert arena_limit({}, tmp_path) == int(expected * SHARE)


def test_without_proc_the_memory_is_the_machines(tmp_path: Path) -> None:
    assert usable_nbytes(tmp_path) == MACHINE


# ---------------------------------------------------------------------------------------------- memory


def test_free_memory_goes_back_to_the_system(arena: Arena) -> None:
    held, block = arena.allocate(2 * GRAIN), arena.allocate(8 * GRAIN)
    held[:], block[:] = 1, 2
    assert backed_nbytes(arena) == 11 * GRAIN == arena.statistics().backed, "with that of the token"
    del block
    assert backed_nbytes(arena) == 4 * GRAIN == arena.statistics().backed, "what is in use, and as much again"
    assert (held == 1).all()
    del held
    assert backed_nbytes(arena) == GRAIN == arena.statistics().backed
    again = arena.allocate(8 * GRAIN)
    assert not again.any(), "these are new pages"
    assert backed_nbytes(arena) == 9 * GRAIN


def test_a_system_without_the_newer_call_reserves_by_the_older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MADV_POPULATE_WRITE", 9999)
    arena = Arena(8 * GRAIN, spare=0)
    block = arena.allocate(4 * GRAIN)
    assert backed_nbytes(arena) == 5 * GRAIN
    del block
    assert backed_nbytes(arena) == GRAIN


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EFAULT])
def test_a_lack_of_memory_is_an_error_of_the_call(arena: Arena, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    advise, failed = Arena._advise, []

    def fail_once(self: Arena, lo: int, hi: int, advice: int) -> int:
        if advice == module._MADV_POPULATE_WRITE and not failed:
            failed.append((lo, hi))
            assert advise(self, lo, hi - GRAIN, advice) == 0, "some of it there was"
            return number
        return advise(self, lo, hi, advice)

    monkeypatch.setattr(Arena, "_advise", fail_once)
    with pytest.raises(ArenaFullError, match=os.strerror(number)) as caught:
        arena.allocate(6 * GRAIN)
    assert failed
    assert isinstance(caught.value.__cause__, OSError)
    assert (arena.statistics().in_use, arena.statistics().blocks) == (0, 0)
    assert backed_nbytes(arena) == GRAIN, "what had been given was given back"
    block = arena.allocate(6 * GRAIN)
    assert backed_nbytes(arena) == 7 * GRAIN
    assert not block.any()


def test_an_interrupted_reservation_goes_on(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    advise, interrupts = Arena._advise, [errno.EINTR, errno.EINTR]
    monkeypatch.setattr(Arena, "_advise", lambda *args: interrupts.pop() if interrupts else advise(*args))
    block = arena.allocate(GRAIN)
    assert not interrupts
    assert backed_nbytes(arena) == 2 * GRAIN
    assert len(block) == GRAIN


# ---------------------------------------------------------------------------------------------- threads


def test_a_block_that_goes_while_the_arena_is_busy_comes_back_afterwards(arena: Arena) -> None:
    block = arena.allocate(GRAIN)
    with arena._settled():  # as when a collection of garbage begins there
        del block
        assert arena._blocks == 1
    assert arena._blocks == 0


@pytest.mark.parametrize("seed", range(4))
def test_live_blocks_of_many_threads_never_overlap(arena: Arena, seed: int) -> None:
    start = threading.Barrier(4)

    def work(number: int) -> int:
        chance = random.Random(seed * 100 + number)
        held: list[tuple[np.ndarray, int]] = []
        full = 0
        start.wait(30)
        for step in range(150):
            if held and chance.random() < 0.5:
                block, mark = held.pop(chance.randrange(len(held)))
                assert (block == mark).all(), "nobody else wrote here"
                del block
                continue
            mark = (number * 64 + step) % 256
            try:
                block = arena.allocate(chance.choice([1, 100, 5000, 300_000, GRAIN, 2 * GRAIN]))
            except ArenaFullError:
                full += 1
                continue
            block[:] = mark
            held.append((block, mark))
            del block
        assert all((block == mark).all() for block, mark in held)
        return full

    with ThreadPoolExecutor(4) as pool:
        full = sum(pool.map(work, range(4)))
    statistics = arena.statistics()
    assert full > 0, "the limit was met"
    assert (statistics.in_use, statistics.blocks) == (0, 0)
    assert list(arena._free) == [(4096, 16 * GRAIN)]
    assert backed_nbytes(arena) == statistics.backed
    assert statistics.backed <= 2 * GRAIN
