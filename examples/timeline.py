"""Records three iterations of three actors, one of them slow, and draws the timeline.

python examples/timeline.py --output timeline.png
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

import raycollect as col

COLOURS = {"plan": "#7f8c8d", "method": "#f1c40f", "check": "#e67e22", "kernel": "#2471a3"}
"""The categories that are drawn; later ones cover earlier ones."""

SAID = {
    "plan": "a plan, in the driver",
    "method": "a method",
    "check": "the consistency check",
    "kernel": "kernels",
}


@ray.remote(num_cpus=0)
class Worker(col.CollectiveParticipant):
    def __init__(self, rank: int) -> None:
        self.gradient, self.late_s = col.zeros(1 << 20, np.float32), 0.004 * (rank == 2)

    def compute(self) -> Any:
        until_s = time.perf_counter() + 0.002 + self.late_s
        while time.perf_counter() < until_s:  # stands for a backward pass
            pass
        return self.gradient


def record(file: Path) -> None:
    """Writes the timeline of some iterations, after one that is not recorded."""
    workers = [Worker.remote(rank) for rank in range(3)]
    col.declare_collective_group(workers)
    col.allreduce_refs([worker.compute.remote() for worker in workers])
    with col.timeline(str(file)):
        for _ in range(3):
            col.allreduce_refs([worker.compute.remote() for worker in workers])
    col.destroy_collective_group()


def draw(file: Path, output: str) -> int:
    """Draws the file as a picture; returns how many spans it shows."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in events if one.get("name") == "process_name"}
    spans = [one for one in events if one.get("ph") == "X" and one["cat"] in COLOURS]
    rows = {pid: at for at, pid in enumerate(sorted(names, key=lambda pid: names[pid].partition(": rank")[2]))}
    first_us = min(one["ts"] for one in spans)
    figure, axes = plt.subplots(figsize=(9, 2.6), layout="constrained")
    for category, colour in COLOURS.items():
        for one in (span for span in spans if span["cat"] == category):
            begin_ms, took_ms = (one["ts"] - first_us) / 1e3, one["dur"] / 1e3
            axes.barh(rows[one["pid"]], took_ms, 0.7, begin_ms, color=colour, label=SAID[category])
    labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    shown = list(labels.values()), list(labels)
    axes.legend(*shown, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    axes.set_yticks(list(rows.values()), [names[pid].split(" (")[0].partition(" of ")[0] for pid in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.savefig(output, dpi=110)
    return len(spans)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws a timeline.")
    parser.add_argument("--output", default="timeline.png", help="where the picture goes (default timeline.png)")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "timeline.json"
        record(file)
        print(f"{draw(file, parser.parse_args().output)} spans")


if __name__ == "__main__":
    main()
