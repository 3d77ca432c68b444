"""What an allreduce would cost on a cluster that you do not have: 1 to 64 hosts of 8 ranks, by each algorithm.

python examples/simulate.py
python examples/simulate.py --output allreduce.png

It needs no Ray, and matplotlib only for the plot. It uses the link costs that `raycollect bench --calibrate` has found,
or the defaults. Set RAYCOLLECT_COSTS to the file of another system to ask about that one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raycollect import backends
from raycollect.group import link_costs
from raycollect.planner import Cluster, Prediction, predict
from raycollect.planner.wording import nbytes_words, seconds_words

HOSTS = (1, 2, 4, 8, 16, 32, 64)
RANKS_PER_HOST = 8
SIZES = (64 << 10, 4 << 20, 256 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of group to choose from.

    Attributes:
        backend: Its backend.
        bitwise: Whether every element is folded in rank order.
    """

    backend: str
    bitwise: bool

    def predict(self, nbytes: int, hosts: int) -> tuple[Prediction, ...]:
        """What each algorithm would cost, the fastest first."""
        known = link_costs.current()
        cluster = Cluster(
            hosts=hosts,
            ranks_per_host=RANKS_PER_HOST,
            inside=known.inside,
            between=known.between,
            backend=backends.get(self.backend),
            bitwise=self.bitwise,
        )
        return predict("allreduce", nbytes, cluster)


KINDS = (Kind(backend="tcp", bitwise=True), Kind(backend="gloo", bitwise=False))


def rows() -> Iterator[tuple[int, int, str, Prediction]]:
    """(bytes, hosts, backend, prediction) of all cases."""
    for nbytes in SIZES:
        for hosts in HOSTS:
            for kind in KINDS:
                for prediction in kind.predict(nbytes, hosts):
                    yield nbytes, hosts, kind.backend, prediction


def show(found: Sequence[tuple[int, int, str, Prediction]]) -> None:
    """Prints the table."""
    print(f"{'bytes':>8} {'hosts':>5} {'ranks':>5}  {'backend':<7} {'algorithm':<12} {'time':>8} {'between hosts':>14}")
    for nbytes, hosts, backend, one in found:
        print(
            f"{nbytes_words(nbytes):>8} {hosts:>5} {hosts * RANKS_PER_HOST:>5}  {backend:<7} {one.name:<12} "
            f"{seconds_words(one.time_s):>8} {nbytes_words(one.nbytes_between):>14}"
        )


def draw(found: Sequence[tuple[int, int, str, Prediction]], path: str) -> None:
    """Plots time against hosts, one panel for each size."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(SIZES), figsize=(10, 3.6), layout="constrained")
    for panel, size in zip(panels, SIZES, strict=True):
        lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for nbytes, hosts, backend, one in found:
            if nbytes == size:
                lines.setdefault((backend, one.name), []).append((hosts, one.time_s))
        for (backend, name), points in lines.items():
            style = {"color": {"tcp": "#4878a8", "gloo": "#d08040"}[backend], "ls": "-" if name == "native" else "--"}
            panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=f"{backend}, {name}", **style)
        panel.set(
            title=f"{nbytes_words(size)} per rank",
            xlabel=f"hosts of {RANKS_PER_HOST} ranks",
            xscale="log",
            yscale="log",
        )
        panel.set_xticks(HOSTS, list(map(str, HOSTS)))
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds, predicted")
    panels[0].legend(fontsize="small")
    figure.savefig(path, dpi=75)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Predicts allreduce on 1 to 64 hosts.")
    parser.add_argument("--output", metavar="FILE", help="also plot to this file")
    output = parser.parse_args(arguments).output
    found = list(rows())
    show(found)
    if output:
        draw(found, output)


if __name__ == "__main__":
    main()
