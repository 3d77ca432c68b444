"""A new operation is a line of one table and its public functions: nothing else has to know it.

The operation whose functions are added moves values, and an allgather substitutes for it. A folding one needs kernels:
`KERNELS` adds one to the kernels of two backends, without functions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import raycollect

PACKAGE = Path(raycollect.__file__).parent

MOST_FILES = 4
"""Of the package; the fifth is `tests/contract/cases.py`, which says what the operation means."""


def _added(before: str, text: str) -> tuple[str, str]:
    return before, text + before


EDITS: dict[str, list[tuple[str, str]]] = {
    "core/operations.py": [
        _added('    BARRIER = "barrier"\n', '    NEIGHBOUR_EXCHANGE = "neighbour_exchange"\n'),
        _added(
            ")\n\n\ndef by_kind(",
            """\
    OperationSpec(
        kind=OpKind.NEIGHBOUR_EXCHANGE,
        sources=lambda position, count: ((position - 1) % count,),
        refs=("tensor_refs", "output_refs"),
        substitutes=((OpKind.ALLGATHER,),),
        price=Price(mesh=lambda at: at.ring(1, 1)),
    ),
""",
        ),
    ],
    "driver/operations.py": [
        _added(
            "# fmt: off\n@overload\ndef barrier(",
            '''\
def neighbour_exchange_refs(
    output_refs: Sequence[Any] | None,
    tensor_refs: Sequence[Any],
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> Any:
    """Gives every rank the tensor of the rank before it; rank 0 gets that of the last one."""
    refs: dict[str, Any] = {"tensor_refs": tensor_refs, "output_refs": output_refs}
    return run(OpKind.NEIGHBOUR_EXCHANGE, group_name, timeout_s, async_op=async_op, **refs)


''',
        ),
    ],
    "member/operations.py": [
        _added(
            "# fmt: off\n@overload\ndef barrier(",
            '''\
def neighbour_exchange(
    output: Any,
    tensor: Any,
    group_name: GroupLike = "default",
    *,
    async_op: bool = False,
    timeout_s: float | None = None,
) -> MemberWork | None:
    """Gives every rank the tensor of the rank before it; rank 0 gets that of the last one. See `allreduce`."""
    call = MemberCall.of(OpKind.NEIGHBOUR_EXCHANGE, group_name)
    return call.run([("tensor", tensor), ("output", output)], async_op=async_op, timeout_s=timeout_s)


''',
        ),
    ],
    "__init__.py": [
        _added(
            "    from raycollect.driver.operations import recv_ref as recv_ref\n",
            "    from raycollect.driver.operations import neighbour_exchange_refs as neighbour_exchange_refs\n",
        ),
        _added(
            "    from raycollect.member.operations import recv as recv\n",
            "    from raycollect.member.operations import neighbour_exchange as neighbour_exchange\n",
        ),
        ("exscan_refs gather_refs recv_ref ", "exscan_refs gather_refs neighbour_exchange_refs recv_ref "),
        ("exscan gather recv reduce ", "exscan gather neighbour_exchange recv reduce "),
    ],
}
"""File -> what is replaced in it, by what; each occurs once."""

KERNELS: dict[str, list[tuple[str, str]]] = {
    "core/operations.py": [
        _added('    BARRIER = "barrier"\n', '    SUFFIX_SCAN = "suffix_scan"\n'),
        _added(
            ")\n\n\ndef by_kind(",
            """\
    OperationSpec(
        kind=OpKind.SUFFIX_SCAN,
        folds=True,
        in_place=True,
        sources=lambda position, count: range(count - 1, position - 1, -1),
        refs=("tensor_refs", ""),
        kernels="own",
    ),
""",
        ),
    ],
    "backends/shm/staged.py": [
        _added("    OpKind.BARRIER: StagedKernels._barrier,\n", "    OpKind.SUFFIX_SCAN: StagedKernels._allreduce,\n")
    ],
    "backends/tcp/run.py": [
        _added("    OpKind.BARRIER: KernelRun._barrier,\n", "    OpKind.SUFFIX_SCAN: KernelRun._scan,\n")
    ],
}
"""The same for a folding operation, which folds from the last rank on."""


def test_a_new_operation_is_added_in_a_few_files(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "raycollect", ignore=shutil.ignore_patterns("__pycache__"))
    assert len(EDITS) <= MOST_FILES
    for name, edits in (*EDITS.items(), *KERNELS.items()):
        path = tmp_path / "raycollect" / name
        text = path.read_text()
        for old, new in edits:
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        path.write_text(text)
    paths = os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "tests.pure.planner.neighbour_exchange", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
