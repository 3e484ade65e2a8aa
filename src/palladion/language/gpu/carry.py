"""What loops and pipelines carry from one step to the next: a pytree, in which Refs stay where they are.

JAX's loops carry values only. Kernels also hand Refs through (an accumulator, say): the same Ref goes in and comes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from palladion import jaxlink, locations
from palladion.errors import kind_of, mistake
from palladion.language.indexing import is_ref


@dataclasses.dataclass(frozen=True)
class Carry:
    """A pytree that a loop carries. Refs in it stay where they are: only the other leaves go round.

    Attributes:
      tree: its structure.
      refs: {number of a leaf: Ref}.
      start: the other leaves.
      owner: what carries it, for messages.
    """

    tree: Any
    refs: dict[int, Any]
    start: list[Any]
    owner: str

    @classmethod
    def of(cls, value: Any, owner: str) -> Carry:
        """The carry that starts with this value; None carries nothing."""
        leaves, tree = jax.tree.flatten(value, is_leaf=is_ref)
        refs = {n: x for n, x in enumerate(leaves) if is_ref(x)}
        return cls(tree, refs, [jnp.asarray(x) for n, x in enumerate(leaves) if n not in refs], owner)

    def value(self, leaves: Sequence[Any]) -> Any:
        """The pytree with these leaves that go round."""
        rest = iter(leaves)
        return jax.tree.unflatten(self.tree, [self.refs.get(n, None) if n in self.refs else next(rest)
                                              for n in range(self.tree.num_leaves)])  # fmt: skip

    def leaves(self, result: Any, body: Callable[..., Any]) -> list[Any]:
        """The leaves that go round of what the body returned.

        Raises:
          TypeError: it has another structure, shapes or dtypes. ValueError: it has another Ref.
        """
        leaves, tree = jax.tree.flatten(result, is_leaf=is_ref)
        where = locations.defined_at(body)
        if tree != self.tree:
            if self.tree.num_leaves == 0:
                headline = f"The body of {self.owner} returns {kind_of(result)}, but nothing is carried."
                raise mistake(ValueError, headline, where=where, hint="give a carry to start with, or return None")
            headline = f"The body of {self.owner} must return a carry like the one it gets, "
            headline += f"not {kind_of(result)}." if tree.num_leaves == 0 else f"{self.tree}, not {tree}."
            raise mistake(TypeError, headline, where=where, hint="return the carry, changed or not")
        found = []
        for n, leaf in enumerate(leaves):
            if n in self.refs:
                if not is_ref(leaf) or _base(leaf) is not _base(self.refs[n]):
                    headline = f"The body of {self.owner} returns another value where its carry has a Ref."
                    raise mistake(ValueError, headline, where=where, hint="return the same Ref: Refs do not change")
                continue
            if is_ref(leaf):
                headline = f"The body of {self.owner} returns a Ref where its carry has a value."
                raise mistake(ValueError, headline, where=where, hint="read it: ref[...]")
            first = self.start[len(found)]
            leaf = jnp.asarray(leaf)
            if leaf.shape != first.shape or (leaf.dtype != first.dtype and not jaxlink.is_weak(leaf)):
                headline = (
                    f"The body of {self.owner} carries {leaf.dtype}{list(leaf.shape)} on, but began with "
                    f"{first.dtype}{list(first.shape)}."
                )
                raise mistake(TypeError, headline, where=where, hint="shapes and dtypes of a carry stay: .astype(…)")
            found.append(lax.convert_element_type(leaf, first.dtype))
        return found


def _base(ref: Any) -> Any:
    while isinstance(ref, jaxlink.TransformedRef):
        ref = ref.ref
    return ref
