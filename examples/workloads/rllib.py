"""Ray RLlib: the weights of its learner in its env runners, by RLlib's own sync and by ours.

    pip install '.[rllib]'
    python -m examples.workloads.rllib [--runners 2] [--rounds 8] [--runs 21] [--json]

PPO learns CartPole on the CPU, with one learner actor and some env runner actors, three times from the same seeds: with
RLlib's own weight sync, with `publish` and `update`, which gives a receipt for each version, and with a captured
`broadcast_refs`. The program checks that the returns of each iteration and the last weights are equal, bit for bit.

Then it times a sync of larger networks in all ways. RLlib's own takes the learner's state as arrays of numpy, puts it
into the object store, and tells the env runners to load it. It does not wait until they have: so it is timed by itself,
and with a call to each env runner behind it, which returns when that runner has the weights, as ours do.

What an RLlib program needs for this: the mixin, next to RLlib's classes of env runner and learner, whose `apply` goes
by value, as RLlib calls all else through it; and another `sync_weights`. An env runner that Ray has restarted has new
tensors: then `Sync` has to be made anew.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

import raycollect as col
from examples.workloads.report import Check, Report, Timing, command_line, compare, declared, ensure_ray

SEED = 7
OWN, PUBLISHED, CAPTURED = "RLlib's own sync", "publish and update", "broadcast_refs, captured"
WIDTHS = (256, 1024, 2048)


# ---------------------------------------------------------------------------------------------- actors


class Runner(SingleAgentEnvRunner, col.CollectiveParticipant):
    """RLlib's env runner, whose weights others may write."""

    apply = col.by_value(SingleAgentEnvRunner.apply)

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of its module: they stay here."""
        module: Any = self.module
        return dict(module.state_dict())


class Learner(PPOTorchLearner, col.CollectiveParticipant):
    """RLlib's learner, whose weights others may read."""

    apply = col.by_value(PPOTorchLearner.apply)

    def weights(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Those tensors of its module that env runners have, too: they lack the value function."""
        state = module_of(self).state_dict()
        return {name: state[name] for name in names}


def module_of(learner: Any) -> torch.nn.Module:
    module: torch.nn.Module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    return module


def names_of(runner: Any) -> list[str]:
    return list(runner.module.state_dict())


def digest_of_runner(runner: Any) -> str:
    state = sorted(runner.module.state_dict().items())
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in state)).hexdigest()


def disturb(learner: Any) -> None:
    """Replaces a step of training if only the sync is timed."""
    with torch.no_grad():
        for parameter in module_of(learner).parameters():
            parameter += 0.01
    learner._weights_seq_no += 1  # env runners ignore what is not newer


# ---------------------------------------------------------------------------------------------- syncs


class Sync:
    """The actors of an algorithm, and ours in the place of its weight sync."""

    def __init__(self, algo: Any) -> None:
        self.group = algo.env_runner_group
        self.learners = algo.learner_group
        manager = self.group._worker_manager
        self.runners = [manager.actors()[number] for number in manager.actor_ids()]
        (self.learner,) = self.learners._workers
        self.own = partial(type(self.group).sync_weights, self.group)
        names = ray.get(self.runners[0].apply.remote(names_of))
        self.source = self.learner.weights.remote(names)
        self.targets = [one.weights.remote() for one in self.runners]

    def by_rllib(self) -> None:
        self.own(from_worker_or_learner_group=self.learners, policies=[DEFAULT_MODULE_ID], inference_only=True)

    def by_rllib_until_all_have_it(self) -> None:
        self.by_rllib()
        self.group.foreach_env_runner(lambda runner: None, local_env_runner=False)

    def disturb(self) -> None:
        ray.get(self.learner.apply.remote(disturb))

    def digests(self) -> set[str]:
        return set(self.group.foreach_env_runner(digest_of_runner, local_env_runner=False))

    @contextmanager
    def published(self) -> Any:
        """Yields a sync: the newest weights as a version, in all env runners. It returns a receipt."""
        with col.publish([self.source], "rllib") as pub, col.subscribe("rllib", self.targets) as sub:

            def sync(**kwargs: Any) -> None:
                version = pub.put()
                receipt = sub.update(version)
                assert len(receipt.ranks) == len(self.runners), receipt

            yield sync

    @contextmanager
    def captured(self) -> Any:
        """Yields a sync that is traced once: a broadcast behind whatever the actors were told before."""
        with declared([self.learner, *self.runners], "rllib") as group:

            @col.step
            def sync() -> None:
                col.broadcast_refs([self.source, *self.targets], group_name=group)

            yield lambda **kwargs: sync()
            sync.close()


@contextmanager
def algorithm(runners: int, width: int) -> Any:
    """PPO with actors of our classes."""
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=runners,
            num_cpus_per_env_runner=0,
            env_runner_cls=Runner,
            rollout_fragment_length=512 // runners,
        )
        .learners(num_learners=1, num_cpus_per_learner=0)
        .training(
            learner_class=Learner,
            train_batch_size_per_learner=512 // runners * runners,
            minibatch_size=128,
            num_epochs=4,
            lr=1e-3,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[width, width]))
        .debugging(seed=SEED)
    )
    algo = config.build_algo()
    try:
        yield algo
    finally:
        algo.stop()


# ---------------------------------------------------------------------------------------------- the whole


def learn(way: str, runners: int, rounds: int) -> tuple[list[float], set[str]]:
    """Trains; returns the mean return of each iteration, and the digests of the last weights."""
    with algorithm(runners, 64) as algo:
        sync = Sync(algo)

        def train() -> tuple[list[float], set[str]]:
            returns = [algo.train()["env_runners"]["episode_return_mean"] for _ in range(rounds)]
            return returns, sync.digests()

        if way == OWN:
            return train()
        with sync.published() if way == PUBLISHED else sync.captured() as ours:
            sync.group.sync_weights = ours
            return train()


def time_syncs(runners: int, width: int, runs: int) -> tuple[Timing, Check]:
    """Times a sync in all ways, and checks each of them."""
    with algorithm(runners, width) as algo:
        sync = Sync(algo)
        with sync.published() as published, sync.captured() as captured:
            ways: dict[str, Callable[[], object]] = {
                PUBLISHED: published,
                CAPTURED: captured,
                OWN: sync.by_rllib,
                f"{OWN}, until all have it": sync.by_rllib_until_all_have_it,
            }
            bad = []
            for name, way in ways.items():
                before = sync.digests()
                sync.disturb()
                way()
                after = sync.digests()
                if len(after) != 1 or after & before:
                    bad.append(name)
            spent = compare(ways, runs, before=sync.disturb)
        held: Any = col.get(sync.source)
        nbytes = sum(tensor.nbytes for tensor in held.values())
    what = f"two layers of {width}, {nbytes / 1e6:.1f} MB"
    return Timing(what=what, ms=spent), Check(
        name=what, found=f"not synced by {', '.join(bad)}" if bad else "synced by each way", good=not bad
    )


def main(runners: int = 2, rounds: int = 8, runs: int = 21, widths: Sequence[int] = WIDTHS) -> Report:
    """Learns with each sync, then times them.

    Args:
        runners: How many env runners there are.
        rounds: Iterations of PPO.
        runs: How often each way is timed.
        widths: Of the two layers of the networks whose weights are synced.
    """
    ensure_ray()
    learned = {way: learn(way, runners, rounds) for way in (OWN, PUBLISHED, CAPTURED)}
    curve, digests = learned[OWN]
    checks = [
        Check(
            name=f"returns and weights, {way}",
            found="those of RLlib's own sync, to the bit" if found == learned[OWN] else f"{found}, not {learned[OWN]}",
            good=found == learned[OWN] and len(digests) == 1,
        )
        for way, found in learned.items()
        if way != OWN
    ]
    found_return = f"{curve[0]:.0f} at first, {curve[-1]:.0f} at last"
    checks.append(Check(name="mean return", found=found_return, good=bool(curve[-1] > curve[0])))
    timed = [time_syncs(runners, width, runs) for width in widths]
    return Report(
        title=f"Weights of an RLlib learner in {runners} env runners",
        unit="sync",
        checks=(*checks, *(check for _, check in timed)),
        timings=tuple(timing for timing, _ in timed),
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="The weights of an RLlib learner, in all env runners.")
    made.add_argument("--runners", type=int, default=2, help="env runners (default 2)")
    made.add_argument("--rounds", type=int, default=8, help="iterations of PPO (default 8)")
    made.add_argument("--runs", type=int, default=21, help="how often each way is timed (default 21)")
    made.add_argument("--widths", type=int, nargs="+", default=WIDTHS, help="of the networks (default 256 1024 2048)")
    return made


if __name__ == "__main__":
    from examples.workloads import rllib  # actors can't find the classes of __main__

    command_line(rllib.main, parser())
