"""Hopper's tensor core: `wgmma`, its accumulators in registers, and `mma` of arrays.

A wgmma is asynchronous: after one is issued, only that one may still be running; `acc[...]` waits for all.

    wgmma_accumulator_init   tree of AccInit(acc, value)
    wgmma                    tree of Wgmma(acc, a, b)        a is a view, or an array in registers
    wgmma_wait               tree of Nothing()               params: n, how many may still be running
    wgmma_accumulator_load   tree of Acc(acc)                params: wait_n (int or None)      gives an array
    mma                      tree of MmaArrays(acc, a, b)                                      gives an array

Source: the Pallas Mosaic GPU reference, section "Hopper (wgmma)"; PTX ISA, wgmma.mma_async.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from palladion import jaxlink
from palladion.errors import kind_of, mistake
from palladion.language.gpu import mma_rules
from palladion.language.gpu.arguments import a_count, print_operands
from palladion.language.gpu.layout_values import Layout
from palladion.language.gpu.memory import REGS
from palladion.language.gpu.primitives import bind, gpu_primitive
from palladion.language.gpu.refs import GPURef, Storage
from palladion.language.indices import is_ref, label_of
from palladion.language.refs import checked_dtype
from palladion.language.semaphores import as_view


class AccInit(NamedTuple):
    """The operands of `wgmma_accumulator_init`."""

    acc: Any
    value: Any


class Wgmma(NamedTuple):
    """The operands of `wgmma`."""

    acc: Any
    a: Any
    b: Any


class Acc(NamedTuple):
    """The operand of `wgmma_accumulator_load`."""

    acc: Any


class MmaArrays(NamedTuple):
    """The operands of `mma`."""

    acc: Any
    a: Any
    b: Any


class Nothing(NamedTuple):
    """No operands."""


def _held(operands: Acc, _: dict[str, Any]) -> list[Any]:
    return [jaxlink.ShapedArray(tuple(operands.acc.shape), operands.acc.dtype)]


wgmma_accumulator_init_p = gpu_primitive("wgmma_accumulator_init", writes=("acc",))
wgmma_p = gpu_primitive("wgmma", reads=("acc", "a", "b"), writes=("acc",))
wgmma_wait_p = gpu_primitive("wgmma_wait")
wgmma_accumulator_load_p = gpu_primitive("wgmma_accumulator_load", reads=("acc",), results=_held)
mma_p = gpu_primitive("mma", results=lambda operands, _: [operands.acc], effect=False)
print_operands(wgmma_accumulator_init_p, wgmma_p, wgmma_wait_p, wgmma_accumulator_load_p, mma_p)


# --- accumulators -----------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class WGMMAAccumulatorRef:
    """The type of a wgmma accumulator, for `pl.run_scoped`; `plgpu.ACC` is a shorter name.

    It begins as zeros. `plgpu.ACC.init(array)`, an argument of `pl.run_state`, begins as the array.

    Arguments:
      shape: (M, N): M a multiple of 64, N a multiple of 8 and at most 256.
      dtype: float32, float16 (of float16 operands), or int32 (of integers).
    """

    shape: tuple[int, int]
    dtype: Any = jnp.float32
    _init: Any = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            shape = tuple(operator.index(n) for n in self.shape)
        except TypeError:
            raise mistake(
                TypeError,
                f"The shape of a wgmma accumulator is two integers, not {kind_of(self.shape)}.",
                hint="plgpu.ACC((64, 128), jnp.float32)",
            ) from None
        object.__setattr__(self, "shape", shape)
        checked_dtype(self.dtype, "a wgmma accumulator")

    @staticmethod
    def init(array: Any) -> WGMMAAccumulatorRef:
        """An accumulator that begins as `array`, for `pl.run_state`."""
        if is_ref(array) or not hasattr(array, "dtype"):
            what = f"the Ref {label_of(array)}" if is_ref(array) else kind_of(array)
            raise mistake(TypeError, f"plgpu.ACC.init takes an array, not {what}.", hint="plgpu.ACC.init(x_ref[...])")
        return WGMMAAccumulatorRef(tuple(array.shape), array.dtype, array)

    def get_ref_aval(self) -> GPURef:
        """The abstract Ref that a kernel sees."""
        if self._init is not None:
            hint = "pl.run_state(f)(plgpu.ACC.init(x)); a scoped one, plgpu.ACC(shape, dtype), begins as zeros"
            raise mistake(ValueError, "plgpu.ACC.init(…) is an argument of pl.run_state, not of a scope.", hint=hint)
        return _acc_type(self, False)

    def state_type(self) -> Any:
        """For `pl.run_state`: the scoped type of the Ref that holds this state."""
        return self if self._init is None else _Initialised(self.shape, self.dtype)

    def begin(self, ref: Any) -> None:
        """For `pl.run_state`: give the Ref its first value."""
        if self._init is not None:
            bind("plgpu.ACC.init", wgmma_accumulator_init_p, AccInit(as_view(ref), self._init))


@dataclasses.dataclass(frozen=True)
class _Initialised:
    shape: tuple[int, int]
    dtype: Any

    def get_ref_aval(self) -> GPURef:
        return _acc_type(self, True)


def _acc_type(acc: Any, init: bool) -> GPURef:
    inner = jaxlink.ShapedArray(tuple(acc.shape), jnp.dtype(acc.dtype))
    return GPURef(inner, REGS, label="an accumulator", storage=Storage(layout=Layout.WGMMA, init=init))


ACC = WGMMAAccumulatorRef


# --- operations -------------------------------------------------------------------------------------------------------
def wgmma(acc: Any, a: Any, b: Any) -> None:
    """Issue `acc += a @ b` on the tensor core.

    All wgmmas but this one have completed when it returns, so that SMEM which earlier ones read can be written again.
    SMEM written by hand needs `plgpu.commit_smem()` first.

    Arguments:
      acc: a Ref of `plgpu.ACC((M, N), dtype)`: M a multiple of 64, N of 8 and at most 256.
      a: (M, K), a Ref in SMEM or an array in registers.
      b: (K, N), a Ref in SMEM. K is a multiple of the swizzle divided by the bytes of an element. Of 16-bit operands
        a and b may be transposed views; others lie with K last.

    Raises:
      KernelFinding: an operand that wgmma does not take (`illegal-shape`, `illegal-layout`).
      TypeError: neither a Ref nor an array.
    """
    name = "plgpu.wgmma"
    mma_rules.check(mma_rules.WGMMA, mma_rules.product(name, acc, a, b))
    bind(name, wgmma_p, Wgmma(as_view(acc), as_view(a) if is_ref(a) else jnp.asarray(a), as_view(b)))


def wgmma_wait(n: int) -> None:
    """Wait until at most `n` wgmmas of this thread are running.

    Raises:
      TypeError, ValueError: `n` is no integer, or negative.
    """
    bind("plgpu.wgmma_wait", wgmma_wait_p, Nothing(), n=a_count("plgpu.wgmma_wait", n))


def wgmma_accumulator_load(acc: Any, *, wait_n: int | None = 0) -> jax.Array:
    """Read an accumulator.

    Arguments:
      acc: a Ref of `plgpu.ACC`.
      wait_n: how many wgmmas may still be running; 0 waits for all. None: do not wait.

    Returns:
      an array, in layout `WGMMA`.

    Raises:
      TypeError: no accumulator, or no integer. ValueError: a negative number.
    """
    name = "plgpu.wgmma_accumulator_load"
    if not is_ref(acc) or mma_rules.operand(name, "acc", acc).space != "acc":
        what = label_of(acc) if is_ref(acc) else kind_of(acc)
        raise mistake(TypeError, f"{name} reads a plgpu.ACC, not {what}.", hint="other Refs are read as ref[...]")
    wait_n = None if wait_n is None else a_count(name, wait_n)
    return bind(name, wgmma_accumulator_load_p, Acc(as_view(acc)), wait_n=wait_n)[0]


def mma(acc: jax.Array, a: jax.Array, b: jax.Array, /) -> jax.Array:
    """`acc + a @ b` of arrays in registers, by the instructions that warps issue.

    Arguments:
      acc: (M, N), layout `MMA_ACC`. a: (M, K), layout `MMA_LHS`. b: (K, N), layout `MMA_RHS`.

    Returns:
      an array like `acc`.

    Raises:
      KernelFinding: `illegal-shape`, `illegal-layout`. TypeError: no array.
    """
    name = "plgpu.mma"
    mma_rules.check(mma_rules.MMA, mma_rules.product(name, acc, a, b))
    return bind(name, mma_p, MmaArrays(jnp.asarray(acc), jnp.asarray(a), jnp.asarray(b)))[0]
