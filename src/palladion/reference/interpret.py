"""The reference interpreter, `interpret=True`: a kernel call becomes ordinary XLA.

Any kernel runs as one loop over its programs in lexicographic order (`run_in_sequence`). The loop carries the
outputs, the scratch, and those inputs that the kernel writes; XLA updates them in place, a block at a time. Inputs
stay outside, since carrying them would make XLA copy whole arrays for each program (measured in spikes/tracing.md).
Kernels whose programs are independent and elementwise run at once instead (`parallel.py`).

On a static grid, window starts are tables worked out beforehand and the loop is a `lax.scan` over them. On a dynamic
or huge grid they are computed in the loop. Index maps that read scalar-prefetch values are evaluated with Cells that
hold the current values, so a batched prefetch operand needs nothing special.

Source: tutorial 3 (order, padding, scratch), 2.2 (clamping).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from palladion import jaxlink
from palladion.language.grid import BlockMapping, GridMapping
from palladion.language.index_maps import MAX_POINTS, evaluate, grid_points, reads_prefetch
from palladion.reference import parallel
from palladion.reference.evaluate import HIDDEN, Cell, Evaluator, uninitialized
from palladion.reference.windows import Window


def lower(ctx: Any, *args: Any, **params: Any) -> Any:
    """The lowering rule of `pallas_call` for `interpret=True`, on any platform."""
    return jaxlink.lower_as(functools.partial(interpret_call, **params), ctx, *args)


def interpret_call(
    *args: Any,
    jaxpr: Any,
    grid_mapping: GridMapping,
    input_output_aliases: Sequence[tuple[int, int]],
    debug_checks: bool = False,
    mesh: Any = None,
    **_: Any,
) -> list[jax.Array]:
    """Run a kernel call by its plain meaning, under whatever trace is active.

    Arguments:
      *args: sizes of dynamic grid axes, scalar-prefetch operands, inputs.
      jaxpr: the kernel.
      grid_mapping, input_output_aliases, debug_checks, mesh: as in the equation.

    Returns:
      the outputs.
    """
    gm = grid_mapping
    sizes, prefetch = args[: gm.num_dynamic], list(args[gm.num_dynamic :][: gm.num_prefetch])
    inputs = list(args[gm.num_dynamic + gm.num_prefetch :])
    aliases = {i - gm.num_prefetch: o for i, o in input_output_aliases}
    if not aliases and not debug_checks and (plan := parallel.plan(jaxpr, gm)) is not None:
        return plan.run(inputs)
    home = {o: i for i, o in aliases.items()}
    outputs = [
        inputs[home[o]] if o in home else uninitialized(m.array.shape, m.array.dtype) for o, m in enumerate(gm.outputs)
    ]
    if gm.num_programs == 0:
        return outputs
    axes = None if mesh is None else mesh.shape
    machine = _Sequence.make(jaxpr, gm, aliases, sizes, prefetch, inputs, debug_checks, axes)
    return machine.run(outputs)


@dataclasses.dataclass(frozen=True)
class _Sequence:
    """One kernel call, ready to run program by program.

    Attributes:
      jaxpr: the kernel; gm: its grid mapping.
      home: for each operand and output, the number of the array that its blocks live in; an aliased output lives in
        its input's array, so that a program sees what earlier ones stored there.
      written: for each operand and output, whether the kernel may write its Ref.
      sizes: the grid, with run-time scalars for dynamic axes.
      prefetch, inputs: the operands.
      tables: clamped starts of all programs, for the mappings (prefetch, inputs, outputs) where they are known.
      windows: one for each mapping.
      mesh: {axis name: size} of a mesh whose cores are the programs, or None.
    """

    jaxpr: Any
    gm: GridMapping
    home: tuple[int, ...]
    written: tuple[bool, ...]
    sizes: tuple[Any, ...]
    prefetch: tuple[Any, ...]
    inputs: tuple[Any, ...]
    tables: tuple[Any, ...]
    windows: tuple[Window, ...]
    checks: bool
    mesh: Any

    @classmethod
    def make(cls, jaxpr, gm: GridMapping, aliases, dynamic_sizes, prefetch, inputs, checks, mesh) -> _Sequence:
        home = list(range(len(gm.block_mappings)))
        for i, o in aliases.items():
            home[gm.num_inputs + o] = i
        rest = iter(dynamic_sizes)
        written_vars = jaxlink.written_vars(jaxpr)
        mappings = (*gm.prefetch_mappings, *gm.block_mappings)
        small = gm.num_programs is not None and gm.num_programs <= MAX_POINTS
        points = grid_points([n or 0 for n in gm.grid]) if small else None
        tables = tuple(_table(m, points) for m in mappings)
        return cls(
            jaxpr=jaxpr,
            gm=gm,
            home=tuple(home),
            written=tuple(v in written_vars for v in jaxpr.invars[gm.num_prefetch :][: len(home)]),
            sizes=tuple(next(rest) if n is None else n for n in gm.grid),
            prefetch=tuple(prefetch),
            inputs=tuple(inputs),
            tables=tables,
            windows=tuple(Window.make(m, t) for m, t in zip(mappings, tables)),
            checks=checks,
            mesh=mesh,
        )

    def run(self, outputs: list[Any]) -> list[jax.Array]:
        n_in, n_refs = self.gm.num_inputs, self.gm.num_prefetch + len(self.home)
        arrays = dict(enumerate([*self.inputs, *outputs]))
        carried = {h: arrays[h] for h, w in zip(self.home, self.written) if w}
        carried |= {h: arrays[h] for h in self.home[n_in:]}
        scratch = [uninitialized(v.aval.shape, v.aval.dtype) for v in self.jaxpr.invars[n_refs:]]
        kinds = tuple(k for k in HIDDEN if self.checks or any(isinstance(e, k) for e in self.jaxpr.effects))
        step, state = functools.partial(self._program, arrays, kinds), (carried, scratch, [HIDDEN[k]() for k in kinds])
        if self.gm.num_programs == 1:
            carried, *_ = step(state, [0] * len(self.sizes), self._known_starts())
        elif self.gm.num_programs is not None and self.gm.num_programs <= MAX_POINTS:
            ids = list(grid_points([n or 0 for n in self.gm.grid]))

            def body(carry, xs):
                ids, starts = xs
                return step(carry, ids, [_join(k, s) for k, s in zip(known, starts)]), None

            known = self._known_starts()
            varying = [_varying(s) for s in known]
            (carried, *_), _ = lax.scan(body, state, (ids, varying))
        else:
            total = functools.reduce(jnp.multiply, self.sizes, jnp.int32(1))

            def body_at(n, carry):
                return step(carry, self._unravel(n), [None] * len(self.windows))

            carried, *_ = lax.fori_loop(0, total, body_at, state)
        return [carried[h] for h in self.home[n_in:]]

    def _known_starts(self) -> list[Any]:
        """For each mapping: its table, with plain ints where all programs agree; None where it is not known."""
        known = []
        for table in self.tables:
            known.append(None if table is None else [(_constant(s), _constant(n)) for s, n in table])
        return known

    def _unravel(self, n: Any) -> list[Any]:
        ids = []
        for size in reversed(self.sizes):
            ids.append(lax.rem(n, jnp.int32(size)))
            n = lax.div(n, jnp.int32(size))
        return ids[::-1]

    def _program(self, arrays, kinds, carry, ids, starts):
        """One program: read its windows, run the kernel on cells, write back what it may have written."""
        carried, scratch, state = carry
        now = arrays | carried
        n_pre = self.gm.num_prefetch
        mappings = (*self.gm.prefetch_mappings, *self.gm.block_mappings)
        starts = list(starts)
        cells: list[Cell] = []
        for k, (mapping, window) in enumerate(zip(mappings, self.windows)):
            if starts[k] is None and not window.is_array:
                starts[k] = _starts_now(mapping, ids, cells[:n_pre])
            array = self.prefetch[k] if k < n_pre else now[self.home[k - n_pre]]
            cells.append(Cell(window.load(array, starts[k]), mapping.origin))
        cells += [Cell(x, v.aval.label) for x, v in zip(scratch, self.jaxpr.invars[len(cells) :])]
        kernel_ids = self.gm.kernel_ids([jnp.int32(i) if isinstance(i, int) else i for i in ids])
        hidden = dict(zip(kinds, map(Cell, state)))
        Evaluator(kernel_ids, self.gm.kernel_ids(self.sizes), self.checks, hidden, self.mesh).run(self.jaxpr, cells)
        for k, (h, w) in enumerate(zip(self.home, self.written), start=n_pre):
            if w:
                now[h] = self.windows[k].store(now[h], starts[k], cells[k].value)
        scratch, state = ([c.value for c in group] for group in (cells[len(mappings) :], hidden.values()))
        return {h: now[h] for h in carried}, scratch, state


def _table(mapping: BlockMapping, points: np.ndarray | None) -> list[tuple[np.ndarray, Any]] | None:
    """Clamped (start, size) columns over all programs, where the index map alone decides them."""
    symbolic = any(jaxlink.is_symbolic_dim(n) for n in mapping.array.shape)
    if points is None or symbolic or reads_prefetch(mapping) or mapping.indirect is not None:
        return None
    pairs = mapping.window(mapping.indices(evaluate(mapping, points)), clip=np.clip)
    return [(s.astype(np.int32), None if n is None else n.astype(np.int32)) for s, n in pairs]


def _constant(column: Any) -> Any:
    if column is None:
        return None
    return int(column[0]) if (column == column[0]).all() else column


def _varying(starts: Any) -> Any:
    """The columns of a table that differ from program to program, to be scanned over."""
    if starts is None:
        return None
    return [tuple(c if isinstance(c, np.ndarray) else None for c in pair) for pair in starts]


def _join(known: Any, here: Any) -> Any:
    """This program's starts: constants from the table, the others from the scan."""
    if known is None:
        return None
    return [
        tuple(h if isinstance(k, np.ndarray) else k for k, h in zip(pair, pair_here))
        for pair, pair_here in zip(known, here)
    ]


def _starts_now(mapping: BlockMapping, ids: Sequence[Any], prefetch: Sequence[Cell]) -> list[tuple[Any, Any]]:
    """The window's starts, by running the index map for this program."""
    ids = [jnp.int32(i) if isinstance(i, int) else i for i in ids]
    refs = prefetch[: len(mapping.index_map.invars) - len(ids)]
    flat = Evaluator([], []).run(mapping.index_map, [*ids, *refs])
    return mapping.window(mapping.indices([jnp.asarray(f, jnp.int32) for f in flat]))
