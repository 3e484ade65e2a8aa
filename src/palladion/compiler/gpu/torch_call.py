"""What a function called with PyTorch tensors is to JAX: its one kernel call, and its arguments as shapes and dtypes.

Tensors become NumPy arrays, and back, through their bits: NumPy knows bfloat16 and the 8-bit floats from ml_dtypes, but
PyTorch hands over neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from palladion import jaxlink
from palladion.errors import explain, kind_of
from palladion.language.primitive import pallas_call_p
from palladion.locations import location_of


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An operand that is no argument: an array that the function holds."""

    value: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TorchCall:
    """The kernel call of a function, for given shapes.

    Attributes:
      params: of the `pallas_call` equation.
      operands: for each operand, the number of an argument, or a `Constant`.
      results: for each result of the function, the number of the call's output, or -1 - the number of an argument.
      tree: of the results.
    """

    params: dict[str, Any]
    operands: tuple[int | Constant, ...]
    results: tuple[int, ...]
    tree: Any


# --- arguments --------------------------------------------------------------------------------------------------------
def check(torch: Any, leaves: Sequence[Any], given: tuple[Any, Any]) -> None:
    """Refuse arguments that no kernel can be called with.

    Arguments: leaves: of the pytree `given`, a pair (args, kwargs).
    Raises: TypeError, ValueError: naming the argument.
    """
    for k, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                explain(
                    f"A kernel made by plgpu.as_torch_kernel takes tensors, but {name_of(given, k)} is {kind_of(x)}.",
                    hint="torch.as_tensor(…), on the device of the others",
                )
            )
        if x.layout != torch.strided:
            raise TypeError(explain(f"{name_of(given, k)} is a tensor of layout {x.layout}.", hint=".to_dense()"))
        if x.requires_grad and torch.is_grad_enabled():
            raise TypeError(
                explain(
                    f"{name_of(given, k)} requires a gradient, and a kernel called on tensors has none.",
                    hint="call it under torch.no_grad(), on x.detach(), or in a torch.autograd.Function of your own",
                )
            )
        if x.device != leaves[0].device:
            raise ValueError(
                explain(
                    f"{name_of(given, 0)} lies on {leaves[0].device}, and {name_of(given, k)} on {x.device}.",
                    hint="a kernel runs on one device: x.to(device)",
                )
            )
        if x.device.type not in ("cpu", "cuda"):
            headline = f"{name_of(given, k)} lies on {x.device}; kernels run on cuda and cpu devices."
            raise ValueError(explain(headline, hint='x.to("cuda")'))
        _check_dtype(x, given, k)


def _check_dtype(x: Any, given: tuple[Any, Any], k: int) -> None:
    name = str(x.dtype).removeprefix("torch.")
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        headline = f"{name_of(given, k)} holds {x.dtype}, which JAX does not have."
        raise TypeError(explain(headline)) from None
    with_jax = jax.dtypes.canonicalize_dtype(dtype)
    if with_jax != dtype:
        raise TypeError(
            explain(
                f"{name_of(given, k)} holds {name}, and JAX has its 64-bit types turned off.",
                hint=f'x.to(torch.{with_jax}), or jax.config.update("jax_enable_x64", True)',
            )
        )
    if x.is_conj() or x.is_neg():
        raise TypeError(explain(f"{name_of(given, k)} is conjugated or negated lazily.", hint="x.resolve_conj()"))


def name_of(given: tuple[Any, Any], k: int) -> str:
    """The name of the k-th leaf of (args, kwargs), as in `args[0]['w']`."""
    path = jax.tree_util.tree_flatten_with_path(given)[0][k][0]
    return ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])


def struct(tensor: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype of a tensor."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jnp.dtype(str(tensor.dtype).removeprefix("torch.")))


# Equations that run a jaxpr and nothing else, those with rules for derivatives among them.
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


# --- the call ---------------------------------------------------------------------------------------------------------
def find(fn: Callable[..., Any], tree: Any, arguments: Sequence[jax.ShapeDtypeStruct]) -> TorchCall:
    """Trace a function and find its one kernel call.

    Arguments: tree: of (args, kwargs); arguments: its leaves.
    Raises: ValueError: it makes none, or several, or runs other operations.
    """

    def flat(*leaves: Any) -> Any:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fn(*args, **kwargs)

    traced, shape = jax.make_jaxpr(flat, return_shape=True)(*arguments)
    calls: list[tuple[Any, list[Any]]] = []
    results = _walk(traced.jaxpr, [*map(_held, traced.consts), *range(len(arguments))], calls)
    name = getattr(fn, "__name__", type(fn).__name__)
    if len(calls) != 1:
        places = [location_of(eqn) for eqn, _ in calls]
        headline = f"plgpu.as_torch_kernel takes a function with one kernel call; {name} makes {len(calls)}."
        many = "a function for each" if calls else "call what pl.pallas_call or plgpu.kernel returns"
        raise ValueError(explain(headline, where=", ".join(p for p in places if p) or None, hint=many))
    eqn, operands = calls[0]
    numbers = []
    for k, source in enumerate(results):
        if isinstance(source, Constant):
            headline = f"Result {k} of {name} is a constant; plgpu.as_torch_kernel returns what the kernel writes."
            raise ValueError(explain(headline, hint="make it with torch"))
        numbers.append(source.number if isinstance(source, _Output) else -1 - source)
    return TorchCall(eqn.params, tuple(operands), tuple(numbers), jax.tree.structure(shape))


@dataclasses.dataclass(frozen=True)
class _Output:
    number: int


def _held(value: Any) -> Constant:
    return Constant(np.asarray(jnp.asarray(value)))  # a number of Python gets JAX's dtype


def _walk(jaxpr: Any, inputs: Sequence[Any], calls: list[tuple[Any, list[Any]]]) -> list[Any]:
    """Collect kernel calls with their operands; where the results of a jaxpr come from."""
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs))

    def source(atom: Any) -> Any:
        return _held(atom.val) if isinstance(atom, jaxlink.Literal) else known[atom]

    for eqn in jaxpr.eqns:
        operands = [source(v) for v in eqn.invars]
        if eqn.primitive is pallas_call_p:
            if any(isinstance(o, _Output) for o in operands):
                raise _other(eqn, "feeds a kernel's result to another kernel")
            calls.append((eqn, operands))
            outputs: list[Any] = [_Output(k) for k in range(len(eqn.outvars))]
        elif eqn.primitive.name in CALLS:
            inner = next(iter(jaxlink.jaxprs_in_params(eqn.params)))
            outputs = _walk(inner, operands, calls)
        else:
            raise _other(eqn, f"also runs {eqn.primitive}")
        known.update(zip(eqn.outvars, outputs))
    return [source(v) for v in jaxpr.outvars]


def _other(eqn: Any, what: str) -> ValueError:
    headline = f"plgpu.as_torch_kernel takes a function with one kernel call and nothing else; this one {what}."
    hint = "do it with torch, before or after the call; or in the kernel"
    return ValueError(explain(headline, where=location_of(eqn), hint=hint))


# --- tensors and arrays -----------------------------------------------------------------------------------------------
_BITS = {"bfloat16": "int16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e8m0fnu": "uint8"}


def torch_dtype(torch: Any, dtype: Any) -> Any:
    """PyTorch's dtype for JAX's.

    Raises: TypeError: it has none.
    """
    found = getattr(torch, np.dtype(dtype).name, None)
    if not isinstance(found, torch.dtype):
        raise TypeError(explain(f"A result holds {np.dtype(dtype).name}, which PyTorch does not have."))
    return found


def to_numpy(torch: Any, tensor: Any) -> np.ndarray:
    """A tensor's values."""
    name = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach().cpu()
    if name in _BITS:
        return tensor.view(getattr(torch, _BITS[name])).numpy().view(jnp.dtype(name))
    return tensor.numpy()


def to_torch(torch: Any, array: np.ndarray) -> Any:
    """A new tensor on the CPU with an array's values."""
    name, kind = array.dtype.name, torch_dtype(torch, array.dtype)
    array = np.array(array, order="C")
    if name in _BITS:
        return torch.from_numpy(array.view(_BITS[name])).view(kind)
    return torch.from_numpy(array)
