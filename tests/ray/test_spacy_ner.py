"""A spaCy pipeline is trained to the weights of one process; it finds entities; spaCy takes the project."""

from __future__ import annotations

import shutil

import pytest
import ray

pytest.importorskip("spacy")

from examples.spacy_ner import corpus, train

SMALL = {
    "components.tok2vec.model.encode.width": 32,
    "components.tok2vec.model.encode.depth": 1,
    "components.tok2vec.model.embed.rows": [500, 100, 250, 250],
    "training.batcher.size": 60,
    "training.optimizer.learn_rate": 0.01,
    "training.max_steps": 40,
    "training.eval_frequency": 20,
}
RANKS = 2
CONFIG = train.HERE / "config.cfg"

pytestmark = pytest.mark.timeout(300)  # each process imports spaCy, and with it torch


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    paths = corpus.write(tmp_path_factory.mktemp("corpus"), train=80, dev=40)
    return {**SMALL, "paths.train": str(paths[0]), "paths.dev": str(paths[1])}


@pytest.mark.full
@pytest.mark.usefixtures("tidy")
def test_actors_learn_what_one_process_learns_and_find_entities(settings, tmp_path):
    import spacy

    trainers = [train.Trainer.remote(CONFIG, settings, rank, RANKS) for rank in range(RANKS)]
    evaluations = list(train.train(trainers, tmp_path))
    assert [each.updates for each in evaluations] == [20, 40]
    assert evaluations[1].loss < 0.75 * evaluations[0].loss
    assert max(each.f_score for each in evaluations) > 0.25
    nlp = spacy.load(tmp_path / "model-best")
    assert {entity.label_ for entity in nlp("Adele Ito paid $5 million on Monday.").ents} <= set(corpus.KINDS)

    def alone():
        learners = [train.Learner(CONFIG, settings, rank, RANKS) for rank in range(RANKS)]
        for _ in range(SMALL["training.max_steps"]):
            first, *others = [learner.gradients() for learner in learners]
            for name, total in first.items():
                for gradients in others:
                    total += gradients[name]
                for gradients in others:
                    gradients[name][...] = total
            for learner in learners:
                learner.apply(first)
        return learners[0].digest()

    expected = ray.get(ray.remote(alone).options(num_cpus=0, runtime_env=train.ONE_THREAD).remote())
    assert ray.get([trainer.digest.remote() for trainer in trainers]) == [expected] * RANKS


def test_spacy_takes_the_project(tmp_path, capfd):
    """Its command `data` runs in a copy of the folder; the one that trains is given what it takes."""
    from spacy.cli import project_run
    from weasel.util import load_project_config

    folder = tmp_path / "spacy_ner"
    shutil.copytree(train.HERE, folder, ignore=shutil.ignore_patterns("corpus", "training", "project.lock"))
    project_run(folder, "data", overrides={"vars.train_documents": 3, "vars.dev_documents": 2})
    assert (folder / "corpus" / "dev.spacy").exists()
    project = load_project_config(folder)
    commands = {command["name"]: command for command in project["commands"]}
    assert set(project["workflows"]["all"]) <= set(commands)
    (script,) = commands["ray-train"]["script"]
    assert train.parse(script.split()[2:]).workers == project["vars"]["workers"]
    project_run(folder, "ray-train", dry=True)
    assert "train.py --workers 2" in capfd.readouterr().out
