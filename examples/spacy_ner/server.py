"""The sharded parameter server of spacy-ray, in lockstep: gradients are pushed to their owners, weights come back.

As in spacy-ray (https://github.com/explosion/spacy-ray, ``proxies.py`` and ``worker.py``), a proxy replaces thinc's own
storage of parameters. Every parameter has an owner. A gradient of another's parameter goes to it by
``inc_grad.remote``, a call per parameter; the owner adds up what all workers sent, lets the optimizer change the
parameter, and sends it to all by ``set_param.remote``. A worker trains in one thread and serves its peers in another.

The differences make the results comparable:

- Workers wait for each other. spacy-ray's do not: they continue with the weights that they have, and drop gradients of
  old weights, so the amount of data that counts depends on the workers' speed.
- The gradients of a parameter are added in the order of ranks, not as they come: the sum has the same bits each time.
- Ownership is balanced by size. spacy-ray gives each worker the same number of layers.
- thinc adds to a gradient several times per update: the parser once per transition. spacy-ray makes a call each time
  (``every_call=True``); here the sum of an update can be sent instead, which takes a fourth of the calls.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from typing import Any, cast

import ray

from examples.spacy_ner.learner import Array, Job, Key, Learner, Parameter, floats
from examples.spacy_ner.threads import ONE_THREAD

WAIT_S = 120.0
"""How long a worker waits for the others, in seconds, before it gives up."""


class Shard:
    """This worker's parameters, and the gradients received for those that it owns.

    It is the proxy of all layers: thinc asks it for weights, and gives it gradients.

    Args:
        learner: The spaCy of this worker.
        peers: All workers, by rank.
    """

    def __init__(self, learner: Learner, peers: list[Any]) -> None:
        self._learner, self._peers = learner, peers
        self._rank, self._ranks = learner.rank, learner.ranks
        self._owners = {parameter.key: parameter.owner for parameter in learner.parameters}
        self._owned = learner.owned(self._rank)
        self._changed = threading.Condition()
        self._mine: dict[Key, Array] = {}
        self.restart(every_call=False)

    def restart(self, *, every_call: bool) -> None:
        """Starts with the learner's weights.

        Args:
            every_call: Whether each gradient that thinc adds is sent at once, by a call of its own.
        """
        self._every_call = every_call
        self._params = {each.key: each.of(self._learner.flat_weights) for each in self._learner.parameters}
        self._versions = dict.fromkeys(self._params, 0)
        self._grads: dict[Key, dict[int, Array]] = defaultdict(dict)
        self._sent: Counter[int] = Counter()
        self._arrived: dict[int, Counter[int]] = defaultdict(Counter)
        self._announced: dict[int, dict[int, int]] = defaultdict(dict)
        self._mine.clear()

    # ------------------------------------------------------------------------------------------ what thinc calls

    def get_param(self, model_id: int, name: str) -> Array:
        """The weights of a parameter."""
        return self._params[model_id, name]

    def set_param(self, model_id: int, name: str, value: Array) -> None:
        """Replaces the weights, here only."""
        self._params[model_id, name] = value

    def set_grad(self, model_id: int, name: str, value: Array) -> None:
        """Replaces this rank's gradient."""
        self._mine[model_id, name] = value

    def inc_grad(self, model_id: int, name: str, value: Array) -> None:
        """Adds to this rank's gradient, or sends it to the owner at once."""
        key = (model_id, name)
        if self._every_call and self._owners[key] != self._rank:
            self._push(key, value)
        elif key in self._mine:
            self._mine[key] += value
        else:
            self._mine[key] = value.copy()

    def _push(self, key: Key, value: Array) -> None:
        owner = self._owners[key]
        self._sent[owner] += 1
        self._peers[owner].inc_grad.remote(self._learner.index[key], self._versions[key], self._rank, value)

    # ------------------------------------------------------------------------------------------ what peers call

    def receive_grad(self, key: Key, version: int, rank: int, value: Array) -> None:
        """Keeps a gradient of an owned parameter, or adds it to those that the rank has sent in this update.

        Raises:
            ValueError: The gradient belongs to other weights than those here.
        """
        with self._changed:
            if version != self._versions[key]:
                raise ValueError(f"a gradient of version {version}, but the weights are of {self._versions[key]}")
            if rank in self._grads[key]:
                self._grads[key][rank] += value
            else:  # values from Ray are read-only
                self._grads[key][rank] = value.copy() if self._every_call else value
            if self._every_call and rank != self._rank:
                self._arrived[version][rank] += 1
            self._changed.notify_all()

    def receive_end(self, version: int, rank: int, calls: int) -> None:
        """Records that a rank has sent all its gradients of this version, and in how many calls."""
        with self._changed:
            self._announced[version][rank] = calls
            self._changed.notify_all()

    def receive_param(self, key: Key, version: int, value: Array) -> None:
        """Takes the weights from their owner; copied, as values from Ray are read-only, which thinc refuses."""
        with self._changed:
            self._params[key][...] = value
            self._versions[key] = version
            self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ an update

    def exchange(self) -> None:
        """Pushes gradients, updates the owned parameters, and waits for the rest."""
        for key, value in self._mine.items():
            if self._owners[key] == self._rank:
                self.receive_grad(key, self._versions[key], self._rank, value)
            else:
                self._push(key, value)
        self._mine.clear()
        if self._every_call:
            self._wait_for_calls(self._learner.update - 1)
        for parameter in self._owned:
            self._wait(lambda key=parameter.key: len(self._grads[key]) == self._ranks)
            self._step(parameter)
        self._learner.optimizer.step_schedules()
        update = self._learner.update
        self._wait(lambda: all(version == update for version in self._versions.values()))

    def _wait_for_calls(self, version: int) -> None:
        """Tells the others how many calls were sent to them, and waits for the announced calls from each."""
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for rank in others:
            self._peers[rank].end.remote(version, self._rank, self._sent[rank])
        with self._changed:
            arrived, announced = self._arrived[version], self._announced[version]
        self._wait(lambda: all(announced.get(rank) == arrived[rank] for rank in others))
        self._sent.clear()
        del self._arrived[version], self._announced[version]

    def _step(self, parameter: Parameter) -> None:
        key = parameter.key
        with self._changed:
            grads = self._grads.pop(key)
        total = grads[0].copy()
        for rank in range(1, self._ranks):
            total += grads[rank]
        weights, _ = self._learner.optimizer(key, floats(self._params[key]), floats(total))
        with self._changed:
            self._params[key] = cast(Array, weights)
            self._versions[key] += 1
        for rank, peer in enumerate(self._peers):
            if rank != self._rank:
                peer.set_param.remote(self._learner.index[key], self._versions[key], weights)

    def _wait(self, ready: Any) -> None:
        with self._changed:
            if not self._changed.wait_for(ready, WAIT_S):
                raise TimeoutError(f"rank {self._rank} waited {WAIT_S:.0f} s for gradients or weights of others")


# Ray's types lack `concurrency_groups`.
@ray.remote(num_cpus=0, concurrency_groups={"training": 1}, runtime_env=ONE_THREAD)  # pyright: ignore[reportCallIssue]
class ServerWorker:
    """A worker that trains, and serves the parameters that it owns. Its peers' calls come in another thread.

    Keys travel as places in the list of parameters, since thinc's own keys count layers of a process.
    """

    def __init__(self, job: Job, rank: int, ranks: int) -> None:
        self._learner = Learner(job, rank, ranks)

    def set_peers(self, peers: list[Any]) -> None:
        """Installs the proxy; `peers` has all workers by rank."""
        self._shard = Shard(self._learner, peers)
        self._learner.set_proxy(self._shard)

    def inc_grad(self, at: int, version: int, rank: int, value: Array) -> None:
        self._shard.receive_grad(self._learner.parameters[at].key, version, rank, value)

    def end(self, version: int, rank: int, calls: int) -> None:
        self._shard.receive_end(version, rank, calls)

    def set_param(self, at: int, version: int, value: Array) -> None:
        self._shard.receive_param(self._learner.parameters[at].key, version, value)

    @ray.method(concurrency_group="training")
    def restart(self, every_call: bool) -> None:
        """Forgets what it has learned; see `Shard.restart`."""
        self._learner.set_proxy(None)
        self._learner.restart()
        self._shard.restart(every_call=every_call)
        self._learner.set_proxy(self._shard)

    @ray.method(concurrency_group="training")
    def train(self, updates: int) -> list[float]:
        """Makes some updates with the others; returns the losses of its batches."""
        losses = []
        for _ in range(updates):
            self._learner.backward()
            self._shard.exchange()
            losses.append(self._learner.loss)
        return losses

    @ray.method(concurrency_group="training")
    def cpu_s(self) -> float:
        """The CPU time of this process, in seconds."""
        return time.process_time()

    @ray.method(concurrency_group="training")
    def digest(self) -> str:
        return self._learner.digest()
