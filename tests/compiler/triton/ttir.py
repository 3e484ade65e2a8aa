"""A small evaluator of Triton IR in NumPy: what a lowered kernel would compute on a GPU, program by program.

It knows the operations that the compiler emits, and takes programs in a random order, as a GPU does. Memory is checked:
a lane that is on and points outside its array is an error, so a missing mask is found wherever it matters. It shares
nothing with the compiler but the module that comes out of it; products are exact (TF32's rounding is not modelled).
"""

import math
from typing import Any

import ml_dtypes
import numpy as np
import scipy.special
from jaxlib.mlir import ir
from jaxlib.triton import dialect as tt

from palladion import jaxlink

DTYPES = {
    "i1": np.bool_, "i8": np.int8, "i16": np.int16, "i32": np.int32, "i64": np.int64,
    "f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn, "f8E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


class Pointer:
    """Pointers into one array: `offset` elements of `data`, which is flat."""

    def __init__(self, data: np.ndarray, offset: Any) -> None:
        self.data, self.offset = data, np.asarray(offset, np.int64)

    def map(self, function: Any) -> "Pointer":
        return Pointer(self.data, function(self.offset))


def dtype_of(kind: ir.Type) -> np.dtype:
    element = kind.element_type if isinstance(kind, ir.RankedTensorType) else kind
    return np.dtype(DTYPES[str(element)])


def shape_of(kind: ir.Type) -> tuple[int, ...]:
    return tuple(kind.shape) if isinstance(kind, ir.RankedTensorType) else ()


def unsigned(x: np.ndarray) -> np.ndarray:
    return x if x.dtype == np.bool_ else x.view(np.dtype(f"u{x.dtype.name}"))


def int_attr(op: Any, name: str) -> int:
    return int(ir.IntegerAttr(op.attributes[name]).value)


def run_kernel(text: str, arrays: list[np.ndarray], grid: tuple[int, int, int], seed: int = 0) -> None:
    """Run a kernel on arrays, in place: one for each of its arguments, C-contiguous."""
    context = jaxlink.mlir.make_ir_context()
    tt.register_dialect(context)
    with context, ir.Location.unknown(), np.errstate(all="ignore"):
        module = ir.Module.parse(text)
        (function,) = list(module.body.operations)
        block = function.regions[0].blocks[0]
        programs = np.random.default_rng(seed).permutation(math.prod(grid))
        for n in programs:
            at = np.unravel_index(n, grid)
            env = {a: Pointer(x.reshape(-1), 0) for a, x in zip(block.arguments, arrays)}
            Machine(env, tuple(int(i) for i in at), grid).run(block)


class Machine:
    """One program."""

    def __init__(self, env: dict[Any, Any], at: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.env, self.at, self.grid = env, at, grid
        self.combining = False  # a region of scalars runs on whole rows at once

    def run(self, block: ir.Block) -> list[Any]:
        """Run a block; the operands of its last operation."""
        for op in block.operations:
            name = op.operation.name
            operands = [self.env[v] for v in op.operation.operands]
            if name in ("scf.yield", "tt.reduce.return", "tt.scan.return", "tt.return", "scf.condition"):
                return operands
            results = self.one(name, op.operation, operands)
            results = results if isinstance(results, list) else [results] if op.operation.results else []
            for v, value in zip(op.operation.results, results):
                self.env[v] = self.checked(name, v.type, value)
        raise AssertionError("a block without an end")

    def checked(self, name: str, kind: ir.Type, value: Any) -> Any:
        if isinstance(value, Pointer):
            assert value.offset.shape == shape_of(kind), (name, value.offset.shape, kind)
            return value
        value = np.asarray(value)
        assert self.combining or value.shape == shape_of(kind), (name, value.shape, str(kind))
        return value.astype(dtype_of(kind))

    def call(self, block: ir.Block, values: list[Any]) -> list[Any]:
        self.env.update(zip(block.arguments, values))
        return self.run(block)

    def one(self, name: str, op: Any, x: list[Any]) -> Any:
        kind, short = (op.results[0].type if op.results else None), name.partition(".")[2]
        if name in ELEMENTWISE:
            return ELEMENTWISE[name](*x)
        if name.startswith("arith.") and hasattr(self, f"arith_{short}"):
            return getattr(self, f"arith_{short}")(op, kind, *x)
        method = getattr(self, name.replace(".", "_"), None)
        assert method is not None, f"the evaluator does not know {name}"
        return method(op, kind, *x)

    # --- constants, comparisons, conversions
    def arith_constant(self, op, kind) -> Any:
        value = op.attributes["value"]
        if isinstance(kind, ir.RankedTensorType):
            splat = ir.DenseElementsAttr(value).get_splat_value()
            return np.full(shape_of(kind), splat.value, dtype_of(kind))
        return np.asarray(value.value, dtype_of(kind))

    def arith_cmpi(self, op, kind, a, b) -> Any:
        which = int_attr(op, "predicate")
        names = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
        if which >= 6:
            a, b, which = unsigned(a), unsigned(b), which - 4
        return getattr(np, names[which])(a, b)

    def arith_cmpf(self, op, kind, a, b) -> Any:
        which = int_attr(op, "predicate")
        ordered = {1: np.equal, 2: np.greater, 3: np.greater_equal, 4: np.less, 5: np.less_equal}
        return np.not_equal(a, b) if which == 13 else ordered[which](a, b)

    def arith_select(self, op, kind, c, a, b) -> Any:
        return np.where(c, a, b)

    def arith_extui(self, op, kind, x) -> Any:
        return unsigned(x).astype(dtype_of(kind))

    def arith_uitofp(self, op, kind, x) -> Any:
        return unsigned(x).astype(dtype_of(kind))

    def arith_fptoui(self, op, kind, x) -> Any:
        wide = np.dtype(f"u{dtype_of(kind).name}")
        return np.nan_to_num(x, nan=0).astype(np.float64).clip(0, np.iinfo(wide).max).astype(wide).view(dtype_of(kind))

    def arith_fptosi(self, op, kind, x) -> Any:
        info = np.iinfo(dtype_of(kind))
        x = np.nan_to_num(x.astype(np.float64), nan=0)
        high = np.asarray(info.max).astype(dtype_of(kind))
        return np.where(x >= float(info.max), high, x.clip(info.min, info.max * (1 - 2**-53)).astype(dtype_of(kind)))

    def tt_fp_to_fp(self, op, kind, x) -> Any:
        return x.astype(np.float32).astype(dtype_of(kind))

    def tt_bitcast(self, op, kind, x) -> Any:
        if isinstance(x, Pointer):
            element = kind.element_type if isinstance(kind, ir.RankedTensorType) else kind
            return Pointer(x.data.view(DTYPES[str(tt.PointerType(element).pointee_type)]), x.offset)
        return np.ascontiguousarray(x).view(dtype_of(kind)).reshape(shape_of(kind))

    # --- shapes
    def tt_splat(self, op, kind, x) -> Any:
        spread = lambda v: np.broadcast_to(v, shape_of(kind))
        return x.map(spread) if isinstance(x, Pointer) else spread(x)

    tt_broadcast = tt_splat

    def tt_unsplat(self, op, kind, x) -> Any:
        return x.reshape(())

    def tt_expand_dims(self, op, kind, x) -> Any:
        return np.expand_dims(x, int_attr(op, "axis"))

    def tt_reshape(self, op, kind, x) -> Any:
        return x.reshape(shape_of(kind))

    def tt_trans(self, op, kind, x) -> Any:
        return np.transpose(x, list(ir.DenseI32ArrayAttr(op.attributes["order"])))

    def tt_make_range(self, op, kind) -> Any:
        return np.arange(int_attr(op, "start"), int_attr(op, "end"))

    def tt_gather(self, op, kind, x, index) -> Any:
        axis = int_attr(op, "axis")
        assert ((index >= 0) & (index < x.shape[axis])).all(), "tt.gather out of range"
        return np.take_along_axis(x, index.astype(np.int64), axis)

    # --- reductions and products
    def combine(self, op, left, right) -> list[Any]:
        self.combining = True
        result = self.call(op.regions[0].blocks[0], [*left, *right])
        self.combining = False
        return result

    def tt_reduce(self, op, kind, *values) -> Any:
        rows = [np.moveaxis(v, int_attr(op, "axis"), 0) for v in values]
        total = [r[0] for r in rows]
        for k in range(1, len(rows[0])):
            total = self.combine(op, total, [r[k] for r in rows])
        return total

    def tt_scan(self, op, kind, *values) -> Any:
        axis, reverse = int_attr(op, "axis"), bool(ir.BoolAttr(op.attributes["reverse"]).value)
        rows = [np.moveaxis(v, axis, 0)[:: -1 if reverse else 1] for v in values]
        totals = [[r[0] for r in rows]]
        for k in range(1, len(rows[0])):
            totals.append(self.combine(op, totals[-1], [r[k] for r in rows]))
        out = [np.stack([t[n] for t in totals])[:: -1 if reverse else 1] for n in range(len(rows))]
        return [np.moveaxis(o, 0, axis) for o in out]

    def tt_dot(self, op, kind, a, b, c) -> Any:
        least = {1: 32, 2: 16, 4: 8, 8: 4}[a.dtype.itemsize]
        assert a.shape[-1] >= least, f"tt.dot of {a.shape[-1]} terms"
        wide = np.int64 if a.dtype == np.int8 else np.float64
        return (a.astype(wide) @ b.astype(wide) + c.astype(wide)).astype(dtype_of(kind))

    def tt_mulhiui(self, op, kind, a, b) -> Any:
        bits = 8 * a.dtype.itemsize
        wide = unsigned(a).astype(object) * unsigned(b).astype(object)
        return np.asarray(wide >> bits).astype(unsigned(a).dtype).view(a.dtype)

    def tt_extern_elementwise(self, op, kind, *x) -> Any:
        symbol = ir.StringAttr(op.attributes["symbol"]).value.removeprefix("__nv_")
        if symbol in BITS:
            return BITS[symbol](unsigned(x[0]))
        if symbol not in LIBDEVICE and symbol.endswith("f"):
            symbol = symbol[:-1]
        return LIBDEVICE[symbol](*(v.astype(np.float64) for v in x)) if symbol != "nextafter" else np.nextafter(*x)

    def tt_elementwise_inline_asm(self, op, kind, *x) -> Any:
        text = ir.StringAttr(op.attributes["asm_string"]).value
        assert text == "tanh.approx.f32 $0, $1;", f"the evaluator does not know {text}"
        return np.tanh(x[0])

    # --- where a program is, and memory
    def tt_get_program_id(self, op, kind) -> Any:
        return self.at[int_attr(op, "axis")]

    def tt_get_num_programs(self, op, kind) -> Any:
        return self.grid[int_attr(op, "axis")]

    def tt_addptr(self, op, kind, p, offset) -> Any:
        return Pointer(p.data, p.offset + offset)

    def lanes(self, p: Pointer, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Offsets and mask, checked: a lane that is on points into the array."""
        on = np.broadcast_to(True if mask is None else mask, p.offset.shape)
        stray = on & ((p.offset < 0) | (p.offset >= p.data.size))
        assert not stray.any(), f"a lane that is on points {p.offset[stray][0]} elements into an array of {p.data.size}"
        return np.where(on, p.offset, 0), on

    def tt_load(self, op, kind, p, mask=None, other=None) -> Any:
        offset, on = self.lanes(p, mask)
        if not p.data.size:
            return np.broadcast_to(other, on.shape)
        return np.where(on, p.data[offset], np.zeros((), p.data.dtype) if other is None else other)

    def tt_store(self, op, kind, p, value, mask=None) -> Any:
        offset, on = self.lanes(p, mask)
        p.data[offset[on]] = np.broadcast_to(value, on.shape)[on].astype(p.data.dtype)

    def tt_atomic_rmw(self, op, kind, p, value, mask=None) -> Any:
        offset, on = self.lanes(p, mask)
        which = tt.RMWOp(int_attr(op, "atomic_rmw_op")).name
        old = np.zeros(offset.shape, p.data.dtype)
        for lane in np.ndindex(offset.shape):
            if on[lane]:
                found = p.data[offset[lane]]
                old[lane] = found
                p.data[offset[lane]] = ATOMIC[which](found, value[lane])
        return old

    def tt_atomic_cas(self, op, kind, p, expected, new) -> Any:
        offset, _ = self.lanes(p, None)
        old = np.zeros(offset.shape, p.data.dtype)
        for lane in np.ndindex(offset.shape):
            old[lane] = p.data[offset[lane]]
            if old[lane] == expected[lane]:
                p.data[offset[lane]] = new[lane]
        return old

    def tt_print(self, op, kind, *x) -> Any:
        return []

    def gpu_barrier(self, op, kind) -> Any:
        return []

    # --- control flow
    def scf_if(self, op, kind, condition) -> Any:
        return self.run(op.regions[0 if condition else 1].blocks[0])

    def scf_for(self, op, kind, lower, upper, step, *carry) -> Any:
        carry = list(carry)
        for i in range(int(lower), int(upper), int(step)):
            carry = self.call(op.regions[0].blocks[0], [np.asarray(i, lower.dtype), *carry])
        return carry

    def scf_while(self, op, kind, *carry) -> Any:
        carry = list(carry)
        while True:
            going, *carry = self.call(op.regions[0].blocks[0], carry)
            if not going:
                return carry
            carry = self.call(op.regions[1].blocks[0], carry)


def _shift(function: Any) -> Any:
    return lambda a, b: function(a, b % (8 * a.dtype.itemsize))  # the compiler keeps larger ones out


def _of_unsigned(function: Any) -> Any:
    return lambda a, b: function(unsigned(a), unsigned(b)).view(a.dtype)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    zero = b == 0
    q = np.abs(a.astype(object)) // np.where(zero, 1, np.abs(b.astype(object)))
    return np.asarray(np.where(zero, -1, np.where((a < 0) != (b < 0), -q, q))).astype(np.int64).astype(a.dtype)


def _same(x: Any) -> Any:
    return x


ELEMENTWISE: dict[str, Any] = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply,
    "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
    "arith.shli": _shift(np.left_shift), "arith.shrsi": _shift(np.right_shift),
    "arith.shrui": lambda a, b: np.right_shift(unsigned(a), unsigned(b) % (8 * a.dtype.itemsize)).view(a.dtype),
    "arith.maxsi": np.maximum, "arith.minsi": np.minimum,
    "arith.maxui": _of_unsigned(np.maximum), "arith.minui": _of_unsigned(np.minimum),
    "arith.divsi": _quotient, "arith.remsi": lambda a, b: a - _quotient(a, b) * b,
    "arith.divui": _of_unsigned(np.floor_divide), "arith.remui": _of_unsigned(np.remainder),
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide,
    "arith.negf": np.negative, "arith.maximumf": np.maximum, "arith.minimumf": np.minimum,
    "arith.extf": _same, "arith.truncf": _same, "arith.sitofp": _same, "arith.extsi": _same, "arith.trunci": _same,
    **{f"math.{name}": getattr(np, name) for name in "exp exp2 log log2 sin cos sqrt floor ceil".split()},
    "math.absf": np.abs, "math.rsqrt": lambda x: 1 / np.sqrt(x), "math.erf": scipy.special.erf,
}  # fmt: skip
LIBDEVICE: dict[str, Any] = {
    **{name: getattr(np, name) for name in "exp exp2 log log2 log1p expm1 sin cos tan sinh cosh tanh".split()},
    **{name: getattr(np, name) for name in "sqrt floor ceil cbrt rint fmod".split()},
    **{name: getattr(scipy.special, name) for name in "erf erfc erfinv".split()},
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "asinh": np.arcsinh, "acosh": np.arccosh,
    "atanh": np.arctanh, "pow": np.power, "atan2": np.arctan2, "lgamma": scipy.special.gammaln,
    "rsqrt": lambda x: 1 / np.sqrt(x), "round": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
}  # fmt: skip
BITS: dict[str, Any] = {
    "popc": np.bitwise_count, "popcll": np.bitwise_count,
    "clz": np.vectorize(lambda n: 32 - int(n).bit_length(), otypes=[np.int32]),
    "clzll": np.vectorize(lambda n: 64 - int(n).bit_length(), otypes=[np.int32]),
}  # fmt: skip
ATOMIC: dict[str, Any] = {
    "AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor, "ADD": np.add, "FADD": np.add,
    "MAX": np.maximum, "MIN": np.minimum, "XCHG": lambda found, value: value,
    "UMAX": lambda a, b: max(a.view(f"u{a.dtype}"), b.view(f"u{b.dtype}")).view(a.dtype),
    "UMIN": lambda a, b: min(a.view(f"u{a.dtype}"), b.view(f"u{b.dtype}")).view(a.dtype),
}  # fmt: skip
