"""Running small programs in processes of their own, as users run them.

Importing JAX takes seconds, so most go through `Forks`: one process that has imported Palladion (and installed
nothing) and forks for each program. What the children print, and how they end, is that of a process of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TIMEOUT = 120  # seconds; a program takes two or three


@dataclasses.dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def environment() -> dict[str, str]:
    """This process's environment without what the test run itself has set, on the CPU."""
    mine = ("PYTEST_", "JAX_", "XLA_FLAGS", "PALLADION_")
    return {k: v for k, v in os.environ.items() if not k.startswith(mine)} | {"JAX_PLATFORMS": "cpu"}


def run(*command: str, cwd: Path | None = None) -> Ran:
    """Run a command."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(),
        timeout=TIMEOUT,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


_SERVER = """
import json, os, sys
from palladion import cli
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        for number in (1, 2):
            os.dup2(os.open(request["files"][number], os.O_WRONLY), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["cwd"])
        sys.argv = ["palladion", *request["args"]]
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
if request["source"] is None:
    sys.exit(cli.main())
exec(compile(request["source"], "<program>", "exec"), {"__name__": "__main__"})
"""


class Forks:
    """A process that runs programs in forks of itself."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def close(self) -> None:
        self.server.communicate(timeout=TIMEOUT)

    def python(self, source: str) -> Ran:
        """Run a program given as text."""
        return self._run(source, [], Path.cwd())

    def palladion(self, *args: str, cwd: Path) -> Ran:
        """Run `palladion ARGS` in a folder."""
        return self._run(None, args, cwd)

    def _run(self, source, args, cwd) -> Ran:
        assert self.server.stdin is not None and self.server.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            for path in (out, err):
                path.touch()
            request = dict(source=source, args=list(args), cwd=str(cwd), files=[None, str(out), str(err)])
            self.server.stdin.write(json.dumps(request) + "\n")
            self.server.stdin.flush()
            status = self.server.stdout.readline()
            assert status, "the process that forks is gone"
            return Ran(int(status), out.read_text(), err.read_text())


def file(folder: Path, name: str, source: str) -> Path:
    """Write a program; its path."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return path
