"""Groups whose ranks are threads of one process and share the GPUs of a fake of cupy."""

from __future__ import annotations

import itertools
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from raycollect.backends import streams
from raycollect.member import init
from raycollect.member.runtime import Runtime
from tests.fake_cupy import installed

DEVICES = 4
_names = itertools.count(1)


class Ranks:
    """Groups whose ranks are threads, each with a runtime of its own; they share the fake's GPUs."""

    def __init__(self, fake, rendezvous):
        self.fake = fake
        self.cupy = fake.cupy
        self._rendezvous = rendezvous
        self._pools = [ThreadPoolExecutor(1) for _ in range(3)]
        self._runtimes = [Runtime() for _ in self._pools]
        self._groups = []

    def group(self, world, backend="nccl", **options):
        return self._formed(world, self._join, backend, options)

    def host_group(self, world, backend):
        return self._formed(world, self._join_on_host, backend)

    def _formed(self, world, join, *args):
        name = f"gpus-{next(_names)}"
        self.must(world, lambda _: None)
        self.must(world, join, world, name, *args)
        self._groups.append((world, name))
        return name

    def _join(self, rank, world, name, backend, options):
        options = options or None
        init.init_collective_group(world, rank, backend, name, 8_000, pg_options=options, rendezvous=self._rendezvous)

    def _join_on_host(self, rank, world, name, backend):
        init.init_host_group(world, rank, backend, name, 8.0, self._rendezvous)

    def run(self, world, body, *args):
        """Calls ``body(rank, *args)`` on all ranks at once; what one raises is in the list like what it returns."""
        futures = [self._pools[rank].submit(self._run, rank, body, args) for rank in range(world)]
        return [future.exception(60) or future.result() for future in futures]

    def _run(self, rank, body, args):
        with self._runtimes[rank].entered():
            return body(rank, *args)

    def must(self, world, body, *args):
        results = self.run(world, body, *args)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self):
        for world, name in self._groups:
            self.must(world, lambda _, name=name: init.destroy_collective_group(name))
        for pool in self._pools:
            pool.shutdown()

    def put(self, device, values):
        """An array of that device."""
        with self.cupy.cuda.Device(device):
            return self.cupy.asarray(np.asarray(values))

    def put_strided(self, device, values):
        """The same, with gaps between the elements."""
        with self.cupy.cuda.Device(device):
            wide = self.cupy.zeros((*np.shape(values), 2), np.asarray(values).dtype)
            wide[..., 0] = self.cupy.asarray(np.asarray(values))
            return wide[..., 0]


@pytest.fixture
def ranks(request, tmp_path, monkeypatch):
    seed = getattr(request, "param", 0)
    path = tmp_path / "rendezvous"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    monkeypatch.setattr(streams, "_free", defaultdict(list))
    with installed(DEVICES, nccl_version=23003, seed=seed) as fake:
        ranks = Ranks(fake, f"file://{path}")
        yield ranks
        ranks.close()
        streams._free.clear()


def host(tensors):
    return [tensor.get() for tensor in tensors]
