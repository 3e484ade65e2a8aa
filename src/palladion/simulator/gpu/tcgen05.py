"""tcgen05 on a simulated Blackwell GPU: products that accumulate in TMEM, copies from SMEM to it, and their completion.

Operands in SMEM are read through the async proxy; TMEM is read and written in the view of the tensor core. What one
thread issues runs in order, and needs no waits in between. That it is complete only a barrier tells: the one that a
product was given, or that `tcgen05_commit_arrive` names. A collective product is issued by the first of two blocks,
with operands of both.

Sources: the Mosaic GPU reference, "Blackwell (tcgen05)", "Collective MMA", "Waiting for tcgen05 instructions"; PTX ISA,
tcgen05.mma, tcgen05.cp, tcgen05.commit; the facts file, section 8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from palladion.language.gpu.tcgen05 import async_copy_smem_to_tmem_p, tcgen05_commit_arrive_p, tcgen05_mma_p
from palladion.simulator.code import Compiler, location, placeholders
from palladion.simulator.engine import Agent, Operation
from palladion.simulator.gpu import chip
from palladion.simulator.gpu.machine import ASYNC, TENSOR, Block, Thread, Who
from palladion.simulator.gpu.products import added, product, scaled, unpacked
from palladion.simulator.gpu.table import RULES
from palladion.simulator.gpu.tensor_core import By, Part, busy, dtype_of, queue_of, together
from palladion.simulator.gpu.views import End, in_block, predicate


@dataclasses.dataclass
class _Half:
    """The operands of a product in one block: the whole product's, or half of a collective one's."""

    acc: Part
    a: Part
    b: Part
    a_scale: Part | None = None
    b_scale: Part | None = None
    a_sparse_metadata: Part | None = None

    def note(self, by: By, add: bool, a_view: int) -> None:
        """Check and note what the product reads and writes."""
        self.a.note("read", by, a_view)
        self.b.note("read", by, ASYNC)
        for part in (self.a_scale, self.b_scale, self.a_sparse_metadata):
            if part is not None:
                part.note("read", by, TENSOR)
        if add:
            self.acc.note("read", by, TENSOR)
        self.acc.note("write", by, TENSOR)


@RULES.rule(tcgen05_mma_p)
def _mma(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    axis, setting = eqn.params["collective_axis"], compiler.machine
    site, k_add = setting.site_of(eqn), given.accumulate.k
    names = [f.name for f in dataclasses.fields(_Half)]
    ends = {n: End(eqn, v) for n in names if (v := getattr(given, n)) is not None}
    barrier = End(eqn, given.barrier) if given.barrier is not None else None
    a_view = TENSOR if _in_tmem(ends["a"].aval) else ASYNC
    multiply = _multiplication(compiler, given, ends)
    (m, n), k = ends["acc"].shape, ends["b"].shape[0]
    bits = jax.dtypes.itemsize_bits(dtype_of(given.b, ends["b"]))
    seconds = chip.product_seconds(m, n, k, bits, setting.chip)

    def issue(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        machine = thread.machine
        blocks = together(agent, axis, eqn, "tcgen05_mma")
        halves = [_Half(**{name: Part(agent, end, operands, block) for name, end in ends.items()}) for block in blocks]
        add = bool(operands[k_add])

        def effect(_: Any) -> None:
            b = halves[0].b.get() if axis is None else np.concatenate([h.b.get() for h in halves], 1)
            for half in halves:
                half.acc.put(multiply(half, b, half.acc.get() if add else None))

        begins, done = busy(agent, blocks, seconds)
        operation = queue_of(thread).start(
            agent, Who(f"the tcgen05_mma of {thread.name}", "tcgen05"), effect,
            _signals(agent, barrier, operands, blocks),
            site=site, home=TENSOR, duration=done - agent.time,
        )  # fmt: skip
        if machine.tracking:
            for half in halves:
                half.note(By(thread, eqn, site, operation), add, a_view)
        _track(thread, operation, barrier is not None)
        machine.span(thread, "tensor core", "tcgen05_mma", "product", begins, done, location(eqn))
        machine.engine.pause(agent)
        return []

    return issue


def _multiplication(compiler: Compiler, given: Any, ends: dict[str, End]) -> Callable:
    """`f(half, b, acc)`: the new accumulator of one block, `acc` None for zeros, `b` with the columns of all blocks."""
    a_dtype, b_dtype = dtype_of(given.a, ends["a"]), dtype_of(given.b, ends["b"])
    out = np.dtype(ends["acc"].aval.dtype)
    bits = jax.dtypes.itemsize_bits(a_dtype)
    plain = product(a_dtype, b_dtype, out, ends["b"].shape[0], skip_floats=compiler.skip_floats)
    if "a_scale" in ends and not compiler.skip_floats:

        def block_scaled(half: Any, b: np.ndarray, acc: Any) -> np.ndarray:
            left, right = scaled(_left(half, bits), half.a_scale.get()), scaled(b.T, half.b_scale.get()).T
            return added(acc, np.matmul(left, right), out)

        return block_scaled
    return lambda half, b, acc: plain(acc, _left(half, bits), b)


def _left(half: _Half, bits: int) -> np.ndarray:
    a = half.a.get()
    return a if half.a_sparse_metadata is None else unpacked(a, half.a_sparse_metadata.get(), bits)


def _in_tmem(aval: Any) -> bool:
    return getattr(aval.memory_space, "name", "") == "TMEM"


@RULES.rule(async_copy_smem_to_tmem_p)
def _copy(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    axis, site = eqn.params["collective_axis"], compiler.machine.site_of(eqn)
    source, target = End(eqn, given.smem), End(eqn, given.tmem)
    arrange, shape = _FORMS[eqn.params["kind"]], target.shape
    seconds = target.size / chip.LANES / compiler.machine.chip.clock

    def issue(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        blocks = together(agent, axis, eqn, "copy to TMEM")
        pairs = [(Part(agent, source, operands, b), Part(agent, target, operands, b, "write")) for b in blocks]

        def effect(_: Any) -> None:
            for smem, tmem in pairs:
                tmem.put(arrange(smem.get(), shape))

        begins, done = busy(agent, blocks, seconds)
        operation = queue_of(thread).start(
            agent, Who(f"the copy to TMEM of {thread.name}", "tcgen05"), effect, (),
            site=site, home=TENSOR, duration=done - agent.time,
        )  # fmt: skip
        for smem, tmem in pairs:
            smem.note("read", By(thread, eqn, site, operation), ASYNC)
            tmem.note("write", By(thread, eqn, site, operation), TENSOR)
        _track(thread, operation, False)
        thread.machine.span(thread, "tensor core", "copy to TMEM", "product", begins, done, location(eqn))
        thread.machine.engine.pause(agent)
        return []

    return issue


def _scales(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Row 32 * i + j, column c of each (128, 4) scales lies at [j, 4 * i + c]."""
    rows, columns = x.shape[:2]
    return x.reshape(rows, columns, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(shape)


_FORMS: dict[str, Callable[[np.ndarray, tuple[int, ...]], np.ndarray]] = {
    "plain": lambda x, shape: x,
    "scales": _scales,
    "sparse_metadata": lambda x, shape: x.transpose(0, 2, 1, 3).reshape(shape),
}


@RULES.rule(tcgen05_commit_arrive_p)
def _commit(compiler: Compiler, eqn: Any) -> Callable:
    given = jax.tree.unflatten(eqn.params["tree"], placeholders(eqn))
    axis, site = eqn.params["collective_axis"], compiler.machine.site_of(eqn)
    barrier, condition = End(eqn, given.barrier), predicate(given.predicate)

    def commit(agent: Agent, *operands: Any) -> list:
        thread: Thread = agent.place
        if not condition(operands):
            return []
        blocks = together(agent, axis, eqn, "tcgen05_commit_arrive")
        wait = max([0.0, *(b.tensor_core.idle_from - agent.time for b in blocks)])
        queue_of(thread).start(
            agent, Who(f"the commit of {thread.name}", "tcgen05"), lambda _: None,
            _signals(agent, barrier, operands, blocks), site=site, home=TENSOR, duration=wait,
        )  # fmt: skip
        (thread.parent or thread).products.pop(thread.warp or 0, None)
        thread.machine.engine.pause(agent)
        return []

    return commit


def _signals(agent: Agent, end: End | None, operands: Sequence[Any], blocks: Sequence[Block]) -> list[Any]:
    """The barriers that get an arrival at completion: one in each block."""
    if end is None:
        return []
    barriers, region = end.of(agent, operands), end.region(operands)
    return [(in_block(agent, barriers, block, end.eqn).one(region), 1) for block in blocks]


def _track(thread: Thread, operation: Operation, told: bool) -> None:
    """Remember an operation whose completion no barrier tells of; what tells of a later one tells of it, too."""
    products, warp = (thread.parent or thread).products, thread.warp or 0
    if told:
        products.pop(warp, None)
    else:
        products.setdefault(warp, []).append(operation)
