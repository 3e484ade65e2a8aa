"""What the tests of JAX's GPU kernels share: the modules, inputs, the same mathematics in NumPy, and running a call."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import linecache
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import palladion
from palladion import mosaic_gpu as plgpu
from palladion.errors import KernelFinding, PalladionWarning

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
M, N = 0, 1  # of MatmulDimension
LEFT_OVER = "barrier-unwaited-completion"  # the warning of all that end with barriers that nobody waits on any more
SCHEDULES = ["eager", 1, pytest.param(2, marks=pytest.mark.slow)]
# Roundings of the result, relative to its largest element.
TOLERANCE = {jnp.dtype(F16): 1e-3, jnp.dtype(BF16): 8e-3, jnp.dtype(F32): 1e-6}


# --- the modules ------------------------------------------------------------------------------------------------------
def ops(name: str) -> Any:
    """A module of `jax.experimental.pallas.ops.gpu`, as it ships."""
    return importlib.import_module(f"jax.experimental.pallas.ops.gpu.{name}_mgpu")


def mended(name: str, *replacements: tuple[str, str]) -> Any:
    """The same module with pieces of its text replaced, each of which must be there once."""
    spec = importlib.util.find_spec(ops(name).__name__)
    assert spec is not None and spec.origin is not None
    source = pathlib.Path(spec.origin).read_text()
    for old, new in replacements:
        assert source.count(old) == 1, f"{name} has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    module = types.ModuleType(f"mended_{name}")
    sys.modules[module.__name__] = module  # dataclasses look there
    file = f"mended_{name}.py"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), vars(module))
    return module


def tuning(module: Any, wg: int = N, cluster: int | None = None, minor: int = N, **sizes: Any) -> Any:
    """A `TuningConfig` of the Hopper matmuls: small tiles, unless told otherwise."""
    dim = module.MatmulDimension
    return module.TuningConfig(
        **(dict(tile_m=64, tile_n=64, tile_k=64, max_concurrent_steps=2) | sizes), wg_dimension=dim(wg),
        cluster_dimension=None if cluster is None else dim(cluster), grid_minor_dim=dim(minor),
    )  # fmt: skip


# --- inputs and results -----------------------------------------------------------------------------------------------
def normal(*shape: int, seed: int = 0, dtype: Any = F16, scale: float = 1.0) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape) * scale, dtype)


def integers(*shape: int, seed: int = 0, dtype: Any = jnp.int8) -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).integers(-100, 100, shape), dtype)


def exact(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def close(got: Any, want: Any, times: float = 1.0) -> None:
    """Equal up to the rounding of the result's dtype, `times` so much."""
    atol = times * TOLERANCE[got.dtype] * max(1.0, np.abs(want).max())
    np.testing.assert_allclose(exact(got), want, atol=atol, rtol=0)


def grouped(x: Any, w: Any, sizes: Any) -> np.ndarray:
    """Rows of x by the matrix of their group."""
    return np.einsum("mk,mkn->mn", exact(x), exact(w)[np.repeat(np.arange(len(sizes)), sizes)])


def grouped_transposed(x: Any, y: Any, sizes: Any) -> np.ndarray:
    """Of each group of rows the product x.T @ y."""
    ends = np.cumsum([0, *sizes])
    return np.stack([exact(x)[i:j].T @ exact(y)[i:j] for i, j in itertools.pairwise(ends)])


def attention(q: Any, k: Any, v: Any, causal: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Attention of (batch, length, heads, dimension), and the base-2 logarithm of the sums of its exponentials."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = exact(q), np.repeat(exact(k), repeats, 2), np.repeat(exact(v), repeats, 2)
    scores = np.einsum("bqhc,bkhc->bhqk", q, k)
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    total = p.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhc->bqhc", p / total, v), (np.log2(np.e) * (top + np.log(total)))[..., 0]


def attention_gradients(q: Any, k: Any, v: Any, g: Any) -> tuple[np.ndarray, ...]:
    """Of the sum of attention(q, k, v) * g."""
    heads, repeats = k.shape[2], q.shape[2] // k.shape[2]
    q, g, k, v = exact(q), exact(g), np.repeat(exact(k), repeats, 2), np.repeat(exact(v), repeats, 2)
    scores = np.einsum("bqhc,bkhc->bhqk", q, k)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bqhc,bkhc->bhqk", g, v)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))

    def folded(x: np.ndarray) -> np.ndarray:
        return x.reshape(*x.shape[:2], heads, repeats, x.shape[-1]).sum(3)

    dq = np.einsum("bhqk,bkhc->bqhc", ds, k)
    dk, dv = np.einsum("bhqk,bqhc->bkhc", ds, q), np.einsum("bhqk,bqhc->bkhc", p, g)
    return dq, folded(dk), folded(dv)


# --- running ----------------------------------------------------------------------------------------------------------
def on_devices(f: Callable[..., Any], count: int, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function of whole arrays that runs on a mesh of so many devices, named "x"."""
    mesh = jax.make_mesh((count,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def along(axis: int | None, rank: int) -> P:
    """Sharded along this axis."""
    return P(*("x" if k == axis else None for k in range(rank)))


@contextlib.contextmanager
def machine(**given: Any) -> Any:
    """A simulated GPU that looks for races, of few SMs, so that each has several tiles to do."""
    fields = {"detect_races": True, "num_sms": 4, **given}
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**fields)):
        yield


def warned(call: Callable[[], Any], *kinds: str) -> Any:
    """Run a call that warns of exactly these kinds, of none if none are given; its result."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = jax.block_until_ready(call())
    texts = [str(w.message) for w in seen if issubclass(w.category, PalladionWarning)]
    found = {next(line for line in t.splitlines() if "kind: " in line).split("kind: ")[1] for t in texts}
    assert found == set(kinds), "\n\n".join(texts)
    return result


def finding(call: Callable[[], Any], kind: str, line: str) -> Any:
    """Run a call that raises a finding of this kind at a line with this text; the finding."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PalladionWarning)
        try:
            jax.block_until_ready(call())
        except (KernelFinding, jax.errors.JaxRuntimeError):  # the latter inside jit
            pass
    found = palladion.last_report().findings[-1]
    assert (found.kind, found.level) == (kind, "error"), found
    assert line in _lines(found.where), found
    return found


def _lines(where: str | None) -> str:
    """The text of the lines that a finding names, with those that the same statement goes on on."""
    texts = []
    for file, number in re.findall(r"([^ ;]+\.py):(\d+)", where or ""):
        texts += linecache.getlines(file)[int(number) - 1 : int(number) + 5]
    return "".join(texts)
