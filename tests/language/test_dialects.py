"""The parameter classes, memory spaces and names of the dialects (`pltpu`, `pltriton`, `plgpu`)."""

import copy
import dataclasses

import numpy as np
import pytest

from palladion import config
from palladion import mosaic_gpu as plgpu
from palladion import tpu as pltpu
from palladion import triton as pltriton
from palladion.language.compiler_params import CompilerParams
from palladion.language.fields import FrozenDict

TPU_DEFAULT = (
    "CompilerParams(dimension_semantics=None, allow_input_fusion=None, vmem_limit_bytes=None, "
    "collective_id=None, has_side_effects=False, flags=None, internal_scratch_in_bytes=None, "
    "serialization_format=1, disable_bounds_checks=False, disable_semaphore_checks=False, "
    "skip_device_barrier=False, allow_collective_id_without_custom_barrier=False, "
    "shape_invariant_numerics=True, use_tc_tiling_on_sc=None, needs_layout_passes=True, "
    "fuse_transposed_lhs_in_matmul=False, opt_level=None)"
)
GPU_DEFAULT = (
    "CompilerParams(approx_math=False, dimension_semantics=None, max_concurrent_steps=1, "
    "unsafe_no_auto_barriers=False, reduction_scratch_bytes=2048, profile_space=0, profile_dir='', "
    "profile_trace_scope=<TraceScope.WARPGROUP: 'warpgroup'>, profile_bounds_check=False, "
    "lowering_semantics=<LoweringSemantics.Warpgroup: 2>, skip_device_barrier=False, is_multi_process=False)"
)
SIMULATOR_DEFAULT = (
    "detect_races=False, on_race='raise', out_of_bounds_reads='raise', skip_floating_point_ops=False, "
    "uninitialized_memory='nan', num_cores_or_threads=1, vector_clock_size=None, logging_mode=None"
)


def first_line(error):
    return str(error.value).splitlines()[0]


# Compiler parameters


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (pltpu.CompilerParams(), TPU_DEFAULT),
        (pltriton.CompilerParams(), "CompilerParams(num_warps=None, num_stages=None)"),
        (plgpu.CompilerParams(), GPU_DEFAULT),
        (pltriton.CompilerParams(4, 3), "CompilerParams(num_warps=4, num_stages=3)"),
        (
            pltpu.CompilerParams(("parallel", "arbitrary"), vmem_limit_bytes=64 << 20),
            TPU_DEFAULT.replace("dimension_semantics=None", "dimension_semantics=('parallel', 'arbitrary')").replace(
                "vmem_limit_bytes=None", "vmem_limit_bytes=67108864"
            ),
        ),
        (
            plgpu.CompilerParams(max_concurrent_steps=2),
            GPU_DEFAULT.replace("max_concurrent_steps=1", "max_concurrent_steps=2"),
        ),
    ],
)
def test_compiler_params_print_as_in_the_tutorial(params, text):
    assert repr(params) == text
    assert isinstance(params, CompilerParams)


def test_compiler_params_store_hashable_values_as_given():
    made = pltpu.CompilerParams(
        dimension_semantics=["parallel", pltpu.ARBITRARY],
        allow_input_fusion=[True, np.bool_(False)],
        vmem_limit_bytes=np.int64(1 << 20),
        flags={"a": [1, {"b": 2}], "c": "x"},
        has_side_effects=pltpu.SideEffectType.PURE,
        opt_level="O2",
    )
    assert made.dimension_semantics == ("parallel", pltpu.GridDimensionSemantics.ARBITRARY)
    assert made.allow_input_fusion == (True, False)
    assert type(made.vmem_limit_bytes) is int
    assert made.flags == {"a": (1, {"b": 2}), "c": "x"}
    assert repr(made.flags) == "FrozenDict({'a': (1, FrozenDict({'b': 2})), 'c': 'x'})"
    assert made.opt_level is pltpu.OptLevel.O2
    assert str(pltpu.PARALLEL) == "GridDimensionSemantics.PARALLEL"


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (
            lambda: pltpu.CompilerParams(dimension_semantics=["parallel"], flags={"b": [1], "a": 2}),
            "collective_id",
        ),
        (lambda: pltriton.CompilerParams(num_warps=8), "num_stages"),
        (lambda: plgpu.CompilerParams(dimension_semantics=["sequential"]), "max_concurrent_steps"),
        (lambda: pltpu.InterpretParams(logging_mode=pltpu.LoggingMode.BARRIER), "random_seed"),
        (lambda: plgpu.InterpretGPUParams(on_race="warn"), "num_tma_threads_per_device"),
    ],
)
def test_params_are_equal_hashable_frozen_and_replaceable(make, changed):
    one, two = make(), make()
    assert one == two and hash(one) == hash(two) and one == copy.deepcopy(one)
    other = dataclasses.replace(one, **{changed: 7})
    assert getattr(other, changed) == 7 and other != one and len({one, two, other}) == 2
    if isinstance(one, CompilerParams):
        assert one.replace(**{changed: 7}) == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(one, changed, 7)


def test_frozen_dict_ignores_the_order_of_items_and_cannot_change():
    one, two = FrozenDict({"a": 1, "b": [2]}), FrozenDict({"b": (2,), "a": 1})
    assert one == two and hash(one) == hash(two) and len(one) == 2 and one != FrozenDict({"a": 1})
    with pytest.raises(TypeError):
        one["a"] = 3


def test_parameters_of_different_targets_are_never_equal():
    assert pltpu.CompilerParams() != plgpu.CompilerParams()


def test_the_base_class_cannot_be_made():
    with pytest.raises(TypeError) as error:
        CompilerParams()
    assert first_line(error) == (
        "pl.CompilerParams has no fields: it stands for the compiler parameters of any target."
    )


_AXES = "None or a sequence with, for each grid axis, "
_TPU_AXES = (
    f"{_AXES}'parallel', 'arbitrary', 'core_parallel', 'subcore_parallel' or a pltpu.GridDimensionSemantics, but "
)
_TPU, _TRITON, _GPU = pltpu.CompilerParams, pltriton.CompilerParams, plgpu.CompilerParams
_SIM, _GPU_SIM = pltpu.InterpretParams, plgpu.InterpretGPUParams
_OWNERS = {
    _TPU: "pltpu.CompilerParams",
    _TRITON: "pltriton.CompilerParams",
    _GPU: "plgpu.CompilerParams",
    _SIM: "pltpu.InterpretParams",
    _GPU_SIM: "plgpu.InterpretGPUParams",
}


@pytest.mark.parametrize(
    ("kind", "cls", "field", "value", "rest"),
    [
        (ValueError, _TPU, "dimension_semantics", ("parallel", "par"), _TPU_AXES + "entry 1 is 'par'."),
        (TypeError, _TPU, "dimension_semantics", (0,), _TPU_AXES + "entry 0 is 0."),
        (TypeError, _TPU, "dimension_semantics", "parallel", _TPU_AXES + "it is 'parallel'."),
        (ValueError, _TPU, "vmem_limit_bytes", 0, "None or a number of bytes of at least 1, but it is 0."),
        (TypeError, _TPU, "vmem_limit_bytes", 1.5, "None or a number of bytes of at least 1, but it is 1.5."),
        (TypeError, _TPU, "collective_id", True, "None or an integer of at least 0, but it is True."),
        (
            TypeError,
            _TPU,
            "allow_input_fusion",
            [True, 1],
            "None or a sequence with, for each input, True or False, but entry 1 is 1.",
        ),
        (
            TypeError,
            _TPU,
            "has_side_effects",
            "yes",
            "True or False, or a pltpu.SideEffectType (SIDE_EFFECTING, DATAFLOW_SIDE_EFFECTING or PURE), "
            "but it is 'yes'.",
        ),
        (
            TypeError,
            _TPU,
            "flags",
            {"a": set()},
            "None or a mapping from strings to values, but the value of 'a' cannot be hashed.",
        ),
        (
            TypeError,
            _TPU,
            "flags",
            {1: 2},
            "None or a mapping from strings to values, but key 1 is not a string.",
        ),
        (
            ValueError,
            _TPU,
            "opt_level",
            "O9",
            "None or a pltpu.OptLevel (O0, O1, O2 or O3) or its value, but it is 'O9'.",
        ),
        (ValueError, _TRITON, "num_warps", 3, "None or a power of two (1, 2, 4, 8, ...), but it is 3."),
        (TypeError, _TRITON, "num_stages", "3", "None or an integer of at least 0, but it is '3'."),
        (
            ValueError,
            _GPU,
            "dimension_semantics",
            ("arbitrary",),
            _AXES + "'parallel' or 'sequential', but entry 0 is 'arbitrary'.",
        ),
        (ValueError, _GPU, "max_concurrent_steps", 0, "an integer of at least 1, but it is 0."),
        (TypeError, _GPU, "profile_dir", 3, "a string, but it is 3."),
        (ValueError, _SIM, "on_race", "ignore", "'raise' or 'warn', but it is 'ignore'."),
        (ValueError, _SIM, "num_cores_or_threads", 0, "an integer of at least 1, but it is 0."),
        (TypeError, _SIM, "grid_point_recorder", 3, "None or a function, but it is 3."),
        (
            TypeError,
            _GPU_SIM,
            "logging_mode",
            "all",
            "None or a LoggingMode (BARRIER, SEMAPHORE or SHARED_MEMORY), but it is 'all'.",
        ),
        (ValueError, _GPU_SIM, "num_tma_threads_per_device", 0, "an integer of at least 1, but it is 0."),
    ],
)
def test_a_wrong_field_is_refused_in_words(kind, cls, field, value, rest):
    with pytest.raises(kind) as error:
        cls(**{field: value})
    assert type(error.value) is kind
    assert first_line(error) == f"{_OWNERS[cls]}: {field} must be {rest}"


def test_half_a_profile_is_refused():
    for given, missing, value in (
        ("profile_space", "profile_dir", 16),
        ("profile_dir", "profile_space", "x"),
    ):
        with pytest.raises(ValueError) as error:
            plgpu.CompilerParams(**{given: value})
        assert first_line(error) == f"plgpu.CompilerParams: {given} is given without {missing}."
    assert plgpu.CompilerParams(profile_space=16, profile_dir="x").profile_space == 16


def test_unknown_field_and_positional_use_are_refused():
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_warps'"):
        pltpu.CompilerParams(num_warps=4)
    with pytest.raises(TypeError, match="positional"):
        pltpu.InterpretParams(True)
    with pytest.raises(TypeError, match="positional"):
        plgpu.CompilerParams(True)


# Simulator parameters and modes


def test_simulator_params_print_as_in_jax():
    ours = ", schedule=None, explore=0, uninitialized_reads='allow', chip=None, vmem_limit=None, trace=False)"
    assert repr(pltpu.InterpretParams()) == (
        f"InterpretParams({SIMULATOR_DEFAULT}, dma_execution_mode='on_wait', random_seed=None, "
        f"grid_point_recorder=None, allow_hbm_allocation_in_run_scoped=False, buffer_bounds='logical'{ours}"
    )
    ours = "arch=None, schedule=None, explore=0, strict=False, trace=False, uninitialized_reads='raise', num_sms=None"
    assert repr(plgpu.InterpretGPUParams()) == (
        f"InterpretGPUParams({SIMULATOR_DEFAULT}, num_tma_threads_per_device=5, inline_mgpu='error', {ours})"
    )


@pytest.mark.parametrize(
    ("force", "set_mode", "params", "line"),
    [
        (
            pltpu.force_tpu_interpret_mode,
            pltpu.set_tpu_interpret_mode,
            pltpu.InterpretParams(detect_races=True),
            "The TPU interpret mode takes a pltpu.InterpretParams or None, but it is True.",
        ),
        (
            plgpu.force_gpu_interpret_mode,
            plgpu.set_gpu_interpret_mode,
            plgpu.InterpretGPUParams(detect_races=True),
            "The GPU interpret mode takes a plgpu.InterpretGPUParams, a plgpu.EmulateParams or None, but it is True.",
        ),
    ],
)
def test_interpret_modes_set_the_option_for_a_block_or_for_good(force, set_mode, params, line):
    before = config.get("interpret")
    with force():
        assert config.get("interpret") == type(params)()
        with force(params):
            assert config.get("interpret") == params
        with force(None):
            assert config.get("interpret") is None
    assert config.get("interpret") == before
    try:
        set_mode(params)
        assert config.get("interpret") == params
    finally:
        set_mode(None)
    assert config.get("interpret") is None
    for use in (force, set_mode):
        with pytest.raises(TypeError) as error:
            use(True)
        assert first_line(error) == line


def test_resetting_the_simulated_tpu_leaves_the_mode_alone():
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(random_seed=1)):
        assert pltpu.reset_tpu_interpret_mode_state() is None
        assert config.get("interpret") == pltpu.InterpretParams(random_seed=1)


# Names


@pytest.mark.parametrize(
    ("module", "name", "line"),
    [
        (
            pltpu,
            "matmul_push_rhs",
            "pltpu.matmul_push_rhs is not built yet: "
            "explicit matrix-unit operations and the Mosaic TPU compiler are later work.",
        ),
        (pltpu, "TPUCompilerParams", "module 'palladion.tpu' has no attribute 'TPUCompilerParams'"),
        (plgpu, "VMEM", "module 'palladion.mosaic_gpu' has no attribute 'VMEM'"),
    ],
)
def test_names_to_come_and_unknown_names(module, name, line):
    assert not hasattr(module, name)
    with pytest.raises(AttributeError) as error:
        getattr(module, name)
    assert first_line(error) == line
    if "not built" in line:
        assert "CompilerParams" in str(error.value).splitlines()[1]


@pytest.mark.parametrize("module", [pltpu, pltriton, plgpu], ids=lambda module: module.__name__)
def test_all_names_are_there(module):
    assert module.__doc__ and len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_the_parameter_classes_say_which_dialect_they_are_of():
    dialects = [
        c.__module__.split(".")[-2] for c in (pltpu.CompilerParams, pltriton.CompilerParams, plgpu.CompilerParams)
    ]
    assert dialects == ["tpu", "triton", "gpu"]
    assert issubclass(pltpu.LoweringException, Exception)
