"""What the ranks of `test_torch_own` run: torch's own tests of collectives and DDP, one after the other.

torch starts new processes for each test. Here they stay, and each test gets a process group of its own.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import types
import unittest
import warnings
from datetime import timedelta
from functools import cache

import numpy as np
import torch
from torch import distributed as dist

import raycollect.torch  # noqa: F401 - registers the backend

TIMEOUT_S = 20.0


@cache
def module(place):
    """torch's module of tests, which takes this backend for gloo: it asks for names where it means host memory."""
    if importlib.util.find_spec("expecttest") is None:  # torch's tests ask only for its class
        sys.modules["expecttest"] = shim = types.ModuleType("expecttest")
        shim.TestCase = unittest.TestCase
    os.environ.update(BACKEND="gloo", MASTER_ADDR="127.0.0.1", TEMP_DIR=place)
    before, sys.argv = sys.argv, sys.argv[:1]  # which they read
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torch.testing._internal.distributed.distributed_test")
    finally:
        sys.argv = before


def names(ranks, place):
    """The names of all tests."""
    os.environ["WORLD_SIZE"] = str(ranks)
    return [name for name in dir(module(place).DistributedTest._DistTestBase) if name.startswith("test_")]


def run(name, number, rank, ranks, place):
    """Runs a test; returns how it ended and why: "passed", "skipped" or "failed"."""
    os.environ["WORLD_SIZE"] = "8" if "_group" in name else str(ranks)  # of eight, two make a group: three are enough
    tests = module(place)
    case = type("Case", (tests.TestDistBackend, tests.DistributedTest._DistTestBase), {"runTest": lambda self: None})
    torch.set_num_threads(1)
    tests.Barrier.init()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(1234)
    store, timeout = f"{place}/store {number}", timedelta(seconds=TIMEOUT_S)
    try:
        dist.init_process_group(
            "raycollect", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout
        )
        test_case = case(name)
        test_case.rank, test_case.file_name = rank, store
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            getattr(case, name)(test_case)
    except unittest.SkipTest as exc:
        return "skipped", str(exc)
    except SystemExit as exc:  # with a number for the reason
        return "skipped", {skip.exit_code: skip.message for skip in tests.TEST_SKIPS.values()}.get(exc.code, "")
    except Exception as exc:
        return "failed", f"{type(exc).__name__}: {exc}"[:1000]
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return "passed", ""
