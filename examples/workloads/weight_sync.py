"""Reinforcement learning: a trainer sends its weights to several rollout workers.

    python -m examples.workloads.weight_sync [--workers 3] [--rounds 40] [--runs 9] [--json]

The trainer and each rollout worker hold a torch module of their own. A sync is one call: `broadcast_refs` of all
tensors, which overwrites the weights of the rollout workers in place. No actor calls `load_state_dict`, and nothing
goes through the object store. Autograd does not see that weights were overwritten: don't sync between a forward and its
backward pass if you train with synced weights.

First a policy learns to balance a pole (REINFORCE). While the rollout workers play, the driver has the trainer learn
from what they played before, and has called the next sync already: it waits in the actors' queues, behind the rollouts,
so each rollout sees the weights of one version from its first step to its last. The program checks that, that all
workers hold the trainer's bits after each sync, and that the returns rise; once by calls, once by a captured sync.

Then it times the sync of transformers of about 300 tensors (float32, bfloat16 and int64, some of them tiny) in these
ways, and checks after each that the weights have come to all workers:

- one flat tensor per dtype: the module's tensors are views of it (`modules.share`), by calls and captured;
- a dict of the module's tensors, likewise;
- the object store: the trainer returns its `state_dict`, each worker gets and loads it;
- the same with numpy views of the tensors, which Ray does not copy when it reads them;
- a remote call per tensor and actor.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

import raycollect as col
from examples.workloads import modules
from examples.workloads.cartpole import ACTIONS, STATE, CartPoles, Steps
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ending, ensure_ray

SEED = 0
EPISODES = 16
LONGEST = 200
LEARNING_RATE = 0.005
DISCOUNT = 0.99
WIDTHS = (32, 128, 208)
LAYERS = 24


# ---------------------------------------------------------------------------------------------- modules


class Versioned(torch.nn.Module):
    """A module whose buffer `version` counts the updates."""

    version: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))


class Policy(Versioned):
    """Returns the logits of the two pushes; [n, 4] float32 -> [n, 2] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(STATE, 64), torch.nn.Tanh(), torch.nn.Linear(64, ACTIONS))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(states)
        return logits


class Transformer(Versioned):
    """A small language model: its output layer is its embedding (tied), which is bfloat16; the layers are float32."""

    places: torch.Tensor

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.embedding = torch.nn.Embedding(2000, width, dtype=torch.bfloat16)
        self.output = torch.nn.Linear(width, 2000, bias=False, dtype=torch.bfloat16)
        self.output.weight = self.embedding.weight
        self.register_buffer("places", torch.randn(128, width), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embedding(tokens).float() + self.places[: tokens.shape[-1]]
        logits: torch.Tensor = self.output(self.encoder(states).bfloat16())
        return logits


# ---------------------------------------------------------------------------------------------- actors


class Holder(col.CollectiveParticipant):
    """Holds a module in shared memory, and an ordinary one for the ways without shared memory."""

    def begin(self, make: Callable[[], Versioned], seed: int) -> None:
        """Makes the modules, with random numbers of this seed."""
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.module = make()
        self.usual = copy.deepcopy(self.module)
        self.shared = modules.share(self.module)

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the module; they stay here, and the ref stands for them as long as it lives."""
        return modules.tensors(self.module)

    def flat(self) -> dict[str, torch.Tensor]:
        """The same in one tensor per dtype."""
        return self.shared

    def digest(self, usual: bool = False) -> str:
        """A hash of all tensors that a module has now."""
        return modules.digest(modules.tensors(self.usual if usual else self.module))

    # For the other ways:

    @col.by_value
    def state(self) -> dict[str, torch.Tensor]:
        return self.usual.state_dict()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        self.usual.load_state_dict(state)

    @col.by_value
    def views(self) -> dict[str, Any]:
        """The bytes of each tensor as an array: numpy has no bfloat16."""
        return {name: as_bytes(tensor) for name, tensor in modules.tensors(self.usual).items()}

    def load_views(self, views: dict[str, Any]) -> None:
        for name, tensor in modules.tensors(self.usual).items():
            np.copyto(as_bytes(tensor), views[name])

    @col.by_value
    def tensor(self, name: str) -> torch.Tensor:
        return modules.tensors(self.usual)[name].detach()

    def set_tensor(self, name: str, value: torch.Tensor) -> None:
        modules.tensors(self.usual)[name].detach().copy_(value)

    def names(self) -> list[str]:
        return list(modules.tensors(self.usual))


def as_bytes(tensor: torch.Tensor) -> Any:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


@ray.remote(num_cpus=0)
class Trainer(Holder):
    """Holds the weights that all others receive."""

    def begin(self, make: Callable[[], Versioned], seed: int) -> None:
        super().begin(make, seed)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=LEARNING_RATE)

    def learn(self, *played: Steps) -> float:
        """A step of REINFORCE, the mean return as the baseline of each step's; returns the mean return."""
        states = torch.from_numpy(np.concatenate([steps.states for steps in played]))
        actions = torch.from_numpy(np.concatenate([steps.actions for steps in played]))
        to_go = torch.from_numpy(np.concatenate([steps.to_go for steps in played]))
        worth = (to_go - to_go.mean()) / (to_go.std() + 1e-6)
        chosen = torch.log_softmax(self.module(states), dim=1).gather(1, actions[:, None])[:, 0]
        self.optimizer.zero_grad()
        (-(chosen * worth).mean()).backward()
        self.optimizer.step()
        self.module.version += 1
        return float(np.concatenate([steps.returns for steps in played]).mean())

    def disturb(self) -> None:
        """Replaces a step of training if only the sync is timed."""
        with torch.no_grad():
            for module in (self.module, self.usual):
                for tensor in module.state_dict().values():  # it lacks the buffer that is not persistent
                    tensor += 1 if tensor.dtype == torch.int64 else 0.01


@ray.remote(num_cpus=0)
class Rollout(Holder):
    """Plays with its weights."""

    def begin(self, make: Callable[[], Versioned], seed: int) -> None:
        super().begin(make, seed)
        self.rng = np.random.default_rng(seed)

    @col.by_value
    def play(self, episodes: int) -> Steps:
        """Plays episodes, side by side, until all have ended."""
        carts = CartPoles(episodes, self.rng)
        states, actions, alive = [], [], [np.ones(episodes, bool)]
        versions = {int(self.module.version)}
        while len(states) < LONGEST and alive[-1].any():
            seen = carts.states.astype(np.float32)
            with torch.no_grad():
                right = torch.softmax(self.module(torch.from_numpy(seen)), dim=1)[:, 1].numpy()
            pushes = (self.rng.random(episodes) < right).astype(np.int64)
            alive.append(alive[-1] & ~carts.step(pushes))
            states.append(seen)
            actions.append(pushes)
            versions.add(int(self.module.version))
        lived = np.stack(alive[:-1])  # [steps, episodes]: the reward of each step is one
        to_go = np.zeros_like(lived, np.float32)
        following = np.zeros(episodes, np.float32)
        for step in reversed(range(len(lived))):
            following = lived[step] * (1 + DISCOUNT * following)
            to_go[step] = following
        return Steps(
            states=np.stack(states)[lived],
            actions=np.stack(actions)[lived],
            to_go=to_go[lived],
            returns=lived.sum(axis=0).astype(np.float32),
            versions=tuple(sorted(versions)),
        )


# ---------------------------------------------------------------------------------------------- learning


def learn(everyone: list[Any], sync: Callable[[], object], rounds: int) -> list[Check]:
    """Trains, and has the weights synced while the workers play.

    Args:
        everyone: The trainer, then the rollout workers.
        sync: Overwrites the workers' weights, in its place in the actors' queues: after all that was called before.
        rounds: How often the trainer learns.

    Returns:
        What must hold.
    """
    trainer, *workers = everyone
    sync()
    digests = [[one.digest.remote() for one in everyone]]
    returns: list[Any] = []
    rollouts: list[list[Any]] = []
    for at in range(rounds):
        rollouts.append([worker.play.remote(EPISODES) for worker in workers])
        if at:
            returns.append(trainer.learn.remote(*rollouts[at - 1]))
        sync()  # called while they play; runs behind the rollouts and the learning
        digests.append([one.digest.remote() for one in everyone])
    mean = ray.get(returns)
    quarter = max(1, len(mean) // 4)
    first, last = float(np.mean(mean[:quarter])), float(np.mean(mean[-quarter:]))
    equal = all(len(set(ray.get(refs))) == 1 for refs in digests)
    seen = [[steps.versions for steps in ray.get(refs)] for refs in rollouts]
    whole = all(versions == [(max(0, at - 1),)] * len(workers) for at, versions in enumerate(seen))
    return [
        Check(name="mean return", found=f"{first:.0f} at first, {last:.0f} at last", good=last > 1.5 * first),
        Check(name="weights after each sync", found="the same bits" if equal else "different bits", good=equal),
        Check(name="a rollout sees", found="one version, the expected" if whole else f"{seen}", good=whole),
    ]


def broadcast(refs: list[Any], group: str) -> col.Step[[]]:
    """A sync."""

    @col.step
    def sync() -> None:
        col.broadcast_refs(refs, group_name=group)

    return sync


def begin(everyone: list[Any], make: Callable[[], Versioned]) -> None:
    """Lets every actor make a module, each a different one."""
    ray.get([one.begin.remote(make, SEED + at) for at, one in enumerate(everyone)])


def learn_in_both_ways(everyone: list[Any], rounds: int) -> list[Check]:
    """Learns with syncs by calls; then, from the beginning, with captured ones."""
    checks = []
    for way in ("calls", "captured"):
        begin(everyone, Policy)
        with declared(everyone, "weights") as group:
            refs = [one.weights.remote() for one in everyone]
            if way == "calls":
                found = learn(everyone, partial(col.broadcast_refs, refs, group_name=group), rounds)
            else:
                with closing(broadcast(refs, group)) as sync:
                    found = learn(everyone, sync, rounds)
        checks += [Check(name=f"{one.name}, {way}", found=one.found, good=one.good) for one in found]
    return checks


# ---------------------------------------------------------------------------------------------- timing


def load_from_object_store(trainer: Any, workers: list[Any]) -> None:
    state = trainer.state.remote()  # what `ray.put` would do, without going through the driver
    ray.get([worker.load.remote(state) for worker in workers])


def load_views_from_object_store(trainer: Any, workers: list[Any]) -> None:
    views = trainer.views.remote()
    ray.get([worker.load_views.remote(views) for worker in workers])


def call_per_tensor(trainer: Any, workers: list[Any], names: list[str]) -> None:
    values = {name: trainer.tensor.remote(name) for name in names}
    ray.get([worker.set_tensor.remote(name, value) for name, value in values.items() for worker in workers])


def is_good(way: Callable[[], object], everyone: list[Any], usual: bool) -> bool:
    """Whether all hold the trainer's bits after a sync, and did not before."""
    ray.get(everyone[0].disturb.remote())
    before = ray.get([one.digest.remote(usual) for one in everyone])
    way()
    after = ray.get([one.digest.remote(usual) for one in everyone])
    return before[0] not in before[1:] and after == [before[0]] * len(everyone)


def time_syncs(everyone: list[Any], make: Callable[[], Versioned], runs: int) -> tuple[Timing, Check]:
    """Times a sync of a module in all ways, and checks each of them."""
    trainer, *rollouts = everyone
    begin(everyone, make)
    held = modules.tensors(make())
    what = f"{len(held)} tensors, {sum(tensor.nbytes for tensor in held.values()) / 1e6:.1f} MB"
    with declared(everyone, "weights") as group:
        refs = [one.weights.remote() for one in everyone]
        flat = [one.flat.remote() for one in everyone]
        with closing(broadcast(refs, group)) as step, closing(broadcast(flat, group)) as flat_step:
            ours: dict[str, Callable[[], object]] = {
                "broadcast_refs, a dict": partial(col.broadcast_refs, refs, group_name=group),
                "the same, captured": step,
                "broadcast_refs, flat": partial(col.broadcast_refs, flat, group_name=group),
                "flat, captured": flat_step,
            }
            others: dict[str, Callable[[], object]] = {
                "object store, numpy views": partial(load_views_from_object_store, trainer, rollouts),
                "object store, load_state_dict": partial(load_from_object_store, trainer, rollouts),
                "a call per tensor": partial(call_per_tensor, trainer, rollouts, list(held)),
            }
            ways = ours | others
            bad = [name for name, way in ways.items() if not is_good(way, everyone, name in others)]
            spent = compare(ways, runs, warmup=1)
    return Timing(what=what, ms=spent), Check(
        name=what, found=f"not synced by {', '.join(bad)}" if bad else "synced by each way", good=not bad
    )


# ---------------------------------------------------------------------------------------------- the whole


def main(
    workers: int = 3, rounds: int = 40, runs: int = 9, widths: Sequence[int] = WIDTHS, layers: int = LAYERS
) -> Report:
    """Learns, then times.

    Args:
        workers: How many rollout workers there are.
        rounds: How often the trainer learns.
        runs: How often each way is timed.
        widths: Of the transformers whose weights are synced.
        layers: Of each of them; a layer has twelve tensors.
    """
    ensure_ray()
    with ending([Trainer.remote(), *(Rollout.remote() for _ in range(workers))]) as everyone:
        checks = learn_in_both_ways(everyone, rounds)
        timed = [time_syncs(everyone, partial(Transformer, width, layers), runs) for width in widths]
    return Report(
        title=f"Weights of a trainer in {workers} rollout workers",
        unit="sync",
        checks=(*checks, *(check for _, check in timed)),
        timings=tuple(timing for timing, _ in timed),
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="The weights of a trainer, in all rollout workers.")
    made.add_argument("--workers", type=int, default=3, help="rollout workers (default 3)")
    made.add_argument("--rounds", type=int, default=40, help="how often the trainer learns (default 40)")
    made.add_argument("--runs", type=int, default=9, help="how often each way is timed (default 9)")
    made.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of the transformers (default 32 128 208)")
    made.add_argument("--layers", type=int, default=LAYERS, help="of each of them (default 24)")
    return made


if __name__ == "__main__":
    command_line(main, parser())
