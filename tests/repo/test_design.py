"""docs/design.md draws the house as it stands: what it marks as there is there, what is planned is not."""

import re

import pytest

from repo.tree import ROOT, SRC

LINE = re.compile(r"    ([+-])( +)(\S+)")


def drawn() -> list[tuple[str, str]]:
    """(mark, path from the root) for every line of the house."""
    text = (ROOT / "docs" / "design.md").read_text()
    house = text[text.index("## The house") : text.index("Arrows point one way")]
    folders: list[tuple[int, str]] = []  # those around the line at hand, with their indentation
    found = []
    for match in filter(None, map(LINE.match, house.splitlines())):
        mark, indent, name = match.groups()
        while folders and folders[-1][0] >= len(indent):
            folders.pop()
        path = (folders[-1][1] if folders else "") + name
        folders.append((len(indent), path))
        found.append((mark, path))
    return found


def test_what_is_marked_as_there_is_there():
    lines = drawn()
    assert ("+", "src/palladion/jaxlink.py") in lines
    assert ("-", "src/palladion/autodiff/") in lines
    missing = [path for mark, path in lines if mark == "+" and not (ROOT / path).exists()]
    assert not missing, f"marked + in docs/design.md, but not in the tree: {', '.join(missing)}"


def test_what_is_marked_as_planned_is_absent():
    built = [path for mark, path in drawn() if mark == "-" and (ROOT / path).exists()]
    assert not built, f"marked - in docs/design.md, but in the tree: {', '.join(built)}"


TABLES = {"Mosaic GPU compiler": "compiler/gpu", "Emulator": "emulator"}


@pytest.mark.parametrize(("section", "folder"), TABLES.items(), ids=TABLES)
def test_files_of_a_rooms_table_are_there(section, folder):
    text = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| .* \| (`.*) \|$", text.split(f"## {section}\n")[1].split("\n## ")[0], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) > 20
    missing = [name for name in names if not (SRC / "palladion" / folder / f"{name}.py").exists()]
    assert not missing, f"in a table of docs/design.md, but not in {folder}: {', '.join(missing)}"


def test_every_room_is_drawn():
    paths = {path.rstrip("/") for _, path in drawn()}
    skip = ("__pycache__", "py.typed")
    rooms = {f"src/palladion/{p.name}" for p in (SRC / "palladion").iterdir() if p.name not in skip}
    assert rooms <= paths, f"not in docs/design.md: {', '.join(sorted(rooms - paths))}"
