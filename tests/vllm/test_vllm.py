"""The backend for vLLM in the real engine, on CPUs: two workers, and a trainer that has transformers' Llama.

`make test-vllm` installs vLLM into an environment of its own; elsewhere these tests are skipped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from contextlib import suppress

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

import raycollect.vllm
from raycollect import errors

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

WORKERS = 2
PROMPT = [5, 6, 7, 8]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,  # vLLM's attention on CPUs has no smaller one
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def llama(version):
    """The trainer's model, with the weights of a version."""
    torch.manual_seed(version)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    return model


def expected(version):
    """The tokens that transformers generates."""
    model, tokens = llama(version), list(PROMPT)
    with torch.no_grad():
        for _ in range(8):
            tokens.append(model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    return tokens[len(PROMPT) :]


class Source:
    """A source as of vLLM 0.33, with an error at will."""

    def __init__(self, model):
        self.model, self.metadata, self.replaced, self.more = model, ModuleSource(model).metadata(), {}, {}
        self.exhausted = 0

    def owned_names(self, rank):
        return [meta.name for meta in self.metadata]

    def implements_iter_full(self):
        return True

    def iter_full(self):
        yield from ({**dict(self.model.named_parameters()), **self.replaced, **self.more}).items()
        self.exhausted += 1


class Corrupted:
    """What each worker has besides vLLM's methods."""

    def corrupt_next_message(self):
        """Flips a bit of the next message that this worker receives."""
        group = self.weight_transfer_engine._group
        broadcast = group.broadcast

        def corrupted(message):
            broadcast(message)
            message[3] ^= 1
            group.broadcast = broadcast

        group.broadcast = corrupted


class Client:
    """Calls vLLM, which is in this process."""

    def __init__(self, engine):
        self.engine, self.refuses = engine, False

    def init_weight_transfer_engine(self, init_info):
        self.engine.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self):
        if self.refuses:
            raise ConnectionError("the server is gone")
        self.engine.start_weight_update()

    def update_weights(self, update_info):
        self.engine.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version=None):
        self.engine.finish_weight_update(weight_version)


class RemoteClient:
    """Calls vLLM, which is in the parent process."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __getattr__(self, method):
        def call(*args):
            self.pipe.send((method, args))
            self.pipe.recv()

        return call


class Killed(ModuleSource):
    """A source that kills the trainer in the middle of an update."""

    def __iter__(self):
        tensors = list(super().__iter__())
        yield from tensors[: len(tensors) // 2]
        os.kill(os.getpid(), signal.SIGKILL)


def trainer(client, source, rendezvous, name="vllm"):
    raycollect.vllm.register()
    info = raycollect.vllm.TrainerInitInfo(
        rank=0,
        world_size=1 + WORKERS,
        group_name=name,
        rendezvous=rendezvous,
        bucket_nbytes=1 << 16,
        timeout_s=60,
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def killed_trainer(pipe, rendezvous):
    trainer(RemoteClient(pipe), Killed(llama(9)), rendezvous, "killed").send_weights()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine is in this process, its workers are not
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            tensor_parallel_size=WORKERS,
            max_model_len=32,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            weight_transfer_config={"backend": "raycollect"},
            worker_extension_cls="tests.vllm.test_vllm.Corrupted",
        )


@pytest.fixture
def rendezvous(tmp_path):
    return f"file://{tmp_path}"


def generated(vllm):
    vllm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    (output,) = vllm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def test_updates_are_loaded_by_all_workers_or_none(vllm, rendezvous):
    assert expected(1) != expected(2) != expected(3)
    model = llama(1)
    engine = trainer(Client(vllm), ModuleSource(model), rendezvous)
    try:
        engine.send_weights()
        assert generated(vllm) == expected(1)
        model.load_state_dict(llama(2).state_dict())
        engine.send_weights()
        assert (generated(vllm), vllm.get_weight_version()) == (expected(2), "2")

        vllm.collective_rpc("corrupt_next_message")
        model.load_state_dict(llama(3).state_dict())
        with pytest.raises(errors.VersionNotWholeError):
            engine.send_weights()
        assert (generated(vllm), vllm.get_weight_version()) == (expected(2), "2")
        engine.send_weights()
        assert (generated(vllm), vllm.get_weight_version()) == (expected(3), "3")
    finally:
        engine.shutdown()


def test_a_new_trainer_takes_the_place_of_one_that_was_killed(vllm, rendezvous):
    before = generated(vllm)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=killed_trainer, args=(theirs, rendezvous))
    process.start()
    theirs.close()
    client, calls = Client(vllm), []
    with suppress(EOFError, OSError):
        while True:
            method, args = ours.recv()
            calls.append(method)
            getattr(client, method)(*args)
            ours.send(None)
    process.join()
    assert (process.exitcode, calls[-1]) == (-signal.SIGKILL, "update_weights")
    assert generated(vllm) == before

    engine = trainer(client, ModuleSource(llama(4)), rendezvous)
    try:
        engine.send_weights()
        assert generated(vllm) == expected(4)
    finally:
        engine.shutdown()


def test_what_source_or_model_refuse_is_an_error_of_the_trainer_alone(vllm, rendezvous):
    client, source = Client(vllm), Source(llama(5))
    engine = trainer(client, source, rendezvous)
    try:
        engine.send_weights()
        assert generated(vllm) == expected(5)

        source.model = llama(6)
        source.replaced = {"lm_head.weight": torch.zeros(3)}
        with pytest.raises(ValueError):
            engine.send_weights()
        source.replaced, source.more = {}, {"more": torch.zeros(3)}
        with pytest.raises(ValueError):
            engine.send_weights()
        assert (generated(vllm), vllm.get_weight_version()) == (expected(5), "1")

        known, source.metadata = source.metadata, [*source.metadata, ParamMeta("more", torch.float32, (3,))]
        with pytest.raises(errors.VersionNotWholeError):
            engine.send_weights()
        source.metadata, source.more = known, {}
        engine.send_weights()
        assert (generated(vllm), vllm.get_weight_version()) == (expected(6), "2")

        client.refuses, exhausted = True, source.exhausted
        with pytest.raises(ConnectionError):
            engine.send_weights()
        assert source.exhausted == exhausted + 1  # the trainer's other ranks gather all tensors
    finally:
        engine.shutdown()


def test_rank_0_of_the_trainer_has_all_tensors(rendezvous):
    source = Source(llama(1))
    with pytest.raises(ValueError):
        trainer(None, None, rendezvous)
    source.owned_names = lambda rank: []
    with pytest.raises(ValueError):
        trainer(None, source, rendezvous)
    source.implements_iter_full = lambda: False
    with pytest.raises(ValueError):
        trainer(None, source, rendezvous)
