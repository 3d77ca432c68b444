"""A spaCy pipeline is trained to the same weights in all ways; its loss falls; spaCy takes its project and config."""

from __future__ import annotations

import importlib.util
import itertools
import shutil

import numpy as np
import pytest

pytest.importorskip("spacy")

from examples.spacy_ner import __main__ as benchmark
from examples.spacy_ner import corpus, learner, train, ways

SMALL = {
    "components.tok2vec.model.encode.width": 32,
    "components.tok2vec.model.encode.depth": 1,
    "components.tok2vec.model.embed.rows": [500, 100, 250, 250],
    "training.batcher.size": 60,
    "training.optimizer.learn_rate": 0.01,
    "training.max_steps": 40,
    "training.eval_frequency": 20,
}
RANKS, UPDATES = 2, 3

pytestmark = pytest.mark.timeout(300)  # four processes import spaCy, and with it torch, which a busy machine feels


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    paths = corpus.write(tmp_path_factory.mktemp("corpus"), train=80, dev=40)
    return learner.Job(train=paths[0], dev=paths[1], overrides=SMALL)


@pytest.fixture(scope="module")
def expected(job):
    """What one process learns that has the batches of all ranks."""
    return learner.train_in_one_process(job, RANKS, UPDATES)


@pytest.fixture(scope="module")
def team(cluster, job):
    from raycollect.driver.controller import Controller

    team = ways.Team(job, RANKS, [name for name in ways.WAYS if name != ways.RAY or importlib.util.find_spec("torch")])
    yield team
    team.close()
    Controller.current().close()
    Controller._current = None


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in ways.WAYS if name != ways.ALONE])
def test_every_way_learns_what_one_process_learns(name, team, expected):
    if name not in team.ways:
        pytest.skip("ray.util.collective needs torch for gloo")
    one, losses = expected
    way = team.ways[name]

    for _ in range(2):
        way.restart()

        assert way.train(UPDATES) == pytest.approx(losses, rel=1e-6)
        assert way.digests() == [one.digest()] * RANKS


@pytest.mark.full
def test_ranks_that_learn_alone_differ(team, expected):
    way = team.ways[ways.ALONE]
    way.restart()
    way.train(UPDATES)

    assert len({expected[0].digest(), *way.digests()}) == 1 + RANKS
    with pytest.raises(AssertionError, match="other weights"):
        benchmark._check(ways.CAPTURED, way, expected[0])


@pytest.mark.full
def test_the_loss_falls_and_entities_are_found(team, tmp_path):
    import spacy

    found = list(train.train(team.ways[ways.CAPTURED].actors, tmp_path))

    assert [each.updates for each in found] == [20, 40]
    assert found[1].loss < 0.75 * found[0].loss
    best = max(found, key=lambda each: each.f_score)
    assert best.f_score > 0.25
    nlp = spacy.load(tmp_path / train.BEST)
    assert nlp.pipe_names == ["tok2vec", "ner"]
    assert {entity.label_ for entity in nlp("Adele Ito paid $5 million on Monday.").ents} <= set(corpus.KINDS)


def test_parameters_are_shared_out_whole_and_evenly(job):
    one = learner.Learner(job, rank=1, ranks=4)

    sizes = [sum(p.stop - p.start for p in one.owned(rank)) for rank in range(4)]
    pieces = one.pieces(one.flat_weights)

    assert [piece.size for piece in pieces] == sizes
    assert sum(sizes) == one.flat_weights.size
    biggest = max(p.stop - p.start for p in one.parameters)
    assert max(sizes) - min(sizes) <= biggest
    for parameter in one.parameters:
        assert np.shares_memory(parameter.of(one.flat_weights), one.weight(parameter))


def test_ranks_have_all_batches_in_turn(job):
    def texts(rank, ranks, count):
        batches = learner.Learner(job, rank, ranks).batches()
        return [[example.text for example in batch] for batch in itertools.islice(batches, count)]

    everything = texts(0, 1, 60)

    assert texts(0, 2, 30) == everything[0::2]
    assert texts(1, 2, 30) == everything[1::2]
    epoch = [text for batch in everything for text in batch][:80]
    assert sorted(epoch) == sorted(example.text for example in learner.Learner(job, 0, 1).examples)


def test_the_corpus_is_the_same_each_time_and_its_tests_have_other_names(tmp_path, job):
    again = corpus.write(tmp_path, train=80, dev=40)

    assert [path.read_bytes() for path in again] == [job.train.read_bytes(), job.dev.read_bytes()]
    for field in ("given", "family", "places", "firms"):
        assert not set(getattr(corpus.TRAIN, field).split("/")) & set(getattr(corpus.DEV, field).split("/"))
    assert not set(corpus.TRAIN.frames) & set(corpus.DEV.frames)


def test_spacy_takes_the_config(job):
    from spacy.cli.debug_config import debug_config

    debug_config(learner.CONFIG, overrides={"paths.train": str(job.train), "paths.dev": str(job.dev)})


def test_spacy_takes_the_project(tmp_path, monkeypatch, capfd):
    """Its command `data` runs in a copy of the folder; the one that trains is given what it takes."""
    from spacy.cli import project_run
    from weasel.util import load_project_config

    folder = tmp_path / "examples" / "spacy_ner"
    ours = shutil.ignore_patterns("corpus", "training", "project.lock", "__pycache__")
    shutil.copytree(learner.HERE, folder, ignore=ours)
    (folder.parent / "__init__.py").touch()

    project_run(folder, "data", overrides={"vars.train_documents": 3, "vars.dev_documents": 2})

    assert (folder / "corpus" / "dev.spacy").exists()
    project = load_project_config(folder)
    commands = {command["name"]: command for command in project["commands"]}
    assert set(project["workflows"]["all"]) <= set(commands)
    (script,) = commands["ray-train"]["script"]
    assert train.parse(script.split()[3:]).workers == project["vars"]["workers"]
    project_run(folder, "ray-train", dry=True)
    assert "project.py train --workers 2" in capfd.readouterr().out
