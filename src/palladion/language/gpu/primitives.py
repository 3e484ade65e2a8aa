"""How an operation of the Mosaic GPU dialect becomes an equation of a kernel.

All of them have one form: the operands are the leaves of a NamedTuple (its structure is `params["tree"]`), in which a
Ref comes before the dynamic indices of its view and unflattens to a `RefView`; what is known when the kernel is traced
is in further parameters. An equation declares which Refs it reads and writes, so that control flow knows them, and the
effect `on_gpu`, which keeps it alive and in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from palladion import jaxlink
from palladion.language import frames
from palladion.language.semaphores import ref_effects
from palladion.rules import only_on

MACHINE = "the simulated GPU"


class GPUEffect(jaxlink.KernelEffect):
    """The effect of an operation of the dialect: it happens, once, in its place."""


on_gpu = GPUEffect()


def gpu_primitive(
    name: str,
    *,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    results: Callable[[Any, dict[str, Any]], Sequence[Any]] | None = None,
    effect: bool = True,
) -> Any:
    """A primitive of the dialect.

    Arguments:
      name: as jaxprs print it.
      reads, writes: the fields of its operands' NamedTuple that are Refs (or None) which it reads and writes.
      results: from the operands' types (the NamedTuple, with types at its leaves; a view is a RefView of types) and
        the parameters to the results' types; None: it has no results. Results are always a list.
      effect: False for a function of its operands' values.
    """
    primitive = jaxlink.Primitive(name)
    primitive.multiple_results = True

    @primitive.def_effectful_abstract_eval
    def _types(*avals, tree, **params):
        effects = ref_effects(tree, len(avals), reads=reads, writes=writes)
        outs = [] if results is None else list(results(jax.tree.unflatten(tree, avals), params))
        return outs, effects | ({on_gpu} if effect else set())

    only_on(MACHINE, primitive)
    return primitive


def bind(function: str, primitive: Any, operands: Any, **params: Any) -> list[Any]:
    """Make an equation.

    Arguments:
      function: the public name, for the message outside a kernel ("plgpu.barrier_wait").
      operands: a NamedTuple of RefViews, arrays and None.

    Raises:
      ValueError: outside a kernel.
    """
    frames.required(function)
    flat, tree = jaxlink.flatten_views(operands)
    return primitive.bind(*flat, tree=tree, **params)
