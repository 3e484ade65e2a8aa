"""libtpu in a child process (`worker.py`): a StableHLO module and the name of a topology become a compiled program.

Only jaxlib is used, of which jax itself makes these calls for `lower(…).compile()` (`jax.experimental.topologies`): the
plugin is loaded, asked for a topology of chips that are not there, and compiles for the first of them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from typing import Any

import numpy as np
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import sdy, stablehlo


def prepare() -> None:
    """Load libtpu."""
    xla_client.load_pjrt_plugin_dynamically("tpu", _library())
    xla_client.initialize_pjrt_plugin("tpu")


def compile(job: dict[str, Any]) -> dict[str, Any]:
    """Compile one module.

    Arguments: job: `module` (MLIR bytecode or text), `topology` ("v5e:2x2"), `devices` (how many, default 1).
    Returns: `seconds`, `hlo` (the compiled program as text), `memory` and `cost` (numbers by name), `empty_code_bytes`
      (of a program that does nothing).
    Raises: JaxRuntimeError: libtpu refuses the module or the topology.
    """
    _devices(job["topology"])  # the time it takes is not the kernel's
    start = time.perf_counter()
    program = _compile(job["module"], job["topology"], job.get("devices", 1))
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "hlo": "\n".join(m.to_string() for m in program.hlo_modules()),
        "memory": _sizes(program),
        "empty_code_bytes": _empty_code_bytes(job["topology"]),
        "cost": {k: float(v) for k, v in program.cost_analysis().items()},
    }


def _compile(text: bytes | str, topology: str, number: int) -> Any:
    devices = _devices(topology)[:number]
    with _context():
        module = ir.Module.parse(text)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(devices)
    build = options.executable_build_options
    build.device_assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in devices]]))
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    devices_of_program = xla_client.DeviceList(devices)
    return devices[0].client.compile(module, executable_devices=devices_of_program, compile_options=options)


def _sizes(program: Any) -> dict[str, int]:
    stats = program.get_compiled_memory_stats()
    return {name: getattr(stats, name) for name in dir(stats) if name.endswith("_in_bytes")}


@functools.cache
def _empty_code_bytes(topology: str) -> int:
    """Every program carries code that is not its own: a megabyte and more."""
    empty = """func.func public @main(%x: tensor<8x128xf32>) -> tensor<8x128xf32> { return %x : tensor<8x128xf32> }"""
    return _sizes(_compile(empty, topology, 1))["generated_code_size_in_bytes"]


@functools.cache
def _devices(topology: str) -> tuple[Any, ...]:
    return tuple(xla_client.make_tfrt_tpu_c_api_device_topology(topology)._make_compile_only_devices())


def _library() -> str:
    given = os.environ.get("TPU_LIBRARY_PATH")
    if given:
        return given
    spec = importlib.util.find_spec("libtpu")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("libtpu is not installed")
    return os.path.join(spec.submodule_search_locations[0], "libtpu.so")


def _context() -> ir.Context:
    """A context for what JAX lowers to; of its own for each module, so that types do not pile up."""
    context = ir.Context()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    stablehlo.register_dialect(context)
    sdy.register_dialect(context)
    return context
