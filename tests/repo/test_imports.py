"""What may import what (docs/design.md).

Nothing imports JAX's own Pallas, one module reaches into JAX's private parts, and arrows point one way.
"""

import subprocess
import sys

import pytest

from repo.tree import Import, imports_of, is_under, own_modules

FORBIDDEN = (
    "jax.experimental.pallas",
    "jax._src.pallas",
    "jax.experimental.mosaic.gpu",
    "jax._src.mosaic_gpu",
    "jax.extend",  # loads jax._src.pallas
)
ONLY_IN_JAXLINK = ("jax._src", "jax.interpreters")

# Rooms of the house and their floor: a room may import from floors below its own.
FLOORS = (
    ("jaxlink",),
    ("rules", "errors", "config", "executors", "locations"),
    ("language",),
    ("reference", "simulator", "compiler", "emulator"),
    ("report", "autodiff", "library"),
    ("__init__", "__main__", "tpu", "mosaic_gpu", "triton", "cpu", "fuser", "dropin", "cli"),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# On these floors the rooms form one unit. On the others they are alternatives that do not know each other.
SHARED_FLOORS = (FLOOR["errors"], FLOOR["cli"])
# Executors in one room are alternatives too.
APART = ("compiler.cpu", "compiler.gpu", "compiler.tpu", "compiler.triton", "simulator.gpu", "simulator.tpu")
# The one exception: a compiled kernel goes to the emulated device.
ALLOWED = {("compiler.gpu.emulated", "emulator.driver")}


def all_imports() -> list[tuple[str, Import]]:
    return [
        (module, found)
        for module, file in own_modules().items()
        for found in imports_of(module, file.read_text(), file.name == "__init__.py")
    ]


def inside(name: str) -> str:
    """The name without `palladion.`; for a re-exported name of the package itself, `__init__`."""
    rest = name.removeprefix("palladion").removeprefix(".")
    return rest if rest.split(".")[0] in FLOOR else "__init__"


def breaks_an_arrow(module: str, found: Import) -> bool:
    """Whether a module of the package imports, from the package, what it may not."""
    source, target = inside(module), inside(found.name)
    here, there = source.split(".")[0], target.split(".")[0]
    if any(source == a and is_under(target, b) for a, b in ALLOWED):
        return False
    if here == "executors" and found.lazy:
        return False  # the table imports an executor when a call first asks for it
    if here == there:
        a, b = (next((p for p in APART if is_under(name, p)), None) for name in (source, target))
        return a is not None and b is not None and a != b
    if FLOOR[here] == FLOOR[there]:
        return FLOOR[here] not in SHARED_FLOORS
    return FLOOR[here] < FLOOR[there]


def place(module: str, found: Import) -> str:
    return f"{own_modules()[module].name}:{found.line}: {module} imports {found.name}"


def test_nothing_of_jaxs_own_pallas_is_imported():
    found = [place(m, i) for m, i in all_imports() if any(is_under(i.name, f) for f in FORBIDDEN)]
    assert not found, "\n".join(found)


def test_only_jaxlink_reaches_into_jax():
    reached = [(m, i) for m, i in all_imports() if any(is_under(i.name, private) for private in ONLY_IN_JAXLINK)]
    assert any(m == "palladion.jaxlink" for m, _ in reached), "the search no longer finds jaxlink's own imports"
    found = [place(m, i) for m, i in reached if m != "palladion.jaxlink"]
    assert not found, "\n".join(found)


def test_every_module_has_a_floor():
    rooms = {name.split(".")[1] for name in own_modules() if "." in name}
    assert rooms <= set(FLOOR), "give these a place in docs/design.md and in FLOORS"


def test_arrows_point_one_way():
    found = [place(m, i) for m, i in all_imports() if is_under(i.name, "palladion") and breaks_an_arrow(m, i)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "name", "lazy", "broken"),
    [
        ("palladion.language.call", "palladion.errors.explain", False, False),
        ("palladion.language.call", "palladion.reference.lower", True, True),
        ("palladion.language.call", "palladion.pallas_call", False, True),
        ("palladion.reference.lower", "palladion.language.grid", False, False),
        ("palladion.reference.lower", "palladion.simulator.engine", False, True),
        ("palladion.executors", "palladion.reference.lower", True, False),
        ("palladion.executors", "palladion.reference.lower", False, True),
        ("palladion.jaxlink", "palladion.errors.explain", False, True),
        ("palladion.compiler.cpu.emit", "palladion.compiler.gpu.emit", False, True),
        ("palladion.compiler.cpu.emit", "palladion.compiler.cache", False, False),
        ("palladion.compiler.gpu.emulated", "palladion.emulator.driver.EmulatedDriver", True, False),
        ("palladion.compiler.gpu.emulated", "palladion.emulator.machine.Machine", True, True),
        ("palladion.compiler.gpu.launch", "palladion.emulator.driver.EmulatedDriver", True, True),
        ("palladion.emulator.driver", "palladion.compiler.gpu.emulated.run", True, True),
        ("palladion.cli", "palladion.dropin.install", False, False),
        ("palladion", "palladion.language.call.pallas_call", False, False),
    ],
)
def test_the_arrows_as_the_design_states_them(module, name, lazy, broken):
    assert breaks_an_arrow(module, Import(name, 1, lazy)) is broken


def test_imports_are_found_in_every_form():
    source = """
import jax.experimental.pallas as a
from jax.experimental import pallas
from ..errors import explain
from . import blocks
def f():
    import importlib
    importlib.import_module("jax.extend.core")
    return jax._src.core.Jaxpr
"""
    found = {(i.name, i.lazy) for i in imports_of("palladion.language.call", source, is_package=False)}
    assert found >= {
        ("jax.experimental.pallas", False),
        ("palladion.errors.explain", False),
        ("palladion.language.blocks", False),
        ("jax.extend.core", True),
        ("jax._src.core.Jaxpr", True),
    }


def test_running_a_kernel_leaves_jaxs_own_pallas_unloaded():
    program = """
import sys, jax, jax.numpy as jnp, palladion as pl
import palladion.tpu, palladion.triton, palladion.mosaic_gpu
def kernel(x_ref, o_ref): o_ref[...] = x_ref[...] + 1
x = jnp.zeros(8)
assert pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)[0] == 1
print([m for m in sys.modules if m.startswith(("jax._src.pallas", "jax.experimental.pallas", "jax.extend"))])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
