"""One kernel call, alone in a program, compiled by libtpu for a TPU that is not there.

The program is lowered here, which needs neither libtpu nor a TPU, and compiled in a child process (`child.py`), for
libtpu ends its process on some modules. In a child its environment variables do not touch the user's either.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from palladion.compiler import child, worker
from palladion.compiler.tpu.module import build_module
from palladion.errors import explain
from palladion.language.primitive import pallas_call_p
from palladion.language.tpu.params import CompilerParams

_WORKER = Path(worker.__file__).with_name("worker_tpu.py")

# What libtpu reads when it is loaded. Without the first two it warns that the machine is no TPU (which chip they name
# does not limit what it compiles for); without the fourth, one process at a time may load it.
_ENVIRONMENT = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_MIN_LOG_LEVEL": "3",  # no log files; failed checks still print
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",  # no look-up at a metadata server
    "TF_CPP_MIN_LOG_LEVEL": "1",  # of jaxlib, which reports that it loads a plugin
}


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A program that makes one kernel call.

    Attributes:
      module: StableHLO, as MLIR bytecode.
      text: StableHLO, as text.
      devices: how many it runs on.
    """

    module: bytes
    text: str
    devices: int


@dataclasses.dataclass(frozen=True)
class Program:
    """What libtpu made of a program.

    Attributes:
      seconds: of compilation.
      hlo: the compiled program as text.
      memory: bytes by name, as XLA reports them (`generated_code_size_in_bytes` …).
      empty_code_bytes: code of a program that does nothing.
      cost: numbers by name, as XLA reports them ("flops", "bytes accessed" …).
    """

    seconds: float
    hlo: str
    memory: Mapping[str, int]
    empty_code_bytes: int
    cost: Mapping[str, float]


def is_installed() -> bool:
    """Whether libtpu is there."""
    return bool(os.environ.get("TPU_LIBRARY_PATH")) or importlib.util.find_spec("libtpu") is not None


def lower(params: Mapping[str, Any], mesh: Mapping[str, int] | None = None) -> Lowered:
    """A program that makes one kernel call, for TPU.

    Arguments:
      params: of the `pallas_call` equation.
      mesh: axes of the `shard_map` around the call, and their sizes; every device gets operands of its own.

    Raises: what the lowering of the call raises, with the user's line.
    """
    fixed = _for_tpu(params)

    def call(*operands: Any) -> Any:
        return pallas_call_p.bind(*operands, **fixed)

    gm = params["grid_mapping"]
    sizes = [jax.ShapeDtypeStruct((), jnp.dtype("int32"))] * gm.num_dynamic
    operands = [*sizes, *(m.array for m in (*gm.prefetch_mappings, *gm.inputs))]
    call.__name__ = call.__qualname__ = params["name"]
    program, devices = call, 1
    if mesh:
        devices = math.prod(mesh.values())
        program, operands = _on_devices(call, operands, mesh)
    donated = tuple(i for i, _ in params["input_output_aliases"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        jitted = jax.jit(program, donate_argnums=donated)
        lowered = jitted.trace(*operands).lower(lowering_platforms=("tpu",))
    module = io.BytesIO()
    operation: Any = lowered.compiler_ir("stablehlo")
    operation.operation.write_bytecode(module)
    return Lowered(module.getvalue(), lowered.as_text(), devices)


def _for_tpu(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a call as a TPU takes it: not interpreted, and without parameters of other compilers."""
    own = params["compiler_params"] if isinstance(params["compiler_params"], CompilerParams) else None
    return {**params, "interpret": False, "compiler_params": own, "debug": False}


def _on_devices(call: Any, operands: list[Any], mesh: Mapping[str, int]) -> tuple[Any, list[Any]]:
    """The call on every device of a mesh, each with whole operands."""
    devices = AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
    everywhere = PartitionSpec()

    def program(*operands: Any) -> Any:
        return call(*operands[: len(operands) - 1])

    placed = NamedSharding(devices, everywhere)
    last = jax.ShapeDtypeStruct((), jnp.dtype("int32"))  # there are calls without operands: it carries the mesh
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed) for x in (*operands, last)]
    program.__name__ = program.__qualname__ = call.__name__
    return jax.shard_map(program, mesh=devices, in_specs=everywhere, out_specs=everywhere, check_vma=False), operands


def compile(lowered: Lowered, topology: str) -> Program:
    """Compile a program with libtpu.

    Arguments: lowered: the program. topology: a name that libtpu knows, such as "v5e:2x2".

    Raises:
      child.CompilerFailure: libtpu refuses the program, or ends its process, or takes too long (`tpu.refusals` has
        these in other words). ModuleNotFoundError: libtpu is not installed.
    """
    if not is_installed():
        raise ModuleNotFoundError(
            explain(
                "Compiling for TPU needs libtpu, which is not installed.",
                hint="pip install 'palladion[tpu]', or point TPU_LIBRARY_PATH at a libtpu.so",
            )
        )
    job = {"module": lowered.module, "topology": topology, "devices": lowered.devices}
    reply = child.run(_WORKER, job, name="libtpu", env=_ENVIRONMENT)
    names = {field.name for field in dataclasses.fields(Program)}
    return Program(**{k: v for k, v in reply.items() if k in names})


def mosaic(params: Mapping[str, Any], mesh: Mapping[str, int] | None = None) -> str:
    """The kernel as the Mosaic module that libtpu is handed (in `Lowered`, it is in an encoding for all versions)."""
    return str(build_module(_for_tpu(params), dict(mesh) if mesh else None))
