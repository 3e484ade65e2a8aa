"""The lowering rule of `pallas_call` for NVIDIA GPUs, by the Mosaic GPU compiler: a custom call that launches a cubin.

The call carries the machine code and the plan of its launch, so that the program is whole. Nothing here needs a GPU:
`jax.jit(f).trace(…).lower(lowering_platforms=("cuda",))` works on any machine with NVRTC. It has not run on hardware
yet; its handler has, with a libcuda that stands in (tests/compiler/gpu/test_lower.py).

Memory that a kernel needs for itself is a further result of the call; if it must be zero at the start (semaphores), XLA
fills an operand with zeros that shares its memory.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.compiler.gpu import launch
from palladion.compiler.gpu.generate import ARCHS
from palladion.compiler.gpu.generated import Pointer
from palladion.errors import explain
from palladion.language.triton.info import get_gpu_info

PLATFORM = "CUDA"


def lower(ctx: Any, *args: Any, **params: Any) -> Sequence[Any]:
    """Lower a kernel call.

    Arguments: ctx: JAX's lowering context; *args: MLIR values of the operands; **params: of the `pallas_call` equation.
    Raises: those of the compiler. NotImplementedError: the grid is known only at run time. ValueError: no such GPU.
    """
    if params["grid_mapping"].num_dynamic:
        headline = (
            f"The grid of {params['name']} is known only at run time; compiled for a GPU, a call has a fixed one."
        )
        raise NotImplementedError(explain(headline, hint="launch the most programs that there may be, and mask"))
    program = launch.prepare(params, arch())
    prints = bool(jaxlink.effects_outside(params["jaxpr"]))
    return jaxlink.lower_as(functools.partial(call, program, prints), ctx, *args)


def arch() -> str | None:
    """Of the GPU that JAX runs on or that an abstract mesh stands for; None: there is none, and the kernel decides.

    Raises: ValueError: the compiler makes no code for it.
    """
    try:
        found = get_gpu_info()
    except ValueError:
        return None
    name = f"sm_{found.compute_capability}a"
    if name not in ARCHS:
        headline = f"The Mosaic GPU compiler makes code for {' and '.join(ARCHS)}, and the GPU is {name[:-1]}."
        raise ValueError(explain(headline, hint="compiler_params=pltriton.CompilerParams() compiles it with Triton"))
    return name


def call(program: launch.Program, prints: bool, *operands: jax.Array) -> list[jax.Array]:
    """The custom call of a program, on traced arrays. `prints`: it is made even if nobody uses its results."""
    made, count = program.generated, len(program.outputs)
    if not all(made.grid):
        return _nothing(program, operands)
    _register(PLATFORM)
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in program.outputs]
    results += [jax.ShapeDtypeStruct((max(space.size, 1),), jnp.uint8) for space in made.workspaces]
    aliases = {source: output - program.first_output for output, source in program.aliases.items()}
    zeros = []
    for k, space in enumerate(made.workspaces):
        if space.zeroed:
            aliases[len(operands) + len(zeros)] = count + k
            zeros.append(jnp.zeros(results[count + k].shape, jnp.uint8))
    image = base64.b64encode(zlib.compress(program.cubin, 6)).decode()
    how = json.dumps(plan(program, len(operands) + len(zeros)), sort_keys=True)
    key = int.from_bytes(hashlib.sha256(f"{image}\0{how}".encode()).digest()[:8], "little", signed=True)
    custom = jax.ffi.ffi_call(_target(), results, has_side_effect=prints, input_output_aliases=aliases)
    return list(custom(*operands, *zeros, id=np.int64(key), image=image, plan=how))[:count]


def plan(program: launch.Program, arguments: int) -> dict[str, Any]:
    """How the handler launches a program, as JSON: a buffer is the number of an argument or of a result of the call.

    Arguments: arguments: of the call: operands, and zeros for workspaces.
    """
    made, first = program.generated, program.first_output

    def param(of: Any) -> dict[str, Any]:
        place = {"result": int(of.operand >= first), "index": of.operand - first if of.operand >= first else of.operand}
        if isinstance(of, Pointer):
            return place
        shape = {"dims": of.dims, "strides": of.strides, "box": of.box, "steps": of.element_strides}
        return {**place, **shape, "dtype": of.dtype, "offset": of.offset, "swizzle": of.swizzle, "fill": of.fill}

    return {
        "name": made.name,
        "grid": made.grid,
        "cluster": made.cluster,
        "threads": made.threads,
        "smem": made.smem_bytes,
        "arguments": arguments,
        "results": len(program.outputs) + len(made.workspaces),
        "params": [param(of) for of in made.params],
    }


def _nothing(program: launch.Program, operands: Sequence[jax.Array]) -> list[jax.Array]:
    """A call without blocks: outputs hold what their aliased inputs do, or zeros."""
    sources = [program.aliases.get(program.first_output + k) for k in range(len(program.outputs))]
    return [
        jnp.zeros(shape, dtype) if source is None else operands[source]
        for source, (shape, dtype) in zip(sources, program.outputs)
    ]


def _target() -> str:
    from palladion.compiler.gpu.attach import TARGET_NAME

    return TARGET_NAME


@functools.cache
def _register(platform: str) -> None:
    """Tell XLA of the handler; on a machine without the platform it is kept until there is one."""
    from palladion.compiler.gpu import attach

    jax.ffi.register_ffi_target(attach.TARGET_NAME, jax.ffi.pycapsule(attach.handler_address()), platform=platform)
