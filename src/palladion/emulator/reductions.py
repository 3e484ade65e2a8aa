"""The arithmetic of `cp.reduce.async.bulk`, `red.async` and tensor reductions: old value and operand, one new value.

Table of operations by PTX name; each takes two arrays of one dtype and gives the new value of the first. 16-bit
floats are added in float32 and rounded once (exact to the format: 24 bits are at least twice the format's and
two more); float32 additions flush subnormals, as the PTX manual says of the bulk form.
"""

import ml_dtypes
import numpy as np

DTYPES = {
    "u16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}
"""NumPy dtype of a PTX type that a reduction may have."""


def _flushed(x):
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _add(old, new):
    if old.dtype in (np.float16, ml_dtypes.bfloat16):
        return (old.astype(np.float32) + new.astype(np.float32)).astype(old.dtype)
    if old.dtype == np.float32:
        return _flushed(_flushed(old) + _flushed(new)).astype(np.float32)
    return old + new


def _least(old, new):
    # fmin on bfloat16 has no NumPy loop of its own; float32 holds every value of it.
    if old.dtype in (np.float16, ml_dtypes.bfloat16):
        return np.fmin(old.astype(np.float32), new.astype(np.float32)).astype(old.dtype)
    return np.minimum(old, new)


def _most(old, new):
    if old.dtype in (np.float16, ml_dtypes.bfloat16):
        return np.fmax(old.astype(np.float32), new.astype(np.float32)).astype(old.dtype)
    return np.maximum(old, new)


def _inc(old, bound):
    return np.where(old >= bound, old.dtype.type(0), old + old.dtype.type(1))


def _dec(old, bound):
    return np.where((old == 0) | (old > bound), bound, old - old.dtype.type(1))


OPERATIONS = {
    "add": _add,
    "min": _least,
    "max": _most,
    "inc": _inc,
    "dec": _dec,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
}

_INTEGERS = {"u32", "s32", "u64", "s64"}
_ALLOWED = {
    "add": {"u32", "s32", "u64", "f32", "f16", "bf16", "f64"},
    "min": _INTEGERS | {"f16", "bf16"},
    "max": _INTEGERS | {"f16", "bf16"},
    "inc": {"u32"},
    "dec": {"u32"},
    "and": {"b32", "b64", "u32", "s32", "u64", "s64"},
    "or": {"b32", "b64", "u32", "s32", "u64", "s64"},
    "xor": {"b32", "b64", "u32", "s32", "u64", "s64"},
}


def allowed(operation: str, type_name: str) -> bool:
    """Whether bulk reductions have this operation on this type (facts file 2.3)."""
    return type_name in _ALLOWED.get(operation, ())


def reduce_bytes(operation: str, type_name: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """`old` reduced with `new`, elementwise.

    Arguments: operation: PTX name; type_name: PTX type; old, new: uint8, whole elements in the last axis.
    Returns: uint8, shape of `old`."""
    dtype = DTYPES[type_name]
    with np.errstate(all="ignore"):
        result = OPERATIONS[operation](np.ascontiguousarray(old).view(dtype), np.ascontiguousarray(new).view(dtype))
    return np.ascontiguousarray(result.astype(dtype, copy=False)).view(np.uint8).reshape(old.shape)
