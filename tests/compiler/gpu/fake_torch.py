"""Enough of PyTorch to call kernels with, where PyTorch is not installed: NumPy arrays with a device.

Memory of "cuda:0" is that of an emulated device, so that a pointer that is handed to a launch is one that it can use,
and what the launch writes is what the tensor holds. `module(driver)` makes the package.
"""

import dataclasses
import types
from typing import Any

import jax.numpy as jnp
import numpy as np

NAMES = (
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
    "float64",
)


class dtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


@dataclasses.dataclass(frozen=True)
class Device:
    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


CPU = Device("cpu")


class Tensor:
    """A strided array on a device; on "cuda" its bytes are the driver's, at `address`."""

    def __init__(self, torch: Any, array: np.ndarray, kind: dtype, device: Device, address: int | None = None) -> None:
        self._torch, self._array, self.dtype, self.device, self._address = torch, array, kind, device, address
        self.layout, self.requires_grad = torch.strided, False
        self.shape = array.shape

    def __del__(self) -> None:
        if self._address is not None and self._owner is self:
            self._torch.driver.free(self._address)

    _owner: Any = None

    def is_conj(self) -> bool:
        return False

    is_neg = is_conj

    def data_ptr(self) -> int:
        if self._address is not None:
            return self._address
        return self._array.ctypes.data

    def is_contiguous(self) -> bool:
        return self._array.flags.c_contiguous

    def contiguous(self) -> "Tensor":
        return self if self.is_contiguous() else self.clone()

    def detach(self) -> "Tensor":
        return self

    def requires_grad_(self) -> "Tensor":
        self.requires_grad = True
        return self

    def t(self) -> "Tensor":
        assert self.device.type == "cpu"
        return Tensor(self._torch, self._array.T, self.dtype, self.device)

    def __getitem__(self, index: Any) -> "Tensor":
        assert self.device.type == "cpu"
        return Tensor(self._torch, self._array[index], self.dtype, self.device)

    def values(self) -> np.ndarray:
        """A copy of what it holds."""
        if self._address is None:
            return self._array.copy()
        raw = self._torch.driver.copy_out(self._address, self._array.nbytes)
        return raw.view(self._array.dtype).reshape(self.shape)

    def clone(self) -> "Tensor":
        return self._torch.empty(self.shape, dtype=self.dtype, device=self.device).copy_(self)

    def copy_(self, other: "Tensor") -> "Tensor":
        values = np.ascontiguousarray(other.values())
        if self._address is None:
            self._array[...] = values
        else:
            self._torch.driver.copy_in(self._address, values)
        return self

    def to(self, device: Any) -> "Tensor":
        if device == self.device:
            return self
        return self._torch.empty(self.shape, dtype=self.dtype, device=device).copy_(self)

    def cpu(self) -> "Tensor":
        return self.to(CPU)

    def view(self, kind: dtype) -> "Tensor":
        return Tensor(self._torch, self._array.view(jnp.dtype(kind.name)), kind, self.device)

    def numpy(self) -> np.ndarray:
        if self.dtype.name.startswith(("bfloat", "float8")):
            raise TypeError(f"Got unsupported ScalarType {self.dtype.name}")
        return self._array


def module(driver: Any = None, stream: int = 0) -> Any:
    """The package. `driver`: of the device "cuda:0"; `stream`: the current one there."""
    torch: Any = types.ModuleType("torch")
    torch.driver, torch.Tensor, torch.dtype, torch.strided = driver, Tensor, dtype, object()
    for name in NAMES:
        setattr(torch, name, dtype(name))

    def empty(*shape: Any, dtype: Any = torch.float32, device: Any = CPU) -> Tensor:
        shape = shape[0] if shape and isinstance(shape[0], tuple) else shape
        array = np.full(int(np.prod(shape, dtype=int)) * jnp.dtype(dtype.name).itemsize, 0xA5, np.uint8)
        array = array.view(jnp.dtype(dtype.name)).reshape(shape)
        if device.type == "cpu":
            return Tensor(torch, array, dtype, device)
        made = Tensor(torch, array, dtype, device, torch.driver.alloc(max(array.nbytes, 1)))
        made._owner = made
        torch.driver.copy_in(made._address, array)
        return made

    def from_numpy(array: np.ndarray) -> Tensor:
        return Tensor(torch, array, getattr(torch, array.dtype.name), CPU)

    def zeros(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made.copy_(Tensor(torch, np.zeros(made.shape, made._array.dtype), made.dtype, CPU))

    torch.empty, torch.zeros, torch.from_numpy = empty, zeros, from_numpy
    torch.is_grad_enabled = lambda: True
    torch.cuda = types.SimpleNamespace(
        current_device=lambda: 0,
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=stream),
    )
    return torch
