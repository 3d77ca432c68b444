"""The programs in the documents run, and print what the documents say.

Each ``python`` block of each document is a program; a ``text`` block that follows it is what it prints. Ids of objects
and actors, which are others each time, count as equal. Comments in a document say otherwise:

- ``<!-- one program -->``: all blocks of the document are one, each going on where the one before it ended;
- ``<!-- not run: why -->``: the next block is none.
"""

from __future__ import annotations

import functools
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))

NOT_RUN = {
    "docs/backends.md": ["a module, which tests/pure/backends/test_own_backend.py runs"],
    "docs/weight-sync.md": ["it needs vLLM and a server of it"],
}
"""Document -> why some of its blocks are no programs. Add to it what can't be run anywhere, and nothing else."""

NEEDS = {
    "import torch\n": "torch",
    "from ray import serve": "starlette",
    "import ray.util.collective": "torch",
    "import cupy": "cupy",
    "from safetensors": "safetensors",
}
"""What a program says -> the library without which it is skipped; Ray's gloo is torch's."""

LIMIT_S = 100
"""How long a program may take on a machine that is shared, in seconds."""

_ONE = "<!-- one program -->"
_NOT_RUN = re.compile(r"<!-- not run: (?P<why>[^>]+?) -->")
_BLOCK = r"^```{0}\n(?P<{0}>.*?)^```\n"
_PROGRAM = re.compile(_BLOCK.format("python") + rf"(?:\n{_BLOCK.format('text')})?", re.DOTALL | re.MULTILINE)
_ODD_FENCE = re.compile(r"^ *(?:```|~~~) *(?:py|py3|python3|Python|\{[^}]*py[^}]*\})\b", re.MULTILINE)
_ID = re.compile(r"\b[0-9a-f]{56}\b|(?<=\()[0-9a-f]{6}(?=\))")
_MARK = "\x1e"


class Program(NamedTuple):
    """What a document shows.

    Attributes:
        blocks: Its parts.
        printed: What each of them prints; None where the document does not say.
    """

    blocks: tuple[str, ...]
    printed: tuple[str | None, ...]

    @property
    def code(self) -> str:
        """All of it, with a mark printed after each part."""
        return f"\nprint({_MARK!r}, flush=True)\n".join(self.blocks)


def blocks_of(text: str) -> tuple[list[re.Match[str]], list[str]]:
    """The blocks of a document that are to run, and why others are not."""
    run, whys, end = [], [], 0
    for found in _PROGRAM.finditer(text):
        why = _NOT_RUN.search(text, end, found.start())
        end = found.end()
        if why:
            whys.append(why["why"])
        else:
            run.append(found)
    return run, whys


def programs_of(text: str) -> list[Program]:
    """The programs of a document."""
    pairs = [(found["python"], found["text"]) for found in blocks_of(text)[0]]
    if _ONE in text and pairs:
        return [Program(*zip(*pairs, strict=True))]
    return [Program((code,), (printed,)) for code, printed in pairs]


TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
PROGRAMS = {f"{name}:{at}": program for name, text in TEXTS.items() for at, program in enumerate(programs_of(text), 1)}
"""Document and place -> the program."""

FIRST = "README.md:1"
"""Where a reader begins."""


_LOST = "not found in RDT object store"
"""What Ray says where a transfer of Direct Transport never came, which was seen once on a busy machine."""


FORKS = """
import os, runpy, sys
import numpy, ray, raycollect

for line in sys.stdin:
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

program = line.rstrip()
for fd, name, flags in (0, os.devnull, os.O_RDONLY), (1, "printed", os.O_WRONLY), (2, "errors", os.O_WRONLY):
    os.dup2(os.open(name, flags | os.O_CREAT | os.O_TRUNC, 0o600), fd)
runpy.run_path(program, run_name="__main__")
"""
"""Makes a process for each program that it is told of. It has imported what all of them import, and nothing else."""


class Programs:
    """Runs programs as a user would, each in a process of its own, but on the Ray of the tests.

    Args:
        folder: One for all programs: what they leave there is theirs to remove.
        address: That of the Ray.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.forks = subprocess.Popen(
            [sys.executable, "-c", FORKS],
            cwd=folder,
            env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.run = functools.cache(self._run)  # some documents show the same program

    def _run(self, code: str) -> str:
        """Gives what a program printed."""
        program = self.folder / "program.py"
        program.write_text(code, encoding="utf-8")
        for _ in range(2):
            exitcode = self._wait_for(program.name)
            errors = (self.folder / "errors").read_text(encoding="utf-8")
            if _LOST not in errors:
                break
        assert exitcode == 0, errors
        printed = (self.folder / "printed").read_text(encoding="utf-8")
        return "".join(line for line in printed.splitlines(keepends=True) if "(raylet)" not in line)  # Ray's own words

    def _wait_for(self, program: str) -> int:
        print(program, file=self.forks.stdin, flush=True)
        if not select.select([self.forks.stdout], [], [], LIMIT_S)[0]:
            os.killpg(self.forks.pid, signal.SIGKILL)
            pytest.fail(f"the program still runs after {LIMIT_S} s")
        return int(self.forks.stdout.readline())

    def close(self) -> None:
        """Ends the process that makes the others."""
        with self.forks:
            self.forks.stdin.close()


@pytest.fixture(scope="module")
def programs(cluster, tmp_path_factory):
    """What runs them."""
    import ray

    made = Programs(tmp_path_factory.mktemp("documents"), ray.get_runtime_context().gcs_address)
    yield made
    made.close()


def _skip_without(code):
    """Skips a program that needs what is not here."""
    import ray

    for said, library in NEEDS.items():
        if said in code:
            pytest.importorskip(library)
    if "num_gpus=" in code and not ray.cluster_resources().get("GPU"):
        pytest.skip("the Ray of the tests has no GPU")


def _marked(name):
    """`.ci/run` runs them all; `make test` the one that a reader meets first."""
    return pytest.param(name, marks=[pytest.mark.full] * (name != FIRST))


@pytest.mark.parametrize("name", [_marked(name) for name in PROGRAMS])
def test_document_program_prints_its_documented_output(programs, name):
    program = PROGRAMS[name]
    _skip_without(program.code)

    told = programs.run(program.code).split(f"{_MARK}\n")

    assert len(told) == len(program.blocks)
    for found, printed in zip(told, program.printed, strict=True):
        if printed is not None:
            assert _ID.sub("id", found) == _ID.sub("id", printed)


def test_blocks_that_are_not_run_are_listed():
    assert {name: whys for name, text in TEXTS.items() if (whys := blocks_of(text)[1])} == NOT_RUN


def test_no_block_is_hidden_by_its_fence():
    assert {name: odd for name, text in TEXTS.items() if (odd := _ODD_FENCE.findall(text))} == {}


def test_every_comment_precedes_a_block():
    for name, text in TEXTS.items():
        assert len(_NOT_RUN.findall(text)) == len(blocks_of(text)[1]), name
        assert _ONE not in text or len(blocks_of(text)[0]) > 1, name
