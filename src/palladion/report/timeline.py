"""A picture of a simulated run: one lane for whoever does something, time from left to right.

On a TPU these are the cores and the copies of a device; on a GPU the threads of a block, its TMA engine and its tensor
core. A lane is blue while it runs, and light grey while it waits; what is under way at the same time in a lane (copies)
stands below each other. The same spans go into Perfetto with `Timeline.save`.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from typing import Any

from palladion.errors import mistake
from palladion.simulator.timeline import Span, Timeline

COLOURS = {"program": "#4878a8", "copy": "#d98c3f", "product": "#5a9a57", "wait": "#d9d9d9", "trace": "#8c3f8c"}
PRODUCTS = ("#5a9a57", "#8c5aa8", "#b8893a", "#3a93a8")  # of the threads that issue them, in turn
LABELS = 100  # spans up to which names are written into them, where they fit
LETTERS = 200  # that fit into the width of the picture
LANES = 12  # shown unless `processes` says which
_HARDWARE = ("TMA", "tensor core")  # below the threads


def draw(
    timeline: Timeline,
    path: str | pathlib.Path,
    *,
    title: str | None = None,
    processes: Sequence[str] | None = None,
    until: float | None = None,
) -> None:
    """Draw a timeline.

    Arguments:
      timeline: e.g. `palladion.last_report().timeline`, of a call with `pltpu.InterpretParams(trace=True)` or
        `plgpu.InterpretGPUParams(trace=True)`.
      path: where to write it; the suffix says how (.png, .svg, .pdf).
      title: above the picture.
      processes: the devices or blocks to show, by the names in `timeline.tracks()`; None: the first ones, as many as
        have a dozen lanes, one at least.
      until: simulated time at which the picture ends, in seconds from its beginning; None: it shows everything.

    Raises:
      ImportError: matplotlib is not installed. ValueError: the timeline is empty, or has no such process.
    """
    if timeline is None or not timeline.spans:
        hint = "run the call with pltpu.InterpretParams(trace=True) or plgpu.InterpretGPUParams(trace=True)"
        raise mistake(ValueError, "There is no timeline to draw.", hint=hint)
    there = _in_order(timeline)
    shown = _first(there) if processes is None else list(processes)
    if unknown := [name for name in shown if name not in there]:
        raise mistake(ValueError, f"The timeline has no {unknown[0]!r}.", hint=f"it has {', '.join(there)}")
    left_out = len(there) - len(shown)
    if left_out and title is not None and processes is None:
        title += f" ({', '.join(shown)} of {len(there)})"
    spans = [s for s in timeline.spans if s.process in shown]
    _figure(spans, [(p, track) for p in shown for track in there[p]], title, until).savefig(
        path, bbox_inches="tight", dpi=150
    )


def _in_order(timeline: Timeline) -> dict[str, list[str]]:
    """The processes, each with its lanes: the first to begin first, threads before what serves them."""
    begun = {s.process: None for s in sorted(timeline.spans, key=lambda s: s.start)}
    tracks = timeline.tracks()
    lanes = {p: [track for process, track in tracks if process == p] for p in begun}
    return {p: sorted(own, key=lambda t: (t in _HARDWARE, _numbered(t))) for p, own in lanes.items()}


def _numbered(track: str) -> list[Any]:
    """wg 2 comes before wg 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", track)]


def _first(lanes: dict[str, list[str]]) -> list[str]:
    shown, count = [], 0
    for process, own in lanes.items():
        count += len(own)
        if shown and count > LANES:
            break
        shown.append(process)
    return shown


def _figure(spans: Sequence[Span], tracks: Sequence[tuple[str, str]], title: str | None, until: float | None) -> Any:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "Drawing a timeline needs matplotlib: pip install 'palladion[report]'. Timeline.save needs nothing."
        ) from error
    figure = Figure(figsize=(11, 1.2 + 0.45 * len(tracks)))
    axes = figure.add_subplot()
    begin = min(s.start for s in spans)
    issuers = sorted({s.name for s in spans if s.kind == "product"})
    colour_of = dict(zip(issuers, PRODUCTS)) if 1 < len(issuers) <= len(PRODUCTS) else {}
    used: dict[str, str] = {}
    wide = until or max(s.end for s in spans) - begin
    for lane, track in enumerate(tracks):
        for kind, colour in COLOURS.items():
            own = [s for s in spans if s.kind == kind and (s.process, s.track) == track]
            for s, (top, height) in zip(own, _rows(own)):
                shade = colour_of.get(s.name, colour)
                used.setdefault(s.name if s.name in colour_of else kind, shade)
                bar = ((s.start - begin) * 1e6, max(s.end - s.start, 1e-9) * 1e6)
                axes.broken_barh([bar], (lane + top, height), facecolors=shade, edgecolor="white", linewidth=0.3)
                label = _label(s)
                if label and len(label) / LETTERS < (s.end - s.start) / wide and len(spans) <= LABELS:
                    middle = bar[0] + bar[1] / 2, lane + top + height / 2
                    axes.text(*middle, label, ha="center", va="center", fontsize=5, clip_on=True)
    one = len({process for process, _ in tracks}) == 1
    axes.set_yticks(range(len(tracks)), [track if one else f"{process}, {track}" for process, track in tracks])
    axes.invert_yaxis()
    axes.set_xlabel("simulated time (us)")
    if until is not None:
        axes.set_xlim(0, until * 1e6)
    order = [*COLOURS, *issuers]
    axes.legend(
        handles=[Patch(color=used[k], label=k) for k in sorted(used, key=order.index)],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncol=len(used),
        fontsize=7,
        frameon=False,
    )
    if title:
        axes.set_title(title, loc="left")
    return figure


def _label(span: Span) -> str:
    """What is written into a bar: of a copy, what is copied; nothing for waits, or a GPU's thread, named beside it."""
    if span.kind == "wait":
        return ""
    copied = re.match(r"the copy of (\S+)", span.name)
    if copied is not None:
        return copied[1]
    return span.name if span.kind != "program" or span.name.startswith("program") else ""


def _rows(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """(top, height) of each span in a lane of height 0.8 around 0: those that overlap stand below each other."""
    free: list[float] = []  # from when on each row is
    row = []
    for s in sorted(spans, key=lambda s: s.start):
        k = next((k for k, t in enumerate(free) if t <= s.start + 1e-15), len(free))
        free[k : k + 1] = [s.end]
        row.append((s, k))
    height = 0.8 / max(len(free), 1)
    places = {id(s): (-0.4 + k * height, height) for s, k in row}
    return [places[id(s)] for s in spans]
