"""The corpus: kernels on which every executor is tested, each with its result in NumPy.

`CASES` maps the name of a case to the case. A file holds one theme. Tags, by which an executor's test may
choose, are words of `VOCABULARY` with the prefix of their group. Float32 and int32 are tagged only where they
are the point.

Words without a prefix:
  alias prefetch scratch print tree empty   what the call has (tree: nested operands; empty: no elements)
  x64        runs under jax.enable_x64(True)
  order      the programs must run in grid order: something is carried from one to the next
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

__all__ = ["CASES", "VOCABULARY", "Case", "arguments", "check", "compare", "expected", "scope"]

VOCABULARY: dict[str, frozenset[str]] = {
    group: frozenset(words.split())
    for group, words in {
        "": "alias prefetch scratch print tree empty x64 order revisit clamp oob padding uninit",
        "block": "int none squeezed blocked element padding bounded whole any default buffered vmem smem",
        "grid": "absent int 1d 2d 3d one empty dynamic ragged permuted constant arithmetic revisit",
        "index": "ellipsis int dynamic negative slice ds stride newaxis array mask store at reshape bitcast "
        "transpose rmw get set swap addupdate",
        "control": "when cond switch fori while scan loop jit custom vmap scoped state nested",
        "prim": "math bits reduce cumulative sort dot conv shape gather scatter random",
        "dtype": "bool int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 "
        "float8_e4m3fn float8_e5m2 bfloat16 float16 float32 float64",
    }.items()
}

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
