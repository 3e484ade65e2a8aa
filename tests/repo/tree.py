"""What the tests about the repository share: its files, its modules, and what each module imports."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import subprocess
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
SRC = ROOT / "src"


def own_files() -> list[pathlib.Path]:
    """Every file of the project that git tracks or would track."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    files = [ROOT / name for name in listing.split("\0") if name]
    return [file for file in files if file.is_file()]


def own_modules() -> dict[str, pathlib.Path]:
    """Dotted name -> file, for every module of the package."""
    modules = {}
    for file in sorted(SRC.rglob("*.py")):
        parts = file.relative_to(SRC).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return modules


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported or reached name.

    Attributes:
      name: absolute dotted name; `from a import b` gives `a.b`, whether b is a module or not.
      line: line in the importing file.
      lazy: inside a function, so not carried out when the module is imported.
    """

    name: str
    line: int
    lazy: bool


def imports_of(module: str, source: str, is_package: bool) -> Iterator[Import]:
    """Imports of a module: statements, `import_module("…")`, and attribute chains that start at `jax`."""
    package = module if is_package else module.rpartition(".")[0]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [node.module])])
            for alias in node.names:
                yield Import(f"{base}.{alias.name}", node.lineno, lazy)
        elif isinstance(node, ast.Call) and _dotted(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Import(argument.value, node.lineno, lazy)
        elif isinstance(node, ast.Attribute) and _dotted(node).startswith("jax."):
            yield Import(_dotted(node), node.lineno, lazy)
            return  # the inner links of the chain are prefixes of this one
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return walk(ast.parse(source), lazy=False)


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes that starts at a plain name, else ""."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def is_under(name: str, parent: str) -> bool:
    """Whether a dotted name is `parent` or something in it."""
    return name == parent or name.startswith(parent + ".")
