"""Reinforcement learning: a trainer sends its weights to several rollout workers.

    python -m examples.workloads.weight_sync [--workers 3] [--rounds 40]

A policy learns to balance a pole (REINFORCE). The trainer and each rollout worker hold a torch module of their own. A
sync is one call: `broadcast_refs` of all tensors, which overwrites the weights of the rollout workers in place. Nobody
calls `load_state_dict`, and nothing goes through the object store. Autograd does not see that weights were overwritten:
don't sync between a forward and its backward pass if you train with synced weights.

While the rollout workers play, the driver has the trainer learn from what they played before, and has called the next
sync already: it waits in the actors' queues, behind the rollouts, so each rollout sees the weights of one version from
its first step to its last. The program checks that, that all workers hold the trainer's bits after each sync, and that
the returns rise.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import ray
import torch

import raycollect as col
from examples.workloads import common, modules
from examples.workloads.cartpole import ACTIONS, STATE, CartPoles, Steps

SEED = 0
EPISODES = 16
LONGEST = 200
LEARNING_RATE = 0.005
DISCOUNT = 0.99


class Policy(torch.nn.Module):
    """Returns the logits of the two pushes; [n, 4] float32 -> [n, 2]. Its buffer `version` counts the updates."""

    version: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(STATE, 64), torch.nn.Tanh(), torch.nn.Linear(64, ACTIONS))
        self.register_buffer("version", torch.zeros((), dtype=torch.int64))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(states)
        return logits


class Holder(col.CollectiveParticipant):
    """An actor with a policy, made with random numbers of a seed."""

    def __init__(self, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.policy = Policy()
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=LEARNING_RATE)
        self.rng = np.random.default_rng(seed)

    def weights(self) -> dict[str, torch.Tensor]:
        """All tensors of the policy; they stay here, and the ref stands for them as long as it lives."""
        return modules.tensors(self.policy)

    def digest(self) -> str:
        """A hash of all tensors as they are now."""
        return modules.digest(modules.tensors(self.policy))


@ray.remote(num_cpus=0)
class Trainer(Holder):
    def learn(self, *played: Steps) -> float:
        """Takes a step of REINFORCE, the mean return as the baseline; returns the mean return."""
        states = torch.from_numpy(np.concatenate([steps.states for steps in played]))
        actions = torch.from_numpy(np.concatenate([steps.actions for steps in played]))
        to_go = torch.from_numpy(np.concatenate([steps.to_go for steps in played]))
        worth = (to_go - to_go.mean()) / (to_go.std() + 1e-6)
        chosen = torch.log_softmax(self.policy(states), dim=1).gather(1, actions[:, None])[:, 0]
        self.optimizer.zero_grad()
        (-(chosen * worth).mean()).backward()
        self.optimizer.step()
        self.policy.version += 1
        return float(np.concatenate([steps.returns for steps in played]).mean())


@ray.remote(num_cpus=0)
class Rollout(Holder):
    @col.by_value
    def play(self) -> Steps:
        """Plays episodes, side by side, until all have ended."""
        carts = CartPoles(EPISODES, self.rng)
        states, actions, alive = [], [], [np.ones(EPISODES, bool)]
        versions = {int(self.policy.version)}
        while len(states) < LONGEST and alive[-1].any():
            seen = carts.states.astype(np.float32)
            with torch.no_grad():
                right = torch.softmax(self.policy(torch.from_numpy(seen)), dim=1)[:, 1].numpy()
            pushes = (self.rng.random(EPISODES) < right).astype(np.int64)
            alive.append(alive[-1] & ~carts.step(pushes))
            states.append(seen)
            actions.append(pushes)
            versions.add(int(self.policy.version))
        lived = np.stack(alive[:-1])  # [steps, episodes]: the reward of each step is one
        to_go = np.zeros_like(lived, np.float32)
        following = np.zeros(EPISODES, np.float32)
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


def main(workers: int = 3, rounds: int = 40) -> dict[str, bool]:
    """Trains, with syncs while the workers play; returns what holds."""
    trainer: Any = Trainer.remote(SEED)
    rollouts: list[Any] = [Rollout.remote(SEED + 1 + at) for at in range(workers)]
    everyone = [trainer, *rollouts]
    col.declare_collective_group(everyone, group_name="weights")
    refs = [actor.weights.remote() for actor in everyone]

    returns, played, digests = [], [], []
    for at in range(rounds):
        col.broadcast_refs(refs, group_name="weights")  # its place in the actors' queues is behind their last calls
        digests.append([actor.digest.remote() for actor in everyone])
        played.append([rollout.play.remote() for rollout in rollouts])
        if at:
            returns.append(trainer.learn.remote(*played[at - 1]))
    versions = [[steps.versions for steps in ray.get(of_round)] for of_round in played]
    mean = ray.get(returns)
    equal = all(len(set(ray.get(of_round))) == 1 for of_round in digests)
    col.destroy_collective_group("weights")

    quarter = max(1, len(mean) // 4)
    print(f"mean return {np.mean(mean[:quarter]):.0f} at first, {np.mean(mean[-quarter:]):.0f} at last")
    return {
        "the mean return rises": float(np.mean(mean[-quarter:])) > 1.5 * float(np.mean(mean[:quarter])),
        "all hold the trainer's bits after each sync": equal,
        "a rollout sees one version, the expected": all(
            of_round == [(max(0, at - 1),)] * workers for at, of_round in enumerate(versions)
        ),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A trainer sends its weights to rollout workers.")
    parser.add_argument("--workers", type=int, default=3, help="rollout workers (default 3)")
    parser.add_argument("--rounds", type=int, default=40, help="how often the trainer learns (default 40)")
    arguments = parser.parse_args()
    common.start_ray()
    common.finish(main(**vars(arguments)))
