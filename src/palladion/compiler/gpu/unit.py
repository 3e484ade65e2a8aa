"""Compiling one kernel to CUDA C++: a walk over its jaxpr, equation by equation, through `RULES`.

A Pallas thread is a warpgroup: all of its 128 CUDA threads run the same code. A scalar is a C++ variable that each of
them computes; an array is a C++ array of registers, of which each holds its part (`fragments.py`). What one thread of
the 128 has to do (starting a copy, arriving at a barrier) stands under `one_thread`; what must have happened in all of
them before, is waited for with `sync`.

A rule is `rule(unit, eqn, *values) -> values`, one for each result; it writes lines and returns what the results are.

    @RULES.rule(lax.neg_p)
    def _neg(unit, eqn, x):
        return unit.elementwise(eqn, lambda x: f"-{x}", x)

Equations are compiled more than once where what comes later decides (the layout of what a loop carries): everything
that a rule changes lies in the unit, which can forget (`trial`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from palladion import jaxlink, locations
from palladion.compiler.gpu import inference, moves
from palladion.compiler.gpu.dtypes import NoSuchType, constant, kind
from palladion.compiler.gpu.fragments import Fragments, default_layout
from palladion.compiler.gpu.generated import Pointer, TensorMap, Workspace
from palladion.compiler.gpu.values import Fragment, Rearranged, Scalar, Splat
from palladion.compiler.gpu.writer import Writer, wanted_name
from palladion.errors import explain
from palladion.rules import RuleTable

RULES = RuleTable("the Mosaic GPU compiler")


@dataclasses.dataclass
class Tables:
    """What a kernel needs beside its lines; rules add to it.

    Attributes:
      params: kernel parameters: (C++ name, `Pointer` or `TensorMap`).
      smem: bytes of dynamic shared memory so far; the first `barriers * 8` bytes are mbarriers.
      barriers: (name, how many, arrivals that complete one) of each group of mbarriers.
      functions: further device functions by name: C++ text that is put before the kernel.
      workspaces: memory that the launch allocates.
      tmem: columns of tensor memory.
      prologue: lines to run at the start of the kernel, before its body (initialisations).
      epilogue: lines at its end.
      notes: lines for people on how things lie.
      max_registers: for the assembler.
      more: what else rules keep, by their own keys.
    """

    params: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    smem: int = 0
    barriers: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    functions: dict[str, str] = dataclasses.field(default_factory=dict)
    workspaces: list[Workspace] = dataclasses.field(default_factory=list)
    tmem: int = 0
    prologue: list[str] = dataclasses.field(default_factory=list)
    epilogue: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    max_registers: int | None = None
    more: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def copied(self) -> Tables:
        """A copy whose containers can be changed alone."""
        return Tables(**{f.name: copy.copy(getattr(self, f.name)) for f in dataclasses.fields(self)})


class Unit:
    """The state of compiling one kernel.

    Attributes:
      writer: of the kernel's body.
      tables: what it needs beside.
      arch: "sm_90a" or "sm_100a".
      mesh: the kernel's `plgpu.Mesh`, or None for a call with a grid.
      axes: {name: Scalar} of the axes that `lax.axis_index` knows.
      ids, sizes: the program's index along each grid axis, and their sizes (calls with a grid).
      warps: CUDA warps that run the present code together: 4, or 1 inside `warp_map`.
      num_threads: Pallas threads of a block.
      layouts: what was inferred for variables: {Var: language layout}; rules ask `layout_for`.
      wanted: of the running equation: which results are used.
      eqn: the running equation.
    """

    def __init__(self, arch: str, mesh: Any, layouts: dict[Any, Any]) -> None:
        self.writer, self.tables = Writer(), Tables()
        self.arch, self.mesh, self.layouts = arch, mesh, layouts
        self.axes: dict[Any, Scalar] = {}
        self.ids: list[Scalar] = []
        self.sizes: list[Scalar] = []
        self.warps, self.num_threads = 4, 1 if mesh is None else mesh.num_threads or 1
        self.wanted: list[bool] = []
        self.eqn: Any = None

    # --- walking -------------------------------------------------------------------------------------------------
    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        """Compile a jaxpr; its results."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr) if not hasattr(jaxpr, "eqns") else jaxpr
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, value in zip(jaxpr.constvars, getattr(jaxpr, "consts", ())):
            env[var] = self.constant(np.asarray(value), np.asarray(value).dtype)
        used = {v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, jaxlink.Literal)}
        used |= {v for v in jaxpr.outvars if not isinstance(v, jaxlink.Literal)}
        for eqn in jaxpr.eqns:
            outer, self.eqn = self.eqn, self._placed(eqn)
            try:
                values = [self.read(env, v) for v in eqn.invars]
                rule = RULES.get(eqn.primitive)
                if rule is None:
                    raise RULES.unsupported(self.eqn)
                self.writer.comment(self.eqn)
                self.wanted = [v in used for v in eqn.outvars]
                outs = rule(self, self.eqn, *values)
            except NoSuchType as error:
                raise self._at_line(error) from None
            finally:
                self.eqn = outer
            outs = list(outs) if isinstance(outs, (list, tuple)) else [] if outs is None else [outs]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [self.read(env, v) for v in jaxpr.outvars]

    def _at_line(self, error: NoSuchType) -> NoSuchType:
        """An exception that says where the user's line is, once."""
        headline, _, rest = str(error).partition("\n")
        where = locations.location_of(self.eqn)
        return error if where is None or rest.startswith("  at:") else type(error)(f"{headline}\n  at: {where}\n{rest}")

    def _placed(self, eqn: Any) -> Any:
        """An equation made in Palladion's own code counts as written where that was called."""
        if self.eqn is not None and locations.location_of(eqn) is None:
            return eqn.replace(source_info=self.eqn.source_info)
        return eqn

    def read(self, env: dict[Any, Any], var: Any) -> Any:
        """The value of a variable or of a literal."""
        if isinstance(var, jaxlink.Literal):
            return self.constant(np.asarray(var.val), var.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        return env[var]

    def constant(self, value: np.ndarray, dtype: Any) -> Any:
        """A constant as a value; an array of several numbers lies in constant memory (see `rules_shapes`)."""
        if value.ndim == 0:
            number = value.astype(jnp.dtype(dtype))[()]
            return Scalar(constant(number, dtype), jnp.dtype(dtype), number)
        if value.size and (value == value.flat[0]).all():
            return Splat(constant(value.flat[0], dtype), jnp.dtype(dtype), value.shape, value.flat[0])
        return moves.table_constant(self, value, jnp.dtype(dtype))

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """What is compiled inside leaves no trace."""
        written, tables, axes = self.writer.snapshot(), self.tables, dict(self.axes)
        self.tables = tables.copied()
        try:
            yield
        finally:
            self.writer.restore(written)
            self.tables, self.axes = tables, axes

    # --- lines ---------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        """Write a line."""
        self.writer.line(text)

    def block(self, head: str) -> Any:
        """`with unit.block("if (x)"):` writes braces around what follows."""
        return self.writer.block(head)

    def name(self, wanted: str | None = None) -> str:
        """A new C++ name; by default what the user calls the result."""
        return self.writer.name(wanted or (wanted_name(self.eqn) if self.eqn is not None else "v"))

    @property
    def lanes(self) -> int:
        """CUDA threads that run the present code together: 128, or 32 in a `warp_map`."""
        return 32 * self.warps

    def one_thread(self) -> Any:
        """`with unit.one_thread():` one CUDA thread of those does what follows."""
        return self.block("if (t == 0)" if self.warps == 4 else "if (lane == 0)")

    def sync(self) -> None:
        """All CUDA threads of the Pallas thread (or warp) have done what comes before, and see it."""
        if self.warps == 1:
            self.line("__syncwarp();")
        elif self.num_threads == 1:
            self.line("__syncthreads();")
        else:
            self.line("sync_warpgroup(wg);")

    def sync_block(self) -> None:
        """The same for all threads of the block, each of which must come here."""
        self.line("__syncthreads();")

    # --- values --------------------------------------------------------------------------------------------------
    def scalar(self, dtype: Any, text: str, wanted: str | None = None, value: Any = None) -> Scalar:
        """A new constant variable."""
        name = self.name(wanted)
        self.line(f"const {kind(dtype).c} {name} = {text};")
        return Scalar(name, jnp.dtype(dtype), value)

    def variable(self, dtype: Any, text: str | None, wanted: str | None = None) -> Scalar:
        """A new variable that may be assigned to."""
        name = self.name(wanted)
        self.line(f"{kind(dtype).c} {name}{'' if text is None else f' = {text}'};")
        return Scalar(name, jnp.dtype(dtype))

    def registers(self, dtype: Any, layout: Fragments, wanted: str | None = None) -> Fragment:
        """A new array of registers, with no values yet."""
        name = self.name(wanted)
        self.line(f"{kind(dtype).c} {name}[{max(layout.count, 1)}];")
        return Fragment(name, jnp.dtype(dtype), layout)

    def fill(self, target: Fragment, text: Callable[[str], str]) -> Fragment:
        """Give each register a value: `text(i)`, C++ for the register number `i` (a name)."""
        n = target.layout.count
        if n == 1:
            self.line(f"{target.name}[0] = {text('0')};")
        elif n:
            self.line("#pragma unroll")
            self.line(f"for (int i = 0; i < {n}; ++i) {target.name}[i] = {text('i')};")
        return target

    def elementwise(self, eqn: Any, function: Callable[..., str], *operands: Any, dtype: Any = None) -> Any:
        """The result of an element-wise operation.

        Arguments:
          eqn: the equation, for the result's type.
          function: from C++ expressions of the operands' elements to one of the result's.
          *operands: values of one shape, or scalars.
          dtype: of the result, if not the equation's first.
        """
        aval = eqn.outvars[0].aval
        dtype = aval.dtype if dtype is None else dtype
        operands = tuple(moves.broadcast(x, tuple(aval.shape)) for x in operands)
        arrays = [x for x in operands if isinstance(x, (Fragment, Rearranged))]
        if not arrays:
            texts = function(*[x.text for x in operands])
            if not aval.shape:
                return self.scalar(dtype, texts)
            found = self.scalar(dtype, texts)
            return Splat(found.text, found.dtype, tuple(aval.shape))
        layout = self.common_layout(eqn.outvars[0], arrays)
        aligned = [self.fragment(x, layout) if isinstance(x, (Fragment, Rearranged)) else x for x in operands]
        result = self.registers(dtype, layout)

        def text(i: str) -> str:
            index: Any = int(i) if i.isdigit() else i
            return function(*[x.at(index) if isinstance(x, Fragment) else x.text for x in aligned])

        return self.fill(result, text)

    def common_layout(self, var: Any, arrays: Sequence[Any]) -> Fragments:
        """The layout in which operands meet: that of one of them, the inferred one if it is among them."""
        layouts = list(dict.fromkeys(x.layout for x in arrays if isinstance(x, Fragment)))
        if not layouts:
            return self.free_layout(var, arrays)
        if len(layouts) == 1:
            return layouts[0]
        inferred = self.inferred_layout(var)
        if inferred in layouts:
            return inferred
        # The one that is not strided: it was asked for, or comes from a tensor core.
        return min(layouts, key=lambda layout: layout.name.startswith("WG_STRIDED"))

    def free_layout(self, var: Any, arrays: Sequence[Rearranged]) -> Fragments:
        """A layout for arrays that have none yet: the inferred one, or one in which the first is where it is needed."""
        inferred = self.inferred_layout(var)
        if inferred is not None:
            return inferred
        x = arrays[0]
        if (found := moves.same_order(x)) is not None:
            return found
        default = default_layout(tuple(x.shape), x.dtype)
        for layout in (x.base.layout, default):
            if layout.shape == tuple(x.shape) and moves.is_local(x, layout):
                return layout
        return default

    def settled(self, value: Any, var: Any = None) -> Fragment:
        """An array as registers, in the layout that it has, or else that of the variable, or the usual one.

        Arguments:
          value: a Fragment, Rearranged or Splat. var: the jaxpr's variable for it, if there is one.
        """
        if isinstance(value, Fragment):
            return value
        if isinstance(value, Rearranged):
            layout = self.free_layout(var, [value]) if var is not None else moves.usual_layout(value)
            return self.fragment(value, layout)
        layout = self.layout_for(var) if var is not None else default_layout(tuple(value.shape), value.dtype)
        return self.fragment(value, layout)

    def inferred_layout(self, var: Any) -> Fragments | None:
        """What layout inference found for a variable, or None if it is open."""
        return inference.fragments_of(self.layouts.get(var), tuple(var.aval.shape), var.aval.dtype)

    def layout_for(self, var: Any, vector: int | None = None) -> Fragments:
        """The layout of a variable whose operation leaves it open.

        Arguments:
          vector: elements of a vector, where it is not inferred; None: as many as make 16 bytes and divide the array.
        """
        found = self.inferred_layout(var)
        if found is not None:
            return found
        return default_layout(tuple(var.aval.shape), var.aval.dtype, vector)

    def fragment(self, value: Any, layout: Fragments) -> Fragment:
        """A value in a layout: constants become registers, others are moved."""
        if isinstance(value, Splat):
            target = self.registers(value.dtype, layout, "splat")
            return self.fill(target, lambda i: value.text)
        if isinstance(value, Rearranged):
            return moves.rearranged(self, value.base, layout, value.source)
        return moves.to_layout(self, value, layout)

    # --- refusals ------------------------------------------------------------------------------------------------
    def refuse(self, headline: str, hint: str | None = None, kind: type[Exception] = NotImplementedError, **facts: Any):
        """An exception at the user's line."""
        where = None if self.eqn is None else locations.location_of(self.eqn)
        return kind(explain(headline, where=where, hint=hint, **facts))

    # --- what a kernel takes --------------------------------------------------------------------------------------
    def param(self, wanted: str, of: Pointer | TensorMap) -> str:
        """The C++ name of a kernel parameter; one that is the same as an earlier one is shared."""
        for name, known in self.tables.params:
            if known == of:
                return name
        name = self.writer.name(wanted)
        self.tables.params.append((name, of))
        return name

    def shared(self, size: int, align: int = 16) -> int:
        """Bytes of dynamic shared memory, never used for anything else: the offset of the first."""
        at = -(-self.tables.smem // align) * align
        self.tables.smem = at + size
        return at

    def function(self, name: str, text: str) -> str:
        """Put a device function before the kernel, once; its name."""
        self.tables.functions.setdefault(name, text)
        return name
