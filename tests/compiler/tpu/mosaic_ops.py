"""What the operations mean that the TPU compiler emits, in NumPy: one small function for each.

Written from MLIR's documentation of `arith`, `math`, `vector`, `memref` and `scf`, and from the names of `tpu`. Values
are NumPy arrays (scalars: of shape ()), a memref is an array that is a view of its memory. Integers are signless: they
are held signed, and unsigned operations look at them as unsigned.
"""

import re

import ml_dtypes
import numpy as np
import scipy.special
from jaxlib.mlir import ir

DTYPES = {
    "f32": np.float32, "bf16": ml_dtypes.bfloat16, "i32": np.int32, "i16": np.int16, "i8": np.int8,
    "i4": ml_dtypes.int4, "i1": np.bool_, "index": np.int64, "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
OPS = {}


def op(*names):
    def register(function):
        for name in names:
            OPS[name] = function
        return function

    return register


def dtype_of(kind):
    shaped = isinstance(kind, (ir.VectorType, ir.MemRefType))
    return np.dtype(DTYPES.get(str(kind.element_type if shaped else kind), np.int32))  # others are semaphores


def shape_of(kind):
    return tuple(kind.shape) if isinstance(kind, (ir.VectorType, ir.MemRefType)) else ()


def unsigned(x):
    return x.view(f"u{x.dtype.name}") if x.dtype.name.startswith("int") and x.dtype.itemsize * 8 >= 8 else x


def ints(text):
    return [
        int(n)
        for n in re.findall(r"-?\d+", str(text).split(":", 1)[-1] if str(text).startswith("array") else str(text))
    ]


# --- arithmetic -------------------------------------------------------------------------------------------------------
def plain(name, function):
    """An operation of values that keeps their type; it is computed in float64 where they are floats."""

    def run(_, o, *xs):
        kind = dtype_of(o.results[0].type)
        floats = kind.kind == "f" or kind.name.startswith(("bfloat", "float"))
        with np.errstate(all="ignore"):
            if floats:
                return np.asarray(function(*(x.astype(np.float64) for x in xs))).astype(kind)
            return np.asarray(function(*xs)).astype(kind)

    OPS[name] = run


def _round_half_away(x):
    return np.trunc(x + np.copysign(0.5, x))


for _name, _function in {
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide,
    "arith.remf": np.fmod, "arith.maximumf": np.maximum, "arith.minimumf": np.minimum, "arith.negf": np.negative,
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor, "arith.maxsi": np.maximum, "arith.minsi": np.minimum,
    "arith.shli": np.left_shift, "arith.shrsi": np.right_shift, "math.absi": np.abs, "math.absf": np.abs,
    "math.exp": np.exp, "math.exp2": np.exp2, "math.log": np.log, "math.log2": np.log2, "math.log1p": np.log1p,
    "math.tanh": np.tanh, "math.sin": np.sin, "math.cos": np.cos, "math.tan": np.tan, "math.sqrt": np.sqrt,
    "math.rsqrt": lambda x: 1 / np.sqrt(x), "math.erf": scipy.special.erf, "math.atan2": np.arctan2,
    "math.powf": np.power, "math.floor": np.floor, "math.ceil": np.ceil, "math.roundeven": np.round,
    "math.round": _round_half_away, "tpu.logistic": scipy.special.expit,
    "math.ctpop": lambda x: np.bitwise_count(unsigned(x)),
    "math.ctlz": lambda x: 32 - np.ceil(np.log2(unsigned(x).astype(np.float64) + 1)),
    "arith.maxui": lambda a, b: np.maximum(unsigned(a), unsigned(b)).view(a.dtype),
    "arith.minui": lambda a, b: np.minimum(unsigned(a), unsigned(b)).view(a.dtype),
    "arith.divui": lambda a, b: (unsigned(a) // np.maximum(unsigned(b), 1)).view(a.dtype),
    "arith.remui": lambda a, b: (unsigned(a) % np.maximum(unsigned(b), 1)).view(a.dtype),
    "arith.shrui": lambda a, b: (unsigned(a) >> unsigned(b)).view(a.dtype),
    "arith.remsi": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "arith.divsi": lambda a, b: np.trunc(a.astype(np.float64) / np.where(b == 0, 1, b)),
}.items():  # fmt: skip
    plain(_name, _function)

_COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@op("arith.cmpi")
def _cmpi(_, o, a, b):
    name = ["eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge"][
        ir.IntegerAttr(o.attributes["predicate"]).value
    ]
    if name.startswith("u"):
        a, b = unsigned(a), unsigned(b)
    return _COMPARE[name if name in _COMPARE else name[1:]](a, b)


@op("arith.cmpf")
def _cmpf(_, o, a, b):
    n = ir.IntegerAttr(o.attributes["predicate"]).value
    assert 1 <= n <= 5, "Mosaic has ordered comparisons only"
    return [np.equal, np.greater, np.greater_equal, np.less, np.less_equal][n - 1](
        a.astype(np.float64), b.astype(np.float64)
    )


@op("arith.select")
def _select(_, o, c, a, b):
    return np.where(c, a, b).astype(a.dtype)


@op("arith.constant")
def _constant(_, o):
    value, kind = o.attributes["value"], o.results[0].type
    if isinstance(value, ir.DenseElementsAttr):
        return np.full(shape_of(kind), _number(value.get_splat_value()), dtype_of(kind))
    return np.asarray(_number(value), dtype_of(kind))


def _number(attribute):
    if isinstance(attribute, ir.BoolAttr):
        return bool(attribute.value)
    return attribute.value


@op("arith.extf", "arith.truncf", "arith.sitofp", "arith.extsi", "arith.trunci", "arith.index_cast", "arith.fptosi")
def _cast(_, o, x):
    kind = dtype_of(o.results[0].type)
    with np.errstate(all="ignore"):
        if o.name == "arith.fptosi":
            return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64))), -(2**31), 2**31 - 1).astype(kind)
        return x.astype(kind)


@op("arith.uitofp")
def _uitofp(_, o, x):
    return unsigned(x).astype(dtype_of(o.results[0].type))


@op("arith.fptoui")
def _fptoui(_, o, x):
    return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64))), 0, 2**32 - 1).astype(np.uint32).view(np.int32)


@op("arith.extui")
def _extui(_, o, x):
    kind = dtype_of(o.results[0].type)
    if x.dtype == ml_dtypes.int4:
        return (x.astype(np.int8) & 15).astype(kind)
    return unsigned(x).astype(kind)


@op("arith.bitcast")
def _bitcast(_, o, x):
    return x.view(dtype_of(o.results[0].type))


@op("tpu.assume_multiple")
def _assume_multiple(_, o, x):
    assert x % ir.IntegerAttr(o.attributes["multiple"]).value == 0, "a false promise of a multiple"
    return x


# --- vectors ----------------------------------------------------------------------------------------------------------
@op("vector.broadcast")
def _broadcast(_, o, x):
    return np.broadcast_to(x, shape_of(o.results[0].type)).copy()


@op("vector.shape_cast", "tpu.reshape")
def _shape_cast(_, o, x):
    return x.reshape(shape_of(o.results[0].type))


@op("vector.extract")
def _extract(_, o, x):
    return np.asarray(x[tuple(ints(o.attributes["static_position"]))])


@op("vector.extract_strided_slice")
def _cut(_, o, x):
    starts, sizes = ints(o.attributes["offsets"]), ints(o.attributes["sizes"])
    for start, size, n in zip(starts, sizes, x.shape):
        assert 0 <= start and start + size <= n
    return x[tuple(slice(s, s + n) for s, n in zip(starts, sizes))].copy()


@op("tpu.concatenate")
def _concatenate(_, o, *xs):
    return np.concatenate(xs, ir.IntegerAttr(o.attributes["dimension"]).value)


@op("tpu.transpose")
def _transpose(_, o, x):
    return x.transpose(ints(o.attributes["permutation"])).copy()


@op("tpu.iota")
def _iota(_, o):
    (axis,), shape = ints(o.attributes["dimensions"]), shape_of(o.results[0].type)
    assert len(shape) > 1, "Mosaic has no iota of one dimension"
    return np.indices(shape, dtype=np.int32)[axis]


@op("tpu.dynamic_rotate")
def _rotate(_, o, x, amount):
    assert amount >= 0, "rotations are towards higher indices"
    return np.roll(x, int(amount), ir.IntegerAttr(o.attributes["dimension"]).value)


@op("tpu.dynamic_gather")
def _gather(_, o, x, places):
    (axis,) = ints(o.attributes["dimensions"])
    assert x.shape == places.shape and places.min() >= 0 and places.max() < x.shape[axis]
    return np.take_along_axis(x, places, axis)


_KINDS = {"add": np.add, "maximumf": np.maximum, "maxsi": np.maximum, "minimumf": np.minimum, "minsi": np.minimum}


@op("vector.multi_reduction")
def _reduction(_, o, x, start):
    kind = _KINDS[re.search(r"<(\w+)>", str(o.attributes["kind"]))[1]]
    wide = x.astype(np.float64) if x.dtype.kind == "f" else x
    reduced = kind.reduce(wide, axis=tuple(ints(o.attributes["reduction_dims"])))
    return np.asarray(kind(reduced, start)).astype(x.dtype)


@op("tpu.matmul")
def _matmul(_, o, a, b, acc):
    groups = re.findall(r"\[([\d, ]*)\]", str(o.attributes["dimension_numbers"]))
    ca, cb, fa, fb, order, ba, bb = ([int(n) for n in g.split(",") if n.strip()] for g in groups)
    wide = np.int64 if a.dtype.name.startswith("int") else np.float64
    a = a.astype(wide).transpose(ba + fa + ca)
    b = b.astype(wide).transpose(bb + cb + fb)
    assert order == ([0, 0] if ba else []) + [0, fa[0], 1, fb[0]]
    return (a @ b + acc).astype(acc.dtype)


@op("tpu.conv")
def _conv(_, o, a, b, acc):
    """By the loops of the definition: every output element is the sum of a window."""
    text = str(o.attributes["dimension_numbers"])
    groups = re.findall(r"\[[\d, ]*\]|\d+", text[text.index("<") :])
    batch, feature, spatial, inwards, outwards, window, to_batch, to_feature, to_spatial = (
        [int(n) for n in re.findall(r"\d+", g)] for g in groups
    )
    strides, padding, spread, apart = (
        ints(o.attributes[n]) for n in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")
    )
    n_groups = ir.IntegerAttr(o.attributes["feature_group_count"]).value
    assert ir.IntegerAttr(o.attributes["batch_group_count"]).value == 1
    a = a.astype(np.float64).transpose(batch + feature + spatial)
    b = b.astype(np.float64).transpose(outwards + inwards + window)
    rank = len(spatial)
    for d in range(rank):
        wide = np.zeros([(n - 1) * spread[d] + 1 if k == d + 2 else n for k, n in enumerate(a.shape)])
        wide[(slice(None),) * (d + 2) + (slice(None, None, spread[d]),)] = a
        a = np.pad(wide, [(padding[2 * d], padding[2 * d + 1]) if k == d + 2 else (0, 0) for k in range(rank + 2)])
    order = to_batch + to_feature + to_spatial
    result = acc.astype(np.float64).transpose(order)
    share_in, share_out = a.shape[1] // n_groups, b.shape[0] // n_groups
    for at in np.ndindex(*result.shape[2:]):
        cuts = [slice(i * s, i * s + (n - 1) * k + 1, k) for i, s, n, k in zip(at, strides, b.shape[2:], apart)]
        seen = a[(slice(None), slice(None), *cuts)]
        for g in range(n_groups):
            part = seen[:, g * share_in : (g + 1) * share_in].reshape(len(a), -1)
            weights = b[g * share_out : (g + 1) * share_out].reshape(share_out, -1)
            result[(slice(None), slice(g * share_out, (g + 1) * share_out), *at)] += part @ weights.T
    return result.transpose(np.argsort(order)).astype(acc.dtype)


# --- memory -----------------------------------------------------------------------------------------------------------
def window(memory, starts, sizes, strides=None):
    strides = strides or [1] * len(sizes)
    for start, size, stride, n in zip(starts, sizes, strides, memory.shape):
        assert 0 <= start and start + (size - 1) * stride < n, "outside the memory"
    cuts = [slice(int(s), int(s) + (n - 1) * k + 1, k) for s, n, k in zip(starts, sizes, strides)]
    return memory[(..., *cuts)]


def sizes_in(memory, kind):
    shape = shape_of(kind)
    return (1,) * (memory.ndim - len(shape)) + shape


@op("vector.load")
def _load(_, o, memory, *starts):
    kind = o.results[0].type
    return window(memory, starts, sizes_in(memory, kind)).reshape(shape_of(kind)).copy()


@op("vector.store")
def _store(_, o, value, memory, *starts):
    window(memory, starts, sizes_in(memory, o.operands[0].type))[...] = value


@op("tpu.vector_store")
def _masked_store(_, o, value, memory, *rest):
    starts, mask = rest[: memory.ndim], rest[memory.ndim]
    part = window(memory, starts, value.shape)
    part[...] = np.where(mask, value, part)


@op("tpu.strided_load")
def _strided_load(_, o, memory, *starts):
    return window(memory, starts, shape_of(o.results[0].type), ints(o.attributes["strides"])).copy()


@op("tpu.strided_store")
def _strided_store(_, o, value, memory, *starts):
    window(memory, starts, value.shape, ints(o.attributes["strides"]))[...] = value


@op("memref.load")
def _scalar_load(_, o, memory, *at):
    return np.asarray(window(memory, at, [1] * memory.ndim).reshape(()))


@op("memref.store")
def _scalar_store(_, o, value, memory, *at):
    window(memory, at, [1] * memory.ndim)[...] = value


@op("tpu.memref_slice")
def _memref_slice(_, o, memory, *starts):
    return window(memory, starts[: memory.ndim], shape_of(o.results[0].type))


@op("tpu.memref_squeeze", "tpu.memref_reshape")
def _memref_reshape(_, o, memory):
    result = memory.reshape(shape_of(o.results[0].type))
    assert np.shares_memory(result, memory) or not memory.size
    return result


@op("tpu.memref_bitcast")
def _memref_bitcast(_, o, memory):
    kind = o.results[0].type
    if memory.dtype.itemsize == dtype_of(kind).itemsize:
        return memory.view(dtype_of(kind))
    raise NotImplementedError("rows of another width lie between each other, which no view of an array does")


@op("memref.alloca", "tpu.sem_alloc")
def _alloca(_, o):
    return unwritten(o.results[0].type)


def unwritten(kind):
    """Memory that nothing has written: NaN, or a number that stands out; semaphores are 0."""
    dtype = dtype_of(kind)
    if "semaphore" in str(kind.element_type):
        return np.zeros(shape_of(kind), np.int64)
    low = -(2**31) if dtype == np.int32 else -(2 ** (dtype.itemsize * 8 - 1)) if dtype.name.startswith("int1") else -8
    return np.full(shape_of(kind), np.nan if dtype.kind in "fV" else low).astype(dtype)


# --- copies -----------------------------------------------------------------------------------------------------------
@op("tpu.enqueue_dma")
def _enqueue(_, o, source, target, *semaphores):
    target[...] = source
    for semaphore in semaphores[:2]:
        semaphore += source.nbytes


@op("tpu.wait_dma2")
def _wait(_, o, semaphore, source, target):
    assert semaphore >= target.nbytes, "a wait that never ends"
    semaphore -= target.nbytes


@op("tpu.sem_signal")
def _signal(_, o, semaphore, amount):
    semaphore += amount


@op("tpu.sem_wait")
def _sem_wait(_, o, semaphore, amount):
    assert semaphore >= amount
    semaphore -= amount


@op("tpu.sem_read")
def _sem_read(_, o, semaphore):
    return semaphore.astype(np.int32)


@op("tpu.log", "tpu.trace_value", "tpu.delay")
def _nothing(*_):
    return None


@op("cf.assert")
def _assert(_, o, condition):
    assert condition


# --- control ----------------------------------------------------------------------------------------------------------
@op("scf.if")
def _if(machine, o, condition):
    region = o.regions[0 if condition else 1]
    return machine.block(region.blocks[0]) if len(region.blocks) else []


@op("scf.for")
def _for(machine, o, lower, upper, step, *carry):
    body = o.regions[0].blocks[0]
    for i in range(int(lower), int(upper), int(step)):
        carry = machine.block(body, np.int32(i), *carry)
    return list(carry)


@op("scf.while")
def _while(machine, o, *carry):
    before, after = (r.blocks[0] for r in o.regions)
    while True:
        go_on, *carry = machine.block(before, *carry)
        if not go_on:
            return carry
        carry = machine.block(after, *carry)


@op("tpu.region")
def _region(machine, o):
    return machine.block(o.regions[0].blocks[0])


ENDS = ("func.return", "scf.yield", "tpu.yield", "scf.condition")
