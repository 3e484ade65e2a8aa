"""Kernel calls of functions, for tests of the TPU compiler: their parameters, their modules, their lowered programs."""

import dataclasses

import jax
import jax.numpy as jnp

import palladion as pl
from palladion import jaxlink
from palladion.compiler.tpu.lower import build_module
from palladion.language.primitive import pallas_call_p


def sds(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def calls_in(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive is pallas_call_p:
            yield eqn
        else:
            for inner in jaxlink.jaxprs_in_params(eqn.params):
                yield from calls_in(inner)


def params_of(f, *args):
    """Of the one kernel call that `f` makes."""
    (eqn,) = calls_in(jax.make_jaxpr(f)(*args).jaxpr)
    return eqn.params


def module_of(f, *args):
    """The Mosaic module of the one kernel call that `f` makes, as text."""
    return str(build_module(params_of(f, *args)))


def lowered(f, *args):
    """The StableHLO of a program for TPU, as text."""
    return jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def elementwise(kernel, *, dtype=jnp.float32, shape=(16, 256), n=1, **options):
    """A call of a kernel on whole arrays of one type, and its operands."""
    call = pl.pallas_call(kernel, sds(*shape, dtype=dtype), **options)
    return call, [sds(*shape, dtype=dtype)] * n


def with_whole_blocks(params):
    """The parameters of a call each of whose blocks is a whole array, so that a TPU takes blocks of any shape.

    The kernel is compiled as it is; it sees the same shapes, at the same number of grid points.
    """
    gm = params["grid_mapping"]
    mappings = tuple(
        dataclasses.replace(m, array=jax.ShapeDtypeStruct(tuple(m.sizes), m.array.dtype)) for m in gm.block_mappings
    )
    outs = tuple(jaxlink.ShapedArray(m.array.shape, m.array.dtype) for m in mappings[gm.num_inputs :])
    whole = dataclasses.replace(gm, block_mappings=mappings)
    return {**params, "grid_mapping": whole, "out_avals": outs, "input_output_aliases": ()}
