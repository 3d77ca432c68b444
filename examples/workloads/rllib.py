"""Ray RLlib: the weights of its learner in its env runners, by `publish` and `update` in the place of its own sync.

    pip install '.[rllib]'
    python -m examples.workloads.rllib [--runners 2] [--rounds 8]

PPO learns CartPole on the CPU, with one learner actor and some env runner actors, twice from the same seeds: with
RLlib's own weight sync, and with `publish` and `update`, which give a receipt for each version. The program checks that
the returns of each iteration and the last weights are equal, bit for bit.

What an RLlib program needs for this: the mixin, next to RLlib's classes of env runner and learner, whose `apply` goes
by value, as RLlib calls all else through it; and another `sync_weights`. An env runner that Ray has restarted has new
tensors: then `subscribe` has to be called again.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from typing import Any

import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

import raycollect as col
from examples.workloads import common

SEED = 7
BATCH = 512


class Runner(SingleAgentEnvRunner, col.CollectiveParticipant):
    """RLlib's env runner, whose weights others may write."""

    apply = col.by_value(SingleAgentEnvRunner.apply)

    def weights(self) -> dict[str, torch.Tensor]:
        """The tensors of its module: they stay here."""
        module: Any = self.module
        return dict(module.state_dict())


class PublishingLearner(PPOTorchLearner, col.CollectiveParticipant):
    """RLlib's learner, whose weights others may read."""

    apply = col.by_value(PPOTorchLearner.apply)

    def weights(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """The tensors of its module that env runners have, too: they lack the value function."""
        module: Any = self.module
        state = module[DEFAULT_MODULE_ID].unwrapped().state_dict()
        return {name: state[name] for name in names}


def names_of(runner: Any) -> list[str]:
    return list(runner.module.state_dict())


def digest_of(runner: Any) -> str:
    state = sorted(runner.module.state_dict().items())
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for _, tensor in state)).hexdigest()


def build(runners: int) -> Any:
    """PPO with actors of these classes."""
    config = PPOConfig().environment("CartPole-v1").debugging(seed=SEED)
    config.env_runners(
        num_env_runners=runners,
        num_cpus_per_env_runner=0,
        env_runner_cls=Runner,
        rollout_fragment_length=BATCH // runners,
    )
    config.learners(num_learners=1, num_cpus_per_learner=0)
    config.training(
        learner_class=PublishingLearner,
        train_batch_size_per_learner=BATCH // runners * runners,
        minibatch_size=128,
        num_epochs=4,
        lr=1e-3,
    )
    config.rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64]))
    return config.build_algo()


def train(algo: Any, rounds: int) -> tuple[list[float], set[str]]:
    """Returns the mean return of each iteration, and the digests of the last weights of all env runners."""
    returns = [algo.train()["env_runners"]["episode_return_mean"] for _ in range(rounds)]
    return returns, set(algo.env_runner_group.foreach_env_runner(digest_of, local_env_runner=False))


def train_published(algo: Any, rounds: int) -> tuple[list[float], set[str]]:
    """The same, with versions in the place of RLlib's sync."""
    manager = algo.env_runner_group._worker_manager
    runners = [manager.actors()[number] for number in manager.actor_ids()]
    (learner,) = algo.learner_group._workers
    names = ray.get(runners[0].apply.remote(names_of))
    source, targets = learner.weights.remote(names), [runner.weights.remote() for runner in runners]
    with col.publish([source], "rllib") as publication, col.subscribe("rllib", targets) as subscription:

        def sync_weights(**_: Any) -> None:
            receipt = subscription.update(publication.put())
            assert len(receipt.ranks) == len(runners), receipt

        algo.env_runner_group.sync_weights = sync_weights
        return train(algo, rounds)


def main(runners: int = 2, rounds: int = 8) -> dict[str, bool]:
    """Trains with both syncs; returns what holds."""
    algo = build(runners)
    returns, digests = train(algo, rounds)
    algo.stop()
    algo = build(runners)
    published = train_published(algo, rounds)
    algo.stop()
    print(f"mean return {returns[0]:.0f} at first, {returns[-1]:.0f} at last")
    return {
        "returns and weights are those of RLlib's own sync, to the bit": published == (returns, digests),
        "all env runners have the same weights": len(digests) == 1,
        "the mean return rises": bool(returns[-1] > returns[0]),
    }


if __name__ == "__main__":
    from examples.workloads import rllib  # actors can't find the classes of __main__

    parser = argparse.ArgumentParser(description="The weights of an RLlib learner, in all env runners.")
    parser.add_argument("--runners", type=int, default=2, help="env runners (default 2)")
    parser.add_argument("--rounds", type=int, default=8, help="iterations of PPO (default 8)")
    arguments = parser.parse_args()
    common.start_ray()
    common.finish(rllib.main(**vars(arguments)))
