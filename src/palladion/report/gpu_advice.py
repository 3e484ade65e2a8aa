"""What costs time in a Mosaic GPU kernel, as far as its code says it for sure: notes of `palladion check`.

| advice | what is looked for | source |
|---|---|---|
| small_products | `tcgen05_mma` of one block with M = 64 or N < 128 | reference, "Blackwell (tcgen05)" |
| narrow_swizzles | a swizzle below 128 bytes on rows that 128 bytes divide | reference, "Memory spaces of A and B" |
| scattered_stores | an array as the tensor core leaves it, stored straight to GMEM | PTX ISA, fragments of wgmma |
| unshared_operands | rows of a grid that each read more than the L2 cache holds | reference, "Using the L2 cache" |
| idle_commits | `commit_smem` in a loop of a lone thread that touches no memory by hand | reference, "commit_smem" |
| early_waits | a wait for each wgmma of a loop that has buffers to go on | reference, "Hopper (wgmma)" |

Nothing is said of `wgmma` with M = 64: that is what one instruction of a warpgroup does. Where a rule might not hold
there is no note: nothing here runs the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import Finding
from palladion.language.gpu import barriers, copies, mma, tcgen05
from palladion.language.gpu.arch import arch_of, equations
from palladion.language.gpu.layout_inference import _Analysis
from palladion.language.gpu.memory import MemorySpace, SwizzleTransform
from palladion.language.gpu.mesh import Mesh
from palladion.language.gpu.refs import is_barrier, storage_of
from palladion.language.ops import run_scoped_p
from palladion.report.analysis import Analysis
from palladion.report.dependence import NOTHING, Set, follow, loop_of
from palladion.report.targets import Target
from palladion.report.text import bytes_text
from palladion.simulator.code import placeholders
from palladion.simulator.gpu.chip import CHIPS
from palladion.simulator.gpu.views import End

KIND = "performance"
L2_BYTES = {"sm_90a": 50 << 20, "sm_100a": 126 << 20}  # H100, B200


def advice(a: Analysis) -> Iterator[Finding]:
    """The notes on a call that is written for a GPU by Mosaic."""
    if a.target is not Target.MOSAIC_GPU or a.call.jaxpr is None:
        return
    found: dict[tuple, Finding] = {}
    for rule in _RULES:
        for finding in rule(a):
            found.setdefault((finding.where, finding.message), finding)
    yield from found.values()


def _note(eqn: Any, message: str, operand: str | None = None) -> Finding:
    return Finding(KIND, "note", message, where=locations.location_of(eqn), operand=operand)


def _given(eqn: Any) -> Any:
    """The operands of an operation of the dialect, as its NamedTuple with placeholders."""
    return jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))


def _place(eqn: Any, view: Any, sets: Sequence[Set]) -> tuple[Any, Set]:
    """The Ref that a view is taken of, and what the place of the view depends on."""
    indices = [x.k for x in jax.tree.leaves(view.transforms) if hasattr(x, "k")]
    return eqn.invars[view.ref.k].aval, NOTHING.union(*(sets[k] for k in indices))


# --- products -------------------------------------------------------------------------------------------------------
def small_products(a: Analysis) -> Iterator[Finding]:
    """Smaller products leave a part of Blackwell's tensor core idle; products of two blocks do not."""
    for eqn in equations(a.call.jaxpr):
        if eqn.primitive is not tcgen05.tcgen05_mma_p or eqn.params["collective_axis"] is not None:
            continue
        m, n = End(eqn, _given(eqn).acc).shape[-2:]
        if m < 128:
            yield _note(eqn, f"tcgen05_mma with M = {m} is much slower than with M = 128: give a block 128 rows.")
        if n < 128:
            yield _note(eqn, f"tcgen05_mma with N = {n} does not reach the tensor core's rate: N of at least 128 does.")


def narrow_swizzles(a: Analysis) -> Iterator[Finding]:
    """Wider rows of tiles make better copies."""
    for ref, eqn in _buffers(a.call.jaxpr):
        swizzles = [t.swizzle for t in storage_of(ref).transforms if isinstance(t, SwizzleTransform)]
        row = ref.shape[-1] * jnp.dtype(ref.dtype).itemsize if swizzles else 0
        if swizzles and swizzles[0] < 128 and row % 128 == 0:
            where = f"{a.call.kernel_at} ({a.call.name})" if eqn is None else locations.location_of(eqn)
            name = ref.label.partition(" (")[0]
            elements = 128 // jnp.dtype(ref.dtype).itemsize
            message = (
                f"{name} has a swizzle of {swizzles[0]} bytes, and its rows of {row:,} bytes allow 128, with which "
                f"copies are faster: TilingTransform((8, {elements})), SwizzleTransform(128)."
            )
            yield Finding(KIND, "note", message, where=where, operand=ref.label)


def _buffers(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """(type, the `run_scoped` that makes it or None) of the kernel's Refs to SMEM."""
    refs = [(v.aval, None) for v in jaxpr.invars]
    for eqn in equations(jaxpr):
        if eqn.primitive is run_scoped_p and (n := eqn.params["num_scoped"]):
            refs += [(v.aval, eqn) for v in eqn.params["jaxpr"].invars[-n:]]
    yield from ((r, e) for r, e in refs if getattr(r, "memory_space", None) is MemorySpace.SMEM and not is_barrier(r))


# --- what the tensor core leaves in registers -----------------------------------------------------------------------
class _Stores(_Analysis):
    """The layout of every array that is stored to GMEM by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[tuple[Any, Any]] = []  # (equation, what is known of the layout)

    def _equation(self, eqn: Any, arrays: list[Any]) -> list[Any]:
        if eqn.primitive is jaxlink.swap_p and eqn.invars[0].aval.memory_space is MemorySpace.GMEM:
            self.stored.append((eqn, arrays[1]))
        return super()._equation(eqn, arrays)


def scattered_stores(a: Analysis) -> Iterator[Finding]:
    """A warp's part of an accumulator is small pieces of many rows."""
    analysis = _Stores()
    try:
        analysis.run(a.call.jaxpr)
    except Exception:  # layouts that clash are the simulator's, or the compiler's, to tell
        return
    for eqn, array in analysis.stored:
        layouts = [] if array is None else sorted(str(layout) for layout in array.root().layouts or ())
        fragments = bool(layouts) and all(layout.startswith(_FRAGMENTS) for layout in layouts)
        if fragments and "TRANSPOSED" not in layouts[0] and eqn.invars[1].aval.ndim == 2:
            ref = eqn.invars[0].aval
            yield _note(
                eqn,
                f"{ref.label.partition(' (')[0]} is written straight from the tensor core's layout ({layouts[0]}): "
                "each instruction of a warp writes small pieces of many rows. Through SMEM (commit_smem, "
                "copy_smem_to_gmem) whole rows are written.",
                ref.label,
            )


_FRAGMENTS = ("Layout.WGMMA", "Layout.TCGEN05")  # and what these become without an explicit layout


# --- the L2 cache ---------------------------------------------------------------------------------------------------
def unshared_operands(a: Analysis) -> Iterator[Finding]:
    """Blocks start in the grid's order, so that those that run together have one row, and all columns."""
    mesh = a.call.params.get("mesh")
    if not isinstance(mesh, Mesh) or math.prod(mesh.cluster) > 1:
        return
    axes = [(name, size) for name, size in zip(mesh.grid_names, mesh.grid) if size > 1]
    arch = arch_of(a.call.jaxpr)
    if len(axes) < 2 or axes[-1][1] < CHIPS[arch].num_sms:
        return
    columns, rows = axes[-1][0], {name for name, _ in axes[:-1]}
    reads: dict[int, tuple[Any, Any, Set]] = {}

    def visit(eqn: Any, sets: Sequence[Set]) -> None:
        if eqn.primitive is copies.copy_gmem_to_smem_p:
            ref, place = _place(eqn, _given(eqn).src, sets)
            reads[id(eqn)] = (eqn, ref, place & (rows | {columns}))

    follow(a.call.jaxpr, [NOTHING] * len(a.call.jaxpr.invars), visit)
    by_row = [ref for _, ref, on in reads.values() if on and on <= rows]
    for eqn, ref, on in reads.values():
        size = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
        if by_row and on == {columns} and size > L2_BYTES[arch]:
            name, other = (r.label.partition(" (")[0] for r in (ref, by_row[0]))
            yield _note(
                eqn,
                f"The blocks of each row of the grid read all of {name} ({bytes_text(size)}, more than the L2 cache's "
                f"{bytes_text(L2_BYTES[arch])}) and one piece of {other}: the next row finds nothing in the cache. A "
                "grid (m // mt, n, mt), with row program_id(0) * mt + program_id(2), or plgpu.planar_snake in a "
                "persistent kernel, lets blocks that run together share both.",
                ref.label,
            )


# --- loops ----------------------------------------------------------------------------------------------------------
_ASYNC = {
    copies.copy_gmem_to_smem_p, copies.copy_smem_to_gmem_p, copies.async_prefetch_p, mma.wgmma_p,
    mma.wgmma_accumulator_init_p, mma.wgmma_accumulator_load_p, tcgen05.tcgen05_mma_p, tcgen05.async_load_tmem_p,
    tcgen05.async_store_tmem_p, tcgen05.async_copy_smem_to_tmem_p, tcgen05.tcgen05_commit_arrive_p,
    barriers.barrier_wait_p, barriers.barrier_arrive_p, barriers.barrier_test_p,
}  # fmt: skip


def _loops(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """(equation, body) of every loop."""
    for eqn in equations(jaxpr):
        if eqn.primitive in (lax.scan_p, lax.while_p):
            body = eqn.params["jaxpr" if eqn.primitive is lax.scan_p else "body_jaxpr"]
            yield eqn, getattr(body, "jaxpr", body)


def idle_commits(a: Analysis) -> Iterator[Finding]:
    """A fence is needed after accesses by hand; a lone thread knows of no others."""
    mesh = a.call.params.get("mesh")
    if isinstance(mesh, Mesh) and ((mesh.num_threads or 1) > 1 or math.prod(mesh.cluster) > 1):
        return
    for _, body in _loops(a.call.jaxpr):
        if any(_by_hand(eqn) for eqn in equations(body)):
            continue
        for eqn in body.eqns:
            if eqn.primitive is copies.commit_smem_p:
                yield _note(
                    eqn,
                    "commit_smem in a loop that neither reads nor writes memory by hand: one before the loop does the "
                    "same, and the fence costs in every round.",
                )


def _by_hand(eqn: Any) -> bool:
    if eqn.primitive in _ASYNC or any(True for _ in jaxlink.jaxprs_in_params(eqn.params)):
        return False
    refs = [v.aval for v in eqn.invars if isinstance(v.aval, jaxlink.AbstractRef)]
    return any(getattr(r, "memory_space", None) not in (MemorySpace.REGS, MemorySpace.TMEM) for r in refs)


def early_waits(a: Analysis) -> Iterator[Finding]:
    """A wgmma call itself waits for the ones before; to wait for it too leaves the tensor core idle for a while."""
    operands: dict[int, tuple[Any, Set]] = {}  # of each wgmma, its B operand, and what its place depends on

    def visit(eqn: Any, sets: Sequence[Set]) -> None:
        if eqn.primitive is mma.wgmma_p:
            operands[id(eqn)] = _place(eqn, _given(eqn).b, sets)

    follow(a.call.jaxpr, [NOTHING] * len(a.call.jaxpr.invars), visit)
    for loop, body in _loops(a.call.jaxpr):
        products = [k for k, eqn in enumerate(body.eqns) if eqn.primitive is mma.wgmma_p]
        if len(products) != 1 or not _in_smem(product := body.eqns[products[0]]):
            continue
        ref, place = operands[id(product)]
        waits = [e for e in body.eqns[products[0] + 1 :] if e.primitive is mma.wgmma_wait_p and e.params["n"] == 0]
        several = len(ref.shape) > 2 and math.prod(ref.shape[:-2]) > 2 and loop_of(loop) in place
        if waits and several and not any(map(_reads_accumulator, equations(body))):
            yield _note(
                waits[0],
                "wgmma_wait(0) after each wgmma of a loop leaves the tensor core idle until the next one: the call of "
                "the next wgmma itself waits for this one, after which its buffers are free (delay_release=1 in a "
                "pipeline).",
            )


def _in_smem(eqn: Any) -> bool:
    return hasattr(_given(eqn).a, "ref")


def _reads_accumulator(eqn: Any) -> bool:
    if eqn.primitive is mma.wgmma_accumulator_load_p:
        return True
    reads = eqn.primitive in (jaxlink.get_p, jaxlink.swap_p)
    return reads and getattr(eqn.invars[0].aval, "memory_space", None) is MemorySpace.REGS


_RULES: tuple[Callable[[Analysis], Iterator[Finding]], ...] = (
    small_products,
    narrow_swizzles,
    scattered_stores,
    unshared_operands,
    idle_commits,
    early_waits,
)
