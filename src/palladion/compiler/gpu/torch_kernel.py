"""`plgpu.as_torch_kernel(f)`: a kernel call, made with PyTorch tensors.

    add = plgpu.as_torch_kernel(pl.pallas_call(add_kernel, out_shape=jax.ShapeDtypeStruct([128], jnp.int32)))
    z = add(x, y)                    # x, y: torch tensors; z: a new one, on their device

On a CUDA device the call is compiled once for its shapes and dtypes, and launched on PyTorch's current stream, with
nothing copied and nothing waited for: all memory comes from PyTorch's allocator, which knows the stream. On the CPU
the native compiler runs it (compiler/cpu). A call that says `interpret=` (or stands under
`plgpu.force_gpu_interpret_mode`) runs as it says, wherever its tensors lie: `interpret=plgpu.EmulateParams()` runs the
code that a GPU would get.

Reference: "Calling kernels from PyTorch" of the Pallas Mosaic GPU reference. What the tensors are to JAX, and the one
call of a function: torch_call.py. PyTorch is imported when a kernel is called.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from palladion import config, jaxlink
from palladion.compiler.gpu import torch_call
from palladion.compiler.gpu.torch_call import TorchCall
from palladion.errors import explain

ALIGNMENT = 16  # bytes, of an operand: what a TMA copy and the widest load need


def as_torch_kernel(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that makes one kernel call callable with PyTorch tensors.

    Arguments:
      fn: a function of arrays, or of pytrees of them, with exactly one kernel call (`pl.pallas_call`, `plgpu.kernel`)
        and no other JAX operation, under `jit` too; or what such a function returns.

    Returns:
      a function of tensors in place of arrays, all on one device. It returns new tensors on that device, in the pytree
      that `fn` returns. A tensor that is not contiguous, or not aligned to 16 bytes, is copied first; an input that an
      output is aliased to keeps its values. There are no gradients through it.

    Raises, when the result is called:
      ModuleNotFoundError: PyTorch is not installed.
      TypeError: an argument is not a tensor, has a dtype that JAX lacks, or requires a gradient.
      ValueError: the tensors lie on several devices; `fn` does more, or less, than one kernel call.
      DriverError: of CUDA. Those of the compiler.

    Example:
      out = plgpu.as_torch_kernel(add_kernel)(x, y)
    """
    calls: dict[Any, TorchCall] = {}

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch = _torch()
        tensors, tree = jax.tree.flatten((args, kwargs))
        torch_call.check(torch, tensors, (args, kwargs))
        device = tensors[0].device if tensors else torch.empty(0).device
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        key = tree, shapes, config.get("interpret"), jaxlink.trace_context()
        found = calls.get(key)
        if found is None:
            found = calls[key] = torch_call.find(fn, tree, [torch_call.struct(t) for t in tensors])
        tensors = [_plain(t) for t in tensors]
        operands = [tensors[o] if isinstance(o, int) else _constant(torch, o, device) for o in found.operands]
        run = _launched if device.type == "cuda" and found.params["interpret"] is False else _through_numpy
        outputs = run(torch, found.params, operands, device)
        given = [outputs[n] if n >= 0 else tensors[-1 - n].clone() for n in found.results]
        return jax.tree.unflatten(found.tree, given)

    return call


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError:
        headline = "A kernel made by plgpu.as_torch_kernel needs PyTorch, which is not installed."
        raise ModuleNotFoundError(explain(headline, hint="pip install torch", name="torch")) from None


def _plain(tensor: Any) -> Any:
    """The tensor as an array that a kernel can address; itself if it is one."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _constant(torch: Any, operand: torch_call.Constant, device: Any) -> Any:
    return torch_call.to_torch(torch, operand.value).to(device)


# --- on the GPU -------------------------------------------------------------------------------------------------------
@functools.cache
def _driver(index: int) -> Any:
    from palladion.compiler.gpu.driver import CudaDriver

    return CudaDriver(index)


@functools.lru_cache(1024)
def _loaded(program: Any, index: int) -> Any:
    """A program's kernel on a device; its module stays."""
    driver = _driver(index)
    return driver.function(driver.load_module(program.cubin), program.generated.name)


def _launched(torch: Any, params: dict[str, Any], operands: Sequence[Any], device: Any) -> list[Any]:
    from palladion.compiler.gpu import launch
    from palladion.compiler.gpu.generate import ARCHS

    index = torch.cuda.current_device() if device.index is None else device.index
    driver = _driver(index)
    if driver.arch not in ARCHS:
        headline = f"The Mosaic GPU compiler makes code for {' and '.join(ARCHS)}, and {device} is {driver.arch[:-1]}."
        raise ValueError(explain(headline, hint="a Hopper (H100, H200) or Blackwell (B200) GPU; or interpret="))
    program = launch.prepare(params, driver.arch)
    made = program.generated
    outputs = []
    for k, (shape, dtype) in enumerate(program.outputs):
        source = program.aliases.get(program.first_output + k)
        kind = torch_call.torch_dtype(torch, dtype)
        empty = torch.empty(shape, dtype=kind, device=device)
        outputs.append(empty if source is None else empty.copy_(operands[source]))
    spaces = [
        (torch.zeros if space.zeroed else torch.empty)(max(space.size, 1), dtype=torch.uint8, device=device)
        for space in made.workspaces
    ]
    if all(made.grid):
        addresses = [t.data_ptr() for t in (*operands, *outputs, *spaces)]
        stream = torch.cuda.current_stream(device).cuda_stream
        launch.start(made, driver, _loaded(program, index), addresses, stream)
    return outputs


# --- elsewhere --------------------------------------------------------------------------------------------------------
def _through_numpy(torch: Any, params: dict[str, Any], operands: Sequence[Any], device: Any) -> list[Any]:
    """Run a call as its `interpret` says, or as native CPU code."""
    from palladion.language.cpu.params import CompilerParams
    from palladion.language.primitive import pallas_call_p

    if params["interpret"] is False and not params["compiler_params"].__class__.__module__.startswith(
        "palladion.language.cpu."
    ):
        if params["mesh"] is not None:
            headline = f"{params['name']} is written for the threads of a GPU, and its tensors lie on the CPU."
            hint = "move them to a CUDA device, or run its code without one: interpret=plgpu.EmulateParams()"
            raise ValueError(explain(headline, hint=hint))
        params = {**params, "compiler_params": CompilerParams()}
    arrays = [torch_call.to_numpy(torch, t) for t in operands]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        results = pallas_call_p.bind(*map(jax.numpy.asarray, arrays), **params)
    return [torch_call.to_torch(torch, np.asarray(x)).to(device) for x in results]


__all__ = ["as_torch_kernel"]
