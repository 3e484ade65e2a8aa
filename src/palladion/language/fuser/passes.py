"""What rules are given: the pass that moves blocks through a graph, and the program that runs a graph on blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import mistake
from palladion.language.blocks import BlockSpec, NoBlockSpec, no_block_spec
from palladion.language.fuser import graph as graphs
from palladion.language.fuser import rules
from palladion.language.fuser.transforms import (
    Base,
    BlockIndexTransform,
    IndexMap,
    RootIndices,
    Unknowable,
    canonical,
    merge,
    program_text,
    ref_shape,
    root_of,
    sizes,
)


def is_spec(x: Any) -> bool:
    """Whether a pytree entry is a leaf of a tree of BlockSpecs."""
    return x is None or isinstance(x, (BlockSpec, NoBlockSpec))


def has_block(spec: Any) -> bool:
    """Whether a leaf of a tree of BlockSpecs is a BlockSpec."""
    return isinstance(spec, BlockSpec)


def spec_leaves(specs: Any, tree: Any, what: str) -> list[Any]:
    """One BlockSpec or `no_block_spec` for each leaf of a pytree structure, of which `specs` is a prefix.

    Raises:
      ValueError: it is none.
    """
    like = jax.tree.unflatten(tree, range(tree.num_leaves))
    try:
        full = jax.tree.map(lambda s, part: jax.tree.map(lambda _: s, part), specs, like, is_leaf=is_spec)
    except (ValueError, TypeError) as error:
        found = jax.tree.structure(specs, is_leaf=is_spec)
        message = f"The block specs of {what} have the structure {found}, but its values have {tree}."
        raise mistake(ValueError, message, hint="give one BlockSpec or pl.no_block_spec for each array") from error
    return jax.tree.leaves(jax.tree.map(lambda s: no_block_spec if s is None else s, full, is_leaf=is_spec))


@dataclasses.dataclass(frozen=True)
class Prefetch:
    """Where the scalars that a fusion closes over come from, inside index maps and inside the kernel.

    Attributes:
      graph: the fusion.
      handler: from the kernel's scalar-prefetch operands to this fusion's, or None.
      grid_len: how many grid indices index maps take, or None.
    """

    graph: graphs.Graph
    handler: Callable[..., Sequence[Any]] | None
    grid_len: int | None

    def __post_init__(self) -> None:
        large = [v.aval.str_short(short_dtypes=True) for v in self.graph.constvars if graphs.is_ref(v) or v.aval.shape]
        if large:
            raise mistake(
                ValueError,
                f"The fusion {self.graph.name} closes over {', '.join(large)}.",
                hint="make closed-over arrays arguments first: fn, values, scalars = fuser.get_fusion_values(fusion)",
            )

    def split(self, args: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The arguments of an index map as grid indices and scalar-prefetch operands."""
        n = len(args) if self.grid_len is None else self.grid_len
        return args[:n], args[n:]

    def reader(self, operands: Sequence[Any]) -> Callable[[Any], Any]:
        """From a scalar variable to its value, given the kernel's scalar-prefetch operands."""
        return self.evaluator(functools.cache(lambda: self._load(operands)))

    def evaluator(self, consts: Callable[[], Sequence[Any]]) -> Callable[[Any], Any]:
        """From a scalar variable to its value, given the values that the graph closes over."""

        def read(atom):
            reached = self.graph.reaching([atom])
            if reached & set(self.graph.invars):
                eqn = self.graph.producers.get(atom)
                raise mistake(
                    ValueError,
                    "A block index in the fusion depends on values that only the kernel has.",
                    where=None if eqn is None else locations.location_of(eqn),
                    hint="start indices of slices must come from scalars that the fused function gets or closes over",
                )
            used = [v for v in self.graph.constvars if v in reached]
            env = dict(zip(self.graph.constvars, consts())) if used else {}
            eqns = [e for e in self.graph.eqns if any(v in reached for v in e.outvars)]
            return graphs.run(eqns, env, [atom])[0]

        return read

    def _load(self, operands: Sequence[Any]) -> list[Any]:
        consts = self.graph.consts
        if self.handler is None:
            if any(isinstance(c, jaxlink.Tracer) for c in consts):
                raise mistake(
                    ValueError,
                    f"The fusion {self.graph.name} computes block indices from run-time scalars, and no "
                    "scalar_prefetch_handler says where the kernel finds them.",
                    hint="pass scalar_prefetch_handler=fuser.make_scalar_prefetch_handler(i), i being the place of the "
                    "fusion's scalars among the scalar-prefetch operands, and grid_len",
                )
            return [np.asarray(c)[()] for c in consts]  # NumPy scalars: literals in whatever is traced
        held = list(self.handler(*operands))
        if len(held) != len(consts):
            raise mistake(
                ValueError,
                f"The scalar_prefetch_handler of {self.graph.name} gives {len(held)} scalar(s), but the fusion uses "
                f"{len(consts)}.",
                hint="its indices must lead to the scalars that get_fusion_values gave for this very fusion",
            )
        return [x if isinstance(x, (jax.Array, np.ndarray, np.generic, int)) else x[...] for x in held]


class Pass:
    """Blocks on their way through a graph.

    Attributes:
      graph, prefetch: the function and its scalars.
      strict: whether two blocks of one value must have the same index function, besides the same shape.
      blocks: the block of each variable found so far.
      roots: the index maps of the blocks that the caller chose.
      bases: the users' index maps that these come from, by which indices are compared.
    """

    def __init__(self, graph: graphs.Graph, prefetch: Prefetch, strict: bool) -> None:
        self.graph, self.prefetch, self.strict = graph, prefetch, strict
        self.blocks: dict[Any, BlockIndexTransform] = {}
        self.roots: list[Callable[..., tuple]] = []
        self.bases: list[Base] = []
        self._of_bases: list[Callable[[Sequence[tuple]], tuple]] = []

    def add_root(self, var: Any, spec: BlockSpec, what: str) -> None:
        """Start from a block that the caller chose."""
        dims, indices = root_of(spec, var.aval.shape, what)
        n = len(self.roots)
        self.roots.append(indices)
        if isinstance(spec.index_map, IndexMap):
            made = spec.index_map
            places = [self._base(b) for b in made.bases]
            self._of_bases.append(lambda bases: made.of_bases([bases[p] for p in places]))
        elif spec.index_map is None:
            self._of_bases.append(lambda bases: indices())
        else:
            place = self._base(Base(spec.index_map, dims))
            self._of_bases.append(lambda bases: bases[place])
        found = BlockIndexTransform(
            dims, lambda *roots: roots[n], memory_space=spec.memory_space, pipeline_mode=spec.pipeline_mode
        )
        self.put(var, found, None)

    def _base(self, base: Base) -> int:
        """The place of a user's index map among those that all indices come from; equal ones share it."""
        for n, known in enumerate(self.bases):
            if known.dims == base.dims and (known.index_map is base.index_map or self._same_maps(known, base)):
                return n
        self.bases.append(base)
        return len(self.bases) - 1

    def _same_maps(self, a: Base, b: Base) -> bool:
        if self.prefetch.grid_len is None:
            return False
        grid = [self.prefetch.grid_len]

        def text(base):
            _, indices = root_of(BlockSpec(base.dims, base.index_map), base.dims, "")
            return program_text(lambda ids, _: indices(*ids[0]), grid, ())

        try:
            return text(a) == text(b)
        except Exception:  # a user's function, called without the scalar-prefetch operands: any error means unknown
            return False

    def put(self, var: Any, found: BlockIndexTransform, eqn: Any) -> None:
        """Note the block of a variable; `eqn` asks for it.

        Raises:
          ValueError: another block of it is asked for elsewhere.
        """
        found = canonical(found, var.aval.shape)
        if var in self.blocks:
            merged = self.merged(self.blocks[var], found)
            if merged is None:
                raise rules.conflict(var, eqn, self.blocks[var], found)
            found = merged
        self.blocks[var] = found

    def merged(self, a: BlockIndexTransform, b: BlockIndexTransform) -> BlockIndexTransform | None:
        """The block that serves both (canonical) blocks, or None."""
        return merge(a, b, self._same if self.strict else lambda a, b: True)

    def _same(self, a: BlockIndexTransform, b: BlockIndexTransform) -> bool:
        """Whether two index functions trace to the same operations; False also when that cannot be seen."""

        def text(found):
            def indices(integers, scalars):
                bases = [base.indices(flat) for base, flat in zip(self.bases, integers)]
                return found.block_index_transform(*self._symbolic(bases, self.prefetch.evaluator(lambda: scalars)))

            return program_text(indices, [base.arity for base in self.bases], self.graph.constvars)

        try:
            return text(a) == text(b)
        except Unknowable:
            return False

    def _symbolic(self, bases: Sequence[tuple], read: Callable[[Any], Any]) -> list[RootIndices]:
        """The block indices at the roots, given the results of the users' index maps."""
        return [RootIndices(of_bases(bases), read) for of_bases in self._of_bases] or [RootIndices((), read)]

    def static(self, atom: Any) -> int | None:
        """The value of an integer operand that is known now, or None."""
        return self.graph.static(atom)

    def divisor(self, atom: Any) -> int:
        """A number that surely divides an integer operand."""
        return self.graph.divisor(atom)

    def start(self, atom: Any, roots: RootIndices) -> Any:
        """The value of an integer operand, inside an index function."""
        known = self.static(atom)
        return roots.scalars(atom) if known is None else known

    def root_indices(self, args: Sequence[Any]) -> list[RootIndices]:
        """The block indices at the roots, given the arguments of an index map."""
        _, operands = self.prefetch.split(args)
        read = self.prefetch.reader(operands)
        return [RootIndices(indices(*args), read, tuple(args)) for indices in self.roots] or [RootIndices((), read)]

    def index_map(self, found: BlockIndexTransform) -> Callable[..., tuple]:
        """The index map of a block."""
        return lambda *args: tuple(found.block_index_transform(*self.root_indices(args)))

    def spec(self, var: Any) -> Any:
        """The BlockSpec of a variable; `no_block_spec` for scalars and for what is not used."""
        found = self.blocks.get(var)
        if found is None or not found.block_shape:
            return no_block_spec

        def of_bases(bases):
            return tuple(found.block_index_transform(*self._symbolic(bases, _unknowable)))

        return BlockSpec(
            found.block_shape,
            IndexMap(self.index_map(found), tuple(self.bases), of_bases),
            memory_space=found.memory_space,
            pipeline_mode=found.pipeline_mode,
        )


def _unknowable(atom: Any) -> Any:
    raise Unknowable


class Program:
    """One program of a kernel, in which a graph runs on blocks.

    Attributes:
      blocks: the block of each variable.
      scalar_prefetch: the kernel's scalar-prefetch operands.
      prefetch: the graph's own scalars.
    """

    def __init__(self, moved: Pass, program_ids: Sequence[Any], scalar_prefetch: Sequence[Any]) -> None:
        self._pass = moved
        self._args = (*program_ids, *scalar_prefetch)
        self.blocks, self.prefetch = moved.blocks, moved.prefetch
        self.scalar_prefetch = tuple(scalar_prefetch)

    @functools.cached_property
    def _roots(self) -> list[RootIndices]:
        return self._pass.root_indices(self._args)

    def indices(self, var: Any) -> tuple[Any, ...]:
        """This program's block indices of a variable."""
        return tuple(self.blocks[var].block_index_transform(*self._roots))

    def spec(self, var: Any) -> Any:
        """The BlockSpec of a variable."""
        return self._pass.spec(var)

    def dims(self, atom: Any) -> tuple[Any, ...]:
        """The block dimensions of an operand or result."""
        return () if graphs.is_literal(atom) or atom not in self.blocks else tuple(self.blocks[atom].block_shape or ())

    def sizes(self, atom: Any) -> tuple[int, ...]:
        """Elements along each dimension of the block of an operand or result."""
        return sizes(self.dims(atom))

    def full(self, atom: Any, value: Any) -> Any:
        """The block of an operand with one dimension for each of the array, squeezed ones included."""
        return lax.reshape(value, self.sizes(atom))

    def fit(self, var: Any, value: Any) -> Any:
        """A result as the rest of the graph sees it: without squeezed dimensions."""
        return reshaped(value, ref_shape(self.dims(var)))

    def run(self, args: Mapping[Any, Any]) -> list[Any]:
        """The blocks of the graph's results, from the blocks of its arguments."""
        graph, env = self._pass.graph, dict(args)
        consts = [v for v in graph.constvars if v in self.blocks]
        if consts:
            read = self.prefetch.reader(self.scalar_prefetch)
            env.update({v: read(v) for v in consts})

        def value(atom):
            return atom.val if graphs.is_literal(atom) else env.get(atom)

        for eqn in graph.eqns:
            if any(v in self.blocks for v in eqn.outvars):
                with locations.as_traced(eqn):
                    env.update(zip(eqn.outvars, rules.find(eqn, "run")(self, eqn, [value(a) for a in eqn.invars])))
        return [value(a) for a in graph.outvars]


def reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    """A block in another shape of as many elements; no operation where it has that shape."""
    return value if np.shape(value) == shape else lax.reshape(value, shape)
