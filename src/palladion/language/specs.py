"""What a user passes to `pallas_call`, checked and laid out: grid, outputs, aliases, operands and their specs.

`Layout` puts together the operands' pytrees, the spec trees (prefixes of them) and the kernel's parameter list, so
that every Ref has an array type, a BlockSpec and a name that messages can use: "x_ref (input 0)".

Source: tutorial 2.1 (order of the Refs), 2.2; the public Pallas documentation of pytrees in specs.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import explain
from palladion.language import frames
from palladion.language.blocks import BlockSpec, NoBlockSpec
from palladion.language.grid import BlockMapping, GridMapping, make_block_mapping
from palladion.language.refs import KernelRef, MemorySpace, checked_dtype


# --- grid ---------------------------------------------------------------------------------------------------------
def normalise_grid(grid: Any, name: str) -> tuple[tuple[int | None, ...], list[Any]]:
    """The grid with None for dynamic axes, and the int32 sizes of those axes.

    Raises:
      ValueError: a size is negative. TypeError: a size is not an integer.
    """
    axes = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    static: list[int | None] = []
    dynamic = []
    for axis, size in enumerate(axes):
        if jaxlink.is_symbolic_dim(size):  # jax.export with symbolic shapes
            size = jnp.asarray(jaxlink.dimension_as_value(size))
        if isinstance(size, jax.Array):
            if size.shape != () or not jnp.issubdtype(size.dtype, jnp.integer):
                raise TypeError(
                    f"Axis {axis} of the grid of {name} is {size.dtype}{list(size.shape)}; a grid size is an integer."
                )
            static.append(None)
            dynamic.append(size.astype(jnp.int32))
            continue
        try:
            if isinstance(size, (bool, np.bool_)):
                raise TypeError
            count = operator.index(size)
        except TypeError:
            raise TypeError(
                explain(
                    f"Axis {axis} of the grid of {name} is {size!r} ({type(size).__name__}); "
                    "a grid size is an integer.",
                    hint="pl.cdiv(n, block) and n // block give integers; n / block is a float",
                )
            ) from None
        if count < 0:
            raise ValueError(f"Axis {axis} of the grid of {name} is {count}; a grid size cannot be negative.")
        static.append(count)
    return tuple(static), dynamic


# --- outputs and operands -------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class OutTree:
    """out_shape, flattened: array types, and the structure that a call returns."""

    arrays: tuple[Any, ...]
    tree: Any
    shape_tree: Any  # out_shape itself, lists as tuples


def out_tree(out_shape: Any) -> OutTree:
    """Check and flatten `out_shape`.

    Raises:
      TypeError: a leaf has no shape and dtype. ValueError: a 64-bit dtype while x64 is off.
    """
    out_shape = tuple(out_shape) if isinstance(out_shape, list) else out_shape

    def is_leaf(x):
        return hasattr(x, "shape") and hasattr(x, "dtype")

    leaves, tree = jax.tree.flatten(out_shape, is_leaf=is_leaf)
    arrays = []
    for i, leaf in enumerate(leaves):
        if not is_leaf(leaf):
            raise TypeError(
                explain(
                    f"Output {i} of out_shape is {leaf!r}; it must have a shape and a dtype.",
                    hint="jax.ShapeDtypeStruct(shape, dtype)",
                )
            )
        dtype = checked_dtype(leaf.dtype, f"output {i} of out_shape")
        arrays.append(jax.ShapeDtypeStruct(tuple(leaf.shape), dtype))
    return OutTree(tuple(arrays), tree, out_shape)


def as_operand(x: Any, number: int, name: str) -> jax.Array:
    """An operand as a JAX array.

    Raises:
      TypeError: it is not something that JAX takes as an array.
    """
    if isinstance(x, jax.Array):
        if isinstance(jaxlink.typeof(x), jaxlink.AbstractRef):
            raise TypeError(f"Operand {number} of {name} is a Ref; pass its value, ref[...].")
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as error:
        raise TypeError(f"Operand {number} of {name} is {type(x).__name__} {x!r}; it must be an array.") from error


def normalise_aliases(aliases: Any) -> tuple[tuple[int, int], ...]:
    """`input_output_aliases` as sorted pairs.

    Raises:
      TypeError: not a mapping of integers. ValueError: an output is aliased twice.
    """
    if not isinstance(aliases, Mapping):
        raise TypeError(f"input_output_aliases maps operand numbers to output numbers, not {aliases!r}.")
    try:
        pairs = tuple(sorted((operator.index(i), operator.index(o)) for i, o in aliases.items()))
    except TypeError:
        raise TypeError(f"input_output_aliases maps integers to integers, not {dict(aliases)!r}.") from None
    outputs = [o for _, o in pairs]
    if doubled := {o for o in outputs if outputs.count(o) > 1}:
        raise ValueError(
            explain(
                f"input_output_aliases gives output {min(doubled)} to more than one operand.",
                aliases=dict(pairs),
                hint="an output can reuse the memory of one operand",
            )
        )
    return pairs


def check_aliases(aliases: tuple[tuple[int, int], ...], grid_mapping: GridMapping) -> None:
    """Aliased operands and outputs exist and have the same shape and dtype."""
    inputs = (*grid_mapping.prefetch_mappings, *grid_mapping.inputs)
    for i, o in aliases:
        if not 0 <= i < len(inputs):
            raise ValueError(f"input_output_aliases names operand {i}, but the call has operands 0..{len(inputs) - 1}.")
        if not 0 <= o < grid_mapping.num_outputs:
            raise ValueError(
                f"input_output_aliases names output {o}, but the call has outputs 0..{grid_mapping.num_outputs - 1}."
            )
        if i < grid_mapping.num_prefetch:
            raise ValueError(
                f"input_output_aliases names operand {i}, a scalar-prefetch operand, which cannot be an output."
            )
        a, b = inputs[i].array, grid_mapping.outputs[o].array
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                explain(
                    f"input_output_aliases pairs operand {i}, {a.dtype}{list(a.shape)}, with output {o}, "
                    f"{b.dtype}{list(b.shape)}: they must have the same shape and dtype.",
                    operand=inputs[i].origin,
                    output=grid_mapping.outputs[o].origin,
                )
            )


# --- spec trees -----------------------------------------------------------------------------------------------------
def match_specs(specs: Any, tree: Any, what: str, against: str) -> list[Any]:
    """One spec for each leaf of `tree`, of which `specs` is a pytree prefix.

    Raises:
      ValueError: the structures differ; the message names the first place where they do.
    """
    if isinstance(specs, list) and isinstance(tree, tuple):
        specs = tuple(specs)
    result: list[Any] = []

    def visit(spec, part, path):
        if isinstance(spec, (BlockSpec, NoBlockSpec)) or spec is None:
            result.extend([spec] * len(jax.tree.leaves(part, is_leaf=_is_array_type)))
            return
        if isinstance(spec, list) and isinstance(part, tuple):
            spec = tuple(spec)
        children = _children(spec)
        if children is None:
            raise _mismatch(f"{what}{path} is {spec!r}, which is not a BlockSpec")
        parts = None if _is_array_type(part) else _children(part)
        if parts is None or list(children) != list(parts):
            raise _mismatch(f"{what}{path} has {_shape_of(spec)}, but {against}{path} has {_shape_of(part)}")
        for key in children:
            visit(children[key], parts[key], f"{path}{key}")

    def _mismatch(text):
        return ValueError(
            explain(
                f"{what} does not match {against}: {text}.",
                hint=f"{what} is a pytree prefix of {against}: one BlockSpec for each array, or for a whole subtree",
            )
        )

    visit(specs, tree, "")
    return result


def _is_array_type(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _children(x: Any) -> dict[str, Any] | None:
    """The children of a pytree node by key path, or None for a leaf."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if len(pairs) == 1 and pairs[0][0] == ():
        return None
    return {jax.tree_util.keystr(path): child for path, child in pairs}


def _shape_of(x: Any) -> str:
    if _is_array_type(x):
        return "an array"
    children = _children(x)
    return repr(x) if children is None else f"{len(children)} entries {list(children)}"


# --- the kernel's parameters ----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Operand:
    """An array operand or output, its spec, and its name in messages."""

    spec: Any
    array: Any
    label: str


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which Ref of the kernel is what.

    Attributes:
      prefetch: mappings of the scalar-prefetch operands.
      prefetch_tree: pytree structure of the tuple of those operands, as index maps get them.
      inputs, outputs: the blocked operands.
      scratch_refs: abstract Refs of the scratch buffers.
      arguments: regroups flat Refs (prefetch, inputs, outputs, scratch) into the kernel's (args, kwargs).
    """

    prefetch: tuple[BlockMapping, ...]
    prefetch_tree: Any
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    scratch_refs: tuple[KernelRef, ...]
    arguments: Callable[[Sequence[Any]], tuple[tuple, dict]]

    @classmethod
    def make(cls, kernel: Callable, name: str, spec: Any, grid: Any, in_tree: Any, avals: Any, outs: OutTree) -> Layout:
        """Lay out a call of `kernel` with operands of these types.

        Raises:
          ValueError: a spec tree does not match. TypeError: the kernel takes another number of Refs.
        """
        operands = jax.tree.unflatten(in_tree, avals)
        n_prefetch = spec.num_scalar_prefetch
        if n_prefetch > len(operands):
            raise ValueError(
                f"The grid_spec of {name} has {n_prefetch} scalar-prefetch operand(s), but the call has "
                f"{len(operands)} operand(s)."
            )
        out_args = outs.shape_tree if type(outs.shape_tree) is tuple else (outs.shape_tree,)
        scratch_args, scratch_kwargs = _scratch(spec.scratch_shapes, name)
        groups = [
            *(("scalar-prefetch operand", x) for x in operands[:n_prefetch]),
            *(("input", x) for x in operands[n_prefetch:]),
            *(("output", x) for x in out_args),
            *(("scratch", x) for x in scratch_args),
        ]
        _check_parameters(kernel, name, groups, scratch_kwargs)
        labels, tree = _labels(kernel, groups, scratch_kwargs)

        ins = match_specs(spec.in_specs, operands[n_prefetch:], "in_specs", "the operands")
        out_specs = match_specs(spec.out_specs, outs.shape_tree, "out_specs", "out_shape")
        n_pre_leaves = len(jax.tree.leaves(operands[:n_prefetch]))
        space = getattr(spec, "prefetch_memory_space", MemorySpace.DEFAULT)
        whole = BlockSpec(memory_space=space)
        flat = [*avals]
        prefetch = tuple(
            make_block_mapping(whole, a, grid, origin=label)
            for a, label in zip(flat[:n_pre_leaves], labels["scalar-prefetch operand"])
        )
        scratch = [*jax.tree.leaves(scratch_args, is_leaf=_is_array_type), *scratch_kwargs.values()]
        return cls(
            prefetch=prefetch,
            prefetch_tree=jax.tree.structure(operands[:n_prefetch]),
            inputs=tuple(Operand(*x) for x in zip(ins, flat[n_pre_leaves:], labels["input"], strict=True)),
            outputs=tuple(Operand(*x) for x in zip(out_specs, outs.arrays, labels["output"], strict=True)),
            scratch_refs=tuple(
                _scratch_ref(x, label, name) for x, label in zip(scratch, labels["scratch"], strict=True)
            ),
            arguments=lambda refs: jax.tree.unflatten(tree, refs),
        )


def _scratch(shapes: Any, name: str) -> tuple[tuple, dict[str, Any]]:
    if isinstance(shapes, Mapping):
        return (), {str(k): v for k, v in shapes.items()}
    if isinstance(shapes, (tuple, list)):
        return tuple(shapes), {}
    raise TypeError(
        explain(
            f"scratch_shapes of {name} must be a tuple or a dict of buffer types, not {shapes!r}.",
            hint="scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)]",
        )
    )


def _scratch_ref(x: Any, label: str, name: str) -> KernelRef:
    if hasattr(x, "get_ref_aval"):
        ref = x.get_ref_aval()
        return KernelRef(ref.inner_aval, ref.memory_space, label=label)
    if _is_array_type(x):
        return KernelRef(jaxlink.ShapedArray(tuple(x.shape), jnp.dtype(x.dtype)), MemorySpace.DEFAULT, label=label)
    raise TypeError(
        explain(
            f"{label} of {name} is {x!r}, which is not a buffer type.",
            hint="pltpu.VMEM(shape, dtype), pltpu.SMEM(shape, dtype) …",
        )
    )


def _describe(x: Any) -> str:
    return f"{jnp.dtype(x.dtype)}{list(x.shape)}" if _is_array_type(x) else type(x).__name__


def _check_parameters(kernel: Callable, name: str, groups: list, kwargs: dict) -> None:
    def message(takes):
        try:
            params = list(inspect.signature(kernel).parameters)
        except (TypeError, ValueError):
            params = []
        lines = []
        for i in range(max(len(groups), len(params))):
            param = params[i] if i < len(params) else "(no parameter)"
            ref = f"{groups[i][0]} {_describe(groups[i][1])}" if i < len(groups) else "(no Ref)"
            lines.append(f"    {i}: {param} <- {ref}")
        return explain(
            f"The kernel {name} takes {takes}, but this call passes {len(groups)} Ref(s)"
            + (f" and scratch by keyword: {', '.join(kwargs)}" if kwargs else "")
            + ".\n  parameters and Refs:\n"
            + "\n".join(lines),
            where=jaxlink.function_location(kernel),
            hint="a kernel has one parameter for each operand, then each output, then each scratch buffer",
        )

    frames.check_arity(kernel, len(groups), message, tuple(kwargs))


def _labels(kernel: Callable, groups: list, kwargs: dict) -> tuple[dict[str, list[str]], Any]:
    """Names of all Refs by role, and the pytree of the kernel's (args, kwargs)."""
    try:
        bound = inspect.signature(kernel).bind(*range(len(groups)), **kwargs)
        names = {v: k for k, v in bound.arguments.items() if isinstance(v, int)}
        for parameter, value in bound.arguments.items():
            if isinstance(value, tuple):  # *refs
                names.update({v: f"{parameter}[{n}]" for n, v in enumerate(value)})
    except (TypeError, ValueError):
        names = {}
    labels: dict[str, list[str]] = {k: [] for k in ("scalar-prefetch operand", "input", "output", "scratch")}

    def add(role, name, value):
        for path, _ in jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_array_type)[0]:
            number = f"{role} {len(labels[role])}"
            labels[role].append(f"{name}{jax.tree_util.keystr(path)} ({number})" if name else number)

    for i, (role, value) in enumerate(groups):
        add(role, names.get(i), value)
    for key, value in kwargs.items():
        add("scratch", key, value)
    placeholder = tuple(value for _, value in groups), dict(kwargs)
    return labels, jax.tree.structure(placeholder, is_leaf=_is_array_type)
