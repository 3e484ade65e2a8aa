"""Small helpers over `llvmlite.ir`: the vocabulary in which every CPU kernel is written.

The code generator runs with no optimiser passes before it (they cost twice the compile time and can undo a register
plan), so what is emitted here is what runs: SSA values and explicit vectors, rotated loops with loop-carried values,
constants folded by the caller, allocas only in the entry block.

    m = new_module("scale")
    fn, b = define(m, "scale", i32, ptr, i64, i64, i64)      # the kernel ABI: see runtime.py
    buffers, begin, end, worker = fn.args
    x = load(b, ptr, gep(b, buffers, 0, ptr))                # data pointer of operand 0
    with loop(b, begin, end) as L:                           # for L.i in range(begin, end)
        p = gep(b, x, L.i, f32)
        store(b, b.fmul(load(b, f32, p), const(2.0, f32)), p)
    b.ret(const(0, i32))

Types are llvmlite's own, so that anything absent here can be had from `b`, an `ir.IRBuilder`. Pointers are opaque
(`ptr`); what llvmlite still gives a pointee type (allocas, globals) is made opaque by the helpers.
Semantics of instructions and intrinsics: the LLVM Language Reference.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from llvmlite import ir

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f16, f32, f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
ptr, void = ir.PointerType(), ir.VoidType()

Value = Any  # an ir.Value
Type = Any  # an ir.Type: llvmlite carries no type hints that a checker could use

_BYTES = {f16: 2, f32: 4, f64: 8}


# --------------------------------------------------------------------------------------------------- types
def vec(ty: Type, lanes: int) -> Type:
    """The type of `lanes` values of `ty`; `ty` itself for one lane."""
    return ty if lanes == 1 else ir.VectorType(ty, lanes)


def lanes_of(ty: Type) -> int:
    """The number of lanes of a vector type; 1 for a scalar type."""
    return ty.count if isinstance(ty, ir.VectorType) else 1


def scalar_of(ty: Type) -> Type:
    """The element type of a vector type; a scalar type itself."""
    return ty.element if isinstance(ty, ir.VectorType) else ty


def like(ty: Type, shape: Type) -> Type:
    """`ty` with as many lanes as `shape` has: `like(i32, vec(f32, 8))` is `vec(i32, 8)`."""
    return vec(scalar_of(ty), lanes_of(shape))


def size_of(ty: Type) -> int:
    """The bytes that one value of the type takes in memory (a vector: its lanes, without padding)."""
    if isinstance(ty, ir.VectorType):
        return ty.count * size_of(ty.element)
    if isinstance(ty, ir.ArrayType):
        return ty.count * size_of(ty.element)
    if isinstance(ty, ir.PointerType):
        return 8
    return (ty.width + 7) // 8 if isinstance(ty, ir.IntType) else _BYTES[ty]


def is_float(ty: Type) -> bool:
    """Whether the type, or its element, is one of f16, f32 and f64."""
    return isinstance(scalar_of(ty), (ir.HalfType, ir.FloatType, ir.DoubleType))


def type_name(ty: Type) -> str:
    """The type's name as the suffixes of intrinsics spell it: v8f32, i64, p0."""
    return f"v{ty.count}{type_name(ty.element)}" if isinstance(ty, ir.VectorType) else ty.intrinsic_name


# ----------------------------------------------------------------------------------------------- constants
class _Compact(ir.Constant):
    """A vector constant printed as one word, not lane by lane, which makes modules several times shorter to parse."""

    def __init__(self, ty: Type, lanes: list[Value], text: str) -> None:
        super().__init__(ty, lanes)
        self.text = text

    def _get_reference(self) -> str:
        return self.text


def const(value: Any, ty: Type = i64) -> Value:
    """A constant of the type. A vector type gets a number in every lane, a sequence lane by lane.

    Arguments: value: a Python or NumPy number or bool, or a sequence of them as long as the vector. Floats are rounded
      to the type's precision; integers may be given signed or unsigned and wrap to the type's width.
    """
    if isinstance(ty, ir.VectorType):
        if isinstance(value, (list, tuple, range)):
            return ir.Constant(ty, [const(v, ty.element) for v in value])
        one = const(value, ty.element)
        return _Compact(ty, [one] * ty.count, f"splat ({ty.element} {one.get_reference()})")
    if isinstance(ty, ir.IntType):
        number = int(value) & ((1 << ty.width) - 1)
        if ty.width > 1 and number >> (ty.width - 1):
            number -= 1 << ty.width
        return ir.Constant(ty, number)
    if ty == ptr:
        return ir.Constant(ptr, None)
    return ir.Constant(ty, float(value))


NULL = const(0, ptr)


def undef(ty: Type) -> Value:
    """A value of the type that may be anything; for lanes that nobody reads."""
    if isinstance(ty, ir.VectorType):
        return _Compact(ty, [undef(ty.element)] * ty.count, "undef")
    return ir.Constant(ty, ir.Undefined)


def iota(ty: Type) -> Value:
    """The constant vector 0, 1, 2, … of the type."""
    return const(range(lanes_of(ty)), ty) if isinstance(ty, ir.VectorType) else const(0, ty)


def as_value(x: Any, ty: Type = i64) -> Value:
    """`x` if it is an IR value already, else the constant."""
    return x if isinstance(x, ir.Value) else const(x, ty)


# ----------------------------------------------------------------------------------- modules and functions
def new_module(name: str) -> Any:
    """An empty module for the host: its triple and data layout set."""
    from palladion.compiler.cpu import target

    module = ir.Module(name)
    module.triple, module.data_layout = target.host().triple, target.host().data_layout
    return module


def declare(module: Any, name: str, ret: Type, *arg_types: Type, var_arg: bool = False) -> Any:
    """The function of that name in the module, declared if it is not there yet."""
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(ret, arg_types, var_arg=var_arg), name)


def define(module: Any, name: str, ret: Type, *arg_types: Type, internal: bool = False) -> tuple[Any, ir.IRBuilder]:
    """A new function and a builder at the start of its entry block.

    Arguments: internal: not seen outside the module, so that the code generator may drop or inline it.
    """
    function = declare(module, name, ret, *arg_types)
    function.attributes.add("nounwind")
    function.linkage = "internal" if internal else "external"
    return function, ir.IRBuilder(function.append_basic_block("entry"))


def call_extern(b: ir.IRBuilder, ret: Type, name: str, *args: Value) -> Value:
    """Call a C function by name; the linker finds it in this process (libc, or an export of the runtime)."""
    return b.call(declare(b.module, name, ret, *[a.type for a in args]), args)


def call_pointer(b: ir.IRBuilder, ret: Type, address: Value, *args: Value) -> Value:
    """Call the function at an address (a `ptr` value)."""
    # llvmlite wants the callee to have a function type, which an opaque pointer lacks, and drops a bitcast between
    # equal pointers; the way through an integer costs no instruction.
    function_type = ir.FunctionType(ret, [a.type for a in args])
    return b.call(b.inttoptr(b.ptrtoint(address, i64), function_type.as_pointer()), args)


def intrinsic(b: ir.IRBuilder, ret: Type, name: str, *args: Value, types: Sequence[Type] | None = None) -> Value:
    """Call an LLVM intrinsic.

    Arguments: name: without "llvm." and the type suffixes: "fma", "masked.load", "fptosi.sat"; types: the types that
      the suffixes name, by default the return type (`()` for an intrinsic that has none). A name that starts with
      "llvm." is taken as it is.
    Example: `intrinsic(b, vec(f32, 8), "fma", x, y, z)` calls llvm.fma.v8f32.
    """
    if not name.startswith("llvm."):
        name = ".".join(["llvm", name, *map(type_name, (ret,) if types is None else types)])
    return call_extern(b, ret, name, *args)


def global_bytes(module: Any, data: bytes, name: str = "data", align: int = 64) -> Value:
    """A pointer to constant bytes in the module (a table of coefficients, a string)."""
    g: Any = ir.GlobalVariable(module, ir.ArrayType(i8, len(data)), module.get_unique_name(name))
    g.initializer, g.global_constant, g.linkage, g.align = (
        ir.Constant(g.value_type, bytearray(data)),
        True,
        "internal",
        align,
    )
    g.type = ptr
    return g


# -------------------------------------------------------------------------------------------------- memory
def gep(b: ir.IRBuilder, base: Value, index: Any, elem_ty: Type = i8) -> Value:
    """&base[index] for elements of `elem_ty`; index: an int or an i64 value."""
    if isinstance(index, int) and index == 0:
        return base
    return b.gep(base, [as_value(index)], source_etype=elem_ty)


def load(b: ir.IRBuilder, ty: Type, address: Value, align: int | None = None) -> Value:
    """The value at an address. Alignment, in bytes: that of the element unless given, so that any address of an
    element is fine for a vector."""
    return b.load(address, typ=ty, align=align or size_of(scalar_of(ty)))


def store(b: ir.IRBuilder, value: Value, address: Value, align: int | None = None) -> None:
    """Write a value to an address; alignment as in `load`."""
    b.store(value, address, align=align or size_of(scalar_of(value.type)))


def masked_load(b: ir.IRBuilder, ty: Type, address: Value, mask: Value, other: Value | None = None) -> Value:
    """A vector from memory; lanes whose mask (i1) is false are not read and get `other` (default: zero)."""
    other = const(0, ty) if other is None else other
    return intrinsic(b, ty, "masked.load", address, const(size_of(ty.element), i32), mask, other, types=(ty, ptr))


def masked_store(b: ir.IRBuilder, value: Value, address: Value, mask: Value) -> None:
    """Write the lanes whose mask (i1) is true; the others are not touched.

    One lane of a constant mask is written by itself: LLVM 22 makes of it, where the value was narrowed before, a store
    of the wide value, which overwrites the next element.
    """
    if isinstance(mask, ir.Constant):
        on = [k for k, lane in enumerate(mask.constant) if getattr(lane, "constant", lane)]
        if len(on) == 1:
            element = b.extract_element(value, const(on[0], i32))
            store(b, element, gep(b, address, on[0], value.type.element))
            return
    align = const(size_of(scalar_of(value.type)), i32)
    intrinsic(b, void, "masked.store", value, address, align, mask, types=(value.type, ptr))


def on_stack(b: ir.IRBuilder, ty: Type, count: int = 1, align: int | None = None) -> Value:
    """Room for `count` values in the function's frame, wherever this is called: never in a loop. Its contents are
    undefined. Keep it well below a megabyte: threads of XLA's pool have 8 MB of stack."""
    with b.goto_entry_block():
        slot: Any = b.alloca(ty if count == 1 else ir.ArrayType(ty, count))
    slot.type = ptr
    slot.align = align or min(64, max(1, size_of(ty)))
    return slot


# ------------------------------------------------------------------------------------------------- vectors
def splat(b: ir.IRBuilder, x: Value, lanes: int) -> Value:
    """The scalar in every lane of a vector; the scalar itself for one lane."""
    if lanes == 1 or isinstance(x.type, ir.VectorType):
        return x
    ty = vec(x.type, lanes)
    if isinstance(x, ir.Constant) and x.constant is not ir.Undefined and x.type != ptr:
        return const(x.constant, ty)
    one = b.insert_element(undef(ty), x, const(0, i32))
    return b.shuffle_vector(one, undef(ty), const(0, vec(i32, lanes)))


def shuffle(b: ir.IRBuilder, x: Value, y: Value | None, lanes: Sequence[int]) -> Value:
    """The vector of the given lanes of x followed by y (None: nobody reads it)."""
    y = undef(x.type) if y is None else y
    chosen = [const(n, i32) for n in lanes]
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(i32, len(chosen)), chosen))


def reduce_values(values: Sequence[Value], combine: Callable[[Value, Value], Value]) -> Value:
    """Combine values as a balanced tree, which is short for the processor and loses little precision in a sum."""
    values = list(values)
    while len(values) > 1:
        odd = values[len(values) // 2 * 2 :]
        values = [combine(p, q) for p, q in zip(values[::2], values[1::2])] + odd
    return values[0]


def reduce_vector(b: ir.IRBuilder, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine the lanes of one vector (a power of two of them) to a scalar: halves, quarters, … with each other."""
    lanes = lanes_of(value.type)
    while lanes > 2:
        lanes //= 2
        value = combine(*(shuffle(b, value, None, range(h, h + lanes)) for h in (0, lanes)))
    return combine(extract(b, value, 0), extract(b, value, 1)) if lanes == 2 else extract(b, value, 0)


def extract(b: ir.IRBuilder, value: Value, lane: int) -> Value:
    """One lane of a vector; a scalar is its own lane 0."""
    return b.extract_element(value, const(lane, i32)) if isinstance(value.type, ir.VectorType) else value


# ---------------------------------------------------------------------------------------------- arithmetic
def fma(b: ir.IRBuilder, x: Value, y: Value, z: Value) -> Value:
    """x * y + z, rounded once: one instruction where the host has it, else a slow but exact library call."""
    return intrinsic(b, x.type, "fma", x, y, z)


def select(b: ir.IRBuilder, cond: Value, x: Value, y: Value) -> Value:
    """cond ? x : y, lane by lane; a scalar condition chooses between whole vectors."""
    return b.select(cond, x, y)


def smin(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    """The smaller of two signed integers."""
    return intrinsic(b, x.type, "smin", x, y)


def smax(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    """The larger of two signed integers."""
    return intrinsic(b, x.type, "smax", x, y)


def add_up(b: ir.IRBuilder, *terms: Any) -> Value:
    """The i64 sum of terms: ints, i64 values, or pairs (value, int stride). Ints are folded, zeros left out."""
    total, constant = None, 0
    for term in terms:
        value, stride = term if isinstance(term, tuple) else (term, 1)
        if isinstance(value, int) or stride == 0:
            constant += value * stride if isinstance(value, int) else 0
            continue
        value = value if stride == 1 else b.mul(value, const(stride))
        total = value if total is None else b.add(total, value)
    if total is None:
        return const(constant)
    return b.add(total, const(constant)) if constant else total


# -------------------------------------------------------------------------------------------- control flow
def blocks(b: ir.IRBuilder, *names: str) -> list[Any]:
    """New basic blocks at the end of the function."""
    return [b.append_basic_block(n) for n in names]


@contextlib.contextmanager
def loop(b: ir.IRBuilder, start: Any, stop: Any, step: Any = 1, carry: Sequence[Value] = ()) -> Iterator[Any]:
    """for (i = start; i < stop; i += step), with loop-carried values.

    Arguments: start, stop, step: ints or values of one signed integer type (i64 for ints), step > 0; carry: the
      carried values before the first iteration.
    Yields L: `L.i` the index, `L.v` the list of carried values. The body assigns the list `L.next` (unassigned: they
      stay the same). After the `with`, `L.out` holds their final values (the initial ones if nothing ran).
    Emitted rotated, a guard and a do-while, with the guard left out where start and stop are ints.
    """
    ty = next((as_value(v).type for v in (start, stop, step) if isinstance(v, ir.Value)), i64)
    runs = start < stop if isinstance(start, int) and isinstance(stop, int) else None
    start, stop, step = (as_value(v, ty) for v in (start, stop, step))
    before, (body, after) = b.block, blocks(b, "loop", "after")
    if runs:
        b.branch(body)
    else:
        b.cbranch(b.icmp_signed("<", start, stop) if runs is None else const(False, i1), body, after)
    b.position_at_end(body)
    i = b.phi(ty)
    phis = [b.phi(v.type) for v in carry]
    L = SimpleNamespace(i=i, v=phis, next=phis, out=[])
    yield L
    following, latch = b.add(i, step), b.block
    i.add_incoming(start, before)
    i.add_incoming(following, latch)
    b.cbranch(b.icmp_signed("<", following, stop), body, after)
    b.position_at_end(after)
    for phi, first, value in zip(phis, carry, L.next, strict=True):
        L.out.append(b.phi(phi.type))
        for p in (phi, L.out[-1]):
            if p is phi or not runs:
                p.add_incoming(first, before)
            p.add_incoming(value, latch)


@contextlib.contextmanager
def repeat_while(b: ir.IRBuilder, carry: Sequence[Value]) -> Iterator[Any]:
    """A while loop: yields W with `W.v`, the carried values. The body computes the condition, calls `W.test(cond)`
    once (the loop ends there when the i1 is false), goes on, and assigns `W.next`. Afterwards `W.out` are the values
    that the failing test saw."""
    before, (head, body, after) = b.block, blocks(b, "while", "do", "done")
    b.branch(head)
    b.position_at_end(head)
    phis = [b.phi(v.type) for v in carry]

    def test(cond: Value) -> None:
        b.cbranch(cond, body, after)
        b.position_at_end(body)

    W = SimpleNamespace(v=phis, next=phis, out=phis, test=test)
    yield W
    for phi, first, value in zip(phis, carry, W.next, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(value, b.block)
    b.branch(head)
    b.position_at_end(after)


def _merge(b: ir.IRBuilder, results: list[list[Value]], ends: list[Any]) -> list[Value]:
    """One phi for each result of several ways that lead here."""
    merged = []
    for values in zip(*results, strict=True):
        phi = b.phi(values[0].type)
        for value, end in zip(values, ends):
            phi.add_incoming(value, end)
        merged.append(phi)
    return merged


def branch(
    b: ir.IRBuilder,
    cond: Value,
    then: Callable[[], Sequence[Value]],
    otherwise: Callable[[], Sequence[Value]],
    likely: bool | None = None,
) -> list[Value]:
    """if/else with results: runs one of two functions that emit code and return equally many values of equal types;
    returns the merged values. For effects alone use `b.if_then` and `b.if_else`."""
    results, ends = [], []
    with b.if_else(cond, likely=likely) as sides:
        for side, emit in zip(sides, (then, otherwise)):
            with side:
                results.append(list(emit()))
                ends.append(b.block)
    return _merge(b, results, ends)


def switch(b: ir.IRBuilder, index: Value, cases: Sequence[Callable[[], Sequence[Value]]]) -> list[Value]:
    """Run case number `index` (an integer value); out of range runs the nearest case, as `lax.switch` does.
    Results as in `branch`."""
    index = smin(b, smax(b, index, const(0, index.type)), const(len(cases) - 1, index.type))
    entries, (after,) = blocks(b, *["case"] * len(cases)), blocks(b, "after")
    chosen = b.switch(index, entries[-1])
    results, ends = [], []
    for number, (entry, emit) in enumerate(zip(entries, cases)):
        if number < len(cases) - 1:
            chosen.add_case(const(number, index.type), entry)
        b.position_at_end(entry)
        results.append(list(emit()))
        ends.append(b.block)
        b.branch(after)
    b.position_at_end(after)
    return _merge(b, results, ends)
