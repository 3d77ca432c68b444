"""Steps of DistributedDataParallel on the process group of raycollect and on gloo: one model, in the same processes.

A step is what a training loop does: forward, backward with the gradients averaged meanwhile, SGD. The model has layers
of 1024 x 1024 (4 MB), and batches of 8, so that a step is mostly gradients. The time of a step is that of the rank on
which it lasted longest.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import names
from benchmarks.report import Record, Skipped
from benchmarks.suite import Choice, Maker, entry, sweep
from benchmarks.targets import MB

NAME = "ddp"
TITLE = "a step of DistributedDataParallel, float32, gradients averaged"
REFERENCE = names.TORCH
NEEDS_RAY = False

SIZES = (4 * MB, 16 * MB, 64 * MB)
BURST = 4
_BACKENDS = {names.HOOK: "raycollect", names.ORDINARY: "raycollect", names.TORCH: "gloo"}
_WIDTH, _BATCH = 1024, 8
_ANSWER_S = 120.0


def measure(choice: Choice) -> Iterator[Record]:
    """Measures over 2 processes."""
    for ranks in choice.ranks or (2,):
        choice.progress(f"{NAME}: starts {ranks} processes")
        with processes(ranks) as pipes:
            makers: list[Maker] = [entry(name, Trained, pipes) for name in _BACKENDS]
            sizes = choice.sizes or SIZES
            yield from sweep(
                NAME, choice, makers, op="step", ranks=ranks, sizes=sizes, runs=lambda _: (20, 60), burst=BURST
            )


@contextmanager
def processes(ranks: int) -> Iterator[Sequence[Connection]]:
    """Processes that have both process groups, and their pipes, by rank."""
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(ranks)]
    with tempfile.TemporaryDirectory() as place:
        started = [
            spawn.Process(target=work, args=(theirs, rank, ranks, f"file://{place}/store"), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for one in started:
            one.start()
        try:
            yield [mine for mine, _ in pairs]
        finally:
            for mine, theirs in pairs:
                mine.close()
                theirs.close()
            for one in started:
                one.join(10)
                one.kill()


class Trained:
    """One model on one process group.

    Args:
        name: What it is called.
        pipes: Those of the processes, by rank.
    """

    def __init__(self, name: str, pipes: Sequence[Connection]) -> None:
        if import_module("importlib.util").find_spec("torch") is None:
            raise Skipped("torch is not installed")
        self.name = name
        self._pipes = pipes

    def prepare(self, nbytes: int) -> None:
        """Makes the model, with gradients of this size."""
        self._ask("prepare", nbytes)

    def fill(self) -> None:
        """Does nothing: the model goes on from where it is."""

    def run(self, count: int) -> Sequence[float]:
        """So many steps."""
        return [max(ranks) for ranks in zip(*self._ask("run", count), strict=True)]

    def check(self, runs: int) -> None:
        """Compares the ranks' parameters, which have to be the same bits."""
        found = self._ask("check", runs)
        if len(set(found)) > 1:
            raise AssertionError(f"{self.name}: ranks have other parameters, {found}")

    def close(self) -> None:
        """Drops the model."""
        self._ask("drop", 0)

    def _ask(self, what: str, number: int) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((self.name, what, number))
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(_ANSWER_S):
            raise TimeoutError(f"{self.name}: a rank does not answer")
        return pipe.recv()


def work(pipe: Connection, rank: int, ranks: int, store: str) -> None:
    """A rank: does what it is asked for until the pipe is closed."""
    torch: Any = import_module("torch")
    import_module("raycollect.torch")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    groups = {name: torch.distributed.new_group(backend=backend) for name, backend in _BACKENDS.items()}
    models: dict[str, _Model] = {}
    while True:
        try:
            name, what, number = pipe.recv()
        except (EOFError, OSError):
            break
        if what == "prepare":
            models[name] = _Model(torch, groups[name], number, rank, with_hook=name == names.HOOK)
            answer: Any = None
        else:
            answer = getattr(models[name], what)(number)
        pipe.send(answer)
    torch.distributed.destroy_process_group()


class _Model:
    """A model on a process group, in one rank."""

    def __init__(self, torch: Any, group: Any, nbytes: int, rank: int, *, with_hook: bool) -> None:
        self._torch, self._group = torch, group
        self._x = torch.randn(_BATCH, _WIDTH, generator=torch.Generator().manual_seed(rank))
        torch.manual_seed(0)
        count = max(1, nbytes // (4 * _WIDTH * _WIDTH))
        layers = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count)))
        made = torch.nn.parallel.DistributedDataParallel
        self._model = made(layers, process_group=group, gradient_as_bucket_view=True)
        if with_hook:
            self._model.register_comm_hook(group, import_module("raycollect.torch").allreduce_hook)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3)

    def run(self, count: int) -> list[float]:
        spent = []
        for _ in range(count):
            self._torch.distributed.barrier(self._group)
            began_s = time.perf_counter()
            self._optimizer.zero_grad()
            self._model(self._x).square().mean().backward()
            self._optimizer.step()
            spent.append(time.perf_counter() - began_s)
        return spent

    def check(self, _: int) -> float:
        return float(sum(one.detach().double().sum() for one in self._model.parameters()))

    def drop(self, _: int) -> None:
        del self._model, self._optimizer
