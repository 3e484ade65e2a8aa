"""Array layouts on the simulated GPU: values have none, so that casts do nothing; clashes are found beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from palladion.language.gpu.layout_inference import printed_layouts
from palladion.language.gpu.layouts import layout_cast_p, print_layout_p
from palladion.simulator.code import Compiler
from palladion.simulator.gpu.table import RULES


def check(jaxpr: Any) -> None:
    """Look for arrays whose layouts clash, and print what `plgpu.print_layout` asks for: once for a kernel, as a
    compiler would.

    Raises:
      KernelFinding: "illegal-layout".
    """
    for line in printed_layouts(jaxpr):
        print(line, flush=True)


@RULES.rule(layout_cast_p)
def _cast(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, x: [x]


@RULES.rule(print_layout_p)
def _print(compiler: Compiler, eqn: Any) -> Callable:
    return lambda agent, x: []
