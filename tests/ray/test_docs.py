"""The programs in the documents run, and print what the documents say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    "README.md",
    "docs/captured.md",
    "docs/failures.md",
    "docs/imperative.md",
    "docs/ordering.md",
    "docs/rank-tables.md",
    "docs/scheduling.md",
    "docs/shared-memory.md",
)

_BLOCK = r"^```{0}\n(?P<{0}>.*?)^```\n"
_PROGRAM = re.compile(_BLOCK.format("python") + rf"(?:\n{_BLOCK.format('text')})?", re.DOTALL | re.MULTILINE)

PROGRAMS = {
    f"{name}:{at}": (found["python"], found["text"])
    for name in DOCUMENTS
    for at, found in enumerate(_PROGRAM.finditer((ROOT / name).read_text(encoding="utf-8")), 1)
}
"""Document and place -> the program, and what it prints if the document says so."""


def _run(code, folder):
    """Runs a program as a user would, but on the Ray of the tests; gives what it printed."""
    import ray

    program = folder / "program.py"
    program.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, program.name],
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return "".join(line for line in done.stdout.splitlines(keepends=True) if "(raylet)" not in line)  # Ray's own words


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_documents_program_does_what_it_says(cluster, tmp_path, program):
    code, printed = PROGRAMS[program]
    if "import torch\n" in code:
        pytest.importorskip("torch")

    told = _run(code, tmp_path)

    if printed is not None:
        assert told == printed


def test_every_document_has_programs():
    assert {program.partition(":")[0] for program in PROGRAMS} == set(DOCUMENTS)


def test_a_program_that_fails_is_told(cluster, tmp_path):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        _run("1 / 0", tmp_path)
