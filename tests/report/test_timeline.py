"""Pictures of timelines: which lanes there are, in which order, and what is written into them."""

import pytest

from palladion.report import timeline as drawing
from palladion.simulator.timeline import Timeline

pytest.importorskip("matplotlib")


def blocks(n, copies=1):
    """n blocks with two threads, TMA and a tensor core each."""
    line = Timeline()
    for k in range(n):
        name, start = f"block x={k}", float(k // 2) * 1e-6
        line.add(name, "tensor core", "wgmma of wg 10", "product", start + 3e-7, start + 6e-7)
        line.add(name, "tensor core", "wgmma of wg 2", "product", start + 6e-7, start + 9e-7)
        line.add(name, "wg 10", "kernel", "program", start, start + 1e-6)
        line.add(name, "wg 2", "kernel", "program", start, start + 1e-6)
        line.add(name, "wg 2", "wait on loaded", "wait", start, start + 3e-7)
        for c in range(copies):
            line.add(name, "TMA", "the copy of a (input 0) to b", "copy", start + c * 1e-8, start + c * 1e-8 + 2e-7)
    return line


def drawn(line, monkeypatch, **options):
    """The axes that are drawn."""
    kept = {}
    figure_of = drawing._figure

    def keep(*args):
        kept["figure"] = figure_of(*args)
        return kept["figure"]

    monkeypatch.setattr(drawing, "_figure", keep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: None)
        drawing.draw(line, "picture.png", **options)
    return kept["figure"].axes[0]


def lanes(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def test_threads_stand_above_the_hardware_in_the_order_of_their_numbers(monkeypatch):
    axes = drawn(blocks(1), monkeypatch)
    assert lanes(axes) == ["wg 2", "wg 10", "TMA", "tensor core"]


def test_of_many_blocks_the_first_are_shown(monkeypatch):
    axes = drawn(blocks(40), monkeypatch, title="forty blocks")
    assert len(lanes(axes)) == 12 and {x.partition(",")[0] for x in lanes(axes)} == {f"block x={k}" for k in range(3)}
    assert axes.get_title(loc="left") == "forty blocks (block x=0, block x=1, block x=2 of 40)"


def test_blocks_by_name(monkeypatch):
    axes = drawn(blocks(40), monkeypatch, processes=["block x=37"], until=1e-6)
    assert lanes(axes) == ["wg 2", "wg 10", "TMA", "tensor core"]
    assert axes.get_xlim() == (0.0, 1.0)
    with pytest.raises(ValueError, match="The timeline has no 'block x=40'"):
        drawing.draw(blocks(40), "picture.png", processes=["block x=40"])


def test_products_have_the_colour_of_who_issued_them(monkeypatch):
    legend = [text.get_text() for text in drawn(blocks(1), monkeypatch).get_legend().get_texts()]
    assert legend == ["program", "copy", "wait", "wgmma of wg 10", "wgmma of wg 2"]


def test_what_is_written_into_bars(monkeypatch):
    assert sorted(t.get_text() for t in drawn(blocks(1), monkeypatch).texts) == ["a", "wgmma of wg 10", "wgmma of wg 2"]
    assert not drawn(blocks(40), monkeypatch, processes=[f"block x={k}" for k in range(40)]).texts  # too many


def test_what_overlaps_stands_below_each_other():
    spans = [s for s in blocks(1, copies=4).spans if s.kind == "copy"]
    tops, heights = zip(*drawing._rows(spans))
    assert tops == pytest.approx((-0.4, -0.2, 0.0, 0.2)) and heights == pytest.approx((0.2,) * 4)
    assert drawing._rows(spans[:1]) == [(-0.4, 0.8)]
