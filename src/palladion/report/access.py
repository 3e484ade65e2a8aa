"""How a kernel uses one of its Refs: whether it writes it at all, and whether it writes, or reads, all of it at once.

A Ref is followed through loops, branches and calls by the position of its variable. Where that is not known, an
access counts as one of the whole Ref, which is the common case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax import lax

from palladion import jaxlink
from palladion.language.check import ref_transforms

# Operands of an equation before those that its inner jaxpr takes, in the inner jaxpr's order.
_LEADING: dict[Any, Callable[[Any], int]] = {
    lax.cond_p: lambda eqn: 1,  # which branch
    lax.while_p: lambda eqn: eqn.params["cond_nconsts"],
}
_READS = (jaxlink.get_p, jaxlink.addupdate_p)
_WRITES = (jaxlink.swap_p, jaxlink.addupdate_p)


def is_written(jaxpr: Any, var: Any) -> bool:
    """Whether a kernel may write a Ref."""
    return var in jaxlink.written_vars(jaxpr)


def writes_whole(jaxpr: Any, var: Any) -> bool:
    """Whether some statement of the kernel writes all of a Ref at once."""
    return any(eqn is None or _is_whole(eqn) for eqn in _accesses(jaxpr, var, _WRITES, jaxlink.written_vars))


def uses_whole(jaxpr: Any, var: Any) -> bool:
    """Whether some statement of the kernel reads or writes all of a Ref at once."""
    reads = _accesses(jaxpr, var, _READS, jaxlink.read_vars)
    return writes_whole(jaxpr, var) or any(eqn is None or _is_whole(eqn) for eqn in reads)


def _accesses(jaxpr: Any, var: Any, primitives: tuple, effects: Callable) -> Iterator[Any]:
    """The equations that read (or write) a Ref; None for one that cannot be looked into."""
    for eqn in jaxpr.eqns:
        if var not in effects(eqn):
            continue
        if eqn.primitive in (*_READS, *_WRITES):
            if eqn.primitive in primitives:
                yield eqn
            continue
        found = False
        operands = eqn.invars[_LEADING.get(eqn.primitive, lambda _: 0)(eqn) :]
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            inner = getattr(inner, "jaxpr", inner)
            for outer_var, inner_var in zip(operands, inner.invars):
                if outer_var is var and inner_var in effects(inner):
                    found = True
                    yield from _accesses(inner, inner_var, primitives, effects)
        if not found:
            yield None


def _is_whole(eqn: Any) -> bool:
    """Whether a read or write has no view or index that takes a part."""
    for transform in ref_transforms(eqn):
        if not isinstance(transform, jaxlink.NDIndexer):
            continue
        if not all(
            isinstance(index, jaxlink.Slice)
            and isinstance(index.start, int)
            and (index.start, index.size, index.stride) == (0, n, 1)
            for index, n in zip(transform.indices, transform.shape)
        ):
            return False
    return True
