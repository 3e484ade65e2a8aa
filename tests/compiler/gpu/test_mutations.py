"""Mistakes put into generated code, one at a time: the emulator, or the comparison with NumPy, finds each.

Each mutation is a small change of one place of a kernel's CUDA, of the kinds that a wrong code generator would make: a
field of a matrix or instruction descriptor, a swizzle, the index of a fragment, bytes that a barrier expects, arrivals
that complete it, a parity, a tensor map. Most kernels here take small integers, so that right results are exact.
"""

import dataclasses
import functools
import importlib.util
import re

import numpy as np
import pytest

from palladion import mosaic_gpu as plgpu
from simulator.gpu.kernels import CORPUS, off_by

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cuda.bindings") is None,
    reason="compiling for a GPU needs NVRTC: pip install 'palladion[gpu]'",
)


def _plus(n):
    return lambda m: str(int(m[0].rstrip("u")) + n) + ("u" if m[0].endswith("u") else "")


# kind: (what it matches in the CUDA, what it becomes)
KINDS = {
    "expected bytes": (r"(?<=barrier_expect\()(\w+(?: \+ [^,]*)?), (\d+)", lambda m: f"{m[1]}, {int(m[2]) + 16}"),
    "fewer expected bytes": (r"(?<=barrier_expect\()(\w+(?: \+ [^,]*)?), (\d+)", lambda m: f"{m[1]}, {int(m[2]) - 16}"),
    "arrivals": (r"(?<=barrier_init\(shared_address\(smem \+ )(\d+)\), (\d+)", lambda m: f"{m[1]}), {int(m[2]) + 1}"),
    "parity": (r"_phase & 1\)", lambda m: "_phase & 1 ^ 1)"),
    "swizzle": (r"swizzle<128>", lambda m: "swizzle<64>"),
    "leading offset": (r"(?<=matrix_start\()(\w+), (\d+)u", lambda m: f"{m[1]}, {int(m[2]) * 2}u"),
    "stride and swizzle": (r"(?<=_high = once<[01]>\()(\d+)u", lambda m: f"{int(m[1]) ^ 1 << 31 | 1 << 30}u"),
    "stride": (r"(?<=_high = once<[01]>\()(\d+)u", lambda m: f"{int(m[1]) + 64}u"),
    "step along K": (r"(?<=_a \+ )(\d+)(?=,)", _plus(2)),
    "step of B along K": (r"(?<=_b \+ )(\d+)(?=,)", _plus(64)),
    "row of a fragment": (r"t / 4 % 8 \* (\d+)", lambda m: f"t / 4 % 4 * {m[1]}"),
    "column of a fragment": (r"t % 4 \* (\d+)", lambda m: f"t % 2 * {m[1]}"),
    "register of a fragment": (r"i / 2 % 4 \* 32", lambda m: "i / 2 % 2 * 32"),
    "pair of a fragment": (r"&get\[i \* 2\]", lambda m: "&get[i * 2 ^ 2]"),
    "instruction descriptor": (r"136\d{6}u", lambda m: f"{int(m[0][:-1]) ^ 1 << 16}u"),
    "type in the descriptor": (r"136\d{6}u", lambda m: f"{int(m[0][:-1]) ^ 1 << 7}u"),
    "accumulation": (r"(?<=136380432u, )true", lambda m: "false"),
    "tensor memory": (r"tmem \+ 64", lambda m: "tmem + 63"),
    "lanes of tensor memory": (r"warp << 21", lambda m: "warp << 20"),
    "wait for products": (r"wgmma_wait<0>\(\);", lambda m: "wgmma_wait<1>();"),
    "fence": (r"commit_shared\(\);", lambda m: ""),
}
# Kernels, and the kinds of mutations that each has places for.
USED = {
    "hopper_simple": [
        "expected bytes", "fewer expected bytes", "arrivals", "parity", "swizzle", "leading offset",
        "stride and swizzle", "stride", "step along K", "step of B along K", "row of a fragment",
        "column of a fragment", "register of a fragment", "pair of a fragment", "fence",
    ],
    "blackwell_simple": [
        "expected bytes", "arrivals", "parity", "stride", "step along K", "step of B along K", "swizzle",
        "instruction descriptor", "type in the descriptor", "accumulation", "tensor memory",
        "lanes of tensor memory", "fence",
    ],
}  # fmt: skip
# Fields of B's descriptor that the hardware ignores for one panel (facts 4.3): changing them changes nothing.
HARMLESS = {("hopper_simple", "leading offset", 0), ("hopper_simple", "leading offset", 1)}
MAPS = ("swizzle", "box", "offset", "stride")


@functools.cache
def captured(name):
    """A kernel's program and operands, and the right result with how far off it may be."""
    from palladion.compiler.gpu import emulated, launch

    calls = []
    with pytest.MonkeyPatch.context() as patch:
        run = emulated._emulate
        patch.setattr(
            emulated, "_emulate", lambda params, operands: calls.append((params, operands)) or run(params, operands)
        )
        with plgpu.force_gpu_interpret_mode(plgpu.EmulateParams(arch=CORPUS[name].arch)):
            actual, expected, tolerance = CORPUS[name].run()
    assert off_by(actual, expected) <= tolerance
    (params, operands), *_ = calls
    return launch.prepare(params, CORPUS[name].arch), operands, expected, tolerance


def caught(program, operands, expected, tolerance):
    """Whether a program's run, or its result, shows that something is wrong."""
    from palladion.compiler.gpu import launch
    from palladion.emulator.driver import EmulatedDriver
    from palladion.emulator.faults import EmulationFault

    for order in ("lazy", "eager", 0, 1, 2, 3):
        driver = EmulatedDriver(program.generated.arch, order=order, source=program.generated.source)
        try:
            (result,) = launch.on_host(program, driver, program.ptx, operands)
        except (EmulationFault, ValueError) as error:  # ValueError: a tensor map that no driver encodes
            return type(error).__name__
        with np.errstate(all="ignore"):
            if off_by(result, expected) > tolerance:
                return "values"
    return None


@pytest.mark.parametrize("name", USED)
def test_mutations_are_caught(name):
    from palladion.compiler.gpu.nvrtc import compile_source

    program, operands, expected, tolerance = captured(name)
    source = program.generated.source
    start = source.index('extern "C"')
    tried, missed = 0, []
    for kind in USED[name]:
        pattern, change = KINDS[kind]
        found = list(re.finditer(pattern, source[start:]))
        assert found, f"{name} has no place for: {kind}"
        for k, match in enumerate(found[:4]):
            if (name, kind, k) in HARMLESS:
                continue
            text = source[: start + match.start()] + change(match) + source[start + match.end() :]
            made = dataclasses.replace(program.generated, source=text)
            ptx = compile_source(text, made.arch, made.name).ptx
            tried += 1
            if caught(dataclasses.replace(program, generated=made, ptx=ptx), operands, expected, tolerance) is None:
                missed.append((kind, k, match[0]))
    assert not missed
    assert tried >= 20


@pytest.mark.parametrize("field", MAPS)
@pytest.mark.parametrize("name", USED)
def test_mutated_tensor_maps_are_caught(name, field):
    from palladion.compiler.gpu.generated import TensorMap

    program, operands, expected, tolerance = captured(name)
    changes = {
        "swizzle": lambda m: dict(swizzle=64 if m.swizzle == 128 else 128),
        "box": lambda m: dict(box=(*m.box[:-1], m.box[-1] // 2)),
        "offset": lambda m: dict(offset=m.offset + 16),
        "stride": lambda m: dict(strides=(m.strides[0] + 16, *m.strides[1:])),
    }
    for k, param in enumerate(program.generated.params):
        if isinstance(param, TensorMap):
            wrong = dataclasses.replace(param, **changes[field](param))
            params = (*program.generated.params[:k], wrong, *program.generated.params[k + 1 :])
            mutant = dataclasses.replace(program, generated=dataclasses.replace(program.generated, params=params))
            assert caught(mutant, operands, expected, tolerance), (name, field, k)
