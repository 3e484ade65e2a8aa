"""Putting lines on a console: broken between words only, so that paths and names can be copied whole."""

from __future__ import annotations

import re

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_UNLIMITED = 10_000  # columns


def wrapped(console: Console, text: Text, indent: int = 0, hanging: int = 0) -> None:
    """Print text broken between words only: a path that is longer than a line is printed whole.

    Arguments:
      indent: blanks before each line; hanging: further ones before all but the first.
    """
    width, start, breaks = max(console.width - indent, 20), 0, []
    for word in re.finditer(r"\S+", text.plain):
        room = width - (hanging if breaks else 0)
        if start < word.start() and cell_len(text.plain[start : word.end()]) > room:
            start = word.start()
            breaks.append(start)
    for k, line in enumerate(text.divide(breaks)):
        line.rstrip()
        console.print(Text(" " * (indent + hanging * (k > 0))).append_text(line), soft_wrap=True)


def indented(console: Console, block: Table | Text, indent: int) -> None:
    """Print a block with blanks before it; what does not fit is cut off nowhere: lines get longer than the console."""
    if isinstance(block, Text):
        console.print(Padding(block, (0, 0, 0, indent), expand=False))
        return
    console.print(
        Padding(block, (0, 0, 0, indent), expand=False),
        width=max(console.width, natural_width(console, block) + indent),
        crop=False,
    )


def natural_width(console: Console, block: Table) -> int:
    """The columns that a table needs to break no word."""
    return Measurement.get(console, console.options.update(width=_UNLIMITED), block).maximum
