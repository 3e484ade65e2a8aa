"""Checks of a traced kernel that need its whole jaxpr.

- a static index outside its Ref that came in through `jax.ref.get`/`set` (indexing with brackets checks as it is
  written);
- a store to an input Ref that no output aliases (fault kind 14), or to a scalar-prefetch Ref that index maps read
  while blocks are in flight (fault kind 17).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from palladion import jaxlink
from palladion.errors import explain
from palladion.language.grid import GridMapping
from palladion.language.index_maps import reads_prefetch

_REF_OPERATIONS = {jaxlink.get_p: 1, jaxlink.swap_p: 2, jaxlink.addupdate_p: 2}  # operands before the indices


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


def check_kernel(jaxpr: Any, grid_mapping: GridMapping, aliases: Any, name: str) -> None:
    """Raise ValueError or IndexError for the mistakes that the module names."""
    _check_static_indices(jaxpr)
    _check_writes(jaxpr, grid_mapping, dict(aliases), name)


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
                        raise IndexError(
                            explain(
                                f"Index {value} is out of range for dimension {dim} of {ref}, which has {size} elements.",
                                where=jaxlink.location_of(eqn),
                            )
                        )


def _first_write(jaxpr: Any, var: Any) -> str | None:
    for eqn in jaxpr.eqns:
        if var in jaxlink.written_vars(eqn):
            for inner in jaxlink.jaxprs_in_params(eqn.params):
                for inner_var in jaxlink.written_vars(inner):
                    if (found := _first_write(inner, inner_var)) is not None:
                        return found
            return jaxlink.location_of(eqn)
    return None


def _check_writes(jaxpr: Any, grid_mapping: GridMapping, aliases: dict[int, int], name: str) -> None:
    written = jaxlink.written_vars(jaxpr)
    n_prefetch = grid_mapping.num_prefetch
    mappings = (*grid_mapping.prefetch_mappings, *grid_mapping.inputs)
    maps_read = [m for m in grid_mapping.block_mappings if n_prefetch and reads_prefetch(m)]
    for i, (var, mapping) in enumerate(zip(jaxpr.invars, mappings)):
        if var not in written or i in aliases:
            continue
        if i < n_prefetch:
            if maps_read:
                raise ValueError(
                    explain(
                        f"The kernel {name} writes to {mapping.origin}, which the index map of {maps_read[0].origin} "
                        "reads while blocks are in flight.",
                        where=_first_write(jaxpr, var),
                        hint="copy the values to scratch and change them there",
                    )
                )
            continue
        raise ValueError(
            explain(
                f"The kernel {name} writes to {mapping.origin}, which is not aliased to an output.",
                where=_first_write(jaxpr, var),
                hint=f"write to an output or scratch Ref, or pass input_output_aliases={{{i}: <output number>}} to "
                "update the operand in place",
            )
        )
