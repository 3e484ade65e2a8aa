"""The corpus: kernels on which every executor is tested, each with its result in NumPy.

`CASES` maps the name of a case to the case. A file holds one theme. The tags, by which an executor's test may
choose, are words:

  block:…    int none squeezed blocked element padding bounded whole any default buffered vmem smem
  grid:…     absent int 1d 2d 3d one empty dynamic ragged permuted constant arithmetic revisit
  index:…    ellipsis int dynamic negative slice ds stride newaxis array mask store at reshape bitcast
             transpose rmw get swap addupdate
  control:…  when cond switch fori while scan loop jit custom vmap scoped state nested
  dtype:…    every dtype that the kernel holds, other than float32 and int32
  prim:…     array operations beyond arithmetic: math reduce cumulative sort dot conv shape gather scatter
             random bits
  alias prefetch scratch print tree empty x64     what the words say; x64 cases run under jax.enable_x64(True)
  order      the programs must run in grid order (something is carried from one to the next)
  revisit    an output block is left and visited again: right in the reference interpreter, wrong on a TPU
  clamp      a block index is out of range and by specification clamps; checked executors refuse it
  oob        a dynamic index is out of range and by specification clamps; checked executors refuse it
  padding    the result shows the fill of blocks that reach beyond the array
  uninit     the result shows the fill of outputs or scratch that nothing wrote
"""

from . import (
    blocks,
    calls,
    control,
    dtypes,
    elementwise,
    functions,
    grids,
    indexing,
    kernels,
    matmul,
    operands,
    reductions,
    scans,
    scoped,
    shapes,
    writing,
)
from .case import Case, arguments, check, compare, expected, scope

__all__ = ["CASES", "Case", "arguments", "check", "compare", "expected", "scope"]

_FILES = (
    elementwise,
    shapes,
    reductions,
    scans,
    matmul,
    kernels,
    blocks,
    grids,
    operands,
    calls,
    indexing,
    writing,
    control,
    functions,
    scoped,
    dtypes,
)


def _collect() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for file in _FILES:
        for value in vars(file).values():
            if isinstance(value, Case):
                assert value.name not in cases, f"two corpus cases are named {value.name}"
                cases[value.name] = value
    return cases


CASES: dict[str, Case] = _collect()
