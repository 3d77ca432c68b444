"""Runs the notebooks of this folder again, and stores their outputs.

    python -m examples.notebooks.refresh [--force] [NAME ...]

A notebook stays unchanged if the new outputs differ only in what varies between runs: ids, process numbers and times,
and all output of cells tagged ``measured``. ``--force`` stores it in any case, for new times.
Needs the packages of ``raycollect[test]``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any, cast

import nbformat
import ray
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))

FAILS = "raises-exception"
"""The tag of cells that are meant to fail."""

MEASURED = "measured"
"""The tag of cells whose output contains times, or amounts of the moment."""

STORED_ADDRESS = "10.0.0.1"
"""Replaces the address of the machine in stored outputs."""

TIMEOUT_S = 60

_FOREIGN = re.compile(r"IProgress not found|import tqdm as notebook_tqdm|pip install -U ipywidgets|\(raylet\)")
"""Warnings of Ray and tqdm about a Jupyter without ipywidgets, and lines of Ray's node process."""

_VARYING = (
    (re.compile(r"\x1b\[[0-9;]*m"), ""),
    (re.compile(r"(?:[^\s\"'(]*/)?ipykernel_\d+/\d+\.py:\d+"), "CELL"),
    (re.compile(r"\bin [A-Z]\w*\.(?=\w)"), "in "),  # a method's class, which Python 3.10 does not know
    (re.compile(r"\b[0-9a-f]{40,}\b"), "ID"),
    (re.compile(r"\(([0-9a-f]{6})\)"), "(ID)"),
    (re.compile(r"\b(node) [0-9a-f]{6}\b"), r"\1 ID"),
    (re.compile(r"\bderived-[0-9a-f]{6}\b"), "derived-ID"),
    (re.compile(r"\b[0-9a-f]{8}\b(?=  )"), "ID"),  # a node in a table of the command line
    (re.compile(r"\bjob [0-9a-f]{8}\b"), "job ID"),
    (re.compile(r"\b\d+\.\d+\.\d+\.\d+(?::\d+)?\b"), "HOST"),
    (re.compile(r"\b(pid|process) \d+\b"), r"\1 PID"),
    (re.compile(r"(style=\\?\"text-align:right[^>]*>)\d{2,}(?=</td>)"), r"\1PID"),
    (re.compile(r"(?<=  )\d{2,}(?=  )"), "PID"),
    (re.compile(r"\b\d[\d.,]* (?:us|ms|s|min)\b"), "TIME"),
    (re.compile(r"\(the (?:connection|peer) [^)]*\)"), "(GONE)"),  # whichever connection showed it
    (re.compile(r"[ \t]+"), " "),
)
"""What varies between runs -> its replacement when outputs are compared."""

_TAG = re.compile(r"</?[a-z][^>]*>")


def load(name: str) -> NotebookNode:
    """Reads a notebook of this folder."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def tags(cell: NotebookNode) -> list[str]:
    """The tags of a cell."""
    return list(cell.metadata.get("tags", []))


def run(notebook: NotebookNode, environment: Mapping[str, str]) -> NotebookNode:
    """Runs all cells in a kernel of their own.

    Args:
        notebook: The notebook; it stays unchanged.
        environment: The kernel's environment; its ``RAY_ADDRESS`` names the Ray cluster.

    Returns:
        The notebook with the outputs of this run.

    Raises:
        CellExecutionError: A cell failed that is not tagged as failing.
    """
    fresh = cast(NotebookNode, nbformat.from_dict(json.loads(json.dumps(notebook))))  # a deep copy
    client = NotebookClient(fresh, timeout=TIMEOUT_S, record_timing=False, kernel_name="python3")
    client.resources["metadata"] = {"path": str(FOLDER)}
    client.execute(env=dict(environment))
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = _tidy(cell.outputs)
    return fresh


def _tidy(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs without foreign lines; all text of one stream is one output."""
    kept: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream":
            lines = output.text.splitlines(keepends=True)
            text = "".join(line for line in lines if not _FOREIGN.search(line))
            last = kept[-1] if kept else None
            if last is not None and last.output_type == "stream" and last.name == output.name:
                last.text += text
                continue
            output.text = text
        kept.append(output)
    return [one for one in kept if one.output_type != "stream" or one.text.strip()]


# ---------------------------------------------------------------------------------------------- what a cell shows


def words(cell: NotebookNode) -> str:
    """The outputs of a cell as text, without what varies; for measurements only the kinds of output."""
    if MEASURED in tags(cell):
        return ", ".join(sorted({kind for output in cell.outputs for kind in _kinds(output)}))
    return "\n".join(masked(_text(output)).strip() for output in cell.outputs)


def _kinds(output: NotebookNode) -> list[str]:
    return sorted(output.get("data", {})) or [output.get("name", output.output_type)]


def _text(output: NotebookNode) -> str:
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    if output.output_type == "stream":
        return str(output.text)
    texts = [str(value) for kind, value in sorted(output.data.items()) if kind == "text/plain"]
    pages = [str(value) for kind, value in sorted(output.data.items()) if kind == "text/html"]
    return "\n".join([*texts, *(unescape(_TAG.sub("  ", page)) for page in pages)])


def masked(text: str) -> str:
    """Replaces what varies between runs."""
    for pattern, stand_in in _VARYING:
        text = pattern.sub(stand_in, text)
    return text


def is_as_stored(stored: NotebookNode, fresh: NotebookNode) -> bool:
    """Whether a new run differs from the stored one only in what varies."""
    return [_raw(cell) for cell in stored.cells] == [_raw(cell) for cell in fresh.cells]


def _raw(cell: NotebookNode) -> tuple[str, ...]:
    if cell.cell_type != "code":
        return cell.id, cell.source
    shown = words(cell) if MEASURED in tags(cell) else masked(json.dumps(cell.outputs))
    return cell.id, cell.source, str(cell.execution_count), shown


# ---------------------------------------------------------------------------------------------- the command


def refresh(name: str, environment: Mapping[str, str], *, is_forced: bool = False) -> bool:
    """Runs a notebook, and stores it if something has changed; returns whether it was stored."""
    stored = load(name)
    text = nbformat.writes(run(stored, environment))
    fresh = nbformat.reads(text.replace(ray.util.get_node_ip_address(), STORED_ADDRESS), as_version=4)
    if is_as_stored(stored, fresh) and not is_forced:
        return False
    fresh.metadata = {"kernelspec": fresh.metadata.kernelspec, "language_info": {"name": "python"}}
    nbformat.validate(fresh)
    nbformat.write(fresh, FOLDER / f"{name}.ipynb")
    return True


def environment_of(address: str, home: str) -> dict[str, Any]:
    """The environment of a kernel.

    Args:
        address: The Ray cluster's.
        home: An empty folder: measured costs of this machine would change the predicted times.
    """
    commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {
        **os.environ,
        "RAY_ADDRESS": address,
        "PATH": commands,
        "PYTHONPATH": str(FOLDER.parents[1]),
        "IPYTHONDIR": home,
        "XDG_CONFIG_HOME": home,
    }


def main(arguments: list[str] | None = None) -> None:
    """Runs the named notebooks, on a Ray cluster of their own."""
    parser = argparse.ArgumentParser(description="Runs the notebooks again, and stores what they show.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--force", action="store_true", help="store also what shows nothing new")
    asked = parser.parse_args(arguments)
    names = asked.names or NAMES
    if strange := sorted(set(names) - set(NAMES)):
        parser.error(f"no notebook {', '.join(strange)}; there are {', '.join(NAMES)}")
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as home:
            for name in names:
                environment = environment_of(ray.get_runtime_context().gcs_address, home)
                is_stored = refresh(name, environment, is_forced=asked.force)
                print(f"{name}: {'stored' if is_stored else 'as it was'}")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
