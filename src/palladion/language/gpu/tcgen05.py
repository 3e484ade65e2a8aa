"""Blackwell's tensor core: matrix products that accumulate in tensor memory (TMEM), and copies into and out of it.

Everything here is asynchronous. What a load gives can be used at once, but its source may be overwritten only after
`wait_load_tmem`; a store is complete after `commit_tmem`; products, and copies from SMEM, are complete when a barrier
that they were given, or that `tcgen05_commit_arrive` names, completes.

    async_load_tmem         tree of Tmem(ref)                 params: layout, reduce     gives an array (or two)
    wait_load_tmem, commit_tmem   tree of Nothing()
    async_store_tmem        tree of TmemStore(ref, value)
    tcgen05_mma             tree of Tcgen05(acc, a, b, barrier, a_scale, b_scale, a_sparse_metadata, accumulate)
                                                              params: collective_axis; accumulate: a bool scalar
    tcgen05_commit_arrive   tree of Bar(barrier, predicate)   params: collective_axis
    async_copy_smem_to_tmem tree of TmemCopy(smem, tmem)      params: kind, collective_axis

Source: the Pallas Mosaic GPU reference, section "Blackwell (tcgen05)"; PTX ISA, tcgen05.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import Finding, KernelFinding, kind_of, mistake
from palladion.language.gpu import mma_rules
from palladion.language.gpu.arguments import a_predicate, an_array, cluster_axes, one_barrier, print_operands
from palladion.language.gpu.barriers import Bar
from palladion.language.gpu.layout_values import check_fits, checked_layout
from palladion.language.gpu.mma import Nothing
from palladion.language.gpu.primitives import bind, gpu_primitive
from palladion.language.gpu.tcgen05_rules import TCGEN05
from palladion.language.indices import is_ref, label_of
from palladion.language.semaphores import as_view
from palladion.locations import current_location


class Tmem(NamedTuple):
    """The operand of `async_load_tmem`."""

    ref: Any


class TmemStore(NamedTuple):
    """The operands of `async_store_tmem`."""

    ref: Any
    value: Any


class Tcgen05(NamedTuple):
    """The operands of `tcgen05_mma`."""

    acc: Any
    a: Any
    b: Any
    barrier: Any
    a_scale: Any
    b_scale: Any
    a_sparse_metadata: Any
    accumulate: Any


class TmemCopy(NamedTuple):
    """The operands of `async_copy_smem_to_tmem`."""

    smem: Any
    tmem: Any


def _loaded(operands: Tmem, params: dict[str, Any]) -> list[Any]:
    shape, dtype = tuple(operands.ref.shape), operands.ref.dtype
    value = jaxlink.ShapedArray(shape, dtype)
    return [value] if params["reduce"] is None else [value, jaxlink.ShapedArray(shape[:-1], dtype)]


async_load_tmem_p = gpu_primitive("async_load_tmem", reads=("ref",), results=_loaded)
wait_load_tmem_p = gpu_primitive("wait_load_tmem")
commit_tmem_p = gpu_primitive("commit_tmem")
async_store_tmem_p = gpu_primitive("async_store_tmem", writes=("ref",))
tcgen05_mma_p = gpu_primitive(
    "tcgen05_mma",
    reads=("acc", "a", "b", "a_scale", "b_scale", "a_sparse_metadata"),
    writes=("acc", "barrier"),
)
tcgen05_commit_arrive_p = gpu_primitive("tcgen05_commit_arrive", writes=("barrier",))
async_copy_smem_to_tmem_p = gpu_primitive("async_copy_smem_to_tmem", reads=("smem",), writes=("tmem",))
print_operands(async_load_tmem_p, wait_load_tmem_p, commit_tmem_p, async_store_tmem_p, tcgen05_mma_p)
print_operands(tcgen05_commit_arrive_p, async_copy_smem_to_tmem_p)


# --- loads and stores -------------------------------------------------------------------------------------------------
_REDUCTIONS = ("max", "min", "absmax", "absmin")


def async_load_tmem(
    src: Any, *, layout: Any = None, reduce: Literal["max", "min", "absmax", "absmin"] | None = None
) -> Any:
    """Load from tensor memory.

    The result can be used at once; before the source is overwritten, this thread calls `plgpu.wait_load_tmem()`.

    Arguments:
      src: a Ref in TMEM, or a view of one.
      layout: of the result: `TCGEN05` or another that tensor memory loads to; None leaves the choice open.
      reduce: also give this reduction along the columns.

    Returns:
      an array; with `reduce` also a second one, of a value for each row.

    Raises:
      KernelFinding: `src` is elsewhere, or the layout does not fit (`illegal-layout`).
      TypeError, ValueError: no Ref, no layout, no reduction.
    """
    name = "plgpu.async_load_tmem"
    view = _in_tmem(name, "the source", src)
    if layout is not None:
        check_fits(checked_layout(name, layout), view.shape)
    if reduce is not None and reduce not in _REDUCTIONS:
        hint = "one of " + ", ".join(map(repr, _REDUCTIONS))
        raise mistake(ValueError, f"{name}: reduce is {kind_of(reduce)}.", hint=hint)
    out = bind(name, async_load_tmem_p, Tmem(view), layout=layout, reduce=reduce)
    return out[0] if reduce is None else tuple(out)


def wait_load_tmem() -> None:
    """Wait until all loads from tensor memory that this thread issued have read it, so that it can be overwritten."""
    bind("plgpu.wait_load_tmem", wait_load_tmem_p, Nothing())


def async_store_tmem(ref: Any, value: Any) -> None:
    """Store to tensor memory; complete after `plgpu.commit_tmem()`.

    Arguments:
      ref: a Ref in TMEM, or a view of one.
      value: an array of its shape and dtype.

    Raises:
      KernelFinding: `ref` is elsewhere (`illegal-layout`). TypeError, ValueError: no array, or of another type.
    """
    name = "plgpu.async_store_tmem"
    view = _in_tmem(name, "the destination", ref)
    if is_ref(value):
        headline = f"{name} stores an array; {label_of(value)} is a Ref."
        raise mistake(TypeError, headline, hint="read it first: smem_ref[...]")
    value = an_array(name, value)
    weak = jaxlink.is_weak(value) and value.ndim == 0
    if tuple(value.shape) != tuple(view.shape) or (value.dtype != view.dtype and not weak):
        raise mistake(
            ValueError,
            f"{name} cannot store {kind_of(value)} to {label_of(ref)}, which is {view.dtype}{list(view.shape)}.",
            hint="stores neither broadcast nor convert: jnp.broadcast_to(value, shape), value.astype(dtype)",
        )
    bind(name, async_store_tmem_p, TmemStore(view, value.astype(view.dtype)))


def commit_tmem() -> None:
    """Wait until all stores to tensor memory that this thread issued are complete."""
    bind("plgpu.commit_tmem", commit_tmem_p, Nothing())


# --- products ---------------------------------------------------------------------------------------------------------
def tcgen05_mma(
    acc: Any,
    a: Any,
    b: Any,
    barrier: Any = None,
    *,
    a_scale: Any = None,
    b_scale: Any = None,
    a_sparse_metadata: Any = None,
    accumulate: bool | jax.Array = True,
    collective_axis: Any = None,
) -> None:
    """Issue `acc += a @ b` (or `acc = a @ b`) on the tensor core.

    Of a collective product, sizes are those of one block: acc (M // 2, N), a (M // 2, K), b (K, N // 2); the first
    block issues it for both.

    Arguments:
      acc: (M, N), a Ref in TMEM, not packed. M is 64 or 128, N a multiple of 8 and at most 512; collective: M 128 or
        256, N at most 256.
      a: (M, K), a Ref in SMEM, or packed in TMEM. b: (K, N), a Ref in SMEM. K is a multiple of the swizzle divided by
        the bytes of an element.
      barrier: gets an arrival when the product is complete; made with `orders_tensor_core=True`. None: use
        `plgpu.tcgen05_commit_arrive`.
      a_scale, b_scale: scales in TMEM: (M, K // 32) and (N, K // 32), for float4 also with 16.
      a_sparse_metadata: in TMEM: `a` is (M, K // 2), and this says which elements it has.
      accumulate: whether to add to what `acc` holds; a bool, or a boolean scalar.
      collective_axis: the cluster axis of the two blocks, for a collective product.

    Raises:
      KernelFinding: an operand that tcgen05 does not take (`illegal-shape`, `illegal-layout`), or a barrier that does
        not order tensor core operations (`missing-fence`).
      TypeError, ValueError: other arguments.
    """
    name = "plgpu.tcgen05_mma"
    if (a_scale is None) != (b_scale is None):
        missing = "a_scale" if a_scale is None else "b_scale"
        raise mistake(ValueError, f"{name}: {missing} is missing.", hint="block-scaled products scale both operands")
    scales = None
    if a_scale is not None:
        scales = (mma_rules.operand(name, "a_scale", a_scale), mma_rules.operand(name, "b_scale", b_scale))
    axis = _axis(name, collective_axis)
    options = dict(collective=axis is not None, sparse=a_sparse_metadata is not None, scales=scales)
    product = mma_rules.product(name, acc, a, b, **options)
    mma_rules.check(TCGEN05, product)
    if a_sparse_metadata is not None:
        _check_metadata(name, a_sparse_metadata, product)
    a_scale, b_scale, metadata = (None if x is None else as_view(x) for x in (a_scale, b_scale, a_sparse_metadata))
    done = None if barrier is None else _ordering_barrier(name, barrier)
    add = _bool(name, "accumulate", accumulate)
    flat = Tcgen05(as_view(acc), as_view(a), as_view(b), done, a_scale, b_scale, metadata, add)
    bind(name, tcgen05_mma_p, flat, collective_axis=axis)


def _check_metadata(name: str, metadata: Any, product: mma_rules.Product) -> None:
    meta = mma_rules.operand(name, "a_sparse_metadata", metadata)
    mma_rules.check_place(name, "a_sparse_metadata", meta.space, ("tmem",), metadata)
    if meta.shape != (product.d.shape[0], product.k // 2):
        wanted = (product.d.shape[0], product.k // 2)
        message = f"{name}: {meta} should have shape {wanted}."
        rule = "the metadata of a sparse A (M, K // 2) is (M, K // 2) of uint2"
        raise KernelFinding(Finding("illegal-shape", "error", message, where=current_location(), hint=rule))


def tcgen05_commit_arrive(
    barrier: Any, collective_axis: Any = None, *, predicate: bool | jax.Array | None = None
) -> None:
    """Have a barrier completed by all products (and copies to TMEM) that this thread issued before.

    `plgpu.tcgen05_commit` is the older name.

    Arguments:
      barrier: one barrier, made with `orders_tensor_core=True`.
      collective_axis: the cluster axis of two blocks; both blocks' barriers get the arrival.
      predicate: a bool or a boolean scalar; False does nothing.

    Raises:
      KernelFinding: the barrier does not order tensor core operations (`missing-fence`).
      TypeError, ValueError: no barrier, or an array of them.
    """
    name = "plgpu.tcgen05_commit_arrive"
    operands = Bar(_ordering_barrier(name, barrier), a_predicate(name, predicate))
    bind(name, tcgen05_commit_arrive_p, operands, collective_axis=_axis(name, collective_axis))


tcgen05_commit = tcgen05_commit_arrive


# --- copies from SMEM -------------------------------------------------------------------------------------------------
def async_copy_smem_to_tmem(smem_ref: Any, tmem_ref: Any, collective_axis: Any = None) -> None:
    """Copy a buffer from SMEM to TMEM; products issued later by this thread come after it.

    Arguments:
      smem_ref, tmem_ref: Refs of one shape and dtype.
      collective_axis: the cluster axis of the two blocks of a collective product; both copy.

    Raises:
      KernelFinding: a Ref in another memory (`illegal-layout`), or shapes that differ (`illegal-shape`).
    """
    _copy("plgpu.async_copy_smem_to_tmem", "plain", smem_ref, tmem_ref, collective_axis)


def async_copy_scales_to_tmem(smem_ref: Any, tmem_ref: Any, collective_axis: Any = None) -> None:
    """Copy the scales of a block-scaled product from SMEM to TMEM.

    Arguments:
      smem_ref: (R // 128, C // 4, 32, 16): each (128, 4) scales with row 32 * i + j, column c at [j, 4 * i + c].
      tmem_ref: (R, C), with `layout=plgpu.TMEMLayout.SCALES_LAYOUT`.
      collective_axis: as in `async_copy_smem_to_tmem`; the errors are its, too.
    """
    _copy("plgpu.async_copy_scales_to_tmem", "scales", smem_ref, tmem_ref, collective_axis)


def async_copy_sparse_metadata_to_tmem(smem_ref: Any, tmem_ref: Any, collective_axis: Any = None) -> None:
    """Copy the metadata of a sparse operand from SMEM to TMEM.

    Arguments:
      smem_ref: what `plgpu.format_tcgen05_sparse_metadata` gives, (M // 128, K // 128, 128, 64) of uint2.
      tmem_ref: (M, K // 2) of uint2, with `layout=plgpu.TMEMLayout.SPARSE_METADATA_LAYOUT`.
      collective_axis: as in `async_copy_smem_to_tmem`; the errors are its, too.
    """
    _copy("plgpu.async_copy_sparse_metadata_to_tmem", "sparse_metadata", smem_ref, tmem_ref, collective_axis)


_FORMS = {
    "plain": ("the shape of the destination", lambda r, c: (r, c)),
    "scales": ("(R // 128, C // 4, 32, 16)", lambda r, c: (r // 128, c // 4, 32, 16)),
    "sparse_metadata": ("(M // 128, K // 128, 128, 64)", lambda r, c: (r // 128, c // 64, 128, 64)),
}


def _copy(name: str, kind: str, smem_ref: Any, tmem_ref: Any, collective_axis: Any) -> None:
    tmem = _in_tmem(name, "the destination", tmem_ref)
    if not is_ref(smem_ref):
        raise mistake(TypeError, f"{name} copies from a Ref, not from {kind_of(smem_ref)}.", hint="a Ref in SMEM")
    source = mma_rules.operand(name, "the source", smem_ref)
    mma_rules.check_place(name, "the source", source.space, ("smem",), smem_ref)
    words, form = _FORMS[kind]
    shape = tuple(tmem.shape)
    fits = len(shape) == 2 and source.shape == form(*shape) and math.prod(source.shape) == math.prod(shape)
    if not fits or source.dtype != tmem.dtype:
        message = f"{name} cannot copy {source} to {label_of(tmem_ref)}, which is {tmem.dtype}{list(shape)}."
        rule = f"the source has the destination's dtype, and shape {words}"
        raise KernelFinding(Finding("illegal-shape", "error", message, where=current_location(), hint=rule))
    axis = _axis(name, collective_axis)
    bind(name, async_copy_smem_to_tmem_p, TmemCopy(as_view(smem_ref), tmem), kind=kind, collective_axis=axis)


# --- arguments --------------------------------------------------------------------------------------------------------
def _in_tmem(name: str, what: str, ref: Any) -> Any:
    if not is_ref(ref):
        raise mistake(TypeError, f"{what} of {name} is {kind_of(ref)}, not a Ref in TMEM.", hint="plgpu.TMEM(…)")
    mma_rules.check_place(name, what, mma_rules.operand(name, what, ref).space, ("tmem",), ref)
    return as_view(ref)


def _ordering_barrier(name: str, barrier: Any) -> Any:
    """The barrier that a tensor core operation arrives on.

    Raises:
      TypeError, ValueError: no barrier, or several. KernelFinding: it does not order tensor core operations.
    """
    view = one_barrier(name, barrier)
    if not barrier.dtype.orders_tensor_core:
        message = f"{name} arrives on {label_of(barrier)}, which does not order tensor core operations."
        hint = "barriers that tensor core operations arrive on are made with orders_tensor_core=True"
        raise KernelFinding(Finding("missing-fence", "error", message, where=current_location(), hint=hint))
    return view


def _bool(name: str, what: str, value: Any) -> Any:
    if isinstance(value, (bool, np.bool_)):
        return jnp.asarray(bool(value))
    if not isinstance(value, jax.Array) or value.shape != () or value.dtype != jnp.bool_:
        headline = f"{what} of {name} is {kind_of(value)}; it must be a bool or a boolean scalar."
        raise mistake(TypeError, headline, hint="accumulate=k > 0")
    return value


def _axis(name: str, axis: Any) -> Any:
    """One cluster axis, or None.

    Raises:
      TypeError: several. Those of `cluster_axes`.
    """
    names = cluster_axes(name, axis, "collective_axis")
    if len(names) > 1:
        headline = f"collective_axis of {name} is {axis!r}, but two blocks along one axis work together."
        raise mistake(TypeError, headline, hint='collective_axis="x"')
    return names[0] if names else None
