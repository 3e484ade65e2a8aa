"""What both pipelines of the Mosaic GPU dialect share: operands and their blocks, buffers, and what a body does.

An operand in GMEM is copied block by block to and from buffers in SMEM, unless its spec says `memory_space=plgpu.GMEM`;
then, and for one that is in SMEM already, the body gets a view of the block where it is. Blocks over the edge of an
array are copied whole: the copy engine fills what is outside, and drops it on the way back.

Source: tutorial 6.2 and the public "Software Pipelining" page for Mosaic GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language.blocks import BlockSpec, BoundedSlice, Element, NoBlockSpec, Squeezed, block_size
from palladion.language.gpu.atomics import atomic_p
from palladion.language.gpu.block_spec import BlockSpec as GPUBlockSpec
from palladion.language.gpu.copies import copy_gmem_to_smem, copy_smem_to_gmem
from palladion.language.gpu.loops import is_known
from palladion.language.gpu.memory import GMEM, REGS, SMEM, TMEM, TransposeTransform
from palladion.language.gpu.mma import wgmma_p
from palladion.language.gpu.params import OOBFillMode
from palladion.language.gpu.refs import space_of
from palladion.language.indexing import is_ref, label_of
from palladion.language.masked import atomic_update_p, masked_load_p, masked_store_p
from palladion.language.refs import MemorySpace
from palladion.language.tpu.block_copies import BlockWindow

PLAIN = GPUBlockSpec()


# --- operands ---------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand of a pipeline.

    Attributes:
      ref: of the array.
      spec: its BlockSpec, as a plgpu.BlockSpec.
      window: how the array is cut into blocks.
      is_output: whether blocks are written back, rather than fetched.
    """

    ref: Any
    spec: GPUBlockSpec
    window: BlockWindow
    is_output: bool

    @property
    def is_copied(self) -> bool:
        """Whether blocks have buffers in SMEM."""
        return self.spec.memory_space is not GMEM and space_of(self.ref) is not SMEM

    def view(self, point: Sequence[Any]) -> Any:
        """The block at a grid point, where the array is."""
        if self.window.is_all and self.spec.index_map is None:
            return self.ref
        return self.ref.at[self.slices(self.window.index(point))]

    def slices(self, index: Sequence[Any]) -> tuple[Any, ...]:
        """What `.at[…]` takes for a block, from the index map's results.

        Raises:
          IndexError: nothing of the block is in the array, and this is known while tracing.
        """
        parts = []
        for dim, i, extent in zip(self.window.block, index, self.window.shape):
            size = np.int32(block_size(dim))
            if isinstance(dim, Squeezed):
                parts.append(i)
                continue
            start = i - np.int32(dim.padding[0]) if isinstance(dim, Element) else i * size
            if not isinstance(start, jax.Array):
                start = self._inside(int(start), int(size), extent, len(parts))
            parts.append(jaxlink.ds(start, int(size)))
        return tuple(parts)

    def _inside(self, start: int, size: int, extent: int, d: int) -> Any:
        """Where a block begins; an array if it goes beyond its array, which only copies by TMA may do."""
        if 0 <= start <= extent - size:
            return start
        if not -size < start < extent:
            headline = f"The index map of {self.window.label} asks for elements {start} to {start + size - 1} of "
            headline += f"dimension {d}, which has {extent}."
            hint = f"return block numbers, not element offsets: block n begins at element n * {size} (pl.Element takes "
            hint += "offsets); or a smaller grid"
            raise mistake(IndexError, headline, where=self.window.where, hint=hint)
        return jnp.asarray(start, jnp.int32)

    def buffer(self, count: int) -> Any:
        """The type of `count` buffers for blocks."""
        transforms = [
            TransposeTransform((0, *(d + 1 for d in t.permutation))) if isinstance(t, TransposeTransform) else t
            for t in self.spec.transforms
        ]
        made = SMEM((count, *self.window.ref_shape), self.ref.dtype, transforms=transforms)
        return dataclasses.replace(made, label=f"the buffer of {label_of(self.ref)}")

    def fetch(self, point: Sequence[Any], buffer: Any, barrier: Any) -> None:
        """Start to copy the block at a grid point to a buffer; the barrier gets an arrival."""
        mode = None if self.spec.oob_fill_mode is OOBFillMode.ZEROS else self.spec.oob_fill_mode
        axes: Any = self.spec.collective_axes or None
        copy_gmem_to_smem(self.view(point), buffer, barrier, collective_axes=axes, oob_mode=mode)

    def write_back(self, point: Sequence[Any], buffer: Any, condition: Any) -> None:
        """Start to copy a buffer to the block at a grid point, if the condition holds."""
        predicate = None if condition is True else condition
        copy_smem_to_gmem(buffer, self.view(point), predicate, commit_group=False)


def operand(spec: Any, ref: Any, role: str, owner: str, is_output: bool) -> Operand:
    """An operand, checked.

    Arguments:
      spec: what the user gave for it; None: the whole array.
      ref: the Ref, or a view.
      role: "input 0", for messages.
      owner: the function that makes the pipeline.

    Raises:
      TypeError, ValueError: they are not as described, or do not fit each other. NotImplementedError: a block that
        the copy engine cannot move.
    """
    if not is_ref(ref):
        headline = f"The {role} of {owner} is {kind_of(ref)}; it must be a Ref."
        raise mistake(TypeError, headline, hint="pass x_gmem, or x_gmem.at[…] for a part of it")
    label = f"{role} of {owner} ({label_of(ref)})"
    window = BlockWindow.make(spec, ref.shape, label)
    if any(isinstance(dim, BoundedSlice) for dim in window.block):
        headline = f"The block of {label} has a pl.BoundedSlice: a copy has one size."
        raise mistake(NotImplementedError, headline, hint="pl.Element(n) takes offsets; the copy fills what is outside")
    if spec is None or isinstance(spec, NoBlockSpec):
        spec = PLAIN
    elif not isinstance(spec, GPUBlockSpec):
        fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(BlockSpec)}
        spec = GPUBlockSpec(**fields)
    space = spec.memory_space
    if space in (MemorySpace.ANY, MemorySpace.DEFAULT):
        space = GMEM if space is MemorySpace.ANY else None
        spec = dataclasses.replace(spec, memory_space=space)
    if space not in (None, SMEM, GMEM):
        headline = f"The blocks of {label} cannot be in {space}."
        raise mistake(ValueError, headline, hint="memory_space=plgpu.SMEM (the default), or plgpu.GMEM for no copies")
    if space_of(ref) in (TMEM, REGS):
        headline = f"The {label} is in {space_of(ref)}; a pipeline moves blocks between GMEM and SMEM."
        raise mistake(ValueError, headline, hint="pass an operand of the kernel")
    if spec.pipeline_mode is not None:
        headline = f"The {label} has a pipeline_mode, which Mosaic GPU pipelines do not take."
        raise mistake(NotImplementedError, headline, hint="max_concurrent_steps=3: buffers for all operands")
    if is_output and spec.collective_axes:
        raise mistake(ValueError, f"The {label} has collective_axes, which are for inputs: one copy feeds many blocks.")
    return Operand(ref, spec, window, is_output)


def as_specs(specs: Any) -> tuple[Any, ...]:
    """The specs of a pytree of them; None is one."""
    return tuple(jax.tree.leaves(specs, is_leaf=lambda x: x is None or isinstance(x, (BlockSpec, NoBlockSpec))))


def operands_of(in_specs: Sequence[Any], out_specs: Sequence[Any], refs: Sequence[Any], owner: str) -> list[Operand]:
    """All operands, inputs first.

    Raises:
      TypeError: there is another number of Refs than of specs. Also as `operand`.
    """
    if len(refs) != len(in_specs) + len(out_specs):
        ins, outs = count_of(len(in_specs), "input"), count_of(len(out_specs), "output")
        raise mistake(
            TypeError,
            f"The pipeline of {owner} has specs for {ins} and {outs}, but it is called with "
            f"{count_of(len(refs), 'Ref')}.",
            hint="pipeline(*input_refs, *output_refs)",
        )
    inputs = [operand(s, r, f"input {n}", owner, False) for n, (s, r) in enumerate(zip(in_specs, refs))]
    rest = refs[len(in_specs) :]
    return inputs + [operand(s, r, f"output {n}", owner, True) for n, (s, r) in enumerate(zip(out_specs, rest))]


def check_steps(in_specs: Sequence[Any], max_concurrent_steps: Any, owner: str) -> int:
    """`max_concurrent_steps`, checked against the specs' `delay_release`.

    Raises:
      TypeError: it is not an integer. ValueError: it is not positive, or not more than a delay_release.
    """
    n = max_concurrent_steps
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        headline = f"The max_concurrent_steps of {owner} is {kind_of(n)}; it must be a Python integer."
        raise mistake(
            TypeError, headline, hint="max_concurrent_steps=2: how many blocks of an operand are held at once"
        )
    if n < 1:
        raise mistake(ValueError, f"The max_concurrent_steps of {owner} is {n}; it must be positive.", hint="2, say")
    for number, spec in enumerate(in_specs):
        if (delay := getattr(spec, "delay_release", 0)) >= n:
            raise mistake(
                ValueError,
                f"max_concurrent_steps must be greater than delay_release, but in {owner} it is {n} and the "
                f"delay_release of input {number} is {delay}.",
                hint=f"max_concurrent_steps={delay + 1} or more: a block that is kept longer needs one more buffer",
            )
    return int(n)


def buffers_for(max_concurrent_steps: int, steps: Any) -> int:
    """How many buffers an operand gets: no more than there are steps."""
    return max(1, min(max_concurrent_steps, int(steps))) if is_known(steps) else max_concurrent_steps


def collective_axes(operands: Sequence[Operand]) -> tuple[Any, ...]:
    """The axes of a ClusterBarrier over which the blocks that share copies meet; () if none do."""
    axes = {o.spec.collective_axes: None for o in operands if o.is_copied and o.spec.collective_axes}
    return tuple(a[0] if len(a) == 1 else a for a in axes)


# --- the body ---------------------------------------------------------------------------------------------------------
class Facts(NamedTuple):
    """What a body does.

    Attributes:
      by_threads: it reads or writes shared memory by loads and stores of the threads, so that a copy that follows needs
        `commit_smem`.
      has_wgmma: it starts matrix products that may still run after it.
    """

    by_threads: bool = False
    has_wgmma: bool = False


# What the threads do to memory themselves; the other operations leave it to copy engines and tensor cores.
_LOADS_AND_STORES = (
    jaxlink.get_p, jaxlink.swap_p, jaxlink.addupdate_p, masked_load_p, masked_store_p, atomic_update_p, atomic_p,
)  # fmt: skip


def traced(body: Callable[[], Sequence[Any]]) -> tuple[list[Any], Facts]:
    """Trace a body into the kernel.

    Arguments:
      body: a function without parameters that gives a list of values; it closes over Refs and values of the kernel.

    Returns:
      these values, and what the body does.
    """
    jaxpr, _ = jaxlink.trace_to_jaxpr(lambda: list(body()), [], jaxlink.debug_info("pipeline", body, ()))
    jaxpr, consts = jaxlink.convert_consts_to_invars(jaxpr)
    eqns = list(_equations(jaxpr))
    facts = Facts(any(map(_is_by_threads, eqns)), any(eqn.primitive is wgmma_p for eqn in eqns))
    return jaxlink.eval_jaxpr(jaxpr, (), *consts), facts


def _is_by_threads(eqn: Any) -> bool:
    if eqn.primitive not in _LOADS_AND_STORES:
        return False
    return any(space_of(v.aval) is SMEM for v in eqn.invars if isinstance(v.aval, jaxlink.AbstractRef))


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxlink.jaxprs_in_params(eqn.params):
            yield from _equations(getattr(inner, "jaxpr", inner))
