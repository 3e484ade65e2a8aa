"""Running functions whose kernel calls go through the Triton compiler and `ttir.py`; everything else runs in JAX."""

from typing import Any

import jax
import numpy as np

from compiler.triton import ttir
from palladion import jaxlink
from palladion.compiler.triton.module import Kernel, lower_call
from palladion.language.primitive import pallas_call_p


def evaluate(function: Any, *args: Any, sm: int = 90, seed: int = 0) -> Any:
    """What a function of arrays gives, with its kernels lowered for Triton and evaluated in NumPy."""
    return evaluate_with(lambda params, operands: run_call(params, operands, sm, seed), function, *args)


def evaluate_with(call: Any, function: Any, *args: Any) -> Any:
    """What a function of arrays gives, with its kernel calls made by `call(params, operands)`."""
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    flat = [np.asarray(x) for x in jax.tree.leaves(args)]
    jaxpr = traced.jaxpr
    outs = _run(jaxpr, list(traced.consts), flat, call)
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _run(jaxpr: Any, consts: list[Any], args: list[Any], call: Any) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args]))

    def read(v: Any) -> Any:
        return v.val if isinstance(v, jaxlink.Literal) else env[v]

    for eqn in jaxpr.eqns:
        values = [read(v) for v in eqn.invars]
        if eqn.primitive is pallas_call_p:
            outs = call(eqn.params, values)
        elif eqn.primitive is jaxlink.jit_p:
            inner = eqn.params["jaxpr"]
            outs = _run(inner, list(getattr(inner, "consts", ())), values, call)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            outs = eqn.primitive.bind(*values, **params)
            outs = outs if eqn.primitive.multiple_results else [outs]
        env.update(zip(eqn.outvars, outs))
    return [read(v) for v in jaxpr.outvars]


def run_call(params: dict[str, Any], operands: list[Any], sm: int, seed: int) -> list[np.ndarray]:
    """Lower a kernel call, and evaluate it on operands."""
    kernel, gm = lower_call(params, sm), params["grid_mapping"]
    sizes, arrays = operands[: gm.num_dynamic], [np.array(x, order="C") for x in operands[gm.num_dynamic :]]
    aliases = {out: k for k, out in dict(params["input_output_aliases"]).items()}
    memory = [_bytes(x) for x in arrays]
    outs = []
    for n, mapping in enumerate(gm.outputs):
        if n in aliases:
            data = memory[aliases[n]]
        else:
            data = _bytes(np.full(mapping.array.shape, 7, mapping.array.dtype))
        memory.append(data)
        outs.append(data)
    ttir.run_kernel(kernel.plain, memory, grid_of(kernel, [int(n) for n in sizes]), seed)
    return [x.view(m.array.dtype) if m.array.dtype != x.dtype else x for x, m in zip(outs, gm.outputs)]


def grid_of(kernel: Kernel, sizes: list[int]) -> tuple[int, int, int]:
    rest = iter(sizes)
    x, y, z = (next(rest) if n is None else n for n in kernel.grid)
    return x, y, z


def _bytes(x: np.ndarray) -> np.ndarray:
    """An array as Triton sees it: integers have no sign, a boolean is a byte."""
    if x.dtype == np.bool_ or x.dtype.kind == "u":
        return x.view(np.dtype(f"int{8 * x.dtype.itemsize}"))
    return x
