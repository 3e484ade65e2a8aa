"""Checks of a traced kernel that need its whole jaxpr.

- a static index outside its Ref that came in through `jax.ref.get`/`set` (indexing with brackets checks as it is
  written);
- a semaphore read or written as data, likewise;
- an axis name of a vmap around the call (`lax.psum(x, "i")`);
- a store to an input Ref that no output aliases (fault kind 14), or to a scalar-prefetch Ref that index maps read
  while blocks are in flight (fault kind 17).

The eager interpreter, which has no jaxpr, makes the last checks as it goes, with the words from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from palladion import jaxlink, locations
from palladion.errors import explain
from palladion.language import masked
from palladion.language.dtypes import SemaphoreDType
from palladion.language.grid import GridMapping
from palladion.language.index_maps import reads_prefetch
from palladion.language.indexing import out_of_range

_REF_OPERATIONS = {jaxlink.get_p: 1, jaxlink.swap_p: 2, jaxlink.addupdate_p: 2}  # operands before the indices
_DATA_OPERATIONS = {*_REF_OPERATIONS, masked.masked_load_p, masked.masked_store_p, masked.atomic_update_p}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of inner jaxprs (loops, branches, calls) included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def ref_transforms(eqn: Any) -> tuple[Any, ...]:
    """The views and indices of a read or write equation."""
    start = _REF_OPERATIONS[eqn.primitive]
    return tuple(jax.tree.unflatten(eqn.params["tree"], eqn.invars[start:]))


def check_kernel(jaxpr: Any, grid_mapping: GridMapping, aliases: Any, name: str, *, stores: bool = True) -> None:
    """Raise ValueError or IndexError for the mistakes that the module names; with `stores=False` not for stores."""
    _check_named_axes(jaxpr, name)
    _check_semaphores(jaxpr)
    _check_static_indices(jaxpr)
    if stores:
        _check_writes(jaxpr, grid_mapping, dict(aliases), name)


def _check_named_axes(jaxpr: Any, name: str) -> None:
    axes = jaxlink.vmapped_axes()
    for eqn in equations(jaxpr) if axes else ():
        for axis in axes.intersection(_axis_names(eqn.params)):
            raise ValueError(
                explain(
                    f"The kernel {name} uses the axis {axis!r} of vmap ({eqn.primitive}), which is not bound in it.",
                    where=locations.location_of(eqn),
                    hint=f"each batch element is a program of its own: use {axis!r} outside, on what the call returns",
                )
            )


def _axis_names(params: Any) -> tuple[Any, ...]:
    """The named axes of a collective operation."""
    found = [params.get("axes", ()), params.get("axis_name", ())]
    return tuple(n for names in found for n in (names if isinstance(names, (tuple, list)) else (names,)))


def _check_semaphores(jaxpr: Any) -> None:
    for eqn in equations(jaxpr):
        if eqn.primitive in _DATA_OPERATIONS and isinstance(eqn.invars[0].aval.dtype, SemaphoreDType):
            label = getattr(eqn.invars[0].aval, "label", "a Ref")
            raise TypeError(
                explain(
                    f"The operation `{eqn.primitive}` on {label}: it is a semaphore, not data.",
                    where=locations.location_of(eqn),
                    hint="pl.semaphore_read, pl.semaphore_signal, pl.semaphore_wait",
                )
            )


def _check_static_indices(jaxpr: Any) -> None:
    for eqn in equations(jaxpr):
        if eqn.primitive not in _REF_OPERATIONS:
            continue
        for transform in ref_transforms(eqn):
            if not isinstance(transform, jaxlink.NDIndexer):
                continue
            for dim, (index, size) in enumerate(zip(transform.indices, transform.shape)):
                value = index.val if isinstance(index, jaxlink.Literal) else index
                if isinstance(value, (int, np.integer, np.ndarray)) and np.ndim(value) == 0:
                    if not -size <= value < size:
                        ref = getattr(eqn.invars[0].aval, "label", "a Ref")
                        raise out_of_range(ref, int(value), dim, size, where=locations.location_of(eqn))


def _first_write(jaxpr: Any, var: Any) -> str | None:
    for eqn in jaxpr.eqns:
        if var in jaxlink.written_vars(eqn):
            for inner in jaxlink.jaxprs_in_params(eqn.params):
                for inner_var in jaxlink.written_vars(inner):
                    if (found := _first_write(inner, inner_var)) is not None:
                        return found
            return locations.location_of(eqn)
    return None


def _check_writes(jaxpr: Any, grid_mapping: GridMapping, aliases: dict[int, int], name: str) -> None:
    written = jaxlink.written_vars(jaxpr)
    for i, var in enumerate(jaxpr.invars[: grid_mapping.num_prefetch + grid_mapping.num_inputs]):
        if var in written and i not in aliases and (refusal := store_refusal(grid_mapping, i, name)) is not None:
            raise refusal(_first_write(jaxpr, var))


def store_refusal(grid_mapping: GridMapping, i: int, name: str) -> Callable[[str | None], ValueError] | None:
    """Why a kernel may not store to operand `i` (scalar prefetch included) that no output aliases.

    Returns:
      None if it may, else a function from the user's `file:line` to the exception.
    """
    mapping = (*grid_mapping.prefetch_mappings, *grid_mapping.inputs)[i]
    if isinstance(mapping.array.dtype, SemaphoreDType):  # waits count down what another call has signalled
        return None
    if i < grid_mapping.num_prefetch:
        reader = next((m for m in grid_mapping.block_mappings if reads_prefetch(m)), None)
        if reader is None:
            return None
        why = f"which the index map of {reader.origin} reads while blocks are in flight"
        hint = "copy the values to scratch and change them there"
    else:
        why = "which is not aliased to an output"
        hint = (
            f"write to an output or scratch Ref, or pass input_output_aliases={{{i}: <output number>}} to update the "
            "operand in place"
        )
    return lambda where: ValueError(
        explain(f"The kernel {name} writes to {mapping.origin}, {why}.", where=where, hint=hint)
    )


def refuse_result(kernel: Callable, out: Any) -> None:
    """Raise ValueError if a kernel returned something."""
    if out is not None:
        raise ValueError(
            f"The kernel function in the pallas_call {locations.function_location(kernel)} should return None. It "
            f"returns a PyTree: {jax.tree.structure(out)}\n"
            "  fix: write results into the output Refs, o_ref[...] = value, and return nothing"
        )
