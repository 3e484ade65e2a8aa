"""The fragments of the Mosaic GPU reference run without a finding, and give what NumPy gives, in both spellings."""

import re
import warnings
from pathlib import Path

import jax
import pytest

from palladion import mosaic_gpu as plgpu
from palladion.errors import UnsupportedPrimitive
from palladion.language.gpu.memory import stored_shape
from simulator.gpu.fragments import FRAGMENTS, SPELLINGS
from simulator.gpu.kernels import off_by


@pytest.mark.parametrize("spelling", SPELLINGS, ids=repr)
@pytest.mark.parametrize("name", FRAGMENTS)
def test_fragment(name, spelling):
    f = FRAGMENTS[name]
    params = plgpu.InterpretGPUParams(detect_races=True, explore=1, arch=f.arch, **f.options)
    with warnings.catch_warnings(), plgpu.force_gpu_interpret_mode(params):
        warnings.simplefilter("error")
        results = jax.block_until_ready(f.run(spelling))  # warnings of a callback come in here
    for actual, expected, tolerance in results if isinstance(results, list) else [results]:
        assert off_by(actual, expected) <= tolerance


def test_inline_mgpu_is_refused():
    """Section "Inline Mosaic GPU" is a TODO of the reference."""

    @plgpu.kernel(out_shape=())
    def kernel():
        plgpu.inline_mgpu()(lambda: None)()

    with (
        pytest.raises(UnsupportedPrimitive, match="inline_mgpu"),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()),
    ):
        kernel()


def test_the_table_of_the_docs_is_complete():
    text = (Path(__file__).parents[3] / "docs" / "mgpu_reference.md").read_text()
    table = text[: text.index("## Two spellings")].splitlines()
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1] for line in table if line.startswith("| ")}
    for f in FRAGMENTS.values():
        assert f"`{f.name}`" in rows[f.section]
    sections = {f.section for f in FRAGMENTS.values()}
    assert {name for section in sections for name in re.findall(r"`(\w+)`", rows[section])} == {*FRAGMENTS}
    for file in set(re.findall(r"`(test_\w+\.py)`", text)):
        assert (Path(__file__).parent / file).exists()


def test_tiles_follow_one_another():
    """Section "Memory reference transforms": tiles are row-major, in row-major order."""
    tiled = plgpu.SMEM((128, 128), "float16", transforms=(plgpu.TileTransform((8, 64)),))
    assert stored_shape(tiled.shape, tiled.dtype, tiled.transforms, "a buffer") == (16, 2, 8, 64)
