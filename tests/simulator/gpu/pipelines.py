"""Random kernels that are right by construction: threads hand items on through queues in SMEM, to a product or to GMEM.

Stage 0 brings items from GMEM (TMA, perhaps multicast to a cluster, or loads and stores by hand), stages between work
on them by hand, and the last one stores them (by hand or by TMA) or multiplies them (wgmma, tcgen05). Between two
stages there is a queue of slots, with a barrier in each direction for each slot. Each synchronisation has a name, so
that a test can leave one out.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import palladion as pl
from palladion import mosaic_gpu as plgpu

ROWS, COLUMNS = 4, 32
SINKS = ("hand", "hand", "tma", "tma", "wgmma", "tcgen05")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A kernel: `slots` of each queue, `workers` of each stage, and how each does its work."""

    source: str
    sink: str
    steps: int
    slots: tuple[int, ...]
    workers: tuple[int, ...]
    copies: int
    pressure: tuple[str, ...]
    delayed: bool
    loop: str
    grid: int
    cluster: int
    multicast: bool
    seed: int

    @property
    def is_product(self) -> bool:
        return self.sink in ("wgmma", "tcgen05")

    @property
    def arch(self) -> str:
        return "sm_100a" if self.sink == "tcgen05" else "sm_90a"


def draw(seed: int) -> Spec:
    """The kernel of a seed."""
    rng = random.Random(seed)
    source, sink = rng.choice(["tma", "tma", "hand"]), rng.choice(SINKS)
    product = sink in ("wgmma", "tcgen05")
    stages = 2 if product else rng.choice([2, 2, 3, 4])
    workers = [rng.choice([1, 2]) for _ in range(stages)]
    if source == "tma":
        workers[0] = 1
    if sink == "tcgen05":
        workers[-1] = 1
    cluster = rng.choice([1, 1, 2, 4])
    delayed = rng.random() < 0.5 and sink in ("wgmma", "tma")
    slots = [rng.choice([1, 2, 3]) for _ in range(stages - 1)]
    if delayed:
        slots[-1] = max(slots[-1], 2)
    return Spec(
        source=source,
        sink=sink,
        steps=rng.choice([1, 2, 3, 5, 7]),
        slots=tuple(slots),
        workers=tuple(workers),
        copies=rng.choice([1, 2]) if source == "tma" else 1,
        pressure=tuple(rng.choice(["late", "early", "last"]) for _ in slots),
        delayed=delayed,
        loop=rng.choice(["fori", "python", "while"]),
        grid=rng.choice([1, 1, 2, 3]),
        cluster=cluster,
        multicast=source == "tma" and cluster > 1 and rng.random() < 0.6,
        seed=seed,
    )


class Kernel:
    """A kernel of a specification, with the synchronisation named `without` left out.

    Attributes: names: of all synchronisation operations, known after the first run.
    """

    def __init__(self, spec: Spec, without: str | None = None) -> None:
        self.spec, self.without, self.names = spec, without, dict[str, None]()
        product = spec.is_product
        m = 128 if spec.sink == "tcgen05" else 64 * spec.workers[-1]
        self.shapes = [(m, 64), (64, 64)] if product else [(ROWS, COLUMNS)]
        self.dtype = jnp.float16 if product else jnp.float32
        outer = spec.grid if spec.multicast else spec.grid * spec.cluster
        numbers = np.random.default_rng(spec.seed).integers
        self.inputs = [jnp.asarray(numbers(-2, 3, (outer, spec.steps, *s)), self.dtype) for s in self.shapes]

    # --- what the kernel must give --------------------------------------------------------------------------------
    def expected(self) -> np.ndarray:
        spec = self.spec
        items = [np.asarray(x, np.float64) for x in self.inputs]
        if spec.multicast:
            items = [np.repeat(x, spec.cluster, axis=0) for x in items]
        if spec.is_product:
            return np.einsum("bsmk,bskn->bmn", *items)
        (value,) = items
        for stage in range(len(spec.workers)):
            value = value * 2 + stage if self._computes(stage) else value
        return value

    def _computes(self, stage: int) -> bool:
        """Whether a stage has its items in registers."""
        last = len(self.spec.workers) - 1
        return self.spec.source == "hand" if stage == 0 else stage < last or self.spec.sink == "hand"

    # --- running it -----------------------------------------------------------------------------------------------
    def __call__(self, **params: Any) -> np.ndarray:
        spec, out = self.spec, self.expected()
        threads = sum(spec.workers)
        clusters = dict(cluster=(spec.cluster,), cluster_names=("c",)) if spec.cluster > 1 else {}
        call = plgpu.kernel(
            self._body,
            out_type=jax.ShapeDtypeStruct(out.shape, jnp.float32),
            scratch_types=self._scratch(),
            grid=(spec.grid,),
            grid_names=("g",),
            num_threads=threads,
            thread_name="t",
            interpret=plgpu.InterpretGPUParams(**{"detect_races": True, "arch": spec.arch, **params}),
            **clusters,
        )
        return np.asarray(call(*self.inputs))

    def _scratch(self) -> dict[str, Any]:
        spec, queues = self.spec, []
        transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)) if spec.is_product else ()
        for k, slots in enumerate(spec.slots):
            last = k == len(spec.slots) - 1
            buffers = [plgpu.SMEM((slots, *s), self.dtype, transforms=transforms) for s in self.shapes]
            produced = len(self.shapes) * spec.copies if k == 0 and spec.source == "tma" else spec.workers[k]
            ordered = last and spec.sink == "tcgen05"
            full = plgpu.Barrier(num_arrivals=produced, num_barriers=slots)
            if k == 0 and spec.multicast:
                empty: Any = plgpu.ClusterBarrier(collective_axes=("c",), num_arrivals=spec.workers[1],
                                                  num_barriers=slots, orders_tensor_core=ordered)  # fmt: skip
            else:
                empty = plgpu.Barrier(num_arrivals=spec.workers[k + 1], num_barriers=slots, orders_tensor_core=ordered)
            queues.append((buffers, full, empty))
        more = {}
        if spec.sink == "tcgen05":
            more = dict(acc=plgpu.TMEM((128, 64), jnp.float32), done=plgpu.Barrier(orders_tensor_core=True))
        return dict(queues=queues, **more)

    def _sync(self, name: str, operation: Callable[..., Any], *args: Any, **params: Any) -> None:
        self.names[name] = None
        if name != self.without:
            operation(*args, **params)

    def _body(self, *refs: Any, queues: Any, acc: Any = None, done: Any = None) -> None:
        spec = self.spec
        inputs, output = refs[:-1], refs[-1]
        block = lax.axis_index("g")
        whole = block * spec.cluster + lax.axis_index("c") if spec.cluster > 1 else block
        mine = [x.at[block if spec.multicast else whole] for x in inputs]
        thread = 0
        for stage, workers in enumerate(spec.workers):
            for worker in range(workers):
                run = lambda s=stage, w=worker: self._stage(s, w, mine, output.at[whole], queues, acc, done)
                pl.when(lax.axis_index("t") == thread)(run)
                thread += 1

    def _loop(self, name: str, body: Callable[[Any, str], None]) -> None:
        """`body(i, name)` for each step; unrolled, each step has names of its own."""
        steps = self.spec.steps
        if self.spec.loop == "python":
            for i in range(steps):
                body(i, f"{name} {i}")
        elif self.spec.loop == "fori":
            lax.fori_loop(0, steps, lambda i, _: body(i, name), None)
        else:
            lax.while_loop(lambda i: i < steps, lambda i: (body(i, name), i + 1)[1], jnp.int32(0))

    def _if(self, condition: Any, then: Callable[[], Any]) -> None:
        if isinstance(condition, (bool, np.bool_)):
            if condition:
                then()
        else:
            pl.when(condition)(then)

    # --- queues ---------------------------------------------------------------------------------------------------
    def _await_empty(self, k: int, queue: Any, i: Any, name: str) -> None:
        _, _, empty = queue
        slots, early = self.spec.slots[k], self.spec.pressure[k] == "early"
        wait = lambda: self._sync(f"{name}: wait empty", plgpu.barrier_wait, empty.at[i % slots])
        self._if(True if early else i >= slots, wait)

    def _rest(self, k: int, queue: Any, name: str) -> None:
        """As many waits as completions."""
        if self.spec.pressure[k] == "late":
            for i in range(max(self.spec.steps - self.spec.slots[k], 0), self.spec.steps):
                self._sync(f"{name}: last wait {i}", plgpu.barrier_wait, queue[2].at[i % self.spec.slots[k]])

    def _begin(self, k: int, queue: Any, name: str) -> None:
        if self.spec.pressure[k] == "early":
            for i in range(min(self.spec.steps, self.spec.slots[k])):
                self._sync(f"{name}: first arrival {i}", plgpu.barrier_arrive, queue[2].at[i])

    def _is_released(self, k: int, i: Any) -> Any:
        return True if self.spec.pressure[k] == "late" else i + self.spec.slots[k] < self.spec.steps

    def _release(self, k: int, queue: Any, i: Any, name: str, by_hand: bool) -> None:
        def release():
            if by_hand and k == 0 and self.spec.source == "tma":
                self._sync(f"{name}: commit after reading", plgpu.commit_smem)
            self._sync(f"{name}: arrive empty", plgpu.barrier_arrive, queue[2].at[i % self.spec.slots[k]])

        self._if(self._is_released(k, i), release)

    # --- stages ---------------------------------------------------------------------------------------------------
    def _stage(self, stage: int, worker: int, mine: Any, output: Any, queues: Any, acc: Any, done: Any) -> None:
        last = len(self.spec.workers) - 1
        name = f"stage {stage} worker {worker}"
        if stage:
            self._begin(stage - 1, queues[stage - 1], name)
        if stage == 0 and self.spec.source == "tma":
            self._copy_in(mine, queues[0], name)
        elif stage < last:
            self._work(stage, worker, mine, queues, name)
        elif self.spec.sink == "wgmma":
            self._wgmma(worker, output, queues[-1], name)
        elif self.spec.sink == "tcgen05":
            self._tcgen05(output, queues[-1], acc, done, name)
        else:
            self._store(worker, output, queues[-1], name)
        if stage < last:
            self._rest(stage, queues[stage], name)

    def _copy_in(self, mine: Any, queue: Any, name: str) -> None:
        buffers, full, _ = queue
        axes = dict(collective_axes="c") if self.spec.multicast else {}

        def step(i: Any, name: str) -> None:
            slot = i % self.spec.slots[0]
            self._await_empty(0, queue, i, name)
            for x, buffer in zip(mine, buffers):
                rows = buffer.shape[1] // self.spec.copies
                for part in range(self.spec.copies):
                    where = pl.ds(part * rows, rows)
                    plgpu.copy_gmem_to_smem(x.at[i, where], buffer.at[slot, where], full.at[slot], **axes)

        self._loop(name, step)

    def _work(self, stage: int, worker: int, mine: Any, queues: Any, name: str) -> None:
        spec = self.spec
        after, fenced = queues[stage], stage == len(spec.slots) - 1 and spec.sink != "hand"

        def step(i: Any, name: str) -> None:
            values, slot = [], i % spec.slots[stage]
            if stage:
                before = queues[stage - 1]
                self._sync(f"{name}: wait full", plgpu.barrier_wait, before[1].at[i % spec.slots[stage - 1]])
                values = [b[i % spec.slots[stage - 1], self._part(b, stage, worker)] for b in before[0]]
                self._release(stage - 1, before, i, name, by_hand=True)
            else:
                values = [x[i, self._part(b, stage, worker)] for x, b in zip(mine, after[0])]
            self._await_empty(stage, after, i, name)
            for value, buffer in zip(values, after[0]):
                made = value if spec.is_product else value * 2 + stage
                buffer[slot, self._part(buffer, stage, worker)] = made
            if fenced:
                self._sync(f"{name}: commit after writing", plgpu.commit_smem)
            self._sync(f"{name}: arrive full", plgpu.barrier_arrive, after[1].at[slot])

        self._loop(name, step)

    def _part(self, buffer: Any, stage: int, worker: int) -> Any:
        rows = buffer.shape[1] // self.spec.workers[stage]
        return pl.ds(worker * rows, rows)

    def _store(self, worker: int, output: Any, queue: Any, name: str) -> None:
        spec, (buffers, full, _) = self.spec, queue
        k, stage, by_hand = len(spec.slots) - 1, len(spec.workers) - 1, spec.sink == "hand"
        where = self._part(buffers[0], stage, worker)

        def step(i: Any, name: str) -> None:
            slot = i % spec.slots[k]
            self._sync(f"{name}: wait full", plgpu.barrier_wait, full.at[slot])
            if by_hand:
                output[i, where] = buffers[0][slot, where] * 2 + stage
                self._release(k, queue, i, name, by_hand=True)
                return
            plgpu.copy_smem_to_gmem(buffers[0].at[slot, where], output.at[i, where])
            kept = 1 if spec.delayed else 0
            self._sync(f"{name}: wait store", plgpu.wait_smem_to_gmem, kept, wait_read_only=True)
            if not spec.delayed:
                self._release(k, queue, i, name, by_hand=False)
            else:
                self._if(i > 0, lambda: self._release(k, queue, i - 1, name, by_hand=False))

        self._loop(name, step)
        if not by_hand:
            self._sync(f"{name}: wait for all stores", plgpu.wait_smem_to_gmem, 0)
            if spec.delayed:
                self._release(k, queue, spec.steps - 1, f"{name} end", by_hand=False)

    def _wgmma(self, worker: int, output: Any, queue: Any, name: str) -> None:
        spec, ((a, b), full, _) = self.spec, queue
        where = pl.ds(worker * 64, 64)

        def scope(acc: Any) -> Any:
            def step(i: Any, name: str) -> None:
                slot = i % spec.slots[0]
                self._sync(f"{name}: wait full", plgpu.barrier_wait, full.at[slot])
                plgpu.wgmma(acc, a.at[slot, where], b.at[slot])
                if not spec.delayed:
                    self._sync(f"{name}: wait wgmma", plgpu.wgmma_wait, 0)
                    self._release(0, queue, i, name, by_hand=False)
                else:
                    self._if(i > 0, lambda: self._release(0, queue, i - 1, name, by_hand=False))

            self._loop(name, step)
            value = acc[...]
            if spec.delayed:
                self._release(0, queue, spec.steps - 1, f"{name} end", by_hand=False)
            return value

        output[where] = pl.run_scoped(scope, plgpu.ACC((64, 64), jnp.float32))

    def _tcgen05(self, output: Any, queue: Any, acc: Any, done: Any, name: str) -> None:
        spec, ((a, b), full, empty) = self.spec, queue

        def step(i: Any, name: str) -> None:
            slot = i % spec.slots[0]
            self._sync(f"{name}: wait full", plgpu.barrier_wait, full.at[slot])
            plgpu.tcgen05_mma(acc, a.at[slot], b.at[slot], accumulate=i > 0)
            if spec.multicast:  # the tensor core arrives on its own block's barriers only
                self._sync(f"{name}: commit step", plgpu.tcgen05_commit_arrive, done)
                self._sync(f"{name}: wait step", plgpu.barrier_wait, done)
                self._release(0, queue, i, name, by_hand=False)
                return
            arrive = lambda: self._sync(f"{name}: arrive empty", plgpu.tcgen05_commit_arrive, empty.at[slot])
            self._if(self._is_released(0, i), arrive)

        self._loop(name, step)
        self._sync(f"{name}: commit", plgpu.tcgen05_commit_arrive, done)
        self._sync(f"{name}: wait product", plgpu.barrier_wait, done)
        output[...] = plgpu.async_load_tmem(acc)
        self._sync(f"{name}: wait load", plgpu.wait_load_tmem)
