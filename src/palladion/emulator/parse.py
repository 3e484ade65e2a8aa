"""From PTX text to `ptx.Module`, for whole modules as NVRTC and Triton emit them and for inline assembly inside them.

A hand-written parser over the tokens of `tokens.py`. Names declared in a nested `{ }` (registers, labels) are made
unique within the function, so that nothing after this file knows about scopes. Debugging sections are skipped;
`.loc` is kept with the instructions that follow it.
Source: PTX ISA manual, "Syntax".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from palladion.emulator.faults import PtxError
from palladion.emulator.initial import initial_bytes, number
from palladion.emulator.ptx import (
    SIZES,
    SPACES,
    Address,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from palladion.emulator.tokens import Reader, Token


@dataclass
class _Scope:
    """Names of a `{ }`: registers, labels and variables."""

    parent: _Scope | None
    suffix: str
    names: dict[str, Operand | Variable] = field(default_factory=dict)

    def find(self, name: str) -> Operand | Variable | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.parent
        return None


def parse(text: str) -> Module:
    """Parse a module.

    Raises: PtxError: with the line of the PTX text.
    """
    try:
        return _Parser(text).module()
    except IndexError:
        raise PtxError(
            f"PTX line {text.rstrip().count(chr(10)) + 1}: the text ends in the middle of something."
        ) from None


class _Parser(Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.out = Module(text=text)
        self.loc: tuple[int, ...] | None = None
        self.callers: dict[tuple[str, ...], tuple[str, ...]] = {}

    # --- module level ---------------------------------------------------------------------------------------
    def module(self) -> Module:
        linkage = False
        while self.at < len(self.tokens):
            token = self.peek()
            if token in (".version", ".target", ".address_size"):
                self.take()
                value = " ".join(self.rest_of_line())
                if token == ".version":
                    self.out.version = value
                elif token == ".target":
                    self.out.target = value
            elif token in (".visible", ".extern", ".weak", ".common"):
                self.take()
                linkage = linkage or token == ".extern"
                continue
            elif token in (".entry", ".func"):
                self.function()
            elif token == ".file":
                self.file()
            elif token == ".loc":
                self.location()
            elif token == ".section":
                while self.peek() != "{":
                    self.take()
                self.skip_braces()
            elif token in (".pragma", ".alias"):
                self.until_semicolon()
            elif token.startswith("."):
                variable = self.variable(extern=linkage)
                self.out.variables[variable.name] = variable
            else:
                raise PtxError(f"PTX line {self.line}: {token!r} is not expected outside a function.")
            linkage = False
        return self.out

    def file(self) -> None:
        self.take(".file")
        parts = self.rest_of_line()
        self.out.files[int(parts[0])] = parts[1].strip('"')

    def location(self) -> None:
        self.take(".loc")
        parts = self.rest_of_line()
        # line 0 stands for what the compiler made itself: the line before it says more
        if len(parts) < 2 or parts[1] == "0":
            return
        self.loc = (int(parts[0]), int(parts[1]))
        if "inlined_at" in parts:
            k = parts.index("inlined_at") + 1
            here, caller = tuple(parts[:3]), tuple(parts[k : k + 3])
            self.callers[tuple(p.strip(",") for p in here)] = caller
            seen = {caller}  # a call that is inlined in turn has said so in a .loc of its own
            while (further := self.callers.get(caller)) is not None and further not in seen:
                seen.add(further)
                caller = further
            self.loc = (*self.loc, int(caller[1]))

    def variable(self, extern: bool = False, semicolon: bool = True) -> Variable:
        """`.space .align n .type name[sizes] = {…}`; several names after one type are not emitted by compilers."""
        space = self.take()[1:]
        align, kind, count = 0, "b8", 1
        while self.peek().startswith("."):
            word = self.take()[1:]
            if word == "align":
                align = int(self.take())
            elif word in ("v2", "v4"):
                count = int(word[1])
            elif word == "attribute":
                while self.take() != ")":
                    pass
            elif word == "ptr":
                while self.peek() in (".global", ".shared", ".const", ".local", ".align"):
                    if self.take() == ".align":
                        self.take()
            elif word in SIZES:
                kind = word
        name = self.take()
        unsized = False
        while self.accept("["):
            if self.accept("]"):
                unsized = True
            else:
                count *= int(number(self.take()))
                self.take("]")
        element = SIZES[kind]
        data, links = b"", ()
        if self.accept("="):
            data, links, items = initial_bytes(self, kind)
            if unsized:
                unsized, count = False, items
        if semicolon:
            self.take(";")
        size = 0 if unsized else element * count
        return Variable(
            name, space, align or element, size, data.ljust(size, b"\0") if data else b"", links, extern, kind
        )

    def parameters(self) -> list[Variable]:
        found = []
        if self.accept("("):
            while not self.accept(")"):
                if self.peek() == ".reg":
                    self.tokens[self.at].text = ".param"
                found.append(self.variable(semicolon=False))
                self.accept(",")
        return found

    # --- functions ------------------------------------------------------------------------------------------
    def function(self) -> None:
        line = self.line
        entry = self.take() == ".entry"
        returns = self.parameters() if not entry else []
        name = self.take()
        function = Function(name, entry, self.parameters(), returns, line=line)
        while self.peek().startswith("."):
            word = self.take()[1:]
            values = []
            while self.tokens[self.at].kind == "number" or self.peek() == ",":
                token = self.take()
                if token != ",":
                    values.append(int(number(token)))
            function.directives[word] = tuple(values)
        if self.accept(";"):
            self.out.functions.setdefault(name, function)
            return
        self.out.functions[name] = function
        self.loc = None
        _Body(self, function).parse()


class _Body:
    """The statements of one function."""

    def __init__(self, parser: _Parser, function: Function) -> None:
        self.p, self.function = parser, function
        self.items: list[tuple[Instruction | Label, _Scope]] = []
        self.scopes = 0

    def parse(self) -> None:
        self.p.take("{")
        top = _Scope(None, "")
        for variable in [*self.function.params, *self.function.returns]:
            top.names[variable.name] = Symbol(variable.name)
        self.block(top)
        self.function.body = [self.resolved(item, scope) for item, scope in self.items]

    def block(self, scope: _Scope) -> None:
        p = self.p
        while not p.accept("}"):
            token = p.peek()
            if token == "{":
                p.take()
                self.scopes += 1
                self.block(_Scope(scope, f"'{self.scopes}"))
            elif token == ".reg":
                self.registers(scope)
            elif token == ".loc":
                p.location()
            elif token in (".pragma", ".callprototype"):
                p.until_semicolon()
            elif token.startswith(".") and token[1:] in SPACES:
                variable = p.variable()
                name = variable.name + scope.suffix
                scope.names[variable.name] = Symbol(name)
                self.function.variables.append(Variable(**{**vars(variable), "name": name}))
            elif p.peek(1) == ":" and p.peek(2) != ":":
                self.label(scope)
            elif token == ";":
                p.take()
            else:
                self.items.append((self.instruction(scope), scope))

    def label(self, scope: _Scope) -> None:
        p = self.p
        name = p.take()
        p.take(":")
        if p.peek() == ".branchtargets":
            p.take()
            targets = []
            while not p.accept(";"):
                token = p.take()
                if token != ",":
                    targets.append(token)
            scope.names[name] = Symbol(name)
            self.function.targets[name] = tuple(targets)
        elif p.peek() == ".callprototype":
            p.until_semicolon()
            scope.names[name] = Symbol(name)
        else:
            label = Label(name + scope.suffix)
            scope.names[name] = label
            self.items.append((label, scope))

    def registers(self, scope: _Scope) -> None:
        p = self.p
        p.take(".reg")
        kind = p.take()[1:]
        if kind in ("v2", "v4"):
            raise PtxError(f"PTX line {p.line}: registers of vectors are not supported.")
        while True:
            name = p.take()
            names = [name]
            if p.accept("<"):
                names = [f"{name}{k}" for k in range(int(p.take()))]
                p.take(">")
            for n in names:
                register = Register(n + scope.suffix, kind)
                scope.names[n] = register
                self.function.registers[register.name] = register
            if not p.accept(","):
                break
        p.take(";")

    def instruction(self, scope: _Scope) -> Instruction:
        p = self.p
        first, line = p.at, p.line
        guard = None
        if p.accept("@"):
            negated = p.accept("!")
            register = scope.find(p.take())
            if not isinstance(register, Register):
                raise PtxError(f"PTX line {line}: the predicate is not a register.")
            guard = (register, negated)
        opcode = p.take()
        operands = []
        while not p.accept(";"):
            operands.append(self.operand(scope))
            p.accept(",")
        text = _text(self.p.tokens[first : p.at])
        return Instruction(opcode, tuple(operands), guard, line, text, p.loc)

    def operand(self, scope: _Scope) -> Operand:
        value = self.single(scope)
        return Pair(value, self.single(scope)) if self.p.accept("|") else value

    def single(self, scope: _Scope) -> Operand:
        p = self.p
        token = p.tokens[p.at]
        if token.text in ("{", "("):
            return Vector(tuple(self.listed(scope, "}" if p.take() == "{" else ")")))
        if p.accept("["):
            first, offset = self.term(scope)
            more = tuple(self.listed(scope, "]")) if p.accept(",") else ()
            if not more:
                p.take("]")
            return Address(first, offset, more)
        if p.accept("!"):
            return Negated(self._register(scope))
        if p.accept("-"):
            if p.tokens[p.at].kind == "number":
                value = _immediate(p.take())
                return Immediate(-value.value, value.kind, value.bits ^ (1 << (63 if value.kind == "f64" else 31)))
            return Negated(self._register(scope))
        if token.kind == "number":
            return _immediate(p.take())
        value, offset = self.term(scope)
        return Symbol(value.name, offset) if isinstance(value, Symbol) and offset else value

    def _register(self, scope: _Scope) -> Register:
        found = scope.find(self.p.take())
        if not isinstance(found, Register):
            raise PtxError(f"PTX line {self.p.line}: a register is expected.")
        return found

    def listed(self, scope: _Scope, end: str) -> list[Operand]:
        found = []
        while not self.p.accept(end):
            found.append(self.operand(scope))
            self.p.accept(",")
        return found

    def term(self, scope: _Scope) -> tuple[Operand, int]:
        """A name or number, with `+ number` after it."""
        p = self.p
        if p.tokens[p.at].kind == "number":
            base: Operand = _immediate(p.take())
        else:
            if p.tokens[p.at].kind != "word":
                raise PtxError(f"PTX line {p.line}: an operand is expected, not {p.peek()!r}.")
            name = p.take()
            found = scope.find(name)
            if name == "_":
                base = Sink()
            elif isinstance(found, Register | Symbol | Label):
                base = found
            elif name.startswith("%"):
                base = Special(name)
            else:
                base = Symbol(name)
        offset = 0
        while p.peek() in ("+", "-") and p.tokens[p.at].kind == "punct":
            sign = -1 if p.take() == "-" else 1
            if p.accept("-"):
                sign = -sign
            offset += sign * int(number(p.take()))
        return base, offset

    def resolved(self, item: Instruction | Label, scope: _Scope) -> Instruction | Label:
        """With labels that were declared after their use."""
        if isinstance(item, Label):
            return item
        if item.name not in ("bra", "brx"):
            return item
        operands = tuple(self._label(o, scope) for o in item.operands)
        if item.name == "brx" and isinstance(item.operands[-1], Symbol):
            names = self.function.targets[item.operands[-1].name]
            labels = tuple(self._label(Symbol(name), scope) for name in names)
            operands = (*operands[:-1], Vector(labels))
        return Instruction(item.opcode, operands, item.guard, item.line, item.text, item.loc)

    def _label(self, operand: Operand, scope: _Scope) -> Operand:
        if isinstance(operand, Symbol):
            found = scope.find(operand.name)
            if isinstance(found, Label):
                return found
        return operand


def _immediate(text: str) -> Immediate:
    if text[:2] in ("0f", "0F"):
        bits = int(text[2:], 16)
        return Immediate(struct.unpack("<f", struct.pack("<I", bits))[0], "f32", bits)
    if text[:2] in ("0d", "0D"):
        bits = int(text[2:], 16)
        return Immediate(struct.unpack("<d", struct.pack("<Q", bits))[0], "f64", bits)
    value = number(text)
    if isinstance(value, float):
        return Immediate(value, "f64", struct.unpack("<Q", struct.pack("<d", value))[0])
    return Immediate(value)


def _text(found: list[Token]) -> str:
    """An instruction as one line."""
    text = ""
    for token in found:
        glue = "" if token.text in ",;)]}|" or not text or text[-1] in "@!([{-|+" or token.text in "+|" else " "
        text += glue + token.text
    return text
