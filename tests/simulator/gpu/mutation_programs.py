"""Programs whose kernels are mutated: the sample where it is there, the corpus, the reference's fragments, JAX's own.

JAX's kernels come through the drop-in, which must be installed before they are asked for. The mended ones are those
that are silent: what the others do is told in tests/dropin/test_ops_gpu_blackwell.py.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from simulator.gpu.fragments import FRAGMENTS, SPELLINGS
from simulator.gpu.kernels import CORPUS

SAMPLE = pathlib.Path(__file__).parents[4] / "shared" / "conformance" / "mgpu_sample.py"
ARCHITECTURES = {"hopper": "sm_90a", "blackwell": "sm_100a"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A program. Attributes: name; group; run; arch: None for what the kernel needs; options of InterpretGPUParams."""

    name: str
    group: str
    run: Callable[[], Any]
    arch: str | None
    options: dict[str, Any]


def sample() -> Iterator[Program]:
    """The sixteen programs of the conformance sample, if it is there."""
    if not SAMPLE.exists():
        return
    spec = importlib.util.spec_from_file_location("mgpu_sample", SAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, case in module.CASES.items():
        yield Program(name, "sample", case.run, ARCHITECTURES[case.target], {})


def corpus() -> Iterator[Program]:
    """The kernels that were written afresh."""
    for name, case in CORPUS.items():
        yield Program(name, "corpus", case.run, case.arch, dict(case.options))


def fragments() -> Iterator[Program]:
    """The fragments of the reference, in its own spelling."""
    for name, f in FRAGMENTS.items():
        yield Program(name, "fragments", lambda f=f: f.run(SPELLINGS[0]), f.arch, dict(f.options))


def shipped() -> Iterator[Program]:
    """JAX's own kernels, small."""
    from dropin import test_ops_gpu, test_ops_gpu_blackwell, test_ops_gpu_devices
    from dropin.gpu_ops import mended, ops

    ops("attention").cuda_versions = types.SimpleNamespace(cuda_runtime_get_version=lambda: 12091)
    options, few = {"num_sms": 4}, [{"num_sms": 1}, {"num_sms": 2}]  # few: each cluster has several tiles to do
    for name, run in [*test_ops_gpu.EACH.items(), *test_ops_gpu_devices.EACH.items()]:
        yield Program(f"jax_{name}", "jax", run, None, options)
    b = test_ops_gpu_blackwell
    for collective in (False, True):
        name = "jax_blackwell_collective" if collective else "jax_blackwell"
        yield Program(name, "jax", lambda c=collective: b.blackwell(b.in_order(c), c)[2](), None, few[0])
    barrier = b.LEADERS_ONLY, 'store_done_barrier=plgpu.ClusterBarrier(collective_axes=("x",), '
    ragged = [barrier, (b.WAIT, "False"), b.thread_waits(" " * 4)]
    yield Program(
        "jax_blackwell_ragged",
        "jax",
        lambda: b.blackwell_ragged(mended("blackwell_ragged_dot", *ragged))[0](),
        None,
        few[1],
    )


def programs(*groups: str) -> list[Program]:
    """The programs of these groups."""
    makers = {"sample": sample, "corpus": corpus, "fragments": fragments, "jax": shipped}
    return [program for group in groups for program in makers[group]()]
