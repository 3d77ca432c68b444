"""A spaCy pipeline is trained to the same weights in all ways; its loss falls; spaCy takes its project."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

pytest.importorskip("spacy")

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
