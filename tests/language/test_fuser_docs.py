"""docs/fuser.md prints what it says."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "fuser.md"


def test_the_page_prints_what_it_says():
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    program = "\n".join(text for language, text in blocks if language == "python")
    expected = "".join(text for language, text in blocks if not language)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(PAGE), "exec"), {"__name__": "docs_fuser"})
    assert printed.getvalue() == expected
