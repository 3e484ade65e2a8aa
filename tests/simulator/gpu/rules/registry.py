"""Rules of the reference as pairs of programs: one that breaks the rule, and a near twin that keeps it.

A rule is a function of the way in which its program is written. It gives a `Program`; what its broken ways must be
found as, and that its good ways are silent and right, `test_rules_of_the_reference.py` checks under each schedule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from palladion import mosaic_gpu as plgpu
from simulator.gpu.calls import params


@dataclasses.dataclass
class Program:
    """A kernel and what it gives.

    Attributes:
      body: body(*operands, *results, *scratch). expected: of each result, or None: nothing is compared.
      given: operands. scratch: types of scratch. mesh: grid, cluster and threads, as `plgpu.kernel` takes them.
      interpret: further parameters of the simulated GPU. devices: how many, along the axis "d".
    """

    body: Callable[..., None]
    expected: Sequence[np.ndarray] | None
    given: Sequence[Any] = ()
    scratch: Any = ()
    mesh: dict[str, Any] = dataclasses.field(default_factory=dict)
    interpret: dict[str, Any] = dataclasses.field(default_factory=dict)
    out: Sequence[Any] = ()
    devices: int = 1

    def call(self, schedule: Any) -> list[np.ndarray]:
        """Run it."""
        out = list(self.out) or [jax.ShapeDtypeStruct(e.shape, e.dtype) for e in self.expected or ()]
        kernel = plgpu.kernel(
            self.body, out_shape=out, scratch_shapes=self.scratch,
            interpret=params(schedule=schedule, **self.interpret), **self.mesh,
        )  # fmt: skip
        if self.devices > 1:
            mesh = jax.make_mesh((self.devices,), ("d",), devices=jax.devices()[: self.devices])
            spec = jax.sharding.PartitionSpec("d")
            kernel = jax.jit(jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
            given = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x in self.given]
            return [np.asarray(x) for x in kernel(*given)]
        return [np.asarray(x) for x in kernel(*self.given)]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule.

    Attributes:
      name; make: the program of one way of writing it. kinds: of finding that a broken way may be; errors: or the
      exceptions. words: in the message. bad, good: ways. lines: how many places of the program the message names.
      warns: whether it is a warning.
    """

    name: str
    make: Callable[[Any], Program]
    kinds: tuple[str, ...]
    words: str
    bad: tuple[Any, ...]
    good: tuple[Any, ...]
    lines: int
    warns: bool
    error: Any


RULES: dict[str, Rule] = {}


def rule(
    kinds: str, words: str = "", *, bad: Any = (False,), good: Any = (True,), lines: int = 1, warns: bool = False,
    error: Any = None,
) -> Any:  # fmt: skip
    """Register a rule: `kinds` separated by spaces; `error`: an exception instead of a finding."""

    def register(make: Callable[[Any], Program]) -> Callable[[Any], Program]:
        name = make.__name__
        assert name not in RULES, name
        RULES[name] = Rule(name, make, tuple(kinds.split()), words, tuple(bad), tuple(good), lines, warns, error)
        return make

    return register


def struct(shape: Sequence[int], dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    """A result of this shape."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
