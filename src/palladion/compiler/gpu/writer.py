"""Text of a C++ function: lines with indentation, names that are used once, and the user's lines as comments."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from palladion import jaxlink
from palladion.compiler.gpu.header import PRELUDE
from palladion.compiler.gpu.memory_header import HEADER

_RESERVED = set(
    """t lane warp wg i j k asm auto bool break case catch char class const constexpr continue default delete do double
    else enum explicit extern false float for friend goto if inline int long mutable namespace new operator private
    protected public register return short signed sizeof static struct switch template this throw true try typedef
    union unsigned using virtual void volatile while half bf16 f16 e4m3 e5m2 i8 u8 i16 u16 i32 u32 i64 u64 smem
    and and_eq bitand bitor compl not not_eq or or_eq xor xor_eq
    blockIdx threadIdx gridDim blockDim min max abs exp log sin cos pow sqrt floor ceil
    and or not xor bitand bitor compl and_eq or_eq xor_eq not_eq
    printf fabs fmod rint round nextafter copysign exp2 expm1 log1p log2 rsqrt cbrt tan asin acos atan sinh cosh tanh
    asinh acosh atanh erf erfc erfinv lgamma atan2 digamma bessel_i1e ordered sort_key log_add_exp""".split()
)
# The versions of functions for float.
_RESERVED |= {f"{name}f" for name in _RESERVED if name.isalnum()}


# Functions of the headers, which a variable of the same name would hide.
_DECLARED = set(re.findall(r"__forceinline__ [^(){};]*?(\w+)\(", PRELUDE + HEADER)) | set("matrix once elected".split())
_RESERVED |= _DECLARED


# Further functions that NVRTC declares, with which a kernel cannot share its name.
_LIBRARY = set(
    """norm norm3d norm4d rnorm rnorm3d rnorm4d hypot rhypot gamma tgamma j0 j1 jn y0 y1 yn fma fdim fmax fmin ldexp
    frexp modf logb ilogb scalbn scalbln remainder remquo trunc isnan isinf isfinite signbit sincos sincospi sinpi cospi
    exp10 log10 normcdf normcdfinv erfcx erfcinv rcbrt lrint llrint lround llround nearbyint nan labs llabs clock
    clock64 malloc free memcpy memset memmove assert saturate umin umax llmin llmax ullmin ullmax mulhi""".split()
)
_LIBRARY |= {f"{name}f" for name in _LIBRARY}


def kernel_name(wanted: str, taken: Iterable[str] = ()) -> str:
    """The C++ name of a kernel: that of the user's function, if the language and its library have no other use for it.

    Arguments: wanted: any text. taken: further names that are not free.
    """
    name = re.sub(r"\W", "_", wanted, flags=re.ASCII) or "kernel"
    if name[0].isdigit():
        return f"kernel_{name}"
    return f"{name}_kernel" if name in _RESERVED | _LIBRARY | set(taken) else name


class Writer:
    """Collects lines.

    Attributes:
      lines: so far. depth: of indentation.
    """

    def __init__(self, depth: int = 1) -> None:
        self.lines: list[str] = []
        self.depth = depth
        self._used: dict[str, int] = {}
        self._comment: str | None = None

    def line(self, text: str) -> None:
        """Add a line (or several) at the present depth."""
        for one in text.split("\n"):
            self.lines.append("  " * self.depth + one if one and not one.startswith("#") else one)

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """`head { … }`."""
        self.line(f"{head} {{" if head else "{")
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")

    def name(self, wanted: str) -> str:
        """A name that is not used yet, `wanted` if possible."""
        base = re.sub(r"\W+", "_", wanted, flags=re.ASCII).strip("_") or "v"
        base = base if not base[0].isdigit() else f"v{base}"
        n = self._used.get(base, 1 if base in _RESERVED else 0)
        while (name := base if n == 0 else f"{base}_{n + 1}") in self._used:
            n += 1
        self._used[base] = n + 1
        self._used.setdefault(name, 1)
        return name

    def comment(self, eqn: Any) -> None:
        """Say which of the user's lines comes next, if it is another one than the last."""
        frame = jaxlink.source_info_util.user_frame(eqn.source_info.traceback)
        if frame is None:
            return
        source = linecache.getline(frame.file_name, frame.start_line).strip()
        where = f"// {os.path.basename(frame.file_name)}:{frame.start_line}"
        text = f"{where}  {source}".rstrip().rstrip("\\")
        if text != self._comment:
            self._comment = text
            self.line(text)

    def snapshot(self) -> Any:
        """The state, for `restore`."""
        return list(self.lines), self.depth, dict(self._used), self._comment

    def restore(self, state: Any) -> None:
        """Forget what was written since."""
        self.lines[:], self.depth, used, self._comment = state
        self._used = dict(used)


def wanted_name(eqn: Any) -> str:
    """What the user calls the result of an equation: the name that the line assigns to, or the operation's."""
    frame = jaxlink.source_info_util.user_frame(eqn.source_info.traceback)
    if frame is not None:
        target = _assigned(frame.file_name).get(frame.start_line)
        if target is not None:
            return target
    return str(eqn.primitive.name)


@functools.lru_cache(64)
def _assigned(file: str) -> dict[int, str]:
    """{line: name} of the simple assignments in a file."""
    found: dict[int, str] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                found[line] = node.targets[0].id
    return found
