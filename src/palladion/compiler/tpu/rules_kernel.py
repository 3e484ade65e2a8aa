"""The kernel's own operations: where a program is, scoped buffers, prints, checks, random numbers, hints."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, cf, memref
from jaxlib.mosaic.python import tpu

from palladion import jaxlink
from palladion.compiler.tpu import build
from palladion.compiler.tpu.build import constant
from palladion.compiler.tpu.emit import RULES, Emitter, Ref
from palladion.compiler.tpu.kinds import Refusal, element_bits, i32, is_bool, is_float, ref_type, typed
from palladion.compiler.tpu.rules_control import _carried_type, _packed, _unpacked
from palladion.language import kernel, ops
from palladion.language.tpu import allocation, hints, random
from palladion.language.tpu.memory import HBM


@RULES.rule(ops.program_id_p)
def _program_id(ev: Emitter, eqn):
    return ev.kernel.ids[eqn.params["axis"]]


@RULES.rule(ops.num_programs_p)
def _num_programs(ev: Emitter, eqn):
    return build.as_i32(ev.kernel.sizes[eqn.params["axis"]])


@RULES.rule(lax.axis_index_p)
def _axis_index(ev: Emitter, eqn):
    name = eqn.params["axis_name"]
    position = None
    for axis in name if isinstance(name, tuple) else (name,):
        size, here = axis_place(ev, axis)
        position = here if position is None else arith.addi(arith.muli(position, constant(size)), here)
    return constant(0) if position is None else position


def axis_place(ev: Emitter, axis: Any) -> tuple[int, ir.Value]:
    """The size of a named axis, of the kernel's cores or of the devices around the call, and the index along it."""
    if axis in ev.kernel.cores:
        size, here = ev.kernel.cores[axis]
        return size, here
    devices = ev.kernel.devices
    if not devices or axis not in devices:
        raise Refusal(
            f"the axis {axis!r} is not bound around this kernel.",
            "call it in a jax.shard_map over a mesh with that axis",
        )
    names = list(devices)
    below = int(np.prod([devices[n] for n in names[names.index(axis) + 1 :]], dtype=np.int64))
    return devices[axis], arith.remsi(arith.divsi(tpu.device_id(), constant(below)), constant(devices[axis]))


# --- buffers ----------------------------------------------------------------------------------------------------------
def allocate(aval: Any, label: str) -> Ref:
    """A buffer at the insertion point: semaphores, VMEM or SMEM."""
    kind: Any = ref_type(aval)
    space = str(kind.memory_space)
    if "semaphore" in space:
        return Ref(tpu.sem_alloc(kind), aval, label)
    if "vmem" not in space and "smem" not in space:
        raise Refusal(
            f"{label} cannot be allocated inside a kernel in memory {aval.memory_space}.", "pltpu.VMEM(shape, dtype)"
        )
    return Ref(memref.alloca(kind, [], []), aval, label)


@RULES.rule(ops.run_scoped_p)
def _run_scoped(ev: Emitter, eqn, *operands):
    jaxpr, n = eqn.params["jaxpr"], eqn.params["num_scoped"]
    avals = [v.aval for v in eqn.outvars]
    region = tpu.RegionOp([_carried_type(a) for a in avals])
    with ir.InsertionPoint(region.body):
        scoped = [allocate(v.aval, v.aval.label) for v in jaxpr.invars[len(jaxpr.invars) - n :]]
        tpu.yield_(_packed(ev.run(jaxpr, [*operands, *scoped])))
    return _unpacked(region.results, avals)


@RULES.rule(kernel.get_global_p, allocation.allocate_p)
def _for_the_call(ev: Emitter, eqn):
    return ev.kernel.globals[id(eqn)]


# --- prints and checks ------------------------------------------------------------------------------------------------
@RULES.rule(ops.debug_print_p)
def _debug_print(ev: Emitter, eqn, *values):
    fmt = eqn.params["fmt"]
    for v in eqn.invars:
        if v.aval.shape:
            raise Refusal(
                f"pl.debug_print prints scalars on TPU, not {v.aval.str_short()}.", "print an element or a sum: x[0, 0]"
            )
    tpu.log(
        [_printable(x, v.aval.dtype) for x, v in zip(values, eqn.invars)], fmt, formatted=bool(values) and "{" in fmt
    )
    return []


@RULES.rule(jaxlink.jax_debug_print_p)
def _jax_debug_print(ev: Emitter, eqn, *values):
    if eqn.params["static_args"] or any(v.aval.shape for v in eqn.invars):
        raise Refusal("jax.debug.print prints scalars by position on TPU.", "pl.debug_print(fmt, x[0, 0])")
    fmt = eqn.params["fmt"]
    tpu.log(
        [_printable(x, v.aval.dtype) for x, v in zip(values, eqn.invars)], fmt, formatted=bool(values) and "{" in fmt
    )
    return []


def _printable(x: ir.Value, dtype: Any) -> ir.Value:
    if is_bool(dtype):
        return build.as_words(x)
    if element_bits(dtype) == 32:
        return x
    return arith.extf(ir.F32Type.get(), x) if is_float(dtype) else arith.extsi(i32(), x)


@RULES.rule(ops.debug_check_p)
def _debug_check(ev: Emitter, eqn, condition):
    if ev.kernel.checks:
        message, where = eqn.params["message"], eqn.params["where"]
        cf.assert_(condition, f"{message} (at {where})" if where else message)
    return []


@RULES.rule(ops.delay_p)
def _delay(ev: Emitter, eqn, nanos):
    tpu.delay(nanos)
    return []


# --- random numbers ---------------------------------------------------------------------------------------------------
@RULES.rule(random.prng_seed_p)
def _prng_seed(ev: Emitter, eqn, *seeds):
    tpu.prng_set_seed_32(list(seeds))
    return []


@RULES.rule(random.prng_random_bits_p)
def _prng_random_bits(ev: Emitter, eqn):
    shape = eqn.params["shape"]
    if len(shape) < 2:  # the generator fills whole registers
        bits = tpu.prng_random_bits(typed((1,) * (2 - len(shape)) + tuple(shape), i32()))
        return build.reshape(bits, shape)
    return tpu.prng_random_bits(typed(shape, i32()))


# --- hints ------------------------------------------------------------------------------------------------------------
RULES.rule(hints.with_memory_space_constraint_p)(lambda ev, eqn, x: x)
RULES.rule(hints.touch_p)(lambda ev, eqn, *operands: [])


@RULES.rule(hints.has_memory_space_p)
def _has_memory_space(ev: Emitter, eqn, *operands):
    return build.full(ir.IntegerType.get_signless(1), eqn.params["memory_space"] is HBM)


@RULES.rule(hints.trace_value_p)
def _trace_value(ev: Emitter, eqn, value):
    tpu.trace_value(value, eqn.params["label"])
    return []
