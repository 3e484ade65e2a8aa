"""`palladion.compile(…, target="cpu")`: numbers, loops, axes, refusals; stages in files; the text that is the key."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import palladion as pl
from palladion import config, jaxlink
from palladion import cpu as plcpu
from palladion import tpu as pltpu
from palladion.compiler.cpu import cache, compile, source, target

HERE = pathlib.Path(__file__).name


def sds(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def softmax_kernel(x_ref, o_ref):
    e = jnp.exp(x_ref[...] - jnp.max(x_ref[...], axis=-1, keepdims=True))
    o_ref[...] = e / jnp.sum(e, axis=-1, keepdims=True)


def rows(kernel, n=64, columns=512, **options):
    spec = pl.BlockSpec((8, columns), lambda i: (i, 0))
    return pl.pallas_call(kernel, sds(n, columns), grid=(n // 8,), in_specs=[spec], out_specs=spec, **options)


def line_of(text):
    """`file:line` of the one line of this file that has a text in it (and is not a test's)."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line and "line_of" not in line)
    return f"{HERE}:{number}"


def one(f, *args):
    (call,) = pl.compile(f, *args).calls
    return call


# --- numbers --------------------------------------------------------------------------------------------------------
def test_facts_and_stages():
    report = pl.compile(rows(softmax_kernel), sds(64, 512))
    (call,) = report.calls
    assert (
        report.ok and call.ok and call.name == "softmax_kernel" and call.kernel.endswith(line_of("def softmax_kernel"))
    )
    assert call.fact("vector_bits") == 8 * target.host().vector_bytes
    assert 200 < call.fact("code_bytes") < 20_000 and call.fact("arena_bytes") >= 512 * 4
    assert call.fact("lower_seconds") > 0 and call.fact("llvm_seconds") > 0 and call.fact("nothing") is None
    assert call.stages == ("jaxpr", "nests", "llvm", "asm")
    assert "exp" in call.text("jaxpr") and "define external i32" in call.text("llvm") and "ret" in call.text("asm")
    for stage in ("lowered", "fused", "shrunk", "arranged"):
        assert f"# inner, {stage}\n" in call.text("nests")
    assert report.text("asm") == call.text("asm")


def test_the_report_as_text_and_json():
    report = pl.compile(rows(softmax_kernel), sds(64, 512))
    text = str(report)
    assert text.startswith("softmax_kernel at ") and "\n1 kernel call in " in text
    assert "axis 0 (8 programs) in parallel: its programs write different blocks" in text
    found = json.loads(report.json())
    assert found["ok"] and found["target"] == "cpu" and found["schema"] == 1
    (call,) = found["calls"]
    assert call["facts"]["code_bytes"] == report.calls[0].fact("code_bytes")
    assert call["axes"][0]["parallel"] and call["loops"][0]["vectorised"] and call["refusal"] is None


def test_calls_under_transforms_are_found_in_order():
    f = rows(softmax_kernel)

    def g(x):
        y = jax.jit(f)(x)
        _, ys = jax.lax.scan(lambda c, r: (c, jax.vmap(f)(r)), 0.0, y[None, None])
        return ys

    calls = pl.compile(g, sds(64, 512)).calls
    assert [[r.size for r in c.remarks if r.subject == "axis"] for c in calls] == [[8], [1, 8]]
    assert pl.compile(jnp.sin, 1.0).calls == ()


# --- loops ----------------------------------------------------------------------------------------------------------
def cumsum_kernel(x_ref, o_ref):
    o_ref[...] = jnp.cumsum(x_ref[...], axis=1)  # a running sum


def recurrence_kernel(x_ref, o_ref):
    o_ref[:, 0] = jax.lax.reduce(x_ref[...], np.float32(0), lambda a, b: a * 0.5 + b, (1,))  # in this order


def short_kernel(x_ref, o_ref):
    o_ref[0, :2] = x_ref[0, :2] * 2  # two elements


def strided_kernel(x_ref, o_ref):
    o_ref[:, 0] = x_ref[:, 0] * 2  # down a column


def sparse_kernel(x_ref, o_ref):
    o_ref[:, :12] = x_ref[:, 0:60:5] + x_ref[:, :12]  # one of the reads takes every fifth element


def sum_kernel(x_ref, o_ref):
    o_ref[:, 0] = jnp.sum(x_ref[...], axis=1)  # along rows


@pytest.mark.parametrize(
    ("kernel", "text", "subject", "good", "reason"),
    [
        (cumsum_kernel, "# a running sum", "loop", True, "contiguous"),
        (recurrence_kernel, "# in this order", "loop", False, "recurrence"),
        (short_kernel, "# two elements", "loop", False, "short"),
        (strided_kernel, "# down a column", "loop", False, "strided"),
        (sparse_kernel, "# one of the reads", "loop", True, "element-access"),
        (sum_kernel, "# along rows", "reduction", True, "contiguous"),
    ],
)
def test_loops_and_why(kernel, text, subject, good, reason):
    call = one(pl.pallas_call(kernel, sds(64, 64)), sds(64, 64))
    line = line_of(f"  {text}" if text.startswith("#") else text)
    found = [(r.subject, r.good, r.kind) for r in call.remarks if any(line in w for w in r.where)]
    assert (subject, good, reason) in found, (call.remarks, line)


# --- grid axes ------------------------------------------------------------------------------------------------------
def matmul_kernel(x_ref, y_ref, o_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    o_ref[...] += x_ref[...] @ y_ref[...]


def matmul(order, **options):
    """A product with the grid axes in some order: "ijk" is the usual one."""

    def at(names):
        pick = {name: order.index(name) for name in "ijk"}
        return lambda *ids: tuple(ids[pick[n]] for n in names)  # the blocks of a product

    spec = {names: pl.BlockSpec((64, 64), at(names)) for names in ("ik", "kj", "ij")}
    return pl.pallas_call(
        matmul_kernel, sds(128, 128), grid=(2, 2, 2), in_specs=[spec["ik"], spec["kj"]], out_specs=spec["ij"], **options
    )


def axes(call):
    return [(r.good, r.kind) for r in call.remarks if r.subject == "axis"]


def test_the_axis_of_a_sum_runs_in_order_and_the_report_says_why():
    call = one(matmul("ijk"), sds(128, 128), sds(128, 128))
    assert axes(call) == [(True, "independent"), (True, "independent"), (False, "same-block")]
    remark = [r for r in call.remarks if r.subject == "axis"][2]
    assert remark.why == "it writes the same block of o_ref as its neighbours"
    assert line_of("# the blocks of a product") in remark.where[0]


def test_only_leading_axes_are_split():
    call = one(matmul("kij"), sds(128, 128), sds(128, 128))
    assert axes(call) == [(False, "same-block"), (False, "inner"), (False, "inner")]


def test_declared_axes():
    options = plcpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"))
    call = one(matmul("ijk", compiler_params=options), sds(128, 128), sds(128, 128))
    assert axes(call) == [(True, "declared"), (True, "independent"), (False, "same-block")]


def test_scratch_that_is_carried_on():
    def kernel(x_ref, o_ref, total_ref):
        total_ref[...] += x_ref[...]  # carried
        o_ref[...] = total_ref[...]

    call = one(rows(kernel, scratch_shapes=[pltpu.VMEM((8, 512), jnp.float32)]), sds(64, 512))
    (remark,) = (r for r in call.remarks if r.subject == "axis")
    assert (remark.good, remark.kind) == (False, "scratch") and line_of("  # carried") in remark.where[0]


def test_prints_and_dynamic_grids():
    def kernel(x_ref, o_ref):
        pl.debug_print("{}", x_ref[0, 0])  # a print
        o_ref[...] = x_ref[...]

    (remark,) = (r for r in one(rows(kernel), sds(64, 512)).remarks if r.subject == "axis")
    assert remark.kind == "effects" and line_of("  # a print") in remark.where[0]

    def dynamic(n, x):
        spec = pl.BlockSpec((8, 512), lambda i: (i, 0))
        return pl.pallas_call(softmax_kernel, sds(64, 512), grid=(n,), in_specs=[spec], out_specs=spec)(x)

    assert axes(one(dynamic, sds(dtype="int32"), sds(64, 512))) == [(False, "dynamic")]


# --- refusals -------------------------------------------------------------------------------------------------------
def test_a_refusal_names_the_line():
    def kernel(x_ref, o_ref):
        o_ref[:, :8] = jax.lax.linalg.cholesky(x_ref[:, :8])  # refused

    report = pl.compile(rows(kernel), sds(64, 512))
    (call,) = report.calls
    assert not report.ok and call.facts == () and call.refusal.type == "UnsupportedPrimitive"
    assert line_of("  # refused") in call.refusal.where and "`cholesky`" in str(report)
    with pytest.raises(ValueError, match="did not compile for cpu"):
        report.text("asm")


def test_mistakes():
    with pytest.raises(ValueError, match=r"no compile target 'tpu'.*\n.*\n  fix: the targets are: cpu"):
        pl.compile(rows(softmax_kernel), sds(64, 512), target="tpu")
    with pytest.raises(TypeError, match="takes a function first"):
        pl.compile(3)
    with pytest.raises(ValueError, match="no stage 'ptx'"):
        pl.compile(rows(softmax_kernel), sds(64, 512)).text("ptx")


# --- PALLADION_DUMP -------------------------------------------------------------------------------------------------
PROGRAM = """
import sys; sys.path.insert(0, {tests!r})
import jax.numpy as jnp
from compiler.cpu.test_report import rows, softmax_kernel
from palladion import cpu as plcpu
print(rows(softmax_kernel, compiler_params=plcpu.CompilerParams())(jnp.ones((64, 512)))[0, 0])
"""


def start(**environment):
    code = PROGRAM.format(tests=str(pathlib.Path(__file__).resolve().parents[2]))
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environment}, **pipes)


def test_two_processes_dump_every_stage(tmp_path):
    processes = [start(PALLADION_DUMP=str(tmp_path / "new" / "folder")) for _ in range(2)]
    for process in processes:
        _, err = process.communicate(timeout=400)
        assert process.returncode == 0, err
    names = sorted(p.name for p in (tmp_path / "new" / "folder").iterdir())
    stems = {name.split(".")[0] for name in names}
    assert len(names) == 4 * len(stems) and all(s.startswith("softmax_kernel-") for s in stems), names
    for stem in stems:
        nests = (tmp_path / "new" / "folder" / f"{stem}.nests.txt").read_text()
        assert all(f"# inner, {stage}\n" in nests for stage in ("lowered", "fused", "shrunk"))


def test_a_dump_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PALLADION_DUMP", str(tmp_path / "file"))
    call = rows(softmax_kernel, compiler_params=plcpu.CompilerParams())
    with pytest.raises(ValueError, match=r"PALLADION_DUMP=\S*file: the stages of softmax_kernel cannot be written"):
        jax.jit(call).lower(sds(64, 512)).compile()


# --- the key --------------------------------------------------------------------------------------------------------
def params_of(f, *args):
    eqns = jax.make_jaxpr(f)(*args).jaxpr.eqns
    return next(e.params for e in eqns if e.primitive is pl.pallas_call_p)


def text_of(f, *args):
    return source.describe(params_of(f, *args), jaxlink.trace_context())


def test_the_text_of_a_call_has_all_that_decides_its_code():
    def scaled(factor, dtype="float32", **options):
        def kernel(x_ref, o_ref):
            o_ref[...] = (x_ref[...] * factor).astype(dtype).astype("float32")

        return rows(kernel, **options)

    texts = [
        text_of(scaled(2.0), sds(64, 512)),
        text_of(scaled(2.5), sds(64, 512)),
        text_of(scaled(2.0, "int32"), sds(64, 512)),
        text_of(scaled(2.0, n=32), sds(32, 512)),
        text_of(scaled(2.0, name="other"), sds(64, 512)),
        text_of(scaled(2.0, input_output_aliases={0: 0}), sds(64, 512)),
        text_of(scaled(2.0, compiler_params=plcpu.CompilerParams(num_threads=1)), sds(64, 512)),
        text_of(rows(softmax_kernel), sds(64, 512)),
    ]
    with jax.enable_x64(True):
        texts.append(text_of(rows(softmax_kernel), sds(64, 512)))
    assert None not in texts and len(set(texts)) == len(texts)
    assert text_of(scaled(2.0), sds(64, 512)) == texts[0]  # another function, at another line
    assert " at 0x" not in "".join(texts)


def test_a_value_without_a_text_of_its_own_gives_none():
    params = params_of(rows(softmax_kernel), sds(64, 512))
    assert source.describe(params) is not None
    assert source.describe({**params, "compiler_params": object()}) is None


def test_a_call_that_the_disk_knows_is_not_lowered_again(tmp_path, monkeypatch):
    with config.state("cache_dir")(str(tmp_path)):
        first = compile.compile_call(compile._Key(params_of(rows(softmax_kernel, n=72), sds(72, 512))))
        compile.compile_call.cache_clear()
        cache._store.memory.clear()
        monkeypatch.setattr(compile, "make_unit", lambda params: pytest.fail("lowered again"))
        again = compile.compile_call(compile._Key(params_of(rows(softmax_kernel, n=72), sds(72, 512))))
    assert again == first


def test_a_kernel_that_prints_works_from_the_disk(tmp_path, capfd):
    def kernel(x_ref, o_ref):
        pl.debug_print("first {}", x_ref[0, 0])
        o_ref[...] = x_ref[...]

    with config.state("cache_dir")(str(tmp_path)):
        for _ in range(2):
            compile.compile_call.cache_clear()
            cache._store.memory.clear()
            jax.clear_caches()
            rows(kernel, n=8, compiler_params=plcpu.CompilerParams())(jnp.ones((8, 512)))
            jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["first 1.0"] * 2


def test_the_folder_may_change_after_the_first_kernel(tmp_path):
    for name, n in (("a", 80), ("b", 88)):
        with config.state("cache_dir")(str(tmp_path / name)):
            compile.compile_call(compile._Key(params_of(rows(softmax_kernel, n=n), sds(n, 512))))
    assert [len(list((tmp_path / name).glob("*.o"))) for name in ("a", "b")] == [1, 1]


def test_a_product_is_told_of_with_its_sizes_and_line():
    def matmul(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.dot(a_ref[...], b_ref[...])

    x = jax.ShapeDtypeStruct((64, 48), jnp.float32)
    y = jax.ShapeDtypeStruct((48, 32), jnp.float32)
    call = pl.pallas_call(matmul, jax.ShapeDtypeStruct((64, 32), jnp.float32), compiler_params=plcpu.CompilerParams())
    text = str(pl.compile(call, x, y))
    assert "product 64×32×48 by a packed kernel, in vectors" in text
    assert "test_report.py" in text.split("product 64")[1].splitlines()[0]
