"""custom_fusion: a JAX function with its author's own fuser rules.

Outside of kernels the function is one equation, so that the fuser meets it whole; JAX's transformations see through
it. Inside a kernel the function, or what `def_pallas_impl` gives in its place, is traced as it stands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from palladion.errors import mistake
from palladion.language import frames
from palladion.language.blocks import BlockSpec, NoBlockSpec, no_block_spec
from palladion.language.fuser import graph as graphs
from palladion.language.fuser.passes import Program
from palladion.language.fuser.rules import NotFusible, rule
from palladion.language.fuser.transforms import SCALAR, BlockIndexTransform, Unknowable, root_of

custom_fusion_p = graphs.carrier("custom_fusion")


@dataclasses.dataclass(frozen=True)
class CustomEvalContext:
    """What the evaluation rule of a `custom_fusion` may look at.

    Attributes:
      out_block_specs: the BlockSpec of each result; `no_block_spec` for those that are not used.
      out_block_indices: this program's block indices of each result; None for those that are not used.
      scalar_prefetch: the kernel's scalar-prefetch operands.
      scalar_prefetch_handler: what picks the fusion's own scalars from them, or None.
    """

    out_block_specs: tuple[Any, ...]
    out_block_indices: tuple[Any, ...]
    scalar_prefetch: tuple[Any, ...]
    scalar_prefetch_handler: Any | None


class custom_fusion:
    """Decorator: a JAX function with fuser rules of its own.

        @fuser.custom_fusion
        def doubled(x): return x * 2

        doubled.def_pull_block_spec(lambda out_transforms: out_transforms)
        doubled.def_eval_rule(lambda ctx, x: [x * 2])

    Arguments:
      fun: a pure JAX function, the operation's meaning outside of kernels.
    """

    def __init__(self, fun: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.eval_rule: Callable[..., Sequence[Any]] | None = None
        self.pull_block_spec_rule: Callable[..., Sequence[BlockIndexTransform]] | None = None
        self.push_block_spec_rule: Callable[..., Sequence[BlockSpec]] | None = None
        self.pallas_impl: Callable[..., Any] | None = None

    def def_eval_rule(self, fn: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        """`fn(ctx, *blocks)` computes the blocks of the results, as a flat sequence. Required."""
        self.eval_rule = fn
        return fn

    def def_pull_block_spec(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn(out_transforms)` gives a BlockIndexTransform for each flat operand. Required."""
        self.pull_block_spec_rule = fn
        return fn

    def def_push_block_spec(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn(in_block_specs)` gives a BlockSpec for each flat result. Needed in output fusions only."""
        self.push_block_spec_rule = fn
        return fn

    def def_pallas_impl(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` takes the function's place inside kernels; its results must be of the same types."""
        self.pallas_impl = fn
        return fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for function, what, define in (
            (self.eval_rule, "an evaluation rule", "def_eval_rule"),
            (self.pull_block_spec_rule, "a pull_block_spec rule", "def_pull_block_spec"),
        ):
            if function is None:
                message = f"The custom_fusion {self.fun.__name__} is missing {what}."
                raise mistake(ValueError, message, hint=f"define one with {define}")
        if frames.current() is not None:
            return (self.pallas_impl or self.fun)(*args, **kwargs)
        flat, tree = jax.tree.flatten((args, kwargs))

        def flat_fun(*leaves):
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return self.fun(*args, **kwargs)

        jaxpr, consts, out_tree = graphs.hoisted(flat_fun, flat, "custom_fusion")
        if jaxpr.effects:
            raise mistake(
                ValueError, f"The custom_fusion {self.fun.__name__} has side effects.", hint="only compute in it"
            )
        if consts:
            message = f"The custom_fusion {self.fun.__name__} closes over {len(consts)} array(s)."
            raise mistake(ValueError, message, hint="make them arguments, so that its rules can give their blocks")
        return jax.tree.unflatten(out_tree, custom_fusion_p.bind(*flat, jaxpr=jaxpr, rules=self))


def _checked(eqn: Any, found: Any, count: int, what: str) -> list[Any]:
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    if len(found) != count:
        name = eqn.params["rules"].fun.__name__
        raise mistake(ValueError, f"The {what} rule of {name} gives {len(found)} result(s) in place of {count}.")
    return found


def _pull(ctx: Any, eqn: Any, outs: list[Any]) -> list[Any]:
    found = _checked(eqn, eqn.params["rules"].pull_block_spec_rule(tuple(outs)), len(eqn.invars), "pull_block_spec")
    return [None if f is None else SCALAR if f.block_shape is None else f for f in found]


def _push(ctx: Any, eqn: Any, ins: list[Any]) -> list[Any]:
    function = eqn.params["rules"].push_block_spec_rule
    if function is None:
        name = eqn.params["rules"].fun.__name__
        raise NotFusible(
            eqn, f"The custom_fusion {name} has no push_block_spec rule.", f"define {name}.def_push_block_spec"
        )
    specs = tuple(
        no_block_spec
        if b is None
        else BlockSpec(b.block_shape, ctx.index_map(b), memory_space=b.memory_space, pipeline_mode=b.pipeline_mode)
        for b in ins
    )
    found = _checked(eqn, function(specs), len(eqn.outvars), "push_block_spec")
    known = dict(zip(map(id, specs), ins))
    return [
        known[id(s)] if id(s) in known else None if isinstance(s, NoBlockSpec) else _transform(s, v)
        for s, v in zip(found, eqn.outvars)
    ]


def _transform(spec: BlockSpec, var: Any) -> BlockIndexTransform:
    """A BlockSpec that an author made; its index map can be called, but not seen through."""
    dims, indices = root_of(spec, var.aval.shape, "a result of a custom_fusion")

    def transform(*roots):
        if roots[0].args is None:
            raise Unknowable
        return indices(*roots[0].args)

    return BlockIndexTransform(dims, transform, memory_space=spec.memory_space, pipeline_mode=spec.pipeline_mode)


def _run(ctx: Program, eqn: Any, values: list[Any]) -> list[Any]:
    used = [v in ctx.blocks for v in eqn.outvars]
    context = CustomEvalContext(
        tuple(ctx.spec(v) if u else no_block_spec for u, v in zip(used, eqn.outvars)),
        tuple(ctx.indices(v) if u else None for u, v in zip(used, eqn.outvars)),
        ctx.scalar_prefetch,
        ctx.prefetch.handler,
    )
    outs = _checked(eqn, eqn.params["rules"].eval_rule(context, *values), len(eqn.outvars), "evaluation")
    return [ctx.fit(v, o) if u else None for u, v, o in zip(used, eqn.outvars, outs)]


rule(custom_fusion_p, pull=_pull, push=_push, run=_run)
