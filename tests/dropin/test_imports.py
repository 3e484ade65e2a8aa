"""`jax.experimental.pallas` in every spelling is Palladion after `install()`, and JAX's own is not loaded."""

import pytest

INSTALL = "import palladion.dropin; palladion.dropin.install()\n"
# What must not be in sys.modules afterwards: JAX's own language and its interpreters.
NOTHING_OF_JAX = """
import sys
own = [m for m in sys.modules if m.startswith(("jax._src.pallas.pallas_call", "jax._src.pallas.primitives",
                                               "jax._src.pallas.hlo_interpreter"))]
assert not own, own
"""
SPELLINGS = {
    "import as": "import jax.experimental.pallas as pl",
    "from import": "from jax.experimental import pallas as pl",
    "attribute": "import jax.experimental; pl = jax.experimental.pallas",
    "importlib": "import importlib; pl = importlib.import_module('jax.experimental.pallas')",
    "__import__": "pl = __import__('jax.experimental.pallas', fromlist=['pallas_call'])",
    "relative importlib": "import importlib; pl = importlib.import_module('.pallas', 'jax.experimental')",
}
DIALECT_SPELLINGS = {
    "import as": "import jax.experimental.pallas.{0} as d",
    "from package": "from jax.experimental.pallas import {0} as d",
    "attribute of pl": "from jax.experimental import pallas as pl; d = pl.{0}",
    "attribute of jax": "import jax; d = jax.experimental.pallas.{0}",
    "importlib": "import importlib; d = importlib.import_module('jax.experimental.pallas.{0}')",
    "names": "from jax.experimental.pallas.{0} import CompilerParams; import jax.experimental.pallas.{0} as d;"
    "assert d.CompilerParams is CompilerParams",
}


def test_every_spelling_is_palladion(forks):
    """One process: each spelling in a fresh namespace gives the same module with Palladion's objects."""
    program = INSTALL + "import palladion\n"
    for text in SPELLINGS.values():
        program += f"ns = {{}}; exec({text!r}, ns); pl = ns['pl']\n"
        program += "assert pl.pallas_call is palladion.pallas_call and pl.__name__ == 'jax.experimental.pallas'\n"
        program += "assert pl is sys.modules['jax.experimental.pallas']\n"
    for dialect in ("tpu", "triton", "mosaic_gpu"):
        for text in DIALECT_SPELLINGS.values():
            program += f"ns = {{}}; exec({text.format(dialect)!r}, ns); d = ns['d']\n"
            program += f"assert d.__name__ == 'jax.experimental.pallas.{dialect}', d\n"
            program += f"assert d.CompilerParams is __import__('palladion.{dialect}').{dialect}.CompilerParams\n"
    ran = forks.python("import sys\n" + program + NOTHING_OF_JAX + "print('done')")
    assert ran.lines == ["done"], ran.err


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_first(forks, spelling):
    """In a process of its own, with nothing imported before it."""
    ran = forks.python(INSTALL + SPELLINGS[spelling] + NOTHING_OF_JAX + "print(pl.pallas_call.__module__)")
    assert ran.lines == ["palladion.language.call"], ran.err


def test_a_kernel_with_all_dialects_runs(forks):
    program = (
        INSTALL
        + """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu, triton as pltriton, mosaic_gpu as plgpu

def kernel(x_ref, o_ref, acc_ref):
    acc_ref[...] = pltriton.load(x_ref, mask=jnp.arange(8) < 5, other=0.0)
    o_ref[...] = pltpu.roll(acc_ref[...], 1, 0)

for params in (None, pltpu.CompilerParams(), pltriton.CompilerParams(), plgpu.CompilerParams()):
    f = pl.pallas_call(kernel, jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True,
                       scratch_shapes=[pltpu.VMEM((8,), jnp.float32)], compiler_params=params)
    print(f(jnp.arange(8.0)).tolist())
"""
    )
    ran = forks.python(program + NOTHING_OF_JAX)
    assert ran.lines == ["[0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0]"] * 4, ran.err


def test_absent_names_read_as_in_the_tutorial(forks):
    program = (
        INSTALL
        + """
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
def message(f):
    try:
        f()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
print(message(lambda: pl.store))
print(message(lambda: pltpu.no_such_thing))
print(message(lambda: pltpu.matmul_push_rhs))
print(hasattr(pl, "store"), hasattr(pl, "load"), hasattr(pltpu, "matmul_push_rhs"), hasattr(pltpu, "annotations"))
print(message(lambda: exec("from jax.experimental.pallas import store")).split(" (")[0])
print(message(lambda: exec("import jax.experimental.pallas.tpu_sc")))
print(message(lambda: exec("from jax.experimental.pallas import tpu_sc")))
print(message(lambda: exec("import jax.experimental.pallas.no_such_thing")))
print(message(lambda: exec("import jax._src.pallas.pallas_call")))
print(message(lambda: exec("from jax.experimental.mosaic.gpu import profiler; profiler.measure")))
print(message(lambda: exec("from jax.experimental.mosaic.gpu import core")).split(" (")[0])
"""
    )
    runs_on = "which Palladion does not have; this process runs Pallas programs on Palladion."
    assert forks.python(program + NOTHING_OF_JAX).lines == [
        "AttributeError: module 'jax.experimental.pallas' has no attribute 'store'",
        "AttributeError: module 'jax.experimental.pallas.tpu' has no attribute 'no_such_thing'",
        "AttributeError: pltpu.matmul_push_rhs is not built yet: "
        "explicit matrix-unit operations and the Mosaic TPU compiler are later work.",
        "False False False False",
        "ImportError: cannot import name 'store' from 'jax.experimental.pallas'",
        *[f"ModuleNotFoundError: jax.experimental.pallas.tpu_sc is a part of JAX's Pallas, {runs_on}"] * 2,
        "ModuleNotFoundError: No module named 'jax.experimental.pallas.no_such_thing'",
        f"ModuleNotFoundError: jax._src.pallas.pallas_call is the inside of JAX's own Pallas, {runs_on}",
        "AttributeError: jax.experimental.mosaic.gpu.profiler.measure is part of JAX's Mosaic GPU compiler, "
        "which a program on Palladion does not use.",
        f"ModuleNotFoundError: jax.experimental.mosaic.gpu.core is JAX's Mosaic GPU compiler, {runs_on}",
    ]


def test_the_modules_behave_as_modules(forks):
    program = (
        INSTALL
        + """
import importlib, inspect, pickle, pkgutil
from jax.experimental import pallas as pl
namespace = {}
exec("from jax.experimental.pallas import *", namespace)
print(namespace["BlockSpec"] is pl.BlockSpec, "tpu" in dir(pl), {"pallas_call", "EagerParams"} <= set(dir(pl)))
print(inspect.ismodule(pl), pl.__file__.endswith("__init__.py"), bool(pl.__doc__), pl.__spec__.name)
print(importlib.reload(pl) is pl, pl.pallas_call.__module__)
print(importlib.util.find_spec("jax.experimental.pallas.ops") is not None)
print([name for name in dir(pl) if inspect.ismodule(getattr(pl, name))])
"""
    )
    assert forks.python(program).lines == [
        "True True True",
        "True True True jax.experimental.pallas",
        "True palladion.language.call",
        "True",
        "['config', 'mosaic_gpu', 'tpu', 'triton']",
    ]


def test_the_kernels_that_ship_with_jax_are_found_on_disk(forks):
    program = (
        INSTALL
        + """
import warnings
warnings.simplefilter("ignore")
import palladion
from jax.experimental.pallas.ops.gpu import attention
from jax.experimental.pallas.ops.tpu import megablox, paged_attention, flash_attention
import jax.experimental.pallas.ops.tpu.splash_attention as splash
print(attention.pl.pallas_call is palladion.pallas_call, attention.__file__.split("jax/experimental/")[1])
"""
    )
    ran = forks.python(program + NOTHING_OF_JAX)
    assert ran.lines == ["True pallas/ops/gpu/attention.py"], ran.err


def test_parts_of_jax_that_use_types_of_its_pallas_still_work(forks):
    """`jax.extend` and lowering for TPU import some of JAX's Pallas by themselves; programs stay on Palladion."""
    program = (
        INSTALL
        + """
import jax, jax.numpy as jnp, palladion
import jax.extend
from jax.experimental import pallas as pl
def kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] + 1
f = jax.jit(pl.pallas_call(kernel, jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True))
text = f.trace(jnp.zeros(8)).lower(lowering_platforms=("tpu",)).as_text()
print(jax.extend.core.Primitive.__name__, "stablehlo" in text, pl.pallas_call is palladion.pallas_call)
"""
    )
    ran = forks.python(program + NOTHING_OF_JAX)
    assert ran.lines == ["Primitive True True"], ran.err


def test_install_after_jaxs_own_pallas_is_refused(forks):
    program = """
import jax.experimental.pallas, palladion.dropin
try:
    palladion.dropin.install()
except RuntimeError as error:
    print(error)
print(palladion.dropin.installed())
"""
    ran = forks.python(program)
    assert ran.lines[0] == (
        "JAX's own Pallas is already loaded in this process, so Palladion cannot take its place."
    ), ran.err
    assert ran.lines[1].startswith("  loaded: jax.experimental.pallas, jax._src.pallas.pallas_call")
    assert "palladion.dropin.install() before anything imports jax.experimental.pallas" in ran.lines[2]
    assert ran.lines[-1] == "False"


def test_install_twice_and_uninstall(forks):
    program = (
        INSTALL
        + """
import sys, palladion.dropin as dropin
from jax.experimental import pallas as first
dropin.install()
from jax.experimental import pallas as second
import jax.experimental.pallas.ops.tpu.example_kernel
from jax.experimental.mosaic.gpu import profiler
print(first is second, dropin.installed(), sum(type(f).__module__ == "palladion.dropin" for f in sys.meta_path))
dropin.uninstall()
dropin.uninstall()
import jax
print(dropin.installed(), hasattr(jax.experimental, "pallas"), any("pallas" in m and m.startswith("jax.experimental")
                                                                   for m in sys.modules))
from jax.experimental import pallas as own
import palladion
print(own.pallas_call is palladion.pallas_call)
from jax.experimental.mosaic.gpu import profiler
print(hasattr(profiler, "measure"))
"""
    )
    ran = forks.python(program)
    assert ran.lines == ["True True 1", "False False False", "False", "True"], ran.err


def test_importing_the_dropin_alone_changes_nothing(forks):
    program = "import palladion.dropin, jax, sys\nprint([m for m in sys.modules if 'jax.experimental.pallas' in m])"
    assert forks.python(program).lines == ["[]"]
