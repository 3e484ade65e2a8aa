"""Buffers that live from where they are made to the end of the kernel, for pipelines that are prefetched into them.

Equation:

    allocate  no operands    params: what (an abstract Ref)    gives a Ref of this core, not initialised
"""

from __future__ import annotations

from typing import Any

from palladion import jaxlink
from palladion.language import frames
from palladion.language.refs import KernelRef
from palladion.rules import only_on

allocate_p = jaxlink.Primitive("allocate")
allocate_p.ref_allocating = True  # to JAX: a Ref that is no argument of the kernel
allocate_p.def_effectful_abstract_eval(lambda *, what: (what, set()))

only_on("the simulated TPU", allocate_p)


def allocate(what: Any) -> Any:
    """A Ref of a buffer type, such as `pltpu.VMEM((8, 128), jnp.float32)`; every call of this gives another.

    Raises:
      ValueError: outside a kernel.
    """
    frames.required("pltpu.emit_pipeline_with_async_prefetch")
    ref = what.get_ref_aval()
    return allocate_p.bind(what=KernelRef(ref.inner_aval, ref.memory_space, label=what.label or "a buffer"))
