"""A progress bar for simulated runs that take longer than a person likes to wait without a word."""

from __future__ import annotations

import sys
import time
from typing import Any

PATIENCE = 2.0  # seconds before the bar appears
OFTEN = 16  # programs between looks at the clock


class Progress:
    """Counts programs; shows a bar on a terminal once a run has taken `PATIENCE` seconds."""

    def __init__(self, name: str, total: int | None) -> None:
        self.name, self.total, self.count = name, total, 0
        self._began = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._visible = sys.stderr.isatty()

    def tick(self) -> None:
        """One more program is done."""
        self.count += 1
        if self._visible and self.count % OFTEN == 0:
            self._show()

    def _show(self) -> None:
        if self._bar is None:
            if time.monotonic() - self._began < PATIENCE:
                return
            import rich.console
            import rich.progress

            self._bar = rich.progress.Progress(console=rich.console.Console(stderr=True), transient=True)
            self._task = self._bar.add_task(f"simulating {self.name}", total=self.total)
            self._bar.start()
        self._bar.update(self._task, completed=self.count)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
