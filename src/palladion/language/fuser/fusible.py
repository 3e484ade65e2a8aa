"""Fusion and fusible: what a kernel that can be fused gets, and how a function is marked as such a kernel.

A fusible does not get arrays. It gets `Fusion`s: functions that would compute its inputs, and functions that would
take its outputs further, which it may run on blocks inside its kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from palladion import jaxlink
from palladion.language.fuser import graph as graphs

fusible_p = graphs.carrier("fusible")


@dataclasses.dataclass
class Fusion:
    """A computation around a kernel, with its types.

    Arguments:
      func: computes it; no arguments for an input fusion, the kernel's results for an output fusion.
      in_type: (args, kwargs) as pytrees of array types.
      out_type: a pytree of array types.
      strict_mode: whether converging blocks must have equal index maps (see `fuse`).
    """

    func: Callable[..., Any]
    in_type: tuple[tuple[Any, ...], dict[str, Any]]
    out_type: Any
    strict_mode: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(*args, **kwargs)

    @property
    def type(self) -> Any:
        """The types of the results."""
        return self.out_type

    @property
    def shape(self) -> Any:
        """The shape of the result, or a pytree of shapes."""
        return jax.tree.map(lambda t: t.shape, self.out_type)

    @property
    def dtype(self) -> Any:
        """The element type of the result, or a pytree of them."""
        return jax.tree.map(lambda t: t.dtype, self.out_type)

    @property
    def in_shape(self) -> Any:
        """Shapes of the arguments, in the structure of `in_type`."""
        return jax.tree.map(lambda t: t.shape, self.in_type)

    @property
    def in_dtype(self) -> Any:
        """Element types of the arguments, in the structure of `in_type`."""
        return jax.tree.map(lambda t: t.dtype, self.in_type)


@dataclasses.dataclass(frozen=True, eq=False)
class FusibleCall:
    """One call of a fusible.

    Attributes:
      function: the user's function, its keyword arguments bound.
      in_tree: pytree structure of the positional arguments.
      prefix: how its outputs are grouped, a pytree prefix of them.
      name: for messages.
      traced_keywords: whether a keyword argument is a traced array, which `fuse` refuses.
    """

    function: Callable[..., Any]
    in_tree: Any
    prefix: Any
    name: str
    traced_keywords: bool = False

    def __call__(self, in_fusions: list[Fusion], out_fusions: list[Fusion | None]) -> Any:
        """Run the user's function with flat input fusions, and one output fusion (or None) for each group."""
        args = jax.tree.unflatten(self.in_tree, in_fusions)
        return self.function(*args, jax.tree.unflatten(jax.tree.structure(self.prefix), out_fusions))

    def unfused(self, *values: Any) -> Any:
        """Run the user's function on arrays."""
        fusions = [Fusion(lambda x=x: x, ((), {}), graphs.abstract(x)) for x in values]
        return self(fusions, [None] * len(jax.tree.leaves(self.prefix)))


def fusible(f: Callable[..., Any] | None = None, *, output_fusion_prefix: Any = True) -> Callable[..., Any]:
    """Mark a function that runs a kernel as one that `fuse` can fuse computations into.

    Arguments:
      f: called as `f(*in_fusions, output_fusions, **kwargs)`: each array argument is a `Fusion` of no arguments, and
        `output_fusions` has the structure of `output_fusion_prefix`, a `Fusion` of the outputs of each group or None
        where nothing follows. Keyword arguments are passed on as they are. None makes a decorator.
      output_fusion_prefix: a pytree prefix of f's outputs, whose leaves group them; True is one group.

    Returns:
      a function of arrays. Outside `fuse` it runs f with nothing to fuse.
    """
    if f is None:
        return functools.partial(fusible, output_fusion_prefix=output_fusion_prefix)
    name = getattr(f, "__name__", None) or getattr(getattr(f, "func", None), "__name__", None) or "fusible"

    def call(*args: Any, **kwargs: Any) -> Any:
        traced = any(isinstance(x, jaxlink.Tracer) for x in jax.tree.leaves(kwargs))
        flat, in_tree = jax.tree.flatten(args)
        one = FusibleCall(functools.partial(f, **kwargs) if kwargs else f, in_tree, output_fusion_prefix, name, traced)
        jaxpr, consts, out_tree = graphs.hoisted(one.unfused, flat, "fusible")
        outs = fusible_p.bind(*consts, *flat, jaxpr=jaxpr, call=one, num_consts=len(consts), out_tree=out_tree)
        return jax.tree.unflatten(out_tree, outs)

    functools.update_wrapper(call, f, updated=())
    return call


def _run_eagerly(*args: Any, call: FusibleCall, num_consts: int, **_: Any) -> list[Any]:
    """Outside of tracing, the user's function runs on the arrays themselves."""
    return jax.tree.leaves(call.unfused(*args[num_consts:]))


fusible_p.def_impl(_run_eagerly)
