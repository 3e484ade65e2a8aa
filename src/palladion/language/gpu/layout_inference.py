"""Which layout each array of a kernel has, found from the operations that make it; arrays whose layouts clash.

Every array has a set of layouts that it can have, or it is open: loads without a layout and iota are, and take what
they meet first. Constants take whatever they meet, each time anew. Casts, accumulators and loads from tensor memory say
which; element-wise operations, branches and loops make arrays have one layout; reductions, broadcasts and transposes
change it. The analysis goes forward, through calls, branches and loops (whose bodies are gone through until nothing
changes). Where it does not know, it says nothing: an operation that it has no rule for gives an open array.

Source: the Pallas Mosaic GPU reference, section on array layouts ("only a splat converts implicitly"); PTX ISA, which
lane holds what in fragments of wgmma and in loads of tensor memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from palladion import jaxlink
from palladion.errors import Finding, KernelFinding
from palladion.language.gpu import layout_rules
from palladion.locations import is_user_file, location_of


def check_layouts(jaxpr: Any) -> None:
    """Look for arrays whose layouts clash.

    Arguments:
      jaxpr: of a kernel.

    Raises:
      KernelFinding: two arrays of different layouts meet, or one is cast to a layout that it cannot be moved to
        (`illegal-layout`); it names both layouts, and the lines that decided them.
    """
    _Analysis().run(jaxpr)


def printed_layouts(jaxpr: Any) -> list[str]:
    """What the `plgpu.print_layout`s of a kernel say, in program order.

    Errors are those of `check_layouts`.
    """
    analysis = _Analysis()
    analysis.run(jaxpr)
    return [fmt.format(layout) for _, fmt, layout in analysis.printed.values()]


def layout_of(jaxpr: Any, index: int = 0) -> Any:
    """The layout of a result of a kernel function, or None as long as several are possible.

    Arguments:
      jaxpr: of the function. index: which result.

    Errors are those of `check_layouts`.
    """
    result = _Analysis().run(jaxpr)[index]
    layouts = None if result is None else result.root().layouts
    return next(iter(layouts)) if layouts is not None and len(layouts) == 1 else None


def inferred_layouts(jaxpr: Any) -> dict[Any, frozenset[Any]]:
    """What every variable of a kernel and of the jaxprs in it can have as layouts.

    An array that is open and cast later has the layout of the first cast; others that are open are left out. A jaxpr
    that is called from several places has the layouts of the last.

    Errors are those of `check_layouts`.
    """
    analysis = _Analysis()
    analysis.run(jaxpr)
    roots = {var: array.root() for var, array in analysis.found.items()}
    known = {var: root.layouts if root.layouts is not None else root.cast for var, root in roots.items()}
    return {var: layouts for var, layouts in known.items() if layouts is not None}


class _Array:
    """What is known of an array, together with those that have its layout; of a constant there is None instead.

    Attributes:
      layouts: those that it can have; None: open.
      eqn: the equation that decided them, or None.
      cast: of an open one, to which layout it is cast first.
    """

    __slots__ = ("cast", "eqn", "layouts", "same_as")

    def __init__(self, layouts: frozenset[Any] | None = None, eqn: Any = None) -> None:
        self.layouts, self.eqn = layouts, eqn
        self.same_as: _Array | None = None
        self.cast: frozenset[Any] | None = None

    def root(self) -> _Array:
        """The one that stands for all with this layout."""
        array: _Array = self
        while array.same_as is not None:
            array = array.same_as
        return array

    def __str__(self) -> str:
        layouts = self.root().layouts
        return "any" if layouts is None else " or ".join(sorted(map(str, layouts)))

    def origin(self) -> str:
        """` (file:line)` of what decided, or nothing."""
        eqn = self.root().eqn
        where = None if eqn is None else location_of(eqn)
        return "" if where is None else f" ({where})"


class _Analysis:
    """One walk over a kernel; `printed` has what to say of each `print_layout`: its equation, text and array."""

    def __init__(self) -> None:
        self.printed: dict[int, tuple[Any, str, Any]] = {}
        # The call of a library's function that is looked into: its equations may carry an earlier caller's line.
        self.at: Any = None
        self.inside: list[Any] = []  # equations of control flow, outermost first
        self.found: dict[Any, _Array] = {}

    def run(self, jaxpr: Any, inputs: Sequence[_Array | None] | None = None) -> list[_Array | None]:
        """The results of a jaxpr (closed or not), from what is known of its arguments."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        inputs = [_Array() for _ in jaxpr.invars] if inputs is None else inputs
        env: dict[Any, _Array | None] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Array | None:
            return None if isinstance(atom, jaxlink.Literal) else env.get(atom)

        for eqn in jaxpr.eqns:
            outs = self._equation(eqn, [read(x) for x in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        self.found.update((var, array) for var, array in env.items() if array is not None)
        return [read(x) for x in jaxpr.outvars]

    def _equation(self, eqn: Any, arrays: list[_Array | None]) -> list[_Array | None]:
        name, params = eqn.primitive.name, eqn.params
        if eqn.primitive in jaxlink.CALLED:
            return self._call(eqn, params[jaxlink.CALLED[eqn.primitive]], arrays)
        if name in _FLOW:
            self.inside.append(eqn)
            outs = _FLOW[name](self, eqn, arrays)
            self.inside.pop()
            return outs
        if name == "print_layout":
            self.printed[id(eqn)] = (eqn, params["fmt"], arrays[0] or "constant")
            return []
        if name in layout_rules.ELEMENTWISE:
            whole = [a for x, a in zip(eqn.invars, arrays, strict=True) if x.aval.ndim]
            return [self.meet(eqn, whole)] * len(eqn.outvars)
        if name in layout_rules.NEEDS:
            self._need(eqn, arrays, *layout_rules.NEEDS[name])
        if name == "layout_cast":
            self._cast(eqn, arrays[0])
        rule = layout_rules.RULES.get(name)
        if rule is None:
            for inner in jaxlink.jaxprs_in_params(params):  # something that calls: what it does inside is looked at
                self.run(inner)
            return [_Array() for _ in eqn.outvars]
        first = arrays[0].root() if arrays and arrays[0] is not None else None
        constant = first is None or eqn.invars[0].aval.ndim == 0
        if constant and name in layout_rules.OF_CONSTANTS:
            return [None] * len(eqn.outvars)
        before = None if first is None else first.layouts
        return [
            first if first is not None and after is layout_rules.SAME else _Array(after, self.at or eqn)
            for after in rule(eqn, before)
        ]

    def _call(self, eqn: Any, jaxpr: Any, arrays: list[_Array | None]) -> list[_Array | None]:
        info = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
        outermost = self.at is None and not is_user_file(getattr(info, "func_filename", None) or "")
        self.at = eqn if outermost else self.at
        try:
            return self.run(jaxpr, arrays)
        finally:
            self.at = None if outermost else self.at

    def _finding(self, eqn: Any, message: str, hint: str) -> KernelFinding:
        where = next(filter(None, map(location_of, (self.at or eqn, *reversed(self.inside)))), None)
        return KernelFinding(Finding("illegal-layout", "error", message, where=where, hint=hint))

    def meet(self, eqn: Any, arrays: Sequence[_Array | None], what: str | None = None) -> _Array | None:
        """Arrays that have one layout, as one; None if all are constants.

        Raises:
          KernelFinding: there is none that all can have.
        """
        roots = [a.root() for a in arrays if a is not None]
        if not roots:
            return None
        kept = roots[0]
        for other in roots[1:]:
            if other is kept:
                continue
            if kept.layouts is None or other.layouts is None:
                common = kept.layouts or other.layouts
            else:
                common = kept.layouts & other.layouts
                if not common:
                    what = what or f"`{eqn.primitive.name}` takes arrays of one layout, but gets"
                    message = f"{what} {kept}{kept.origin()} and {other}{other.origin()}."
                    raise self._finding(
                        eqn, message, "load both with one layout; through SMEM an array changes its layout"
                    )
            if common != kept.layouts:
                kept.layouts, kept.eqn = common, other.eqn
            kept.cast = kept.cast or other.cast
            other.same_as = kept
        return kept

    def _cast(self, eqn: Any, array: _Array | None) -> None:
        before = None if array is None else array.root().layouts
        after = layout_rules.canonical(eqn.params["layout"])
        splat = layout_rules.is_splat(eqn.params["layout"])
        if array is not None and before is None and after is not None and array.root().cast is None:
            array.root().cast = frozenset({after})
        if before is None or (not splat and any(layout_rules.castable(b, after) for b in before)):
            return
        message = (
            f"An array in layout {array}{array.origin() if array else ''} cannot be cast to {eqn.params['layout']}."
        )
        raise self._finding(eqn, message, "store it to SMEM and load it with the other layout")

    def _need(self, eqn: Any, arrays: list[_Array | None], field: str, needed: Any, what: str) -> None:
        """An operand that an instruction wants in certain layouts."""
        numbered = jax.tree.unflatten(eqn.params["tree"], range(len(eqn.invars)))
        position = getattr(numbered, field)
        array = arrays[position] if isinstance(position, int) else None  # else it is a Ref
        accepted = None if array is None else needed(eqn.invars[position].aval)
        if array is None or accepted is None:
            return
        root = array.root()
        if root.layouts is None:  # an open array takes what it meets
            root.layouts, root.eqn = accepted, eqn
        elif not root.layouts & accepted:
            wanted = " or ".join(sorted(map(str, accepted)))
            message = f"{what} is in layout {array}{array.origin()}."
            raise self._finding(eqn, message, f"it must be in {wanted}: load it so, or store it to SMEM")

    # --- control flow ------------------------------------------------------------------------------------------------
    def cond(self, eqn: Any, arrays: list[_Array | None]) -> list[_Array | None]:
        branches = [self.run(branch, arrays[1:]) for branch in eqn.params["branches"]]
        what = "The branches of a condition give arrays of different layouts:"
        return [self.meet(eqn, results, what) or _Array() for results in zip(*branches, strict=True)]

    def while_loop(self, eqn: Any, arrays: list[_Array | None]) -> list[_Array | None]:
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        conds, consts, init = arrays[:n_cond], arrays[n_cond : n_cond + n_body], arrays[n_cond + n_body :]
        carry = self._carry(eqn, init, lambda carry: self.run(eqn.params["body_jaxpr"], [*consts, *carry]))
        self.run(eqn.params["cond_jaxpr"], [*conds, *carry])
        return list(carry)

    def scan(self, eqn: Any, arrays: list[_Array | None]) -> list[_Array | None]:
        n_consts, n_carry = jaxlink.scan_counts(eqn)
        consts, init = arrays[:n_consts], arrays[n_consts : n_consts + n_carry]
        xs = [_Array() for _ in arrays[n_consts + n_carry :]]
        body = eqn.params["jaxpr"]
        carry = self._carry(eqn, init, lambda carry: self.run(body, [*consts, *carry, *xs])[:n_carry])
        return [*carry, *(_Array() for _ in eqn.outvars[n_carry:])]

    def _carry(
        self, eqn: Any, init: Sequence[_Array | None], body: Callable[[list[_Array]], Sequence[_Array | None]]
    ) -> list[_Array]:
        carry = [a or _Array() for a in init]
        what = "A loop carries an array whose layout changes:"
        while True:
            before = [a.root().layouts for a in carry]
            for a, result in zip(carry, body(carry), strict=True):
                self.meet(eqn, [a, result], what)
            if before == [a.root().layouts for a in carry]:  # sets only shrink, so this comes
                return carry

    def scope(self, eqn: Any, arrays: list[_Array | None]) -> list[_Array | None]:
        jaxpr = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        return self.run(jaxpr, [*arrays, *(_Array() for _ in jaxpr.invars[len(arrays) :])])


_FLOW: dict[str, Any] = {
    "cond": _Analysis.cond,
    "while": _Analysis.while_loop,
    "scan": _Analysis.scan,
    "run_scoped": _Analysis.scope,
}
