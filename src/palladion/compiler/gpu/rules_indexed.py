"""Gather and scatter, as indexing with arrays makes them, through the scratch in shared memory.

Indices outside the operand follow the mode of the operation: clamped, or (FILL_OR_DROP) filled and dropped. Nothing
outside the operand is touched.

Not optimal: in a scatter every thread looks at all updates, in order, and applies those to the elements that it owns;
so repeated indices count one after the other, as in JAX's own order, without atomics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion.compiler.gpu.dtypes import constant, kind
from palladion.compiler.gpu.rules_elementwise import add, maximum, minimum, mul, sub
from palladion.compiler.gpu.spill import coordinate, read_back, registers_of, spilled, spilled_registers, strides_of
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Scalar, Splat


def _fill(dtype: Any, value: Any) -> str:
    if value is None:
        if jnp.issubdtype(dtype, jnp.floating):
            value = np.nan
        elif dtype == np.bool_:
            value = True
        else:
            value = jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.iinfo(dtype).max
    return constant(value, dtype)


class _Starts:
    """Lines that read where a window starts.

    Attributes: at: {dimension of the operand: C++ of the clamped start}. inside: whether all starts fit; None: yes.
    """

    def __init__(
        self, unit: Unit, pointer: str, row: Sequence[str], rows: Sequence[int], dims: Sequence[int], limits: Any
    ) -> None:
        strides = strides_of(rows)
        base = [f"{at} * {s}" for at, s in zip(row, strides) if at != "0"]
        self.at, tests = {}, []
        for k, d in enumerate(dims):
            index = unit.name("index")
            unit.line(f"const i64 {index} = (i64){pointer}[{' + '.join([*base, str(k)])}];")
            start = unit.name("start")
            unit.line(f"const int {start} = (int)min(max({index}, 0ll), {max(limits[d], 0)}ll);")
            self.at[d] = start
            tests.append(f"{start} == {index}")
        self.inside = " && ".join(tests) or None


def _place(strides: Sequence[int], *parts: Any) -> str:
    """C++ for the number of an element, from (dimension, index) of all kinds."""
    found = []
    for d, at in (one for part in parts for one in part):
        if at != "0" and strides[d]:
            found.append(at if strides[d] == 1 else f"{at} * {strides[d]}")
    return " + ".join(found) or "0"


@RULES.rule(lax.gather_p)
def _gather(unit: Unit, eqn: Any, x: Any, indices: Any) -> Any:
    p, out, given = eqn.params, eqn.outvars[0].aval, eqn.invars[0].aval
    if 0 in out.shape or (isinstance(x, Splat) and p["mode"] != lax.GatherScatterMode.FILL_OR_DROP):
        text = constant(0, out.dtype) if not isinstance(x, Splat) else x.text
        return Splat(text, out.dtype, tuple(out.shape)) if out.shape else Scalar(text, out.dtype)
    dn, sizes = p["dimension_numbers"], p["slice_sizes"]
    batch = [d for d in range(out.ndim) if d not in dn.offset_dims]
    hidden = (*dn.collapsed_slice_dims, *dn.operand_batching_dims)
    window = [d for d in range(given.ndim) if d not in hidden]
    limits = {d: given.shape[d] - sizes[d] for d in range(given.ndim)}
    rows, strides = tuple(eqn.invars[1].aval.shape), strides_of(given.shape)
    if 0 in given.shape:
        fill = _fill(out.dtype, p["fill_value"])
        return Splat(fill, out.dtype, tuple(out.shape)) if out.shape else Scalar(fill, out.dtype)
    table, numbers = spilled(unit, (x, eqn.invars[0]), (indices, eqn.invars[1]))

    def element(at: Callable[[int], str]) -> str:
        """Lines up to the element of the result with these indices, and C++ of it."""
        row = [at(d) for d in batch]
        starts = _Starts(unit, numbers, row, rows, dn.start_index_map, limits)
        batching = [(d, row[b]) for d, b in zip(dn.operand_batching_dims, dn.start_indices_batching_dims)]
        inner = [(d, at(o)) for d, o in zip(window, dn.offset_dims)]
        value = f"{table}[{_place(strides, batching, starts.at.items(), inner)}]"
        if p["mode"] == lax.GatherScatterMode.FILL_OR_DROP and starts.inside is not None:
            return f"{starts.inside} ? {value} : {_fill(out.dtype, p['fill_value'])}"
        return value

    if not out.shape:
        return unit.scalar(out.dtype, element(lambda d: "0"))
    layout = unit.layout_for(eqn.outvars[0], None if out.ndim and out.shape[-1] > 1 else 1)
    result = unit.registers(out.dtype, layout)
    unit.line("#pragma unroll")
    with unit.block(f"for (int i = 0; i < {layout.count}; ++i)"):
        unit.line(f"{result.at('i')} = {element(lambda d: coordinate(layout, d, 'i'))};")
    return result


def _scatter(combine: Callable | None) -> Callable:
    def rule(unit: Unit, eqn: Any, x: Any, indices: Any, updates: Any) -> Any:
        p, given, change = eqn.params, eqn.invars[0].aval, eqn.invars[2].aval
        if 0 in given.shape or 0 in change.shape:
            return x
        dn = p["dimension_numbers"]
        window = dn.update_window_dims
        batch = [d for d in range(change.ndim) if d not in window]
        hidden = (*dn.inserted_window_dims, *dn.operand_batching_dims)
        windowed = [d for d in range(given.ndim) if d not in hidden]
        extent = {d: change.shape[w] for d, w in zip(windowed, window)}
        limits = {d: given.shape[d] - extent.get(d, 1) for d in range(given.ndim)}
        rows, strides = tuple(eqn.invars[1].aval.shape), strides_of(given.shape)
        of = kind(given.dtype)
        x = registers_of(unit, x, eqn.outvars[0])
        held = [registers_of(unit, v, var) for v, var in zip((indices, updates), eqn.invars[1:])]
        table, numbers, new = spilled_registers(unit, x, *held)
        order = [*batch, *window]
        sizes = [change.shape[d] for d in order]
        below = strides_of(sizes)
        own = strides_of(change.shape)
        name = unit.name("update")
        with unit.block(f"for (int {name} = 0; {name} < {math.prod(sizes)}; ++{name})"):
            at = {}
            for k, d in enumerate(order):
                text = name if below[k] == 1 else f"{name} / {below[k]}"
                at[d] = "0" if sizes[k] == 1 else f"({text})" if k == 0 else f"({text} % {sizes[k]})"
            row = [at[d] for d in batch]
            starts = _Starts(unit, numbers, row, rows, dn.scatter_dims_to_operand_dims, limits)
            batching = [(d, row[b]) for d, b in zip(dn.operand_batching_dims, dn.scatter_indices_batching_dims)]
            inner = [(d, at[w]) for d, w in zip(windowed, window)]
            place = unit.name("place")
            unit.line(f"const int {place} = {_place(strides, batching, starts.at.items(), inner)};")
            test = f"{place} % 128 == t"
            if p["mode"] != lax.GatherScatterMode.CLIP and starts.inside is not None:
                test = f"{test} && {starts.inside}"
            with unit.block(f"if ({test})"):
                value, old = f"{new}[{_place(own, at.items())}]", f"{table}[{place}]"
                if combine is not None:
                    value = combine(of, old, value)
                elif p["update_jaxpr"] is not None:
                    pair = (Scalar(old, given.dtype), Scalar(value, given.dtype))
                    (found,) = unit.run(p["update_jaxpr"], [*_constants(unit, p["update_consts"]), *pair])
                    value = found.text
                unit.line(f"{old} = {value};")
        unit.sync()
        return read_back(unit, table, given.dtype, x.layout)

    return rule


def _constants(unit: Unit, values: Any) -> list[Any]:
    return [unit.constant(np.asarray(v), np.asarray(v).dtype) for v in values]


for _primitive, _combine in {
    lax.scatter_p: None, lax.scatter_add_p: add, lax.scatter_sub_p: sub, lax.scatter_mul_p: mul,
    lax.scatter_min_p: minimum, lax.scatter_max_p: maximum,
}.items():  # fmt: skip
    RULES.rule(_primitive)(_scatter(_combine))
