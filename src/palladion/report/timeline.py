"""A picture of a simulated run: one lane for each core and for each device's copies, time from left to right.

Programs, copies and waits have a colour each; what waits shows as a gap that is filled in light grey. The same spans go
into Perfetto with `Timeline.save`.
"""

from __future__ import annotations

import pathlib
from typing import Any

from palladion.errors import mistake
from palladion.simulator.timeline import Timeline

COLOURS = {"program": "#4878a8", "copy": "#d98c3f", "wait": "#d9d9d9", "trace": "#8c3f8c"}
LABELS = 60  # spans up to which names are written into them


def draw(timeline: Timeline, path: str | pathlib.Path, *, title: str | None = None) -> None:
    """Draw a timeline.

    Arguments:
      timeline: e.g. `palladion.last_report().timeline`, of a call with `pltpu.InterpretParams(trace=True)`.
      path: where to write it; the suffix says how (.png, .svg, .pdf).
      title: above the picture.

    Raises:
      ImportError: matplotlib is not installed. ValueError: the timeline is empty.
    """
    if timeline is None or not timeline.spans:
        raise mistake(
            ValueError, "There is no timeline to draw.", hint="run the call with pltpu.InterpretParams(trace=True)"
        )
    figure = _figure(timeline, title)
    figure.savefig(path, bbox_inches="tight", dpi=150)


def _figure(timeline: Timeline, title: str | None) -> Any:
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "Drawing a timeline needs matplotlib: pip install 'palladion[report]'. Timeline.save needs nothing."
        ) from error
    tracks = timeline.tracks()
    lanes = {track: k for k, track in enumerate(tracks)}
    figure = Figure(figsize=(11, 1.2 + 0.45 * len(tracks)))
    axes = figure.add_subplot()
    begin = min(s.start for s in timeline.spans)
    for kind, colour in COLOURS.items():
        for track, lane in lanes.items():
            bars = [
                ((s.start - begin) * 1e6, max(s.end - s.start, 1e-9) * 1e6)
                for s in timeline.spans
                if s.kind == kind and (s.process, s.track) == track
            ]
            if bars:
                axes.broken_barh(bars, (lane - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
    if len(timeline.spans) <= LABELS:
        for s in timeline.spans:
            if s.kind != "wait":
                middle = ((s.start + s.end) / 2 - begin) * 1e6
                axes.text(middle, lanes[s.process, s.track], s.name, ha="center", va="center", fontsize=5, clip_on=True)
    axes.set_yticks(range(len(tracks)), [f"{process}, {track}" for process, track in tracks])
    axes.invert_yaxis()
    axes.set_xlabel("simulated time (us)")
    used = [kind for kind in COLOURS if any(s.kind == kind for s in timeline.spans)]
    axes.legend(
        handles=[Patch(color=COLOURS[k], label=k) for k in used],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncol=len(used),
        fontsize=7,
        frameon=False,
    )
    if title:
        axes.set_title(title, loc="left")
    return figure
