"""What is known of a kernel before code is written (what divides integers, what products read), and what that leaves
out of the code: meetings of CUDA threads, instructions."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import palladion as pl
from palladion import jaxlink
from palladion import mosaic_gpu as plgpu
from palladion.compiler.gpu import smem_inference
from palladion.compiler.gpu.generate import generate
from palladion.compiler.gpu.usage import Usage
from palladion.language.gpu.memory import SwizzleTransform, TilingTransform
from palladion.language.primitive import pallas_call_p

f16, f32 = jnp.float16, jnp.float32


def params_of(body, out, *args, **options):
    """The parameters of a kernel's call."""
    jaxpr = jax.make_jaxpr(plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(*out), **options))(*args)
    (found,) = [eqn.params for eqn in jaxpr.eqns if eqn.primitive is pallas_call_p]
    return found


def code(*args, arch="sm_90a", **options):
    """The lines of the kernel's body, and what was generated."""
    made = generate(params_of(*args, **options), arch)
    return made.source[made.source.index('extern "C"') :].splitlines(), made


def meetings(lines) -> int:
    return sum(line.strip() in ("__syncthreads();", "sync_warpgroup(wg);") for line in lines)


def test_what_divides_integers():
    def body(x_ref, n_ref, y_ref):
        block, n = lax.axis_index("x"), n_ref[0]

        @pl.loop(0, 4)
        def _(i):
            start = block * 64 + i * 16
            rest = jnp.where(n > 0, start, lax.rem(start, 48))
            y_ref[pl.ds(start, 8)] = x_ref[pl.ds(rest, 8)]
            y_ref[pl.ds(pl.multiple_of(n, 32), 8)] = x_ref[pl.ds(n * 6, 8)]

    found = params_of(body, ((512,), f32), jnp.zeros(512), jnp.zeros(1, jnp.int32), grid=(2,), grid_names=("x",))
    usage = Usage(found["jaxpr"])
    starts = set()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive in (jaxlink.get_p, jaxlink.swap_p):
                starts.update(usage.multiple(v) for v in eqn.invars if str(v.aval) == "int32[]")
            for inner in jaxlink.jaxprs_in_params(eqn.params):
                walk(inner)

    walk(found["jaxpr"])
    assert starts == {6, 16, 32}


def test_products_decide_how_buffers_lie():
    def body(a_ref, b_ref, o_ref, a, b, loaded):
        plgpu.copy_gmem_to_smem(a_ref, a, loaded)
        plgpu.copy_gmem_to_smem(b_ref, b, loaded)
        plgpu.barrier_wait(loaded)

        def multiply(acc):
            plgpu.wgmma(acc, a, plgpu.transpose_ref(b, (1, 0)))
            return acc[...]

        o_ref[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), f32))

    usage = Usage(
        params_of(
            body,
            ((64, 64), f32),
            jnp.zeros((64, 96), f16),
            jnp.zeros((64, 96), f16),
            scratch_types=dict(
                a=plgpu.SMEM((64, 96), f16), b=plgpu.SMEM((64, 96), f16), loaded=plgpu.Barrier(num_arrivals=2)
            ),
        )["jaxpr"]
    )
    aval = plgpu.SMEM((64, 96), f16).get_ref_aval()
    for root in (3, 4):
        assert smem_inference.inferred(usage.of(root), aval) == (TilingTransform((8, 32)), SwizzleTransform(64))


def test_threads_meet_only_where_one_may_need_what_another_did():
    scratch = dict(s=plgpu.SMEM((64, 64), f32))

    def same(x_ref, y_ref, s):
        s[...] = x_ref[...]
        y_ref[...] = s[...]

    def moved(x_ref, y_ref, s):
        s[...] = x_ref[...]
        y_ref[pl.ds(0, 32)] = s[pl.ds(32, 32)]

    def overwritten(x_ref, y_ref, s):
        s[...] = x_ref[...]
        y_ref[...] = s[...]
        s[pl.ds(0, 32)] = x_ref[pl.ds(32, 32)]

    def looped(x_ref, y_ref, s):
        @pl.loop(0, 64)
        def _(i):
            s[i] = x_ref[i]
            y_ref[i] = s[63 - i]

    x = jnp.zeros((64, 64))
    counted = [meetings(code(b, ((64, 64), f32), x, scratch_types=scratch)[0]) for b in (same, moved, overwritten)]
    assert counted == [0, 1, 1]
    lines = code(looped, ((64, 64), f32), x, scratch_types=scratch)[0]
    assert meetings(lines) == 2  # each turn before the store, and between the two


def test_copies_one_after_the_other_need_one_meeting():
    def body(x_ref, y_ref, s, loaded):
        y_ref[...] = s[0] + s[1]
        for k in range(2):
            plgpu.copy_gmem_to_smem(x_ref, s.at[k], loaded)
        plgpu.barrier_wait(loaded)

    scratch = dict(s=plgpu.SMEM((2, 64, 64), f32), loaded=plgpu.Barrier(num_arrivals=2))
    lines, _ = code(body, ((64, 64), f32), jnp.zeros((64, 64)), scratch_types=scratch)
    copies = [k for k, line in enumerate(lines) if "copy_in_" in line]
    assert len(copies) == 2
    first = max(k for k, line in enumerate(lines) if line.strip() == "__syncthreads();")
    assert first < copies[0]


def test_memory_of_scopes_is_used_again():
    def body(x_ref, y_ref):
        for k in range(3):

            def scope(s, k=k):
                s[...] = x_ref[...]
                y_ref[k] = s[...]

            pl.run_scoped(scope, plgpu.SMEM((64, 64), f32))

    _, made = code(body, ((3, 64, 64), f32), jnp.zeros((64, 64)))
    assert made.smem_bytes == 64 * 64 * 4


def test_alternatives_of_a_union_share_memory():
    def body(x_ref, y_ref, u):
        (a, (b, c)) = u
        a[...] = x_ref[...]
        b[...] = a[pl.ds(0, 32)]
        c[...] = a[0]
        y_ref[...] = b[...]

    union = plgpu.RefUnion(plgpu.SMEM((64, 64), f32), [plgpu.SMEM((32, 64), f32), plgpu.SMEM((64,), f32)])
    _, made = code(body, ((32, 64), f32), jnp.zeros((64, 64)), scratch_types=dict(u=union))
    assert made.smem_bytes == 64 * 64 * 4


def test_a_name_of_the_header_is_no_name_of_a_variable():
    def load(x_ref, y_ref):
        store = x_ref[0] + 1
        y_ref[0] = store * store

    lines, made = code(load, ((1,), f32), jnp.zeros(1))
    assert made.name != "load"
    assert any(re.match(r"\s*const float store_\d+ =", line) for line in lines)
    assert not any("float store =" in line for line in lines)


def test_blackwells_operations_are_refused_on_hopper():
    def body(y_ref, result, barrier):
        plgpu.try_cluster_cancel(result, barrier)
        plgpu.barrier_wait(barrier)
        y_ref[0] = 1

    scratch = dict(result=plgpu.TryClusterCancelResult(), barrier=plgpu.Barrier())
    with pytest.raises(NotImplementedError, match=r"plgpu.try_cluster_cancel needs Blackwell(.|\n)*test_usage.py:"):
        code(body, ((1,), jnp.int32), scratch_types=scratch)


def test_semaphores_are_memory_of_the_call():
    def body(y_ref, sems):
        pl.semaphore_signal(sems.at[1])
        pl.semaphore_wait(sems.at[1])
        y_ref[0] = 1

    _, made = code(body, ((1,), jnp.int32), scratch_types=dict(sems=plgpu.SemaphoreType.REGULAR((3,))))
    assert [(w.size, w.zeroed) for w in made.workspaces] == [(12, True)]
    assert np.all([p.operand for p in made.params] == [0, 1])
