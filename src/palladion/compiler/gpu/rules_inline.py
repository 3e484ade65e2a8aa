"""`plgpu.inline_ptx`: an `asm` statement for each register of the result."""

from __future__ import annotations

import re
from typing import Any

from palladion.compiler.gpu import moves
from palladion.compiler.gpu.dtypes import Kind, kind
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Fragment, Rearranged, Scalar, Splat
from palladion.language.gpu.inline_ptx import inline_ptx_p

_CONSTRAINTS = {("float", 64): "d", ("float", 32): "f"}


def _constraint(of: Kind) -> str:
    return _CONSTRAINTS.get((of.family, of.bits)) or {16: "h", 32: "r", 64: "l"}[of.bits]


def _register(of: Kind, text: str) -> str:
    """The C++ that stands for a value's register: narrow floats are held in structs."""
    return f"{text}.bits" if of.family == "float" and of.bits == 16 else text


@RULES.rule(inline_ptx_p)
def _inline(unit: Unit, eqn: Any, *operands: Any) -> list[Any]:
    """The operands in one layout; the results in it too."""
    shape = tuple(eqn.params["shape"])
    code = re.sub(r"\$(\d+)", r"%\1", eqn.params["code"].replace("%", "%%"))
    code = code.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    operands = tuple(moves.broadcast(x, shape) for x in operands)
    arrays = [x for x in operands if isinstance(x, (Fragment, Rearranged))]
    layout = unit.common_layout(eqn.outvars[0], arrays) if arrays else None
    if layout is None and shape:
        layout = unit.layout_for(eqn.outvars[0])
    aligned = [
        unit.fragment(x, layout) if layout is not None and not isinstance(x, (Scalar, Splat)) else x for x in operands
    ]
    if layout is None:
        results: list[Any] = [unit.variable(d, None) for d in eqn.params["dtypes"]]
    else:
        results = [unit.registers(d, layout) for d in eqn.params["dtypes"]]

    def statement(i: str) -> str:
        outs = [f'"={_constraint(r.kind)}"({_register(r.kind, _at(r, i))})' for r in results]
        ins = [f'"{_constraint(x.kind)}"({_source(x, i)})' for x in aligned]
        return f'asm("{code}" : {", ".join(outs)} : {", ".join(ins)});'

    if layout is None or layout.count == 1:
        unit.line(statement("0"))
    elif layout.count:
        unit.line("#pragma unroll")
        unit.line(f"for (int i = 0; i < {layout.count}; ++i) {statement('i')}")
    return results


def _at(value: Any, i: str) -> str:
    return value.at_text(i) if isinstance(value, Fragment) else value.text


def _source(value: Any, i: str) -> str:
    """An operand's register; of a constant the number in its own type."""
    of = kind(value.dtype)
    if isinstance(value, Fragment):
        return _register(of, value.at_text(i))
    return _register(of, f"{of.c}({value.text})")
