"""The timeline of a run in simulated time: what it holds, its export for Perfetto, and its picture."""

import json

import jax
import jax.numpy as jnp
import pytest

import palladion as pl
from palladion import tpu as pltpu
from palladion.report import timeline as drawing

X = jnp.ones((256, 512))


def run(**params):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...].T)

    pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((256, 64), jnp.float32),
        grid=(4,),
        in_specs=[pl.BlockSpec((64, 512), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((64, 64), lambda i: (i, 0)),
        interpret=pltpu.InterpretParams(**params),
    )(X)
    return pl.last_report()


def test_the_spans_of_a_pipeline():
    report = run(trace=True)
    spans = report.timeline.spans
    assert [s.name for s in spans if s.kind == "program"] == [f"program ({i},)" for i in range(4)]
    copies = [s for s in spans if s.kind == "copy"]
    assert sum(s.name.endswith("in") for s in copies) == sum(s.name.endswith("out") for s in copies) == 4
    assert report.seconds == max(s.end for s in spans)
    assert all(s.end > s.start >= 0 for s in spans)
    # Double buffering: the second block is on its way while the first program runs.
    first = next(s for s in spans if s.kind == "program")
    second = [s for s in copies if s.name.endswith("in")][1]
    assert second.start <= first.start < second.end
    # A v5e moves 819 GB/s: the 128 KiB block takes 160 ns.
    assert second.end - second.start == pytest.approx(64 * 512 * 4 / 819e9, rel=0.01)


def test_a_faster_chip_is_faster():
    assert run(trace=True, chip="v6e").seconds < run(trace=True, chip="v5e").seconds


def test_without_trace_there_is_none():
    report = run()
    assert report.timeline is None
    assert report.seconds is None
    assert report.vmem_bytes == 2 * (64 * 512 * 4 + 64 * 128 * 4)  # whole tiles: 64 columns take 128


def test_the_export_for_perfetto(tmp_path):
    line = run(trace=True).timeline
    line.save(tmp_path / "run.json")
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"device 0", "core 0", "copies"}
    assert len(spans) == len(line.spans)
    assert all({"name", "cat", "pid", "tid", "ts", "dur"} <= set(e) and e["dur"] > 0 for e in spans)
    assert spans[0]["ts"] == pytest.approx(line.spans[0].start * 1e6)


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    drawing.draw(run(trace=True).timeline, tmp_path / "run.png", title="four programs")
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "run.png").stat().st_size > 5_000
    with pytest.raises(ValueError, match="no timeline"):
        drawing.draw(None, tmp_path / "none.png")
