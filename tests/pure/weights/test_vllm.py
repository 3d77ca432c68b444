"""The backend for vLLM: its shape is that which was recorded from vLLM, and all workers load an update, or none."""

from __future__ import annotations

import importlib
import inspect
import sys

import pytest

from raycollect import errors
from tests.support import fake_vllm
from tests.support.fake_vllm import BASE, FACTORY, INTERFACE

torch = pytest.importorskip("torch")
from tests.pure.weights import vllm_workers  # noqa: E402 - it needs torch
from tests.pure.weights.vllm_workers import Client, Source, shown, values  # noqa: E402

KINDS = {"positional": inspect.Parameter.POSITIONAL_OR_KEYWORD, "keyword": inspect.Parameter.KEYWORD_ONLY}
RECORDED = {cls: classes for module in INTERFACE["modules"].values() for cls, classes in module.items()}


@pytest.fixture
def vllm(monkeypatch):
    """The backend, where this process believes that it has vLLM."""
    for name, module in fake_vllm.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for registry in (fake_vllm.WeightTransferEngineFactory, fake_vllm.WeightTransferTrainerFactory):
        monkeypatch.setattr(registry, "_registry", {})
    monkeypatch.delitem(sys.modules, "raycollect.vllm", raising=False)
    yield importlib.import_module("raycollect.vllm")
    del sys.modules["raycollect.vllm"]


def parameters(owner, name):
    """(name, kind, default in the source's words) of a method's parameters, `self` and `cls` too."""
    method = inspect.getattr_static(owner, name)
    function = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
    signature = inspect.signature(function).parameters.values()
    return [
        (param.name, param.kind, None if param.default is param.empty else repr(param.default)) for param in signature
    ]


def recorded(name, method):
    return [(param, KINDS[kind], default) for param, kind, default in RECORDED[name]["methods"][method]["parameters"]]


@pytest.mark.parametrize(
    ("cls", "method"), [(cls, method) for cls, record in RECORDED.items() for method in record["methods"]]
)
def test_the_fake_has_the_signatures_of_the_recording(cls, method):
    owner = getattr(fake_vllm, cls)
    assert parameters(owner, method) == recorded(cls, method)
    is_abstract = "abstractmethod" in RECORDED[cls]["methods"][method]["decorators"]
    assert getattr(inspect.getattr_static(owner, method), "__isabstractmethod__", False) == is_abstract


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("Engine", "WeightTransferEngine"), ("TrainerEngine", "TrainerWeightTransferEngine")],
)
def test_the_engines_have_the_signatures_of_the_recording(vllm, ours, theirs):
    engine = getattr(vllm, ours)
    for method, record in RECORDED[theirs]["methods"].items():
        actual, expected = parameters(engine, method), recorded(theirs, method)
        more = actual[len(expected) :]
        assert actual[: len(expected)] == expected, method
        assert all(default is not None for _, _, default in more), f"{method}: {more}"
        if "abstractmethod" in record["decorators"]:
            assert method in vars(engine), f"{method} is left abstract"
    assert not engine.__abstractmethods__
    for name, value in RECORDED[theirs]["fields"]:
        assert value is not None or name in vars(engine), f"{name} is not said"


def test_the_dataclasses_come_and_go_as_dicts(vllm):
    theirs = sys.modules[BASE]
    sender = vllm.TrainerInitInfo(rank=0, world_size=3)
    assert (sender.is_sender, vllm.TrainerInitInfo(rank=1, world_size=3).is_sender) == (True, False)
    assert isinstance(sender, theirs.TrainerInitInfo)
    assert sender.backend == "raycollect"
    assert issubclass(vllm.InitInfo, theirs.WeightTransferInitInfo)
    assert issubclass(vllm.UpdateInfo, theirs.WeightTransferUpdateInfo)
    with pytest.raises(ValueError, match="1 names, 0 dtypes"):
        vllm.UpdateInfo(version=1, names=["a"])


def test_it_registers_once_on_both_sides(vllm):
    factory = sys.modules[FACTORY]
    for registry, cls in (
        (factory.WeightTransferEngineFactory, vllm.Engine),
        (factory.WeightTransferTrainerFactory, vllm.TrainerEngine),
    ):
        vllm.register()
        vllm.register()
        assert registry._registry["raycollect"]() is cls


def test_what_can_not_be_sent_is_refused(vllm):
    class Source(fake_vllm.WeightSource):
        metadata = [fake_vllm.ParamMeta("expert", torch.float32, (2,), owners=(1,))]  # noqa: RUF012

        def iter_full(self):
            return iter(())

    info = vllm.TrainerInitInfo(rank=0, world_size=2)
    with pytest.raises(ValueError, match="needs a WeightSource"):
        vllm.TrainerEngine.trainer_init(info, client=None)
    with pytest.raises(ValueError, match="'expert' belongs to the ranks"):
        vllm.TrainerEngine.trainer_init(info, client=None, source=Source())


# ---------------------------------------------------------------------------------------------- updates


@pytest.fixture
def trainers(vllm, crew):
    """Makes a trainer's engine here, and workers in processes of their own."""
    vllm.register()
    begun, engines = [], []

    def make(workers, source, rank=0, **options):
        new = [worker for worker in workers if worker not in begun]
        for worker in new:
            worker.call(vllm_workers.begin, workers.index(worker), len(workers))
        begun.extend(new)
        info = vllm.TrainerInitInfo(
            rank=rank,
            world_size=1 + len(workers),
            group_name=f"vllm-{len(engines)}",
            rendezvous=crew.rendezvous,
            **{"timeout_s": 20, **options},
        )
        theirs = sys.modules[FACTORY].WeightTransferTrainerFactory
        engines.append(theirs.trainer_init(info, client=Client(workers), source=source))
        return engines[-1]

    yield make
    for side in engines:
        side.shutdown()
    for side in begun:
        if side.process.is_alive():
            side.call(vllm_workers.end)


def loaded(workers):
    return [worker.call(vllm_workers.look)[:2] for worker in workers]


def updates(workers):
    """How many updates were begun in each, and how many have ended."""
    return [worker.call(vllm_workers.look)[2:] for worker in workers]


@pytest.mark.parametrize("bucket_nbytes", [64 << 20, 64])
def test_pain_1_updates_are_loaded_by_all_or_none(trainers, crew, bucket_nbytes):
    workers, source = crew.take(2), Source()
    engine = trainers(workers, source, bucket_nbytes=bucket_nbytes)
    for source.version in (1, 2):
        engine.send_weights()
        expected = shown(values(source.version)), str(source.version), source.version, source.version
        assert [worker.call(vllm_workers.look) for worker in workers] == [expected] * 2

    workers[1].call(vllm_workers.spoil)
    source.version = 7
    with pytest.raises(errors.VersionNotWholeError, match="other bits"):
        engine.send_weights()
    assert loaded(workers) == [(shown(values(2)), "2")] * 2
    assert updates(workers) == [(3, 3)] * 2  # vLLM has put back what it took away
    source.version = 3
    engine.send_weights()
    assert loaded(workers) == [(shown(values(3)), "3")] * 2


def test_pain_2_a_worker_that_dies_is_an_error_and_another_takes_its_place(trainers, crew):
    workers, source = crew.take(2), Source(1)
    engine = trainers(workers, source)
    engine.send_weights()
    workers[1].kill()
    source.version = 2
    with pytest.raises((errors.RaycollectError, EOFError, OSError)):
        engine.send_weights()
    assert loaded(workers[:1]) == [(shown(values(1)), "1")]
    assert updates(workers[:1]) == [(2, 2)]
    workers[1] = crew.take(1)[0]
    engine.shutdown()
    again = trainers(workers, source)
    again.send_weights()
    assert loaded(workers) == [(shown(values(2)), "1")] * 2


def test_ranks_of_the_trainer_that_do_not_send_only_gather(trainers, crew):
    workers, source = crew.take(1), Source(4)
    other = trainers(workers, source, rank=1)
    other.send_weights()
    assert (source.given, loaded(workers)) == (5, [({}, None)])
    trainers(workers, source).send_weights()
    assert loaded(workers) == [(shown(values(4)), "1")]


def test_pain_2_a_source_that_gives_less_than_it_says_is_told_at_once(trainers, crew):
    workers = crew.take(1)
    engine = trainers(workers, Source(1, leaves_out=1), timeout_s=2)
    with pytest.raises(ValueError, match="not 'embed'"):
        engine.send_weights()
    assert loaded(workers) == [({}, None)]
    assert updates(workers) == [(1, 1)]


def test_pain_1_a_worker_without_a_group_ends_the_update(crew):
    (worker,) = crew.take(1)
    worker.call(vllm_workers.begin, 0, 1)
    worker.call(vllm_workers.start_weight_update)
    with pytest.raises(errors.UnknownGroupError):
        worker.call(vllm_workers.update_weights, {"version": 1})
    assert updates([worker]) == [(1, 1)]
    worker.call(vllm_workers.finish_weight_update, None)
    assert updates([worker]) == [(1, 1)]
    worker.call(vllm_workers.end)


def test_pain_2_the_source_comes_to_its_end_and_gives_no_more_than_it_says(trainers, crew):
    workers, source = crew.take(1), Source(1, more=["bias"])
    engine = trainers(workers, source)
    with pytest.raises(ValueError, match="also yields 'bias'"):
        engine.send_weights()
    assert loaded(workers) == [({}, None)]
    assert updates(workers) == [(1, 1)]
    source.more = ()
    engine.send_weights()
    assert (source.ended, loaded(workers)) == (1, [(shown(values(1)), "1")])


def test_pain_2_after_a_worker_has_failed_to_begin_the_name_of_the_group_is_free(vllm, trainers, crew, monkeypatch):
    def fails(self, info):
        begin(self, info)
        raise RuntimeError("no memory")

    begin = Client.init_weight_transfer_engine
    workers, source = crew.take(1), Source(1)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="no memory"):
        patched.setattr(Client, "init_weight_transfer_engine", fails)
        trainers(workers, source)
    trainers(workers, source).send_weights()
    assert loaded(workers) == [(shown(values(1)), "1")]


def test_pain_1_a_trainer_that_has_left_the_group_sends_nothing_and_says_so(trainers, crew):
    engine = trainers(crew.take(1), Source(1))
    engine.shutdown()
    with pytest.raises(errors.UnknownGroupError, match="shutdown has been called"):
        engine.send_weights()
