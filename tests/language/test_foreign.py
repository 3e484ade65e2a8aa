"""Programs that mix names of JAX's own Pallas with Palladion's are told so. JAX's is loaded in another process only."""

import subprocess
import sys
import textwrap

import pytest

from palladion.language.foreign import is_foreign, refuse_foreign

PROGRAM = """
import traceback
import jax, jax.numpy as jnp
from jax.experimental import pallas as theirs
from jax.experimental.pallas import tpu as theirs_tpu
import palladion as pl

x, shape = jnp.zeros((8, 128)), jax.ShapeDtypeStruct((8, 128), jnp.float32)

def copy(x_ref, o_ref, *_):
    o_ref[...] = x_ref[...]

def with_id(x_ref, o_ref):
    o_ref[...] = x_ref[...] + theirs.program_id(0)

def call(kernel=copy, out_shape=shape, interpret=True, **options):
    return pl.pallas_call(kernel, out_shape, interpret=interpret, **options)(x)

vmem = theirs_tpu.VMEM((8, 128), jnp.float32)
block = theirs.BlockSpec((8, 128), lambda: (0, 0))
cases = dict(
    in_specs=lambda: call(in_specs=[block]),
    out_specs=lambda: call(out_specs=block),
    grid_spec=lambda: call(grid_spec=theirs.GridSpec(grid=(1,))),
    in_grid_spec=lambda: call(grid_spec=pl.GridSpec(grid=(1,), in_specs=[block])),
    compiler_params=lambda: call(compiler_params=theirs_tpu.CompilerParams()),
    interpret=lambda: call(interpret=theirs_tpu.InterpretParams()),
    scratch_shapes=lambda: call(scratch_shapes=dict(acc=vmem)),
    out_shape=lambda: call(out_shape=[vmem]),
    cost_estimate=lambda: call(cost_estimate=theirs.CostEstimate(flops=1, transcendentals=1, bytes_accessed=1)),
    memory_space=lambda: pl.BlockSpec(memory_space=theirs_tpu.SMEM),
    pipeline_mode=lambda: pl.BlockSpec((8, 128), pipeline_mode=theirs.Buffered(1)),
    block_shape=lambda: pl.BlockSpec((theirs.Element(8), 128)),
    traced=lambda: call(with_id, grid=(1,)),
    eager=lambda: call(with_id, grid=(1,), interpret=pl.EagerParams()),
)
for name, case in cases.items():
    try:
        case()
    except Exception as error:
        print(name, "|", type(error).__name__, "|", str(error).partition("\\n")[0], "|", "fix:" in str(error))
        for note in getattr(error, "__notes__", ()):
            print(name, "note |", note.replace("\\n", " "))
print("end")
"""
HINT = "(or run the program with `palladion run`)"


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """name of a case -> what it printed after its name."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("end\n"), done.stderr
    lines = [line.split(" | ", 1) for line in done.stdout.splitlines()[:-1]]
    return {name: [text for n, text in lines if n == name] for name, _ in lines}


@pytest.mark.parametrize(
    ("case", "argument", "kind"),
    [
        ("in_specs", "in_specs", "BlockSpec"),
        ("out_specs", "out_specs", "BlockSpec"),
        ("grid_spec", "grid_spec", "GridSpec"),
        ("in_grid_spec", "in_specs", "BlockSpec"),
        ("compiler_params", "compiler_params", "CompilerParams"),
        ("interpret", "interpret", "InterpretParams"),
        ("scratch_shapes", "scratch_shapes", "MemoryRef"),
        ("out_shape", "out_shape", "MemoryRef"),
        ("cost_estimate", "cost_estimate", "CostEstimate"),
        ("memory_space", "memory_space", "MemorySpace"),
        ("pipeline_mode", "pipeline_mode", "Buffered"),
        ("block_shape", "block_shape", "Element"),
    ],
)
def test_an_object_of_jaxs_own_pallas_is_refused(said, case, argument, kind):
    ((line),) = said[case]
    assert line.startswith(f"TypeError | {argument}: this {kind} is JAX's own Pallas (jax._src.pallas.")
    assert line.endswith("Palladion cannot use it. | True")


@pytest.mark.parametrize("case", ["traced", "eager"])
def test_an_operation_of_jaxs_own_pallas_is_explained(said, case):
    notes = [note for note in said[f"{case} note"] if note.startswith("The kernel")]
    assert notes == [
        "The kernel with_id runs on Palladion, but uses an operation of JAX's own Pallas (`jax.experimental.pallas`)."
        f"   fix: import palladion as pl {HINT}"
    ]


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("jax._src.pallas.core", "palladion as pl"),
        ("jax._src.pallas.mosaic.core", "palladion.tpu as pltpu"),
        ("jax._src.pallas.mosaic_gpu.core", "palladion.mosaic_gpu as plgpu"),
        ("jax._src.pallas.triton.core", "palladion.triton as pltriton"),
    ],
)
def test_the_fix_names_the_module_to_import(module, use):
    kind = type("Thing", (), {"__module__": module})
    assert is_foreign(kind) and is_foreign(kind())
    with pytest.raises(TypeError) as caught:
        refuse_foreign(grid=1, scratch_shapes=[{"acc": kind()}])
    assert str(caught.value).splitlines()[-1] == f"  fix: import {use} {HINT}"


def test_everything_else_is_let_through():
    refuse_foreign(a=[1, "x", None, {"b": (object(),)}], b=int)
    assert not is_foreign(type("Thing", (), {"__module__": "jax._src.pallas_like"}))
