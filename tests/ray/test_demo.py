"""The programs in examples/ do what they say."""

from __future__ import annotations

import numpy as np
import pytest

from examples import digits, quickstart


@pytest.mark.usefixtures("cluster")
def test_quickstart_leaves_the_sum_in_both_buffers():
    buffers = quickstart.main()

    assert len(buffers) == 2
    for buffer in buffers:
        np.testing.assert_array_equal(buffer, np.full(10, 2, np.float32))


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("actors", [pytest.param(2, marks=pytest.mark.full), 3])  # three shards are of unequal size
def test_digits_learn_the_same_in_actors_as_in_one_process(actors):
    result = digits.main(steps=60, actors=actors, runs=2)

    assert result.accuracy >= digits.MIN_ACCURACY
    assert result.difference <= digits.MAX_DIFFERENCE
    assert result.same_bits
    assert result.ok
    assert result.loop_ms > 0
    assert result.step_ms > 0
    assert all(timing.allreduce_ms > 0 and timing.object_store_ms > 0 for timing in result.timings)


def test_shards_hold_every_image_once():
    train, test = digits.load()

    assert len(train) + len(test) == 1797
    shards = train.shards(3)
    assert sum(len(shard) for shard in shards) == len(train)
    np.testing.assert_array_equal(np.concatenate([shard.labels for shard in shards]), train.labels)


def test_shard_gradients_add_up_to_the_gradient_over_all_images():
    train, _ = digits.load()
    rng = np.random.default_rng(7)
    whole = digits.Learner(train, total=len(train))
    parts = [digits.Learner(shard, total=len(train)) for shard in train.shards(5)]
    start = rng.normal(size=whole.parameters.shape)
    for learner in (whole, *parts):
        learner.parameters[:] = start

    np.testing.assert_allclose(sum(part.gradient() for part in parts), whole.gradient(), rtol=0, atol=1e-12)


def test_failed_checks_are_printed(capsys):
    bad = digits.Result(actors=2, accuracy=0.5, difference=1.0, same_bits=False, loop_ms=3.0, step_ms=0.5, timings=())

    digits.show(bad)

    assert not bad.ok
    said = capsys.readouterr().out
    assert said.count("NOT OK") == 3
    assert "by a step 0.50 ms (6.0 times faster)" in said


def test_a_learner_can_begin_anew():
    train, _ = digits.load()
    learner = digits.Learner(train, total=len(train))
    for _ in range(3):
        learner.apply(learner.gradient())
    learner.begin()
    for _ in range(5):
        learner.apply(learner.gradient())

    assert learner.weights().tobytes() == digits.train_in_one_process(train, 5).tobytes()
