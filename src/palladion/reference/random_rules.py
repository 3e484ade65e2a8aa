"""The reference interpreter's meaning of the TPU's random generator, and of buffers outside a scope.

The state of the generator is hidden, and goes from program to program. `language/tpu/random.py` says what numbers it
gives.
"""

from __future__ import annotations

from jax import lax

from palladion.language.tpu import allocation, random
from palladion.reference.evaluate import HIDDEN, RULES, Cell, Evaluator, uninitialized

HIDDEN[random.RandomEffect] = lambda: random.mix([0])


@RULES.rule(random.prng_seed_p)
def _prng_seed(ev: Evaluator, eqn, *seeds):
    ev.hidden[random.RandomEffect].value = random.mix(seeds)
    return []


@RULES.rule(random.prng_random_bits_p)
def _prng_random_bits(ev: Evaluator, eqn):
    cell = ev.hidden[random.RandomEffect]
    bits, cell.value = random.random_bits(cell.value, eqn.params["shape"])
    return lax.bitcast_convert_type(bits, eqn.outvars[0].aval.dtype)


@RULES.rule(allocation.allocate_p)
def _allocate(ev: Evaluator, eqn):
    what = eqn.params["what"]
    return Cell(uninitialized(what.shape, what.dtype), what.label)
