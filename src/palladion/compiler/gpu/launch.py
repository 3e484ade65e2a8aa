"""Running a generated kernel on arrays, through a `Driver`: CUDA's, or that of the emulated device.

A call's arrays are its prefetched scalars, inputs and outputs, in that order. An input that an output is aliased to is
copied into the output's memory first, and the kernel gets that.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from palladion.compiler.gpu import narrow
from palladion.compiler.gpu.build import build
from palladion.compiler.gpu.driver import encode
from palladion.compiler.gpu.generated import Generated, Pointer, TensorMap
from palladion.language.gpu.arch import arch_of
from palladion.language.intern import CallKey


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A call that is ready to run.

    Attributes:
      generated: its code. ptx, cubin: what the assembler made of it.
      first_output: the number of its first output among its arrays.
      aliases: {output: input}, as numbers among the arrays.
      outputs: shapes and dtypes.
    """

    generated: Generated
    ptx: str
    cubin: bytes
    first_output: int
    aliases: dict[int, int]
    outputs: tuple[tuple[tuple[int, ...], np.dtype], ...]


_FIELDS = ("jaxpr", "grid_mapping", "input_output_aliases", "compiler_params", "mesh")


def prepare(params: dict[str, Any], arch: str | None = None) -> Program:
    """Generate and compile a call, once for equal parameters.

    Arguments:
      params: of the `pallas_call` equation.
      arch: "sm_90a" or "sm_100a"; None: sm_100a if the kernel uses what only Blackwell has, else sm_90a.

    Raises: as `generate` and `nvrtc.compile_source`.
    """
    return _prepare(CallKey(params, fields=_FIELDS), arch or arch_of(params["jaxpr"]))


@functools.lru_cache(256)
def _prepare(key: Any, arch: str) -> Program:
    params = key.params
    built = build(params, arch)
    made, binary = built.generated, built.binary
    gm = params["grid_mapping"]
    first = gm.num_prefetch + gm.num_inputs
    aliases = {first + o: i for i, o in params["input_output_aliases"]}
    outputs = tuple((tuple(a.shape), np.dtype(a.dtype)) for a in params["out_avals"])
    return Program(made, binary.ptx, binary.cubin, first, aliases, outputs)


def on_host(program: Program, driver: Any, code: Any, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run on NumPy arrays: copy in, launch, copy out.

    Arguments:
      program: what to run. driver: a `Driver`. code: what its `load_module` takes, PTX or a cubin.
      operands: prefetched scalars and inputs.
    """
    owned: list[int] = []
    try:
        addresses = []
        for x in map(narrow.packed, operands):
            addresses.append(driver.alloc(max(x.nbytes, 1)))
            owned.append(addresses[-1])
            if x.nbytes:
                driver.copy_in(addresses[-1], np.ascontiguousarray(x))
        for k, (shape, dtype) in enumerate(program.outputs):
            size = narrow.bytes_of(shape, dtype)
            source = program.aliases.get(program.first_output + k)
            address = driver.alloc(max(size, 1))
            owned.append(address)
            addresses.append(address)
            if source is not None and size:
                driver.copy_in(address, np.ascontiguousarray(narrow.packed(operands[source])))
        if all(program.generated.grid):
            launch(program, driver, code, addresses, owned)
        results = []
        for (shape, dtype), address in zip(program.outputs, addresses[program.first_output :]):
            size = narrow.bytes_of(shape, dtype)
            raw = driver.copy_out(address, size) if size else np.empty(0, np.uint8)
            results.append(narrow.unpacked(np.asarray(raw), shape, dtype) if size else np.empty(shape, dtype))
        return results
    finally:
        for address in owned:
            driver.free(address)


def launch(
    program: Program, driver: Any, code: Any, addresses: Sequence[int], owned: list[int], stream: Any = None
) -> None:
    """Start a kernel.

    Arguments:
      program, driver, code: as of `on_host`.
      addresses: of the call's arrays on the device.
      owned: the addresses of workspaces are added; the caller frees them when the kernel is over.
      stream: of the driver, or None.
    """
    made = program.generated
    places = list(addresses)
    for space in made.workspaces:
        address = driver.alloc(max(space.size, 1))
        owned.append(address)
        places.append(address)
        if space.zeroed:
            driver.copy_in(address, np.zeros(space.size, np.uint8))
    start(made, driver, driver.function(driver.load_module(code), made.name), places, stream)


def start(made: Generated, driver: Any, function: Any, addresses: Sequence[int], stream: Any = None) -> None:
    """Start a loaded kernel, all of whose memory is there.

    Arguments:
      made: its code. driver: a `Driver`. function: of the driver.
      addresses: of the call's arrays and then of its workspaces.
      stream: of the driver, or None.
    """
    driver.launch(
        function,
        made.grid,
        (made.threads, 1, 1),
        [argument(driver, of, addresses) for of in made.params],
        cluster=made.cluster,
        smem=made.smem_bytes,
        stream=stream,
    )


def argument(driver: Any, of: Pointer | TensorMap, addresses: Sequence[int]) -> bytes:
    """The bytes of one kernel parameter."""
    if isinstance(of, Pointer):
        return struct.pack("<Q", addresses[of.operand])
    return encode(driver, of, addresses[of.operand])


__all__ = ["Program", "launch", "on_host", "prepare", "start"]
