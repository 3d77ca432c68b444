"""A ref of a dict or list of tensors stands for what that holds when it is used, also where tensors were replaced."""

from __future__ import annotations

import numpy as np
import pytest
import ray

import raycollect as col
from raycollect import errors
from tests.support.actors import Worker


def made(worker, library="numpy"):
    """A ref of a dict with two tensors and a list of one, which the actor keeps."""

    def make(self, library):
        self.held = {"a": np.zeros((5, 3), np.float32), "b": np.zeros(7, np.float32), "more": [np.zeros(2, np.float32)]}
        if library == "torch":
            import torch

            self.held = {key: torch.nn.Parameter(torch.zeros(5, 3)) for key in "ab"}
        return self.held

    return worker.make.remote(make, library)


def change(worker, function, *args):
    ray.get(worker.call.remote(lambda self, function, args: function(self.held, *args), function, args))


def values_of(worker):
    def read(self):
        leaves = [*self.held.values()] if "more" not in self.held else [*self.held.values()][:2] + self.held["more"]
        return [sorted({float(one) for one in np.asarray(leaf.detach() if hasattr(leaf, "detach") else leaf).flat})
                for leaf in leaves]  # fmt: skip

    return ray.get(worker.call.remote(read))


def add_anew(held, value):
    """Puts other tensors of the same form in place of those that are there, but for one."""
    held["a"] = held["a"] + value
    held["more"][0] = held["more"][0] + value
    held["b"] += value


def flat(worker):
    """A ref of a dict of two arrays, as publications take it."""

    def make(self):
        self.held = {"a": np.zeros((5, 3), np.float32), "b": np.zeros(7, np.float32)}
        return self.held

    return worker.make.remote(make)


def add_flat(held, value):
    held["a"] = held["a"] + value
    held["b"] += value


@pytest.mark.parametrize("inplace", [False, True])
def test_versions_are_put_and_shown_in_the_tensors_of_now(actors, name, inplace):
    trainer, rollout = actors(Worker, 2)
    with col.publish([flat(trainer)], name) as pub, col.subscribe(name, [flat(rollout)], inplace=inplace) as sub:
        for value in range(1, 4):
            change(trainer, add_flat, 1)
            pub.put()
            change(rollout, add_flat, 0)
            sub.update()
            assert values_of(rollout) == [[float(value)]] * 2
        stream = pub.stream([sub])
        change(trainer, add_flat, 1)
        stream.part("a")
        stream.commit()
        assert values_of(rollout) == [[4.0]] * 2
        change(rollout, add_flat, 0)  # between what is shown and the next update, which changes nothing
        assert sub.update().version.number == 4
        assert values_of(rollout) == [[4.0]] * 2


def test_collectives_take_the_tensors_of_now_the_first_time_and_in_a_loop(actors):
    pair = actors(Worker, 2)
    refs = [made(one) for one in pair]
    expected = 0.0
    for turn in range(8):
        for one in pair:
            change(one, add_anew, 1)
        col.allreduce_refs(refs)
        expected = 2 * (expected + 1)
        assert [values_of(one) for one in pair] == [[[expected]] * 3] * 2, turn
        assert all(np.all(one["a"] == expected) for one in col.get(refs))


def test_captured_steps_take_the_tensors_of_now(actors):
    pair = actors(Worker, 2)
    refs = [made(one) for one in pair]
    with col.capture() as step:
        col.allreduce_refs(refs)
    expected = 0.0
    for turn in range(5):
        for one in pair:
            change(one, add_anew, 1)
        step.run()
        expected = 2 * (expected + 1)
        assert [values_of(one) for one in pair] == [[[expected]] * 3] * 2, turn
    change(pair[0], lambda held: held.update(c=np.zeros(1, np.float32)))
    with pytest.raises(errors.RaycollectError) as raised:
        step.run()
    assert "['c']" in str(raised.value)


CHANGES = {
    "['c']": lambda held: held.update(c=np.zeros(1, np.float32)),
    "['b']": lambda held: held.pop("b"),
    "['a']": lambda held: held.update(a=held["a"].astype(np.float64)),
}


@pytest.mark.parametrize("key", CHANGES)
def test_tensors_of_another_form_are_refused_wherever_they_are_used_and_the_key_is_named(actors, name, key):
    trainer, rollout = actors(Worker, 2)
    published, received = flat(trainer), flat(rollout)
    with col.publish([published], name) as pub, col.subscribe(name, [received]) as sub:
        pub.put()
        sub.update()
        for one in (trainer, rollout):
            change(one, CHANGES[key])
        for use in (
            lambda: pub.put(),
            lambda: sub.update(),
            lambda: col.allreduce_refs([published, received]),
            lambda: col.get(published),
        ):
            with pytest.raises(errors.TensorReplacedError) as raised:
                use()
            assert any(key in one.found for one in raised.value.violations)
        assert sub.version().number == 1


@pytest.mark.parametrize("keeps", ["state_dict", "named_parameters"])
def test_parameters_that_a_module_has_no_more_are_refused_and_named(actors, name, keeps):
    pytest.importorskip("torch")
    trainer, rollout = actors(Worker, 2)

    def make(self, keeps):
        import torch

        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        return self.model.state_dict() if keeps == "state_dict" else dict(self.model.named_parameters())

    def train(self):
        import torch

        with torch.no_grad():
            for one in self.model.parameters():
                one.fill_(2.0)

    def load(self):
        other = {key: one.clone() for key, one in self.model.state_dict().items()}
        other["0.weight"].fill_(7.0)
        self.model.load_state_dict(other, assign=True)

    def values(self):
        return sorted({float(one) for tensor in self.model.parameters() for one in tensor.detach().flatten()})

    refs = [one.make.remote(make, keeps) for one in (trainer, rollout)]
    with col.publish(refs[:1], name) as pub, col.subscribe(name, refs[1:]) as sub:
        ray.get(trainer.call.remote(train))
        pub.put()
        sub.update()
        assert ray.get(rollout.call.remote(values)) == [2.0]
        ray.get([one.call.remote(load) for one in (trainer, rollout)])
        for use in (pub.put, sub.update):
            with pytest.raises(errors.TensorReplacedError) as raised:
                use()
            assert [one.field for one in raised.value.violations] == [
                f"tensor '{at}.{kind}'" for at in range(2) for kind in ("bias", "weight")
            ]
    again = [one.make.remote(lambda self: self.model.state_dict()) for one in (trainer, rollout)]
    with col.publish(again[:1], name) as pub, col.subscribe(name, again[1:]) as sub:
        pub.put()
        sub.update()
        assert ray.get(rollout.call.remote(values)) == [2.0, 7.0]
