"""Checks for the fields of parameter classes, so that a wrong argument is refused where it is written.

The dialects' parameter classes (`pltpu.CompilerParams`, `plgpu.InterpretGPUParams`, ...) are frozen
dataclasses. Each keeps a table from field name to `Check`; `check_fields` runs the table from
`__post_init__`. A check says in words what the field may be and turns what was given into its stored form
(lists into tuples, mappings into `FrozenDict`, NumPy integers into ints), so that every instance can be
hashed: compile caches are keyed by it. Pallas itself accepts any value here and fails, if at all, deep inside
a compiler.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from palladion.errors import explain

__all__ = [
    "Check",
    "FrozenDict",
    "check_fields",
    "choice",
    "flag",
    "frozen_mapping",
    "function",
    "integer",
    "member",
    "one_of",
    "optional",
    "power_of_two",
    "sequence_of",
    "text",
]


class FrozenDict(Mapping):
    """A mapping that cannot be changed and has a hash; equal to any mapping with the same items.

    Arguments:
      items: a mapping with string keys. Lists and mappings among its values are frozen as well.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = {key: _freeze(value) for key, value in items.items()}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenDict({self._items!r})"


def _freeze(value: Any) -> Any:
    if isinstance(value, Mapping):
        return FrozenDict(value)
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(entry) for entry in value)
    return value


@dataclasses.dataclass(frozen=True)
class Check:
    """What a field may hold.

    Attributes:
      expected: the allowed values in words, to follow "must be".
      convert: returns the form to store; raises TypeError or ValueError for anything else. A text in the
        exception says which part is wrong ("entry 1 is 'x'"); without one the whole value is quoted.
      hint: the usual fix, or None.
    """

    expected: str
    convert: Callable[[Any], Any]
    hint: str | None = None


def check_fields(params: Any, owner: str, table: Mapping[str, Check]) -> None:
    """Checks and converts the fields of a frozen dataclass instance, in place; for use in `__post_init__`.

    Arguments:
      params: the instance.
      owner: the class as users spell it, such as "pltpu.CompilerParams".
      table: a `Check` for each field of the class.

    Raises:
      TypeError, ValueError: naming the class, the field, what it may be and what it is.
    """
    for name, check in table.items():
        value = getattr(params, name)
        try:
            stored = check.convert(value)
        except (TypeError, ValueError) as error:
            detail = str(error) or f"it is {value!r}"
            raise type(error)(
                explain(f"{owner}: {name} must be {check.expected}, but {detail}.", hint=check.hint)
            ) from None
        object.__setattr__(params, name, stored)


def flag() -> Check:
    """True or False."""

    def convert(value: Any) -> bool:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError
        return bool(value)

    return Check("True or False", convert)


def integer(minimum: int | None = None, of: str = "integer") -> Check:
    """An int (not a bool), at least `minimum`; `of` says what it counts."""

    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError
        if minimum is not None and value < minimum:
            raise ValueError
        return int(value)

    article = "an" if of[0] in "aeiou" else "a"
    return Check(f"{article} {of}" + ("" if minimum is None else f" of at least {minimum}"), convert)


def power_of_two() -> Check:
    """1, 2, 4, 8, ..."""

    def convert(value: Any) -> int:
        count = integer(1).convert(value)
        if count & (count - 1):
            raise ValueError
        return count

    return Check("a power of two (1, 2, 4, 8, ...)", convert)


def text() -> Check:
    """A str."""

    def convert(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        return value

    return Check("a string", convert)


def choice(*values: str) -> Check:
    """One of the given strings."""

    def convert(value: Any) -> str:
        if value not in values:
            raise ValueError if isinstance(value, str) else TypeError
        return value

    return Check(_either(map(repr, values)), convert)


def member(kind: type[enum.Enum], spelled: str, *, by_value: bool = False) -> Check:
    """A member of an enum, spelled as users do; with `by_value`, a value stands for its member."""

    def convert(value: Any) -> enum.Enum:
        if isinstance(value, kind):
            return value
        if by_value and isinstance(value, str):
            return _member_of(kind, value)
        raise TypeError

    expected = f"a {spelled} ({_either(m.name for m in kind)})"
    return Check(f"{expected} or its value" if by_value else expected, convert)


def _member_of(kind: type[enum.Enum], value: str) -> enum.Enum:
    try:
        return kind(value)
    except ValueError:
        raise ValueError from None  # without the enum's own text: the caller quotes the value


def one_of(*checks: Check) -> Check:
    """What any of the checks allows, tried in order."""

    def convert(value: Any) -> Any:
        errors = []
        for check in checks:
            try:
                return check.convert(value)
            except (TypeError, ValueError) as error:
                errors.append(error)
        raise next((e for e in errors if isinstance(e, ValueError)), errors[0])

    return Check(", or ".join(check.expected for check in checks), convert)


def optional(check: Check) -> Check:
    """None, or what `check` allows."""
    return Check(f"None or {check.expected}", lambda value: None if value is None else check.convert(value), check.hint)


def sequence_of(check: Check, each: str, hint: str | None = None) -> Check:
    """A list or tuple, stored as a tuple, of what `check` allows; there is one entry for `each` thing."""

    def convert(value: Any) -> tuple[Any, ...]:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
            raise TypeError
        entries = []
        for i, entry in enumerate(value):
            try:
                entries.append(check.convert(entry))
            except (TypeError, ValueError) as error:
                raise type(error)(f"entry {i} is {entry!r}") from None
        return tuple(entries)

    return Check(f"a sequence with, for each {each}, {check.expected}", convert, hint)


def frozen_mapping() -> Check:
    """A mapping with string keys, stored as a `FrozenDict`; frozen, its values must have hashes."""

    def convert(value: Any) -> FrozenDict:
        if not isinstance(value, Mapping):
            raise TypeError
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not a string")
            try:
                hash(_freeze(item))
            except TypeError:
                raise TypeError(f"the value of {key!r} cannot be hashed") from None
        return FrozenDict(value)

    return Check("a mapping from strings to values", convert)


def function() -> Check:
    """Anything callable."""

    def convert(value: Any) -> Callable:
        if not callable(value):
            raise TypeError
        return value

    return Check("a function", convert)


def _either(words: Any) -> str:
    *first, last = list(words)
    return f"{', '.join(first)} or {last}" if first else last
