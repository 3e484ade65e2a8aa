"""Memory spaces, scratch shapes, and the Refs a kernel reads and writes.

A kernel's parameters are JAX's own abstract refs (`jax.ref`), so that control flow, `jit`, `vmap` and jaxpr
printing know them. `KernelRef` refines them with what a kernel author expects of an array: NumPy indexing (new
axes, masks, negative and out-of-range integers), and errors that name the operand. Three mistakes that JAX's refs
let pass are refused here, at the user's line: a static integer index past the end, a write of another shape or
dtype, and a boolean mask taken for integers. Views (`.at[…]`, `.reshape`, `.bitcast`, `.T`) are `RefView`s, which
add the same to JAX's `TransformedRef`; `indexing.py` and `indices.py` hold the rules.

Sources: tutorial sections 2.1 and 7; `jax.ref` documentation; NumPy's indexing rules.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import count_of, kind_of, mistake
from palladion.language import indexing


class MemorySpace(enum.Enum):
    """Memory spaces that mean the same on every target.

    `ANY` leaves an operand where it is (no block is copied); `DEFAULT` is the target's choice for blocks. `ERROR`,
    `INDEX` and `KEY` mark operands with a special role (error state, index arrays, PRNG keys).
    A member is callable: `ANY((8, 128), jnp.float32)` is a scratch shape.
    """

    DEFAULT = "default"
    ANY = "any"
    KEY = "key"
    INDEX = "index"
    ERROR = "error"

    def __str__(self) -> str:  # a jaxpr shows a ref as Ref<default>{f32[8]}
        return self.value

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> MemoryRef:
        return memory_ref(self, shape, dtype)


@dataclasses.dataclass(frozen=True)
class MemoryRef:
    """The type of a buffer in a memory space: a scratch shape, or an output that lives there.

    Arguments:
      inner_aval: the array type (shape and dtype).
      memory_space: a member of a dialect's `MemorySpace`.
      label: how messages call a scoped buffer of this type; None: by its number.
    """

    inner_aval: Any
    memory_space: Any
    label: str | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inner_aval.shape

    @property
    def dtype(self) -> Any:
        return self.inner_aval.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def get_ref_aval(self, label: str = "scratch") -> KernelRef:
        """The abstract Ref that a kernel sees."""
        return KernelRef(self.inner_aval, self.memory_space, label=label)

    def __str__(self) -> str:
        return f"MemoryRef<{self.memory_space}>{{{self.inner_aval.str_short()}}}"


def memory_ref(memory_space: Any, shape: Any, dtype: Any) -> MemoryRef:
    """A buffer type: what calling a memory space does, `pltpu.VMEM((8, 128), jnp.float32)`.

    Arguments:
      memory_space: a member of a dialect's `MemorySpace`.
      shape: ints, one for each dimension.
      dtype: anything that `jnp.dtype` takes.

    Raises:
      TypeError: a dimension is not an integer. ValueError: a dimension is negative.
    """
    shape = (shape,) if isinstance(shape, (int, np.integer)) else shape
    try:
        dims = tuple(operator.index(d) for d in shape)
    except TypeError as error:
        raise mistake(
            TypeError,
            f"The shape of a {memory_space} buffer must be integers, not {kind_of(shape)}.",
            hint="sizes are fixed when the kernel is built: use Python ints; // gives one, / does not",
        ) from error
    if any(d < 0 for d in dims):
        raise mistake(
            ValueError,
            f"The shape of a {memory_space} buffer cannot be negative, but it is {dims}.",
            hint="give the number of elements along each dimension",
        )
    return MemoryRef(jaxlink.ShapedArray(dims, checked_dtype(dtype, f"a {memory_space} buffer")), memory_space)


def checked_dtype(dtype: Any, what: str) -> Any:
    """`dtype` as JAX holds it; refuses 64-bit types while x64 is off, which JAX would quietly narrow."""
    try:
        if jaxlink.is_opaque(dtype):
            return getattr(dtype, "dtype", dtype)  # `pltpu.dma_semaphore` stands for its one dtype
        wanted = jnp.dtype(dtype)
    except TypeError:
        wanted = None
    if wanted is None or not (wanted == np.bool_ or jnp.issubdtype(wanted, np.number)):
        raise mistake(
            TypeError, f"The dtype of {what} is {kind_of(dtype)}, which is not one.", hint="jnp.float32, jnp.int32 …"
        )
    held = _canonical(wanted)
    if held != wanted:
        raise mistake(
            ValueError,
            f"The dtype of {what} is {wanted}, but 64-bit types are off in JAX.",
            hint=f"ask for {held}, or switch them on: `with jax.enable_x64(True):`",
        )
    return wanted


def _canonical(dtype: Any) -> Any:
    return np.dtype(jaxlink.canonicalize_dtype(dtype))


class KernelRef(jaxlink.AbstractRef):
    """The type of a kernel's parameter: array type, memory space, and a label for messages."""

    __slots__ = ("label",)

    def __init__(self, inner_aval: Any, memory_space: Any = None, kind: Any = None, *, label: str = "a Ref"):
        super().__init__(inner_aval, memory_space, kind)
        self.label = label

    def update(self, inner_aval: Any = None, memory_space: Any = None, kind: Any = None) -> KernelRef:
        return KernelRef(
            self.inner_aval if inner_aval is None else inner_aval,
            self.memory_space if memory_space is None else memory_space,
            self.kind if kind is None else kind,
            label=self.label,
        )

    def to_tangent_aval(self) -> KernelRef:
        return self.update(inner_aval=self.inner_aval.to_tangent_aval())

    def to_ct_aval(self) -> KernelRef:
        return self.update(inner_aval=self.inner_aval.to_ct_aval())

    @jaxlink.aval_property
    def at(self) -> ViewIndexer:
        return ViewIndexer(self)

    @jaxlink.aval_property
    def T(self) -> RefView:
        return RefView(self, ()).T

    @jaxlink.aval_method
    def transpose(self, *permutation: Any) -> RefView:
        return RefView(self, ()).transpose(*permutation)

    @jaxlink.aval_method
    def reshape(self, *shape: Any) -> RefView:
        return RefView(self, ()).reshape(*shape)

    @jaxlink.aval_method
    def bitcast(self, dtype: Any) -> RefView:
        return RefView(self, ()).bitcast(dtype)

    @jaxlink.aval_method
    def get(self, idx: Any = ()) -> Any:
        return indexing.read(self, idx)

    @jaxlink.aval_method
    def set(self, value: Any, idx: Any = ()) -> None:
        indexing.write(self, idx, value)

    @jaxlink.aval_method
    def swap(self, value: Any, idx: Any = ()) -> Any:
        return indexing.swap(self, idx, value)

    @jaxlink.aval_method
    def addupdate(self, value: Any, idx: Any = ()) -> None:
        indexing.accumulate(self, idx, value)

    def _getitem(self, tracer: Any, idx: Any) -> Any:
        return indexing.read(tracer, idx)

    def _setitem(self, tracer: Any, idx: Any, value: Any) -> None:
        indexing.write(tracer, idx, value)


jaxlink.register_ref_type(KernelRef)


class RefView(jaxlink.TransformedRef):
    """A part of a Ref, or another shape of it: `ref.at[1:3]`, `ref.reshape(8, 2)`, `ref.T`. Views chain."""

    @property
    def at(self) -> ViewIndexer:
        return ViewIndexer(self)

    @property
    def T(self) -> RefView:
        return self.transpose(tuple(reversed(range(self.ndim))))

    @property
    def label(self) -> str:
        return indexing.label_of(self)

    def transpose(self, *permutation: Any) -> RefView:
        axes = permutation[0] if len(permutation) == 1 and not _is_int(permutation[0]) else permutation
        axes = () if axes is None or (isinstance(axes, (tuple, list)) and list(axes) == [None]) else axes
        try:
            axes = tuple(operator.index(a) + self.ndim * (a < 0) for a in axes) or tuple(reversed(range(self.ndim)))
        except TypeError:
            axes = ()
        if sorted(axes) != list(range(self.ndim)):
            raise mistake(
                ValueError,
                f"{self.label} has {count_of(self.ndim, 'dimension')}; {permutation} is not an order of them.",
                hint="name each dimension once: transpose(1, 0), or .T",
            )
        return RefView(self.ref, (*self.transforms, jaxlink.TransposeTransform(axes)))

    def reshape(self, *shape: Any) -> RefView:
        dims = shape[0] if len(shape) == 1 and not _is_int(shape[0]) else shape
        try:
            dims = tuple(operator.index(d) for d in dims)
        except TypeError:
            raise mistake(
                TypeError,
                f"A Ref is reshaped to Python integers, not to {kind_of(shape[0] if len(shape) == 1 else shape)}.",
                hint="ref.reshape(8, 16), or ref.reshape(-1)",
            ) from None
        dims = indexing.full_shape(dims, self)
        return RefView(self.ref, (*self.transforms, jaxlink.ReshapeTransform(dims)))

    def bitcast(self, dtype: Any) -> RefView:
        dtype = jnp.dtype(dtype)
        shape = tuple(self.shape)
        indexing.check_bitcast(self, dtype)
        cast: tuple = (jaxlink.BitcastTransform(dtype),)
        if len(shape) < 2:  # JAX's transform wants two dimensions
            cast = (jaxlink.ReshapeTransform((1, *shape) if shape else (1, 1)), *cast)
            cast = (*cast, jaxlink.ReshapeTransform(shape))
        return RefView(self.ref, (*self.transforms, *cast))

    def get(self, idx: Any = ()) -> Any:
        return indexing.read(self, idx)

    def set(self, value: Any, idx: Any = ()) -> None:
        indexing.write(self, idx, value)

    def swap(self, value: Any, idx: Any = ()) -> Any:
        return indexing.swap(self, idx, value)

    def addupdate(self, value: Any, idx: Any = ()) -> None:
        indexing.accumulate(self, idx, value)

    def __getitem__(self, idx: Any) -> Any:
        return indexing.read(self, idx)

    def __setitem__(self, idx: Any, value: Any) -> None:
        indexing.write(self, idx, value)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-dimensional Ref view")
        return int(self.shape[0])


jaxlink.register_pytree_like_ref_view(RefView)


# --- Refs where values are meant --------------------------------------------------------------------------------------
def not_a_value(ref: Any, verb: str, *, hint: str = "read it first: x_ref[...]", kind: type = TypeError) -> Exception:
    """The mistake of using a Ref where its value is meant: `x_ref + 1`, `x_ref.sum()`."""
    return mistake(kind, f"Cannot {verb} {indexing.label_of(ref)}: a Ref is not a value.", hint=hint)


# What arrays can do and Refs cannot. A traced Ref asks its type for `_add`; a view is asked for `__add__` itself.
_BINARY = dict(
    add="+", sub="-", mul="*", truediv="/", floordiv="//", mod="%", pow="**", matmul="@", lshift="<<", rshift=">>",
    lt="<", le="<=", gt=">", ge=">=",
    **{"and": "&", "or": "|", "xor": "^"},
)  # fmt: skip
_SIGNS = {**_BINARY, **{f"r{name}": sign for name, sign in _BINARY.items()}, "neg": "-", "invert": "~", "abs": "abs"}
_METHODS = (
    "all any argmax argmin argsort astype clip conj cumprod cumsum dot flatten item max mean min prod ravel repeat "
    "round sort squeeze std sum swapaxes take tolist trace var"
)
_ROWS = "read it first, `for row in x_ref[...]`, or loop over x_ref[i] with pl.loop"


def _raising(verb: str, **details: Any) -> Callable[..., Any]:
    def refuse(ref, *_, **__):
        raise not_a_value(ref, verb, **details)

    return refuse


for _name, _sign in _SIGNS.items():
    _refuse = _raising(f"apply {_sign} to")
    setattr(KernelRef, f"_{_name}", staticmethod(_refuse))
    setattr(RefView, f"__{_name}__", _refuse)
for _name in _METHODS.split():
    _refuse = _raising(f"call .{_name}() of", hint=f"read it first: x_ref[...].{_name}(…)")
    setattr(KernelRef, _name, jaxlink.aval_method(_refuse))
    setattr(RefView, _name, _refuse)
for _name in ("eq", "ne"):  # of views, == compares the objects, as in JAX
    setattr(KernelRef, f"_{_name}", staticmethod(_raising(f"apply {'==' if _name == 'eq' else '!='} to")))
for _class, _name, _refuse in (
    (KernelRef, "_iter", staticmethod(_raising("iterate over", hint=_ROWS))),
    (RefView, "__iter__", _raising("iterate over", hint=_ROWS)),
    (KernelRef, "__jax_array__", jaxlink.aval_method(_raising("compute with"))),  # what jnp.sin(x_ref) asks for
    (RefView, "__jax_array__", _raising("compute with")),
    (RefView, "__array__", _raising("compute with")),  # and np.sin
):
    setattr(_class, _name, _refuse)


class ViewIndexer:
    """What `ref.at` is: indexing it gives a view instead of a value."""

    __slots__ = ("target",)

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getitem__(self, idx: Any) -> RefView:
        indexer = indexing.make_indexer(self.target, idx, "take a view of")
        view = self.target if isinstance(self.target, jaxlink.TransformedRef) else RefView(self.target, ())
        return RefView(view.ref, view.transforms if indexer is None else (*view.transforms, indexer))


def _is_int(x: Any) -> bool:
    return isinstance(x, (int, np.integer))
