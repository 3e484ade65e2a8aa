"""Memory spaces and storage of the dialects, and the specs they add: `plgpu.BlockSpec`, scalar prefetch."""

import jax
import jax.numpy as jnp
import pytest

from palladion import mosaic_gpu as plgpu
from palladion import tpu as pltpu
from palladion.language.blocks import BlockSpec, GridSpec, no_block_spec


def first_line(error):
    return str(error.value).splitlines()[0]


# Memory spaces


@pytest.mark.parametrize("name", ["VMEM", "VMEM_SHARED", "SMEM", "CMEM", "SEMAPHORE", "HBM"])
def test_tpu_memory_spaces_make_scratch_shapes(name):
    space = getattr(pltpu, name)
    value = "semaphore_mem" if name == "SEMAPHORE" else name.lower()
    assert space is pltpu.MemorySpace[name] and repr(space) == name and str(space) == value
    ref = space((8, 128), jnp.bfloat16)
    assert (ref.shape, ref.dtype, ref.memory_space) == ((8, 128), jnp.bfloat16, space)
    assert ref == space([8, 128], "bfloat16") and hash(ref) == hash(space((8, 128), "bfloat16"))
    assert ref == space.like(jnp.ones((8, 128), jnp.bfloat16)) != pltpu.VMEM((8, 1), jnp.bfloat16)
    assert str(ref.get_ref_aval()) == f"Ref<{value}>{{bfloat16[8,128]}}"


def test_gpu_memory_spaces_make_scratch_shapes():
    for name in ("GMEM", "SMEM", "REGS"):
        space = getattr(plgpu, name)
        ref = space((64, 64), jnp.float16)
        assert repr(space) == f"<MemorySpace.{name}: '{name.lower()}'>" and str(space) == name.lower()
        assert (ref.shape, ref.dtype, ref.memory_space) == ((64, 64), jnp.float16, space)
        assert (ref.transforms, ref.collective, ref.packed) == ((), None, None)
        assert space.like(jax.ShapeDtypeStruct((64, 64), jnp.float16)) == ref
        assert str(ref.get_ref_aval()) == f"Ref<{name.lower()}>{{float16[64,64]}}"
    layers = [plgpu.TileTransform((8, 64)), plgpu.SwizzleTransform(128)]
    ref = plgpu.SMEM((64, 64), jnp.float16, transforms=layers)
    assert ref.transforms == (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    assert hash(ref) == hash(plgpu.SMEM((64, 64), jnp.float16, transforms=tuple(layers)))
    assert ref != plgpu.SMEM((64, 64), jnp.float16)
    assert repr(layers) == "[TilingTransform(tiling=(8, 64)), SwizzleTransform(swizzle=128)]"


def test_tensor_memory_says_how_elements_share_columns():
    assert plgpu.TMEM((128, 512), jnp.float32).collective is False
    assert plgpu.TMEM((64, 32), jnp.float32, collective=True).collective is True
    assert plgpu.TMEM((2, 128, 32), jnp.float16, packed=True).packed is True
    for make, line in [
        (
            lambda: plgpu.TMEM((128, 64), jnp.float16),
            "A TMEM buffer of float16 must say whether its elements share the 32-bit columns.",
        ),
        (
            lambda: plgpu.TMEM((8, 128), jnp.float32),
            "A TMEM buffer has 64 or 128 rows and some columns, but its shape is (8, 128).",
        ),
        (
            lambda: plgpu.TMEM((128,), jnp.float32),
            "A TMEM buffer has 64 or 128 rows and some columns, but its shape is (128,).",
        ),
        (
            lambda: plgpu.TMEM((128, 64), jnp.float32, transforms=(plgpu.SwizzleTransform(128),)),
            "A TMEM buffer has no transforms: its layout is the hardware's.",
        ),
        (
            lambda: plgpu.SMEM((128, 64), jnp.float32, packed=True),
            "packed, collective and layout describe buffers in TMEM; this one is in SMEM.",
        ),
    ]:
        with pytest.raises(ValueError) as error:
            make()
        assert first_line(error) == line


def test_wrong_transforms_are_refused():
    for make, kind, line in [
        (
            lambda: plgpu.SwizzleTransform(48),
            ValueError,
            "plgpu.SwizzleTransform: swizzle is 16, 32, 64 or 128 bytes, not 48.",
        ),
        (
            lambda: plgpu.TilingTransform((8, 0)),
            ValueError,
            "plgpu.TilingTransform: tiling must be a sequence with, for each tiled dimension, "
            "an integer of at least 1, but entry 1 is 0.",
        ),
        (
            lambda: plgpu.SMEM((8, 8), jnp.float32, transforms=((8, 8),)),
            TypeError,
            "A transform of a smem buffer cannot be (8, 8).",
        ),
        (
            lambda: plgpu.SMEM((8, 8), jnp.float32, transforms=plgpu.SwizzleTransform(64)),
            TypeError,
            "The transforms of a smem buffer are a tuple, not SwizzleTransform(swizzle=64).",
        ),
    ]:
        with pytest.raises(kind) as error:
            make()
        assert first_line(error) == line


def test_plgpu_block_spec():
    spec = plgpu.BlockSpec((64, 64), lambda i: (i, 0), memory_space=plgpu.SMEM, transforms=[plgpu.SwizzleTransform(64)])
    assert isinstance(spec, BlockSpec) and spec.block_shape == (64, 64) and spec.memory_space is plgpu.SMEM
    assert spec.transforms == (plgpu.SwizzleTransform(64),)
    plain = plgpu.BlockSpec()
    assert (plain.transforms, plain.delay_release, plain.collective_axes) == ((), 0, None)
    assert plain.oob_fill_mode is plgpu.OOBFillMode.ZEROS == 2
    assert plgpu.BlockSpec(collective_axes=["x", "y"]).collective_axes == ("x", "y")
    assert plgpu.BlockSpec(collective_axes="cluster").collective_axes == ("cluster",)
    changed = spec.replace(delay_release=2)
    assert type(changed) is plgpu.BlockSpec and changed.delay_release == 2 and changed.transforms == spec.transforms
    with pytest.raises(ValueError) as error:
        plgpu.BlockSpec(delay_release=-1)
    assert first_line(error) == (
        "plgpu.BlockSpec: delay_release must be a number of steps of at least 0, but it is -1."
    )
    with pytest.raises(ValueError, match=r"^The first argument of BlockSpec is the block shape"):
        plgpu.BlockSpec(lambda i: i)


# Scalar prefetch


def test_prefetch_grid_spec():
    spec = pltpu.PrefetchScalarGridSpec(2, (3,), scratch_shapes=(pltpu.VMEM((8,), jnp.float32),))
    assert isinstance(spec, GridSpec) and spec.num_scalar_prefetch == 2 and spec.grid == (3,)
    assert spec.in_specs is no_block_spec and spec.out_specs is no_block_spec
    assert spec.scratch_shapes == (pltpu.VMEM((8,), jnp.float32),)
    assert spec == pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2, grid=(3,), scratch_shapes=(pltpu.VMEM((8,), jnp.float32),)
    )
    assert spec != pltpu.PrefetchScalarGridSpec(1, (3,), scratch_shapes=(pltpu.VMEM((8,), jnp.float32),))
    assert GridSpec().num_scalar_prefetch == 0
    for kind, count in ((ValueError, -1), (TypeError, "a"), (TypeError, True)):
        with pytest.raises(kind) as error:
            pltpu.PrefetchScalarGridSpec(count)
        assert first_line(error) == (
            "pltpu.PrefetchScalarGridSpec: num_scalar_prefetch must be a number of operands of at least 0, "
            f"but it is {count!r}."
        )
