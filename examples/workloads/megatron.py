"""Post-training: a tensor-parallel trainer feeds engines that are cut otherwise.

    python -m examples.workloads.megatron [--tp 4] [--steps 8] [--runs 9] [--width 256] [--json]

The trainer is a small Megatron: its tensor-parallel ranks hold a fused QKV projection each, and a vocabulary that is
padded until all ranks hold equally much. The engines hold Q, K and V apart, over two tensor-parallel ranks, twice: two
replicas. One call, `reshard_refs`, brings the weights from the one layout to the other, in place; the layouts say how
each side cuts its tensors, and nothing else is written for it.

First the trainer learns to predict the next token of a fixed text. After each step the weights go to the engines, and
the program checks that both engines compute the logits, and so the loss, that the trainer computes; that they did not
before; and that the padding stays as it was.

Then it times the ways in which the weights can get there, and checks after each that they did:

- `reshard_refs`, by calls and captured;
- by `ray.util.collective`: the first rank of the trainer gathers the full tensors and broadcasts them, and each rank of
  an engine takes its share;
- through the object store: each rank of the trainer puts its tensors there, and each rank of an engine takes its share.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import ray
import torch
from torch.nn import functional

import raycollect as col
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ending, ensure_ray

VOCABULARY = 1000
PADDED_TO = 128
"""The trainer's vocabulary is a multiple of it."""
HEAD = 16
LAYERS = 2
ENGINE_TP = 2
REPLICAS = 2
LEARNING_RATE = 0.02
TOKENS = torch.arange(64) * 7 % 50 * 19 % VOCABULARY

Layouts = dict[str, col.Layout]


def layouts(width: int, mesh: Mapping[str, int], *, is_fused: bool) -> Layouts:
    """How a model is cut: vocabulary, heads and hidden units over ``tp``, as Megatron and the engines do it."""
    make = partial(col.layout, mesh=mesh)
    found = {name: make([VOCABULARY, width], spec=("tp",)) for name in ("embedding", "head")}
    if is_fused:  # the padding is in no layout: `Shard.weights` gives the rest of each rank's rows
        rows = -(-VOCABULARY // PADDED_TO) * PADDED_TO // mesh["tp"]
        cuts = [(min(rank * rows, VOCABULARY), min((rank + 1) * rows, VOCABULARY)) for rank in range(mesh["tp"])]
        regions = [col.Region(rank=at, box=(cut, (0, width)), at=(0, 0)) for at, cut in enumerate(cuts)]
        found = dict.fromkeys(found, col.Layout.of_regions([VOCABULARY, width], regions))
    for at in range(LAYERS):
        qkv = {f"{at}.{name}": make([width, width], spec=("tp",)) for name in "qkv"}
        found |= col.fused_layouts(f"{at}.qkv", qkv) if is_fused else qkv
        found[f"{at}.norm"] = make([width])
        found[f"{at}.out"] = make([width, width], spec=(None, "tp"))
        found[f"{at}.up"] = make([4 * width, width], spec=("tp",))
        found[f"{at}.down"] = make([width, 4 * width], spec=(None, "tp"))
    return found


# ---------------------------------------------------------------------------------------------- a model that is cut


class Spread(torch.autograd.Function):
    """What all ranks have goes into what each has cut: the gradients of all are added up."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        total = gradient.clone()
        col.allreduce(total, ctx.group)
        return total, None


class Total(torch.autograd.Function):
    """The sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, group: str) -> torch.Tensor:
        total = states.clone()
        col.allreduce(total, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


class Shard(col.CollectiveParticipant):
    """One tensor-parallel rank of a model with attention, which computes together with the others of `group`."""

    def begin(self, rank: int, side: Mapping[str, Any], group: str, place: int) -> None:
        """Makes the rank's module.

        Args:
            rank: In the side's layouts.
            side: The arguments of `layouts`.
            group: The name of the tensor-parallel group.
            place: The rank in it.
        """
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.rank, self.group, self.place, self.is_fused = rank, group, place, side["is_fused"]
        self.layouts = layouts(**side)
        self.begun = 0  # the first row of the vocabulary here
        self.module = torch.nn.ParameterDict()
        for name, one in self.layouts.items():
            key, shape = one.key or name, one.local_shape(rank)
            assert shape is not None
            if name in ("embedding", "head"):
                self.begun, self.held = one.regions.of_rank[rank][0].box[0][0], shape[0]
                shape = (-(-VOCABULARY // PADDED_TO) * PADDED_TO // side["mesh"]["tp"], shape[1])
            elif one.key:
                shape = (3 * shape[1] // side["mesh"]["tp"], shape[1])
            if key.replace(".", "_") not in self.module:
                made = torch.ones(shape) if name.endswith("norm") else torch.randn(shape) / shape[-1] ** 0.5
                self.module[key.replace(".", "_")] = torch.nn.Parameter(col.array(made))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE, momentum=0.9)

    def _of(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.module[name.replace(".", "_")]
        return found

    @torch.no_grad()
    def weights(self) -> dict[str, torch.Tensor]:
        """The rank's tensors without their padding, as views."""
        found = {one.key or name: self._of(one.key or name).detach() for name, one in self.layouts.items()}
        return found | {name: found[name][: self.held] for name in ("embedding", "head")}

    def logits(self) -> torch.Tensor:
        """Of each next token, by this rank's part of the vocabulary, [tokens, held]."""
        local = TOKENS - self.begun
        is_here = (local >= 0) & (local < self.held)
        states = functional.embedding(local.clamp(0, self.held - 1), self._of("embedding")) * is_here[:, None]
        states = Total.apply(states, self.group)
        for at in range(LAYERS):
            inner = Spread.apply(functional.rms_norm(states, states.shape[1:], self._of(f"{at}.norm")), self.group)
            fused = self._of(f"{at}.qkv") if self.is_fused else torch.cat([self._of(f"{at}.{name}") for name in "qkv"])
            q, k, v = (inner @ fused.T).unflatten(1, (3, -1, HEAD)).permute(1, 2, 0, 3)
            heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            states = states + Total.apply(heads.transpose(0, 1).flatten(1) @ self._of(f"{at}.out").T, self.group)
            hidden = functional.silu(Spread.apply(states, self.group) @ self._of(f"{at}.up").T)
            states = states + Total.apply(hidden @ self._of(f"{at}.down").T, self.group)
        found: torch.Tensor = Spread.apply(states, self.group) @ self._of("head")[: self.held].T
        return found

    def learn(self) -> float:
        """A step of the trainer; returns the loss before it."""
        self.optimizer.zero_grad()
        logits, target = self.logits()[:-1], TOKENS[1:] - self.begun
        most = logits.detach().max(dim=1).values
        col.allreduce(most, self.group, op="max")
        scale = Total.apply((logits - most[:, None]).exp().sum(dim=1), self.group)
        is_here = (target >= 0) & (target < self.held)
        right = Total.apply(
            (logits.gather(1, target.clamp(0, self.held - 1)[:, None])[:, 0] - most) * is_here, self.group
        )
        loss = (scale.log() - right).mean()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @col.by_value
    @torch.no_grad()
    def seen(self) -> Any:
        """The logits, for the driver."""
        return self.logits().numpy()

    def padding(self) -> float:
        """The sum of what is in no layout."""
        return float(sum(self._of(name)[self.held :].detach().abs().sum() for name in ("embedding", "head")))

    def disturb(self) -> None:
        """Changes all weights."""
        for tensor in self.weights().values():
            tensor += 0.01

    # For the other ways:

    @col.by_value
    def put(self) -> dict[str, Any]:
        return {name: tensor.numpy() for name, tensor in self.weights().items()}

    def take(self, theirs: Layouts, *parts: dict[str, Any]) -> None:
        """Puts the full tensors together from what the trainer's ranks have put, and takes its share."""
        self.cut(full_of(theirs, parts))

    def cut(self, full: Mapping[str, Any]) -> None:
        """Takes its share of full tensors."""
        mine = self.weights()
        for name, one in self.layouts.items():
            for region in one.regions.of_rank[self.rank]:
                mine[name].numpy()[local_slices(region)] = full[name][global_slices(region)]

    def join(self, ranks: int, rank: int) -> None:
        import_module("ray.util.collective").init_collective_group(ranks, rank, "gloo", "by hand")

    def gather(self, rank: int, theirs: Layouts, count: int) -> None:
        """The first rank of the trainer gets what the others have; then all get all of it."""
        collective = import_module("ray.util.collective")
        flat = np.empty(sum(int(np.prod(one.shape)) for one in theirs.values()), np.float32)
        if 0 < rank < count:
            for part in self.put().values():
                collective.send(np.ascontiguousarray(part), 0, "by hand")
        if rank == 0:
            parts = [self.put()]
            for peer in range(1, count):
                shapes = {one.key or name: _local_shape(theirs, one.key or name, peer) for name, one in theirs.items()}
                parts.append({key: np.empty(shape, np.float32) for key, shape in shapes.items()})
                for part in parts[-1].values():
                    collective.recv(part, peer, "by hand")
            flat[...] = np.concatenate([one.ravel() for one in full_of(theirs, parts).values()])
        collective.broadcast(flat, 0, "by hand")
        if rank >= count:
            ends = np.cumsum([int(np.prod(one.shape)) for one in theirs.values()])[:-1]
            pairs = zip(theirs.items(), np.split(flat, ends), strict=True)
            self.cut({name: part.reshape(one.shape) for (name, one), part in pairs})


def full_of(side: Layouts, parts: Any) -> dict[str, Any]:
    """The full tensors, from what the ranks of a side hold."""
    found = {}
    for name, one in side.items():
        whole = found[name] = np.empty(one.shape, np.float32)
        for region in one.regions.rows:
            whole[global_slices(region)] = parts[region.rank][one.key or name][local_slices(region)]
    return found


def _local_shape(side: Layouts, key: str, rank: int) -> tuple[int, ...]:
    shapes = [one.local_shape(rank) or () for name, one in side.items() if (one.key or name) == key]
    return tuple(max(sizes) for sizes in zip(*shapes, strict=True))


def global_slices(region: col.Region) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in region.box)


def local_slices(region: col.Region) -> tuple[slice, ...]:
    return tuple(slice(at, at + hi - lo) for at, (lo, hi) in zip(region.at, region.box, strict=True))


# ---------------------------------------------------------------------------------------------- the driver


Actor: Any = ray.remote(num_cpus=0)(Shard)


def logits_of(shards: list[Any]) -> Any:
    """The logits of a model, from the parts of its ranks."""
    return np.concatenate(ray.get([one.seen.remote() for one in shards]), axis=1)


def loss_of(logits: Any) -> float:
    return float(functional.cross_entropy(torch.from_numpy(logits)[:-1], TOKENS[1:]))


def learn(trainer: list[Any], engines: list[list[Any]], sync: Callable[[], object], steps: int) -> list[Check]:
    """Trains, brings the weights to the engines after each step, and tells what must hold."""
    padding = ray.get([one.padding.remote() for engine in engines for one in engine])
    losses, apart, together = [], [], []
    for _ in range(steps):
        losses.append(ray.get([one.learn.remote() for one in trainer])[0])
        expected = logits_of(trainer)
        apart += [float(np.abs(logits_of(engine) - expected).max()) for engine in engines]
        sync()
        together += [float(np.abs(logits_of(engine) - expected).max()) for engine in engines]
    found = loss_of(logits_of(engines[-1])), loss_of(logits_of(trainer))
    same = ray.get([one.padding.remote() for engine in engines for one in engine]) == padding
    return [
        Check(name="the loss falls", found=f"{losses[0]:.2f} to {losses[-1]:.2f}", good=losses[-1] < 0.9 * losses[0]),
        Check(name="logits before a sync", found=f"differ by {min(apart):.2g} and more", good=min(apart) > 1e-3),
        Check(name="logits after each sync", found=f"differ by {max(together):.1g} at most", good=max(together) < 1e-4),
        Check(name="losses", found=f"{found[0]:.5f}, {found[1]:.5f}", good=abs(found[0] - found[1]) < 1e-5),
        Check(name="padding", found="as it was" if same else "changed", good=same),
    ]


def main(tp: int = 4, steps: int = 8, runs: int = 9, width: int = 256) -> Report:
    """Learns, then times.

    Args:
        tp: How many tensor-parallel ranks the trainer has.
        steps: How often it learns.
        runs: How often each way is timed.
        width: Of the model.
    """
    ensure_ray()
    sides = [
        {"width": width, "mesh": {"tp": tp}, "is_fused": True},
        {"width": width, "mesh": {"dp": REPLICAS, "tp": ENGINE_TP}, "is_fused": False},
    ]
    src, dst = (layouts(**side) for side in sides)  # type: ignore[arg-type]
    count = tp + REPLICAS * ENGINE_TP
    with ending([Actor.remote() for _ in range(count)]) as actors:
        trainer, rest = actors[:tp], actors[tp:]
        engines = [rest[at : at + ENGINE_TP] for at in range(0, len(rest), ENGINE_TP)]
        teams = [trainer, *engines]
        for number, team in enumerate(teams):
            col.declare_collective_group(team, group_name=f"tp {number}")
            first = max(0, number - 1) * ENGINE_TP
            side = sides[min(number, 1)]
            ray.get([one.begin.remote(first + at, side, f"tp {number}", at) for at, one in enumerate(team)])
        ray.get([one.join.remote(count, rank) for rank, one in enumerate(actors)])
        with declared(actors, "weights") as group:
            held = [one.weights.remote() for one in actors]
            call = partial(col.reshard_refs, held[:tp], held[tp:], group, src=src, dst=dst)
            checks = learn(trainer, engines, call, steps)

            @col.step
            def sync() -> None:
                call()

            with closing(sync):
                ways: dict[str, Callable[[], object]] = {
                    "reshard_refs": call,
                    "the same, captured": sync,
                    "ray.util.collective": lambda: ray.get(
                        [one.gather.remote(rank, src, tp) for rank, one in enumerate(actors)]
                    ),
                    "object store": lambda: ray.get(
                        [one.take.remote(src, *[two.put.remote() for two in trainer]) for one in rest]
                    ),
                }
                bad = [name for name, way in ways.items() if not is_good(way, (src, dst), actors, tp)]
                spent = compare(ways, runs, warmup=1)
        for number in range(len(teams)):
            col.destroy_collective_group(f"tp {number}")
    what = f"{len(dst)} tensors, {sum(4 * int(np.prod(one.shape)) for one in dst.values()) / 1e6:.1f} MB"
    found = f"not moved by {', '.join(bad)}" if bad else "moved by each way"
    return Report(
        title=f"Weights of a trainer over {tp} ranks, in {REPLICAS} engines over {ENGINE_TP}",
        unit="sync",
        checks=(*checks, Check(name=what, found=found, good=not bad)),
        timings=(Timing(what=what, ms=spent),),
    )


def is_good(way: Callable[[], object], sides: tuple[Layouts, Layouts], actors: list[Any], tp: int) -> bool:
    """Whether all engines hold the trainer's bits after a sync of other weights."""
    src, dst = sides
    ray.get([one.disturb.remote() for one in actors[:tp]])
    way()
    parts = ray.get([one.put.remote() for one in actors])
    expected, found = full_of(src, parts[:tp]), parts[tp:]
    return all(
        np.array_equal(found[region.rank][name][local_slices(region)], expected[name][global_slices(region)])
        for name, one in dst.items()
        for region in one.regions.rows
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="A tensor-parallel trainer feeds engines that are cut otherwise.")
    made.add_argument("--tp", type=int, default=4, help="tensor-parallel ranks of the trainer (default 4)")
    made.add_argument("--steps", type=int, default=8, help="how often it learns (default 8)")
    made.add_argument("--runs", type=int, default=9, help="how often each way is timed (default 9)")
    made.add_argument("--width", type=int, default=256, help="of the model (default 256)")
    return made


if __name__ == "__main__":
    command_line(main, parser())
