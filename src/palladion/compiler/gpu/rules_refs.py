"""Reading and writing Refs by brackets, `plgpu.load` and `plgpu.store`; layouts that the kernel asks for.

An accumulator or a buffer in tensor memory is not a `memory.Ref`; what it is has methods of its own for these
operations (`get(unit, eqn, transforms)`, `swap(unit, eqn, transforms, value)`).
"""

from __future__ import annotations

from typing import Any

import jax

from palladion import jaxlink
from palladion.compiler.gpu import access, clusters, hazards, inference, memory
from palladion.compiler.gpu.rules_elementwise import add
from palladion.compiler.gpu.unit import RULES, Unit
from palladion.compiler.gpu.values import Fragment, Rearranged, Scalar, Splat
from palladion.compiler.gpu.views import Index, View, resolve
from palladion.language.gpu.layouts import layout_cast_p, print_layout_p
from palladion.language.gpu.views import MulticastRef, PeerMemRef
from palladion.language.masked import masked_load_p, masked_store_p


def _view(unit: Unit, eqn: Any, ref: Any, transforms: Any) -> View:
    return resolve(unit, ref, transforms)


def _transforms(unit: Unit, eqn: Any, values: Any, first: int) -> tuple[Any, ...]:
    flat = memory.operands_of(unit, eqn, values, first)
    return tuple(jax.tree.unflatten(eqn.params["tree"], flat))


def base_of(unit: Unit, view: View) -> str | None:
    """C++ of the address of a view's buffer, if it is that of another block; None: this block's."""
    for place in view.where:
        if isinstance(place, (PeerMemRef, MulticastRef)):
            raise unit.refuse(
                f"{view.ref.label} is accessed on another device; the compiler builds kernels for one device so far.",
                "interpret=plgpu.InterpretGPUParams() runs it on simulated devices",
            )
    if not view.where:
        return None
    (place,) = view.where
    return f"in_block({view.ref.base}, {clusters.rank_of(unit, place.block_id)})"


@RULES.rule(jaxlink.get_p)
def _get(unit: Unit, eqn: Any, ref: Any, *flat: Any) -> Any:
    transforms = _transforms(unit, eqn, (ref, *flat), 1)
    if not isinstance(ref, memory.Ref):
        return ref.get(unit, eqn, transforms)
    view = _view(unit, eqn, ref, transforms)
    return read(unit, view, eqn.outvars[0])


def read(unit: Unit, view: View, var: Any) -> Any:
    """The value of a view, in the layout of a variable."""
    base = base_of(unit, view)
    if not view.shape:
        return access.load_scalar(unit, view, base)
    _whole_thread(unit, view)
    return access.load(unit, view, _layout_of(unit, var), base=base)


def _layout_of(unit: Unit, var: Any) -> Any:
    """The layout of what is read: the inferred one, that of a cast that follows, or one of wide vectors."""
    found = unit.inferred_layout(var)
    if found is None and (cast := memory.usage(unit).casts.get(var)) is not None:
        found = inference.registers_of(cast, tuple(var.aval.shape), var.aval.dtype)
    return unit.layout_for(var) if found is None else found


def _whole_thread(unit: Unit, view: View) -> None:
    if unit.warps != 4:
        raise unit.refuse(
            f"A single warp accesses an array, a part of {view.ref.label} of shape {view.shape}.",
            "arrays belong to the whole Pallas thread: access scalars in a warp_map, or do it outside",
        )


@RULES.rule(jaxlink.swap_p)
def _swap(unit: Unit, eqn: Any, ref: Any, value: Any, *flat: Any) -> Any:
    transforms, wanted = _transforms(unit, eqn, (ref, value, *flat), 2), unit.wanted[0]
    if not isinstance(ref, memory.Ref):
        return ref.swap(unit, eqn, transforms, value)
    view = _view(unit, eqn, ref, transforms)
    old = read(unit, view, eqn.outvars[0]) if wanted else _unread(eqn.outvars[0])
    write(unit, view, value)
    return old


def _unread(var: Any) -> Any:
    """What stands for a result that nothing uses."""
    shape = tuple(var.aval.shape)
    return Splat("0", var.aval.dtype, shape) if shape else Scalar("0", var.aval.dtype)


def write(unit: Unit, view: View, value: Any) -> None:
    """Store a value in a view."""
    _refuse_input(unit, view)
    base = base_of(unit, view)
    if not view.shape:
        access.store_scalar(unit, view, value, base)
        return
    _whole_thread(unit, view)
    access.store(unit, view, _as_array(value, view), base)


def _as_array(value: Any, view: View) -> Any:
    return Splat(value.text, value.dtype, view.shape, value.value) if isinstance(value, Scalar) else value


def _refuse_input(unit: Unit, view: View) -> None:
    inputs = unit.tables.more.get("inputs", ())
    if view.ref.operand in inputs:
        raise unit.refuse(
            f"The kernel stores to {view.ref.label}, an operand of the kernel.",
            "write an output; to work in place alias the two (pl.run_state and pl.core_map do)",
            ValueError,
        )


@RULES.rule(jaxlink.addupdate_p)
def _addupdate(unit: Unit, eqn: Any, ref: Any, value: Any, *flat: Any) -> list[Any]:
    transforms = _transforms(unit, eqn, (ref, value, *flat), 2)
    if not isinstance(ref, memory.Ref):
        return ref.addupdate(unit, eqn, transforms, value)
    view = _view(unit, eqn, ref, transforms)
    if not view.shape:
        old = access.load_scalar(unit, view, base_of(unit, view))
        write(unit, view, unit.scalar(view.dtype, add(old.kind, old.text, value.text), "sum"))
        return []
    if view.folded().gathers:  # a row that an index array names twice is added to twice
        from palladion.compiler.gpu import rules_atomics

        _refuse_input(unit, view)
        hazards.before(unit, view.ref, writes=True, pattern=None)
        rules_atomics.update(unit, view, value, "add", base_of(unit, view))
        return []
    value = access.as_registers(unit, view, _as_array(value, view))
    old = access.load(unit, view, value.layout, base=base_of(unit, view))
    total = unit.registers(view.dtype, value.layout, "sum")
    unit.fill(total, lambda i: add(total.kind, old.at_text(i), value.at_text(i)))
    write(unit, view, total)
    return []


def _element(value: Any, i: str) -> str:
    return value.at_text(i) if isinstance(value, Fragment) else value.text


# --- masks ----------------------------------------------------------------------------------------------------------
@RULES.rule(masked_load_p)
def _masked_load(unit: Unit, eqn: Any, ref: Any, *flat: Any) -> Any:
    transforms, mask, other = jax.tree.unflatten(eqn.params["tree"], memory.operands_of(unit, eqn, (ref, *flat), 1))
    view = _view(unit, eqn, ref, transforms)
    mask, other = _plain(mask), _plain(other)
    if mask is None:
        return read(unit, view, eqn.outvars[0])
    if not view.shape:
        off = "0" if other is None else other.text
        text = f"*(const {_c(view)}*)({access.element(unit, view.folded(), base_of(unit, view))})"
        return unit.scalar(view.dtype, f"{mask.text} ? {text} : {_c(view)}({off})")
    layout = mask.layout if isinstance(mask, Fragment) else _layout_of(unit, eqn.outvars[0])
    mask, off = _in_layout(unit, mask, layout), _in_layout(unit, other, layout)
    on = lambda i: _element(mask, i)
    rest = lambda i: f"{_c(view)}({'0' if off is None else _element(off, i)})"
    return access.load_where(unit, view, layout, on, rest, base_of(unit, view))


@RULES.rule(masked_store_p)
def _masked_store(unit: Unit, eqn: Any, ref: Any, value: Any, *flat: Any) -> list[Any]:
    transforms, mask = jax.tree.unflatten(eqn.params["tree"], memory.operands_of(unit, eqn, (ref, value, *flat), 2))
    view, mask = _view(unit, eqn, ref, transforms), _plain(mask)
    if mask is None:
        write(unit, view, value)
        return []
    if not view.shape:
        with unit.block(f"if ({mask.text})"):
            write(unit, view, value)
        return []
    value = _as_array(value, view)
    value = access.as_registers(unit, view, value)
    mask = _in_layout(unit, mask, value.layout)
    access.store_where(unit, view, value, lambda i: _element(mask, i), base_of(unit, view))
    return []


def _in_layout(unit: Unit, value: Any, layout: Any) -> Any:
    """An array in a layout; constants and scalars are everywhere."""
    return unit.fragment(value, layout) if isinstance(value, (Fragment, Rearranged)) else value


def _plain(given: Any) -> Any:
    return given.value if isinstance(given, Index) else given


def _c(view: View) -> str:
    from palladion.compiler.gpu.dtypes import kind

    return kind(view.dtype).c


# --- layouts --------------------------------------------------------------------------------------------------------
@RULES.rule(layout_cast_p)
def _layout_cast(unit: Unit, eqn: Any, x: Any) -> list[Any]:
    aval = eqn.outvars[0].aval
    layout = inference.registers_of(eqn.params["layout"], tuple(aval.shape), aval.dtype)
    if isinstance(x, Splat) or layout is None:
        return [x]
    return [unit.fragment(x, layout)]


@RULES.rule(print_layout_p)
def _print_layout(unit: Unit, eqn: Any, x: Any) -> list[Any]:
    found = "WG_SPLAT" if isinstance(x, Splat) else unit.settled(x).layout.name
    print(eqn.params["fmt"].format(found))
    return []
