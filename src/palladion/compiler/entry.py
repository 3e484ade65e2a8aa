"""`palladion.compile`: the kernel calls of a function, compiled for a machine that need not be here, and reported.

The function is traced, not run. A family of targets is a module with `compile_call(params, target, …) -> CompiledCall`,
imported when it is first asked for; `palladion check --target` goes through the same table.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from palladion import jaxlink, locations
from palladion.compiler.reports import CompiledCall, CompileReport, Refusal
from palladion.compiler.tpu.topologies import CHIPS as TPUS
from palladion.compiler.triton.chips import CHIPS as GPUS
from palladion.errors import explain, kind_of, mistake
from palladion.language.primitive import EagerKernel, pallas_call_p


@dataclasses.dataclass(frozen=True)
class Family:
    """Targets that one compiler serves.

    Attributes:
      module: has `compile_call(params, target)`; with `meshes`, also the mesh of devices around the call.
      members: what stands after the family's name and a colon; none: the family's name is the target.
      package: what must be installed (`pip install 'palladion[extra]'`, the extra named as the family), or None.
      aliases: further names of members.
      variable: an environment variable that may name the compiler instead.
      meshes: whether a call on several devices is compiled as such.
    """

    module: str
    members: tuple[str, ...] = ()
    package: str | None = None
    variable: str | None = None
    meshes: bool = False
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


FAMILIES = {
    "cpu": Family("palladion.compiler.cpu.report"),
    "tpu": Family("palladion.compiler.tpu.report", tuple(TPUS), "libtpu", "TPU_LIBRARY_PATH", meshes=True),
    "triton": Family("palladion.compiler.triton.report", tuple(f"sm_{sm}" for sm in GPUS), "triton"),
    "gpu": Family(
        "palladion.compiler.gpu.report",
        ("sm_90a", "sm_100a"),
        "cuda.bindings",
        meshes=True,
        aliases={"h100": "sm_90a", "b200": "sm_100a"},
    ),
}
TARGETS = tuple(
    f"{name}:{member}" if member else name for name, family in FAMILIES.items() for member in family.members or ("",)
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A kernel call to compile.

    Attributes:
      params: the parameters of its `pallas_call` equation.
      kernel, called_at: where kernel and call were written.
      mesh: axes of the `shard_map` around it, and their sizes.
    """

    params: dict[str, Any]
    kernel: str | None
    called_at: str | None
    mesh: Mapping[str, int] | None = None


def known_target(name: str) -> str:
    """The name of a target, checked; of an alias, what it stands for.

    Raises:
      ValueError: there is no such target; the message lists those that there are. ModuleNotFoundError: its compiler is
        not installed; the message says how to install it.
    """
    kind, _, member = name.partition(":")
    if kind in FAMILIES and member in FAMILIES[kind].aliases:
        name = f"{kind}:{FAMILIES[kind].aliases[member]}"
    if name not in TARGETS:
        raise mistake(
            ValueError, f"There is no compile target {name!r}.", hint=f"the targets are: {', '.join(TARGETS)}"
        )
    family = FAMILIES[kind]
    given = family.variable is not None and os.environ.get(family.variable)
    if family.package is not None and not given and not _is_installed(family.package):
        raise mistake(
            ModuleNotFoundError,
            f"Compiling for {name} needs the package {family.package.replace('.', '-')}, which is not installed.",
            hint=f"pip install 'palladion[{kind}]'",
        )
    return name


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package inside one that is not there
        return False


def compile_call(call: Call, target: str) -> CompiledCall:
    """Compile one call; what cannot be compiled comes back as a refusal, with the user's line."""
    family = FAMILIES[known_target(target).partition(":")[0]]
    try:
        if isinstance(call.params["jaxpr"], EagerKernel):
            headline = "A call with interpret=pl.EagerParams() is not traced, so there is nothing to compile."
            raise TypeError(explain(headline, where=call.called_at, hint="leave interpret out"))
        compiler = importlib.import_module(family.module)
        around = {"mesh": call.mesh} if family.meshes else {}
        found = compiler.compile_call(call.params, target, **around)
        return dataclasses.replace(found, kernel=call.kernel, called_at=call.called_at)
    except Exception as error:
        where = getattr(error, "where", None) or _line_in(str(error)) or call.kernel
        refusal = Refusal(type(error).__name__, str(error), where)
        return CompiledCall(target, call.params["name"], call.kernel, call.called_at, refusal=refusal)


def _line_in(message: str) -> str | None:
    match = re.search(r"^  at: (.*)$", message, re.MULTILINE)
    return match and match[1]


def compile(f: Callable[..., Any], *args: Any, target: str = "cpu") -> CompileReport:
    """Compile the kernel calls of a function, without running it, and report what came of each.

        report = palladion.compile(softmax, jax.ShapeDtypeStruct((4096, 4096), "float32"), target="tpu:v5e")
        print(report)                    # code size, VMEM, compile time; or what is wrong, and where
        print(report.text("mosaic"))     # the code of a stage; report.calls[0].stages lists them

    Arguments:
      f: a function of arrays that makes kernel calls, under `jit` and other transforms too; or what `pallas_call`
        returns. `interpret` and `compiler_params` of another target do not matter.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`s for shapes alone, and pytrees of them.
      target: "cpu": native code for this machine. "tpu:v5e" and so on: by libtpu, for a TPU that need not be here
        (v4, v4i, v5e, v5p, v6e, v7x). "triton:sm_90" and so on: by Triton, for an NVIDIA GPU that need not be here
        (sm_80, sm_86, sm_89, sm_90, sm_100, sm_120). "gpu:sm_90a" (or "gpu:h100") and "gpu:sm_100a" (or "gpu:b200"): by
        Palladion's Mosaic GPU compiler and NVRTC, for a Hopper or Blackwell GPU that need not be here.

    Returns:
      a `CompileReport`, with one entry for each kernel call; a call that the target cannot compile has a `refusal` in
      place of numbers. Compilers of vendors run in processes of their own: nothing they do ends this one.

    Raises:
      TypeError: f is not a function. ValueError: there is no such target. ModuleNotFoundError: its compiler is not
      installed. What tracing f raises.
    """
    if not callable(f):
        raise mistake(TypeError, f"palladion.compile takes a function first, not {kind_of(f)}.")
    if not isinstance(target, str):
        raise mistake(TypeError, f"target is a string, not {kind_of(target)}.", hint='target="tpu:v5e"')
    for given in args:
        if isinstance(given, str):
            hint = f"target={given!r}" if ":" in given or given in TARGETS else "pass arrays or jax.ShapeDtypeStructs"
            raise mistake(TypeError, f"palladion.compile takes arguments of f, which {given!r} is not.", hint=hint)
    target = known_target(target)
    traced = jax.make_jaxpr(f)(*args)
    calls = tuple(compile_call(call, target) for call in _calls_in(traced.jaxpr))
    return CompileReport(getattr(f, "__name__", type(f).__name__), target, calls)


def _calls_in(jaxpr: Any, mesh: Mapping[str, int] | None = None) -> Iterator[Call]:
    for eqn in jaxpr.eqns:
        if eqn.primitive is pallas_call_p:
            yield Call(eqn.params, kernel_location(eqn.params["jaxpr"]), locations.location_of(eqn), mesh)
        else:
            inside = dict(eqn.params["mesh"].shape) if eqn.primitive.name == "shard_map" else mesh
            for inner in jaxlink.jaxprs_in_params(eqn.params):
                yield from _calls_in(inner, inside)


def kernel_location(body: Any) -> str | None:
    """`file:line` of a kernel function; files below the working folder as relative paths."""
    if isinstance(body, EagerKernel):
        return (locations.defined_at(body.function) or "").partition(" (")[0] or None
    return locations.traced_at(body)
