"""Where things come from: `file:line (function)` of equations, of functions, of errors, of the code that runs.

Palladion's and JAX's own frames are not the user's, so that every message names the kernel's own line.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from palladion import jaxlink


def shortened(path: str) -> str:
    """A file below the working folder as a relative path; others as they are."""
    try:
        relative = os.path.relpath(path) if os.path.isabs(path) else path
    except FileNotFoundError:  # the working folder is gone
        return path
    return path if relative.startswith("..") else relative


def _plain(name: str) -> str:
    """A function's qualified name, without what Python puts between a function and the one around it."""
    return name.replace(".<locals>", "")


def _frame_text(frame: Any) -> str:
    return f"{shortened(frame.file_name)}:{frame.start_line} ({_plain(frame.function_name)})"


def location_of(eqn: Any) -> str | None:
    """`file:line (function)` of the user's line that made an equation."""
    frame = jaxlink.source_info_util.user_frame(eqn.source_info.traceback)
    return None if frame is None else _frame_text(frame)


def current_location() -> str | None:
    """`file:line (function)` of the innermost user frame on the stack."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if _is_user_code(frame.f_code):
            return f"{shortened(frame.f_code.co_filename)}:{line} ({_plain(frame.f_code.co_qualname)})"
    return None


def _is_user_code(code: types.CodeType) -> bool:
    # <string>: the __init__ that a dataclass makes
    return code.co_filename != "<string>" and jaxlink.source_info_util.is_user_filename(code.co_filename)


def raised_in_library(error: BaseException) -> bool:
    """Whether an exception came from JAX (or other libraries), not from a `raise` in the user's code or in ours."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = frames[-1].f_code.co_filename if frames else jaxlink.PACKAGE_DIR
    return not last.startswith(jaxlink.PACKAGE_DIR) and not jaxlink.source_info_util.is_user_filename(last)


def location_of_error(error: BaseException) -> str | None:
    """`file:line (function)` of the innermost user frame in an exception's traceback."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _is_user_code(frame.f_code):
            found = f"{shortened(frame.f_code.co_filename)}:{line} ({_plain(frame.f_code.co_qualname)})"
    return found


def defined_at(fun: Any) -> str | None:
    """`file:line (function)` where a Python function is defined, seen through wrappers, partials and methods."""
    for _ in range(8):
        fun = inspect.unwrap(fun)
        if hasattr(fun, "__code__"):
            return f"{shortened(fun.__code__.co_filename)}:{fun.__code__.co_firstlineno} ({fun.__name__})"
        fun = getattr(fun, "func", None) or type(fun).__call__
    return None


def traced_at(jaxpr: Any) -> str | None:
    """`file:line` of the function that a jaxpr is a trace of."""
    match = re.fullmatch(r".* at (.*):(\d+)", jaxpr.debug_info.func_src_info or "", re.DOTALL)
    return match and f"{shortened(match[1])}:{match[2]}"


@contextlib.contextmanager
def as_traced(eqn: Any):
    """Run under an equation's own source location, name stack and configuration (precision and such)."""
    names = jaxlink.source_info_util.current_name_stack() + eqn.source_info.name_stack
    with jaxlink.source_info_util.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def is_user_file(path: str) -> bool:
    """Whether a source file is the user's: not JAX's, not Palladion's, not Python's own."""
    return jaxlink.source_info_util.is_user_filename(path)


def function_location(fun: Callable) -> str:
    """`name at file:line` of a Python function, seen through wrappers and partials."""
    return jaxlink.api_util.fun_sourceinfo(fun) or repr(fun)
