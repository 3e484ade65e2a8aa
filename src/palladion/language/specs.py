"""What a user passes to `pallas_call`, checked and laid out: grid, outputs, aliases, operands and their specs.

`Layout` puts together the operands' pytrees, the spec trees (prefixes of them) and the kernel's parameter list, so
that every Ref has an array type, a BlockSpec and a name that messages can use: "x_ref (input 0)".

Source: tutorial 2.1 (order of the Refs), 2.2; the public Pallas documentation of pytrees in specs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink, locations
from palladion.errors import count_of, explain, kind_of, mistake
from palladion.language import frames
from palladion.language.blocks import BlockSpec, NoBlockSpec
from palladion.language.buffers import buffer_ref, is_array_type, settle_types
from palladion.language.grid import BlockMapping, GridMapping, make_block_mapping
from palladion.language.indexing import is_ref, label_of
from palladion.language.refs import KernelRef, MemorySpace, checked_dtype


# --- grid ---------------------------------------------------------------------------------------------------------
def normalise_grid(grid: Any, name: str) -> tuple[tuple[int | None, ...], list[Any]]:
    """The grid with None for dynamic axes, and the int32 sizes of those axes.

    Raises:
      ValueError: a size is negative, or there are 2**31 programs or more. TypeError: a size is not an integer.
    """
    axes = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    static: list[int | None] = []
    dynamic = []
    for axis, size in enumerate(axes):
        if jaxlink.is_symbolic_dim(size):  # jax.export with symbolic shapes
            size = jnp.asarray(jaxlink.dimension_as_value(size))
        if isinstance(size, jax.Array):
            if size.shape != () or not jnp.issubdtype(size.dtype, jnp.integer):
                raise _not_a_size(axis, name, kind_of(size))
            static.append(None)
            dynamic.append(size.astype(jnp.int32))
            continue
        try:
            if isinstance(size, (bool, np.bool_)):
                raise TypeError
            count = operator.index(size)
        except TypeError:
            raise _not_a_size(axis, name, kind_of(size)) from None
        if count < 0:
            raise mistake(
                ValueError,
                f"Axis {axis} of the grid of {name} is {count}; a grid size cannot be negative.",
                grid=axes,
                hint="a grid says how many programs run along each axis; 0 runs none",
            )
        static.append(count)
    if max([math.prod(n for n in static if n), *(n for n in static if n)], default=0) >= 2**31:
        raise mistake(
            ValueError,
            f"The grid of {name} is too large: program numbers are 32-bit integers.",
            grid=axes,
            hint="make blocks larger, or loop inside the kernel with pl.loop",
        )
    return tuple(static), dynamic


def _not_a_size(axis: int, name: str, what: str) -> TypeError:
    return mistake(
        TypeError,
        f"Axis {axis} of the grid of {name} is {what}; a grid size is an integer.",
        hint="write grid=n or a tuple of ints; pl.cdiv(n, block) and n // block give ints, n / block is a float",
    )


def kernel_name(kernel: Any) -> str:
    """What messages call a kernel: its function's name, seen through partials and methods, or its class's."""
    while isinstance(kernel, functools.partial):
        kernel = kernel.func
    return getattr(kernel, "__name__", None) or type(kernel).__name__


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
            raise mistake(
                TypeError,
                f"Output {i} of out_shape is {kind_of(leaf)}; it must have a shape and a dtype.",
                hint="out_shape=jax.ShapeDtypeStruct(shape, dtype), or a pytree of them",
            )
        dtype = checked_dtype(leaf.dtype, f"output {i} of out_shape")
        arrays.append(jax.ShapeDtypeStruct(tuple(leaf.shape), dtype))
    return OutTree(tuple(arrays), tree, out_shape)


def as_operand(x: Any, number: int, name: str) -> jax.Array:
    """An operand as a JAX array.

    Raises:
      TypeError: it is not something that JAX takes as an array.
    """
    if is_ref(x):
        raise mistake(
            TypeError,
            f"Operand {number} of {name} is a Ref, {label_of(x)}; it must be an array.",
            hint="pass its value: call(x_ref[...]); a kernel that updates a Ref in place is a pl.core_map",
        )
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise mistake(
            TypeError,
            f"Operand {number} of {name} is {kind_of(x)}; it must be an array.",
            because=str(error).partition("\n")[0],
            hint="operands are arrays, numbers and pytrees of them; bind other things with functools.partial",
        ) from error


def normalise_aliases(aliases: Any) -> tuple[tuple[int, int], ...]:
    """`input_output_aliases` as sorted pairs.

    Raises:
      TypeError: not a mapping of integers. ValueError: an output is aliased twice.
    """
    hint = "input_output_aliases={0: 0} lets output 0 reuse the memory of operand 0"
    if not isinstance(aliases, Mapping):
        headline = f"input_output_aliases maps operand numbers to output numbers; it cannot be {kind_of(aliases)}."
        raise mistake(TypeError, headline, hint=hint)
    try:
        pairs = tuple(sorted((operator.index(i), operator.index(o)) for i, o in aliases.items()))
    except TypeError:
        headline = f"input_output_aliases maps operand numbers to output numbers, not {dict(aliases)!r}."
        raise mistake(TypeError, headline, hint=hint) from None
    outputs = [o for _, o in pairs]
    if doubled := {o for o in outputs if outputs.count(o) > 1}:
        raise mistake(
            ValueError,
            f"input_output_aliases gives output {min(doubled)} to more than one operand.",
            aliases=dict(pairs),
            hint="an output can reuse the memory of one operand",
        )
    return pairs


def check_aliases(aliases: tuple[tuple[int, int], ...], grid_mapping: GridMapping) -> None:
    """Aliased operands and outputs exist and have the same shape and dtype."""
    inputs = (*grid_mapping.prefetch_mappings, *grid_mapping.inputs)
    for i, o in aliases:
        for what, number, count in (("operand", i, len(inputs)), ("output", o, grid_mapping.num_outputs)):
            if not 0 <= number < count:
                raise mistake(
                    ValueError,
                    f"input_output_aliases names {what} {number}, but the call has {count_of(count, what)}.",
                    aliases=dict(aliases),
                    hint="arrays are counted from 0, scalar-prefetch operands included",
                )
        if i < grid_mapping.num_prefetch:
            raise mistake(
                ValueError,
                f"input_output_aliases names operand {i}, {inputs[i].origin}, which cannot become an output.",
                aliases=dict(aliases),
                hint=f"scalar-prefetch operands come first: the first blocked operand is {grid_mapping.num_prefetch}",
            )
        a, b = inputs[i], grid_mapping.outputs[o]
        if (a.array.shape, a.array.dtype) != (b.array.shape, b.array.dtype):
            raise mistake(
                ValueError,
                f"input_output_aliases pairs operand {i}, {kind_of(a.array)}, with output {o}, {kind_of(b.array)}: "
                "they must have the same shape and dtype.",
                operand=a.origin,
                output=b.origin,
                hint="give the output the operand's type, jax.ShapeDtypeStruct(x.shape, x.dtype)",
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
            result.extend([spec] * len(jax.tree.leaves(part, is_leaf=is_array_type)))
            return
        if isinstance(spec, list) and isinstance(part, tuple):
            spec = tuple(spec)
        children = _children(spec)
        if children is None:
            raise _mismatch(f"{what}{path} is {kind_of(spec)}, not a BlockSpec")
        parts = None if is_array_type(part) else _children(part)
        if parts is None or list(children) != list(parts):
            found = f"{against}{path} {'is one array' if is_array_type(part) else f'has {_shape_of(part)}'}"
            if part is tree and against == "the operands":
                found = f"the call has {count_of(len(part), 'operand')}"
            raise _mismatch(f"{what}{path} has {_shape_of(spec)}, but {found}")
        for key in children:
            visit(children[key], parts[key], f"{path}{key}")

    def _mismatch(text):
        return mistake(
            ValueError,
            f"{what} does not match {against}: {text}.",
            hint=f"{what} is a pytree prefix of {against}: one BlockSpec for each array, or for a whole subtree",
        )

    visit(specs, tree, "")
    return result


def _children(x: Any) -> dict[str, Any] | None:
    """The children of a pytree node by key path, or None for a leaf."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if len(pairs) == 1 and pairs[0][0] == ():
        return None
    return {jax.tree_util.keystr(path): child for path, child in pairs}


def _shape_of(x: Any) -> str:
    if is_array_type(x):
        return "an array"
    children = _children(x)
    if children is None:
        return kind_of(x)
    if isinstance(x, dict):
        return f"the keys {', '.join(map(repr, x))}"
    return count_of(len(children), "entry", "entries")


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
            raise mistake(
                ValueError,
                f"The grid_spec of {name} asks for {count_of(n_prefetch, 'scalar-prefetch operand')}, but the call has "
                f"{count_of(len(operands), 'operand')}.",
                hint="scalar-prefetch operands are the first operands of the call",
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
        scratch = jax.tree.leaves((scratch_args, scratch_kwargs), is_leaf=is_array_type)
        return cls(
            prefetch=prefetch,
            prefetch_tree=jax.tree.structure(operands[:n_prefetch]),
            inputs=tuple(Operand(*x) for x in zip(ins, flat[n_pre_leaves:], labels["input"], strict=True)),
            outputs=tuple(Operand(*x) for x in zip(out_specs, outs.arrays, labels["output"], strict=True)),
            scratch_refs=tuple(buffer_ref(x, label, name) for x, label in zip(scratch, labels["scratch"], strict=True)),
            arguments=lambda refs: jax.tree.unflatten(tree, refs),
        )


def _scratch(shapes: Any, name: str) -> tuple[tuple, dict[str, Any]]:
    if isinstance(shapes, Mapping):
        shapes = settle_types(dict(shapes))
        return (), {str(k): shapes[k] for k in sorted(shapes, key=str)}  # the order in which pytrees flatten a dict
    if isinstance(shapes, (tuple, list)):
        return settle_types(tuple(shapes)), {}
    what = "one buffer type" if hasattr(shapes, "get_ref_aval") else kind_of(shapes)
    raise mistake(
        TypeError,
        f"scratch_shapes of {name} is {what}; it must be a tuple or a dict of buffer types.",
        hint="scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32)]",
    )


def _describe(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if is_array_type(x) else f"a {type(x).__name__} of arrays"


def _check_parameters(kernel: Callable, name: str, groups: list, kwargs: dict) -> None:
    def message(takes):
        try:
            params = inspect.signature(kernel).parameters
        except (TypeError, ValueError):
            params = {}
        refs = [f"{role} {_describe(x)}" for role, x in groups]
        given = {**dict(enumerate(refs)), **{k: f"scratch {_describe(x)}" for k, x in kwargs.items()}}
        # What is passed by keyword alone and has a default needs no Ref: functools.partial bound it.
        positional = [
            name
            for name, p in params.items()
            if name not in kwargs and not (p.kind is p.KEYWORD_ONLY and p.default is not p.empty)
        ]
        lines = [f"\n    {p} <- {given.pop(i, 'no Ref')}" for i, p in enumerate(positional)]
        lines += [f"\n    {p} <- {given.pop(p)}" for p in params if p in kwargs]
        lines += [f"\n    {'no parameter' if isinstance(k, int) else f'no {k}'} <- {ref}" for k, ref in given.items()]
        return explain(
            f"The kernel {name} takes {takes}, but this call passes {count_of(len(groups), 'Ref')}"
            + (f" and, by keyword, {', '.join(kwargs)}" if kwargs else "")
            + ".",
            where=locations.defined_at(kernel),
            parameters_and_Refs="".join(lines),
            hint="a kernel has one parameter for each operand, then each output, then each scratch buffer; bind other "
            "parameters with functools.partial",
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
        for path, _ in jax.tree_util.tree_flatten_with_path(value, is_leaf=is_array_type)[0]:
            number = f"{role} {len(labels[role])}"
            labels[role].append(f"{name}{jax.tree_util.keystr(path)} ({number})" if name else number)

    for i, (role, value) in enumerate(groups):
        add(role, names.get(i), value)
    for key, value in kwargs.items():
        add("scratch", key, value)
    placeholder = tuple(value for _, value in groups), dict(kwargs)
    return labels, jax.tree.structure(placeholder, is_leaf=is_array_type)
