"""Outputs that begin as an operand (`input_output_aliases`).

The compiler shares the arrays' memory in HBM, but never fetches a block of an output: what a kernel does not write of
it, or reads before it has, is whatever lay in VMEM. By the language it is the operand's block. So, unless a kernel
plainly writes all of an aliased output before it reads it, the block of the operand is copied to it when the program is
the first one with that block.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, scf

from palladion import jaxlink
from palladion.compiler.tpu.build import constant
from palladion.compiler.tpu.emit import uses_of
from palladion.compiler.tpu.windows import space_of
from palladion.errors import PalladionWarning, explain
from palladion.language.grid import BlockMapping, GridMapping


def fill_read_outputs(
    params: Mapping[str, Any], ids: Sequence[ir.Value], refs: Sequence[Any], copy: Callable[[Any, Any], None]
) -> None:
    """Emit the copies, at the beginning of a kernel.

    Arguments:
      params: of the equation.
      ids: of the program, one for each grid axis.
      refs: of the scalar-prefetch operands, the inputs and the outputs.
      copy: emits a copy of what one Ref holds to another.
    """
    mapping: GridMapping = params["grid_mapping"]
    for i, o in params["input_output_aliases"]:
        number = mapping.num_prefetch + mapping.num_inputs + o
        if i < mapping.num_prefetch or _written_first(params["jaxpr"], params["jaxpr"].invars[number]):
            continue
        source, target = mapping.inputs[i - mapping.num_prefetch], mapping.outputs[o]
        if space_of(target) != "vmem" or 0 in target.array.shape:
            continue
        axes = None if space_of(source) != "vmem" else _axes_of_revisits(source, target, len(ids))
        if axes is None:
            _warn(params["name"], source, target)
            continue
        first = None
        for axis in axes:
            here = arith.cmpi(arith.CmpIPredicate.eq, ids[axis], constant(0))
            first = here if first is None else arith.andi(first, here)
        if first is None:
            copy(refs[i], refs[number])
            continue
        branch: Any = scf.IfOp(first)
        with ir.InsertionPoint(branch.then_block):
            copy(refs[i], refs[number])
            scf.YieldOp([])


def _written_first(jaxpr: Any, ref: Any) -> bool:
    """Whether the first equation that uses a Ref writes all of it."""
    first = next((e for e in jaxpr.eqns if any(v is ref for v in e.invars)), None)
    if first is None or first.primitive is not jaxlink.swap_p:
        return False
    whole = first.params["tree"] == jax.tree.structure(())  # no view of it
    return whole and first.outvars[0] not in uses_of(jaxpr) and first.invars[0] is ref


def _axes_of_revisits(source: BlockMapping, target: BlockMapping, n_axes: int) -> list[int] | None:
    """The grid axes along which a block stays the same, if the two operands have the same blocks; else None."""
    if source.block_shape != target.block_shape or source.array.shape != target.array.shape:
        return None
    if source.covers_array and target.covers_array:
        return list(range(n_axes))
    a, b = source.index_map, target.index_map
    if a is not b and str(a) != str(b):
        return None
    used = _used(b)
    return [axis for axis in range(min(n_axes, len(b.invars))) if b.invars[axis] not in used]


def _used(jaxpr: Any) -> set[Any]:
    """The variables that a jaxpr's results depend on."""
    used = {v for v in jaxpr.outvars if not isinstance(v, jaxlink.Literal)}
    for eqn in reversed(jaxpr.eqns):
        if any(v in used for v in eqn.outvars):
            used.update(v for v in eqn.invars if not isinstance(v, jaxlink.Literal))
    return used


def _warn(name: str, source: BlockMapping, target: BlockMapping) -> None:
    text = explain(
        f"What the kernel {name} does not write of {target.origin} is not that of {source.origin}, to which it is "
        "aliased: a TPU does not fetch blocks of outputs.",
        where=target.map_location,
        hint="give both the same blocks in VMEM, or write all of the block: o_ref[...] = x_ref[...]",
    )
    warnings.warn(text, PalladionWarning, skip_file_prefixes=jaxlink.LIBRARY_DIRS)
