"""The words of PTX text, and a reader that goes over them. Comments are left out; every token knows its line.

Source: PTX ISA manual, "Syntax".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from palladion.emulator.faults import PtxError

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+)|(?P<newline>\n)|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<number>0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?
       |\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+|\d+U?)
    |(?P<word>[.]?[%$A-Za-z_][\w$]*(?:(?:\.|::)[\w$]+)*)|(?P<punct>[{}()\[\],;:@!|=<>+\-*~&^/])""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True)
class Token:
    kind: str
    text: str
    line: int


def tokens(text: str) -> list[Token]:
    """The tokens of PTX text, with their lines; comments are left out."""
    found, line, at = [], 1, 0
    for match in _TOKEN.finditer(text):
        if match.start() != at:
            break
        at = match.end()
        kind = match.lastgroup or ""
        if kind == "newline":
            line += 1
        elif kind == "comment":
            line += match.group().count("\n")
        elif kind != "space":
            found.append(Token(kind, match.group(), line))
    if at != len(text.rstrip("\0")):
        raise PtxError(f"PTX line {line}: cannot read {text[at : at + 20]!r}.")
    return found


class Reader:
    """Goes over the tokens of a text."""

    def __init__(self, text: str) -> None:
        self.tokens = tokens(text)
        self.at = 0

    def peek(self, ahead: int = 0) -> str:
        k = self.at + ahead
        return self.tokens[k].text if k < len(self.tokens) else ""

    def take(self, expected: str | None = None) -> str:
        if self.at >= len(self.tokens):
            raise IndexError
        token = self.tokens[self.at]
        if expected is not None and token.text != expected:
            raise PtxError(f"PTX line {token.line}: {expected!r} is expected, not {token.text!r}.")
        self.at += 1
        return token.text

    def accept(self, text: str) -> bool:
        if self.peek() == text:
            self.at += 1
            return True
        return False

    @property
    def line(self) -> int:
        return self.tokens[min(self.at, len(self.tokens) - 1)].line

    def rest_of_line(self) -> list[str]:
        line, found = self.line, []
        while self.at < len(self.tokens) and self.tokens[self.at].line == line:
            found.append(self.take())
        return found

    def skip_braces(self) -> None:
        depth = 0
        while True:
            token = self.take()
            depth += (token == "{") - (token == "}")
            if depth == 0 and token == "}":
                return

    def until_semicolon(self) -> None:
        while self.take() != ";":
            pass
