"""How jaxprs show the equations of kernels whose operands are a pytree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from palladion.jaxlink import Primitive, TransformedRef, core, pretty_printer, state_primitives


def print_equations_of(primitive: Primitive, words: Callable[[Any, dict], Sequence[Any]]) -> None:
    """How jaxprs show a primitive whose operands are a pytree, `params["tree"]`: `words(operands, params)` gives
    strings, views of Refs, and pytrees of variables, which are printed one after the other."""

    def doc(x: Any, context: Any) -> Any:
        if isinstance(x, str):
            return pretty_printer.text(x)
        if isinstance(x, TransformedRef):
            return state_primitives.pp_ref_transforms(context, x)
        leaves, tree = jax.tree.flatten(x)
        shown = [str(core.pp_var(v, context)) for v in leaves]
        return pretty_printer.text(shown[0] if leaves == [x] else str(jax.tree.unflatten(tree, map(_Bare, shown))))

    def rule(eqn: Any, context: Any, settings: Any) -> Any:
        operands = jax.tree.unflatten(eqn.params["tree"], eqn.invars)
        left = [core.pp_vars(eqn.outvars, context, print_shapes=settings.print_shapes), "="] if eqn.outvars else []
        parts = [
            x if isinstance(x, pretty_printer.Doc) else doc(x, context) for x in [*left, *words(operands, eqn.params)]
        ]
        return pretty_printer.concat([x for part in parts for x in (part, pretty_printer.text(" "))][:-1])

    core.pp_eqn_rules[primitive] = rule


class _Bare(str):
    """A string that is shown without quotes."""

    __repr__ = str.__str__
