"""Rules for every file: no names of hosts or machines, one idea a file, a docstring that says which."""

import ast
import re

import pytest

from repo.tree import ROOT, SRC, own_files, own_modules

MAX_LINES = 450

# Written in pieces, so that this file does not name them either. A clone must install from whatever registry
# its own machine is set up for, and must not look for folders of the machine it was written on.
HOSTS = ("pypi" + ".org", "python" + "hosted.org", "npm" + "js.org", "yarn" + "pkg.com", "deb" + "ian.org")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:root|work|opt/pypi|opt/wheels|home/\w+)(?:/|\b)")


def lines_with(search) -> list[str]:
    found = []
    for file in own_files():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue  # a picture or other binary
        for number, line in enumerate(text.splitlines(), 1):
            if search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    return found


def test_no_file_names_a_registry_host():
    found = lines_with(lambda line: any(host in line for host in HOSTS))
    assert not found, "\n".join(found)


def test_no_file_names_a_path_of_one_machine():
    found = lines_with(MACHINE_PATH.search)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "names_one"),
    [
        ("open('" + "/" + "work/main/x')", True),
        ("cd " + "/" + "root/.cache", True),
        ("see " + "/" + "home/alice/notes", True),
        ("../work/shared and a/root/b", False),
        ("docs/work/x, n/root", False),
    ],
)
def test_what_counts_as_a_path_of_one_machine(line, names_one):
    assert bool(MACHINE_PATH.search(line)) is names_one


def test_files_are_short():
    lengths = {file.relative_to(ROOT): len(file.read_text().splitlines()) for file in SRC.rglob("*.py")}
    assert lengths
    found = [f"{file}: {length} lines" for file, length in lengths.items() if length >= MAX_LINES]
    assert not found, "\n".join(found)


def test_every_module_says_what_it_is():
    sources = {file: file.read_text() for file in own_modules().values()}
    silent = [
        str(file.relative_to(ROOT))
        for file, source in sources.items()
        if source.strip() and not (ast.get_docstring(ast.parse(source)) or "").strip()
    ]
    assert not silent, "\n".join(silent)
