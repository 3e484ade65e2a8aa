"""An executor for tests: a kernel call is compiled for TPU, and its Mosaic module is run in NumPy, program by program.

`interpret=MosaicInNumPy()` makes a call go through it. Nothing of Mosaic's compiler takes part: this says whether the
module means what the kernel says, not whether libtpu takes it, so blocks of any shape are let through.
"""

import contextlib
import itertools
import re

import jax
import numpy as np
from jaxlib.mlir import ir

from compiler.tpu.mosaic_ops import ENDS, OPS, dtype_of, ints, shape_of, unwritten
from palladion import executors, jaxlink
from palladion.compiler.tpu import blocks, context, module
from palladion.compiler.tpu import lower as lowering


class MosaicInNumPy:
    """The value of `interpret=`."""

    def __hash__(self):
        return 1

    def __eq__(self, other):
        return isinstance(other, MosaicInNumPy)


@contextlib.contextmanager
def installed():
    """Let `interpret=MosaicInNumPy()` stand in kernel calls, with blocks of any shape."""
    executors._MACHINES["MosaicInNumPy"] = __name__
    check, blocks.check_shape = blocks.check_shape, lambda mapping: None
    try:
        yield
    finally:
        context._here.modules.clear()  # modules that would have been refused
        blocks.check_shape = check
        del executors._MACHINES["MosaicInNumPy"]


def run(*args, **params):
    return [jax.numpy.asarray(x) for x in _run(params, *map(_host, args))]


def lower(ctx, *args, **params):
    def call(*operands):
        out = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in params["out_avals"]]
        return jax.pure_callback(lambda *xs: tuple(_run(params, *map(np.asarray, xs))), tuple(out), *operands)

    return jaxlink.lower_as(call, ctx, *args)


def _host(x):
    return np.asarray(jax.random.key_data(x)) if jaxlink.is_opaque(x.dtype) else np.asarray(x)


class Machine:
    """Runs the blocks of a module."""

    def __init__(self, sizes):
        self.env, self.sizes = {}, sizes

    def block(self, block, *arguments):
        self.env.update(zip(block.arguments, arguments, strict=True))
        for o in block.operations:
            operation = o.operation
            inputs = [self.env[x] for x in operation.operands]
            if operation.name in ENDS:
                return inputs
            if operation.name == "tpu.iteration_bound":
                results = np.int32(self.sizes[ir.IntegerAttr(operation.attributes["dim"]).value])
            else:
                results = OPS[operation.name](self, operation, *inputs)
            results = results if isinstance(results, list) else [] if results is None else [results]
            for result, value in zip(operation.results, results, strict=True):
                if not isinstance(result.type, ir.MemRefType):
                    assert value.shape == shape_of(result.type), (operation.name, value.shape, str(result.type))
                    assert value.dtype == dtype_of(result.type), (operation.name, value.dtype, str(result.type))
                self.env[result] = value
        raise AssertionError("a block without an end")


def _run(params, *args):
    gm = params["grid_mapping"]
    dynamic, arrays = args[: gm.num_dynamic], [_signless(x) for x in args[gm.num_dynamic :]]
    if gm.num_programs == 0 or all(0 in a.shape for a in params["out_avals"]):
        return lowering._nothing(params, *args)
    built = module.build_module(params)
    with built.context:
        functions = {f.attributes["sym_name"].value: f for f in built.body.operations}
        main = functions["main"]
        outputs = [_fresh(a) for a in params["out_avals"]]
        home = {o: i for i, o in params["input_output_aliases"]}
        for o, i in home.items():
            outputs[o] = arrays[i]  # one memory
        bounds = ints(main.attributes["iteration_bounds"]) if "iteration_bounds" in main.attributes else []
        rest = iter(dynamic)
        sizes = [int(next(rest)) if n < 0 else n for n in bounds]
        prefetch, operands = arrays[: gm.num_prefetch], [*arrays[gm.num_prefetch :], *outputs]
        passed = [n for n, x in enumerate(operands) if x.size]
        n_in = sum(n < gm.num_inputs for n in passed)
        _grid(functions, main, sizes, prefetch, [operands[n] for n in passed], n_in)
    return [_back(x, a) for x, a in zip(outputs, params["out_avals"])]


def _grid(functions, main, sizes, prefetch, operands, n_in):
    machine, block = Machine(sizes), main.regions[0].blocks[0]
    kinds = [a.type for a in block.arguments][len(sizes) :]
    n_scratch = ir.IntegerAttr(main.attributes["scratch_operands"]).value
    scratch = [unwritten(k) for k in kinds[len(kinds) - n_scratch :]]
    windows = list(main.attributes["window_params"]) if sizes else [{}] * len(operands)
    held = [None] * len(operands)  # (where, block) of each operand
    for ids in itertools.product(*map(range, sizes)):
        point, refs = [np.int32(i) for i in ids], []
        for n, (w, array, kind) in enumerate(zip(windows, operands, kinds[len(prefetch) :])):
            where = _where(machine, functions, w, point, prefetch) if len(w) else None
            if where is None:
                refs.append(array)
                continue
            assert tuple(ints(w["window_bounds"])) == shape_of(kind)
            if held[n] is None or held[n][0] != where:
                fill = unwritten(kind)
                if n < n_in:  # blocks of outputs are not fetched
                    _copy(array, fill, where, inwards=True)
                held[n] = where, fill
            refs.append(held[n][1])
        machine.block(block, *point, *prefetch, *refs, *scratch)
        for n in range(n_in, len(operands)):
            if held[n] is not None:
                _copy(operands[n], held[n][1], held[n][0], inwards=False)


def _where(machine, functions, w, point, prefetch):
    """Where in the array a window begins, in elements."""
    function = functions[w["transform_indices"].value]
    indices = [int(i) for i in machine.block(function.regions[0].blocks[0], *point, *prefetch)]
    if "window_kind" in w:
        low = [int(n) for n in re.search(r"<\[([\d, ]*)\]", str(w["window_kind"]))[1].split(",")]
        return tuple(i - p for i, p in zip(indices, low))
    return tuple(i * n for i, n in zip(indices, ints(w["window_bounds"])))


def _copy(array, block, where, inwards):
    """The part of a block that lies in its array, in or out."""
    there, here = [], []
    for start, n, size in zip(where, array.shape, block.shape):
        low, high = max(start, 0), min(start + size, n)
        there.append(slice(low, max(high, low)))
        here.append(slice(low - start, max(high, low) - start))
    if inwards:
        block[tuple(here)] = array[tuple(there)]
    else:
        array[tuple(there)] = block[tuple(here)]


def _signless(x):
    """An operand as it crosses the border."""
    if x.dtype == np.bool_:
        return x.astype(np.int32)
    name = x.dtype.name
    return np.array(x.view(name[1:]) if name.startswith("uint") else x)


def _fresh(aval):
    dtype = np.dtype(np.int32 if aval.dtype == np.bool_ else aval.dtype)
    dtype = np.dtype(dtype.name[1:]) if dtype.name.startswith("uint") else dtype
    return np.full(aval.shape, np.nan if dtype.kind in "fV" and "int" not in dtype.name else 0).astype(dtype)


def _back(x, aval):
    if aval.dtype == np.bool_:
        return x != 0
    return x.view(aval.dtype) if x.dtype != aval.dtype else x
