"""What type checkers see: a user's programs are clean, every public symbol has a known type, results are not `Any`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYRIGHT = (sys.executable, "-m", "pyright")

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),  # it reads all of torch's and scikit-learn's types, too
]

PROGRAM = """
from typing import Any, assert_type

import ray

import raycollect as col
from raycollect.member.work import MemberWork


class Trainer:
    @col.step
    def iteration(self, rate: float) -> object:
        return rate


@col.step
def plain(rate: float, *, depth: int = 1) -> object:
    return rate


@col.step(static=("depth",))
def static(depth: int) -> object:
    return depth


def steps(trainer: Trainer) -> None:
    assert_type(plain(0.1, depth=2), Any)
    assert_type(static.explain(2), str)
    trainer.iteration(0.1)
    plain("wrong")  # type: ignore[arg-type]
    static(depth="wrong")  # type: ignore[arg-type]
    trainer.iteration()  # type: ignore[call-arg]
    trainer.iteration(None)  # type: ignore[arg-type]


def program(refs: list[ray.ObjectRef[float]], step: col.Capture) -> None:
    assert_type(col.allreduce_refs(refs), list[ray.ObjectRef[Any]])
    assert_type(col.allreduce_refs(refs, async_op=True), col.Work)
    assert_type(col.send_ref(refs[0], refs[1]), ray.ObjectRef[Any])
    assert_type(col.barrier(async_op=True), col.Work | MemberWork)
    assert_type(col.allreduce(refs, async_op=True), MemberWork)
    assert_type(col.get(refs), list[float])
    assert_type(col.get(refs[0]), float)
    assert_type(step.run(async_op=True, rate=0.1), col.CapturedRun)
    assert_type(step.explain(), str)
    assert_type(col.plan(col.allreduce_refs, refs).explain(), str)
"""
"""The last lines of a user's program, and what the results are."""

ENVIRONMENT = {
    **os.environ,
    # The second: with `--verifytypes` pyright takes msgspec's types for unknown where it finds them by itself.
    "PYTHONPATH": os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")]),
    "PYRIGHT_PYTHON_GLOBAL_NODE": "1",
    "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What pyright says of the examples, and of the package; both are asked at the same time."""
    pytest.importorskip("pyright")
    if shutil.which("node") is None:
        pytest.skip("pyright needs node")
    asked = subprocess.run([*PYRIGHT, "--version"], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if asked.returncode:  # it is fetched from npm when it is used first
        pytest.skip(f"pyright does not run here: {(asked.stderr.strip() or asked.stdout.strip())[-300:]}")
    folder = tmp_path_factory.mktemp("pyright")
    examples = os.path.relpath(ROOT / "examples", folder)  # it takes no absolute paths there
    (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
    project = {
        "include": [examples, "program.py"],
        "strict": [f"{examples}/quickstart.py"],
        "typeCheckingMode": "basic",
        "extraPaths": [os.path.relpath(ROOT, folder)],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(project), encoding="utf-8")
    running = {
        "examples": _start("-p", str(folder)),
        "package": _start("--verifytypes", "raycollect", "--ignoreexternal"),
    }
    try:
        return {name: json.loads(process.communicate()[0]) for name, process in running.items()}
    finally:
        for process in running.values():
            process.kill()
            process.wait()
            process.stdout.close()


def _start(*args):
    command = [*PYRIGHT, "--pythonpath", sys.executable, "--outputjson", *args]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def test_the_examples_are_clean(reports):
    report = reports["examples"]
    assert report["summary"]["filesAnalyzed"] >= len(list((ROOT / "examples").rglob("*.py")))
    found = [
        f"{one['file']}:{one['range']['start']['line'] + 1}: {one['message']}" for one in report["generalDiagnostics"]
    ]
    assert not found, "\n".join(found)


def test_results_are_not_any_to_mypy(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(program)]
    found = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


_OF_OTHERS = ("raycollect.member.torch.", "raycollect.torch.TorchProcessGroup", "raycollect.verl.", "raycollect.vllm.")
"""Derived from classes of torch, verl and vLLM, which need not be there: to checkers these are Any."""


def test_every_public_symbol_has_a_known_type(reports):
    symbols = reports["package"]["typeCompleteness"]["symbols"]
    assert "raycollect.allreduce_refs" in {one["name"] for one in symbols}
    unknown = [
        f"{one['name']}: {'; '.join(told['message'] for told in one['diagnostics'])}"
        for one in symbols
        if one["isExported"] and not one["isTypeKnown"] and not one["name"].startswith(_OF_OTHERS)
    ]
    assert not unknown, "\n".join(unknown)
