"""Matrix products of blocks, as LLVM functions.

    spec = MatmulSpec(256, 256, 512, a=(1024, 1), b=(1024, 1), c=(1024, 1), accumulate=True)
    product = emit_matmul(module, spec)               # void product(ptr A, ptr B, ptr C, ptr workspace)
    b.call(product, [a, b, c, workspace])             # with workspace_bytes(spec) bytes, of one thread's own

One function for each shape; a grid's programs call it from any thread. matmul_plan.py decides how, pack.py copies and
converts, matmul_tile.py multiplies; here are the loops around them:

    for each slice of k:
      for each block of columns of B:          pack it (it stays in the L2 cache)
        for each panel of rows of A:           pack it (it stays in the L1 cache)
          for each tile:                       multiply, and add to C

Nothing outside the operands is read or written: edges are packed with zeros, read and stored under masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from palladion.compiler.cpu import target
from palladion.compiler.cpu.builder import (
    Value,
    add_up,
    const,
    define,
    gep,
    i64,
    load,
    loop,
    ptr,
    size_of,
    store,
    vec,
    void,
)
from palladion.compiler.cpu.matmul_plan import MatmulSpec, Plan, plans
from palladion.compiler.cpu.matmul_tile import Result, column_sums, emit_dots, emit_tile, write_tile
from palladion.compiler.cpu.pack import (
    STORED,
    load_first,
    pack_elements,
    pack_rows,
    pack_side_by_side,
    transposer,
)

__all__ = ["MatmulSpec", "emit_matmul", "workspace_bytes"]

TOGETHER = 16  # vectors of B that are packed side by side

Index = Any  # an int or an i64 value


def workspace_bytes(spec: MatmulSpec, host: target.Host | None = None) -> int:
    """The bytes of workspace that the product's function needs; 0 if none. Any alignment will do, 64 is best."""
    plan = _best(spec, host or target.host())
    return 0 if plan is None else max(offset + size for offset, size in plan.areas().values())


def emit_matmul(module: Any, spec: MatmulSpec, host: target.Host | None = None, plan: Plan | None = None) -> Any:
    """Emit an internal function `void (ptr A, ptr B, ptr C, ptr workspace)` that forms the product.

    Arguments:
      module: an ir.Module; the same spec emitted twice into it is one function.
      spec: the product. The pointers are to element [0, 0] of the batch's first A, B and C.
      host: the machine to compile for (default: this one).
      plan: how to form it, one of `matmul_plan.plans(spec, host)` (default: the first).
    Returns: the function.
    Raises: ValueError: a size is negative, or no product of these dtypes exists.
    """
    host = host or target.host()
    plan = plan or _best(spec, host)
    label = "x".join(map(str, (spec.m, spec.n, spec.k)))
    name = f"matmul_{label}_{abs(hash_of(spec, plan)):x}"
    if name in module.globals:
        return module.globals[name]
    function, b = define(module, name, void, ptr, ptr, ptr, ptr, internal=True)
    function.attributes.add("noinline")
    a, bb, c, workspace = function.args
    if spec.m and spec.n and spec.batch:
        with loop(b, 0, spec.batch) as L:
            offsets = zip((a, bb, c), spec.batch_strides, (spec.a_dtype, spec.b_dtype, spec.c_dtype))
            a, bb, c = (gep(b, p, add_up(b, (L.i, s)), STORED[d]) for p, s, d in offsets)
            if plan is None:
                _emit_zeros(b, spec, c, host)
            elif plan.dots:
                _emit_dots_nest(b, module, name, plan, *_sides(plan, a, bb), c, workspace)
            else:
                _emit_tile_nest(b, module, name, plan, *_sides(plan, a, bb), c, workspace)
    b.ret_void()
    return function
