"""Existing Pallas programs, unchanged: `jax.experimental.pallas` and its dialects resolve to Palladion.

    import palladion.dropin
    palladion.dropin.install()
    from jax.experimental import pallas as pl      # Palladion from here on

The same without touching the program: `palladion run FILE`, `palladion run -m MODULE`, `pytest -p palladion.dropin`.

How: a finder at the front of `sys.meta_path`. It answers for `jax.experimental.pallas`, `.tpu`, `.triton` and
`.mosaic_gpu` with modules that hold Palladion's names; it finds `jax.experimental.pallas.ops` (kernels that ship with
JAX, ordinary programs on the public API) on disk where JAX has them; and what else lies in JAX's Pallas package is
refused with a sentence. Parts of `jax._src.pallas` may still be loaded by JAX itself (`jax.extend`, and lowering for
TPU, import types from there); they are never reached from a user's program.

What is taken over, and what is not, is in `docs/dropin.md`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from palladion import config, executors
from palladion.errors import explain

ROOT = "jax.experimental.pallas"
DIALECTS = ("tpu", "triton", "mosaic_gpu")  # attributes of the package, as in JAX's
# Each module of the reference and the module of Palladion that holds its names.
SOURCES = {ROOT: "palladion", **{f"{ROOT}.{name}": f"palladion.{name}" for name in (*DIALECTS, "fuser")}}
# JAX's Mosaic GPU compiler is not loaded, but kernels that ship with JAX import its profiler for their benchmarks.
_MOSAIC_GPU = "jax.experimental.mosaic.gpu"
_EMPTY = (_MOSAIC_GPU, f"{_MOSAIC_GPU}.profiler")
_TEST_UTILITIES = "jax._src.test_util"  # those kernels import it, too, and need absl-py for nothing else
_PRIVATE = "jax._src.pallas"
# One of these in sys.modules means that JAX's own language is alive in the process.
_LOADED_BY_JAX = (f"{_PRIVATE}.pallas_call", f"{_PRIVATE}.primitives", f"{_PRIVATE}.hlo_interpreter")


# --- the modules that programs see --------------------------------------------------------------------------------
class _Loader(importlib.abc.Loader):
    """Fills a module with the public names of one of Palladion's."""

    def __init__(self, source: str) -> None:
        self.source = source

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        source = importlib.import_module(self.source)
        module.__doc__ = source.__doc__
        for name in getattr(source, "__all__", None) or vars(source):
            value = vars(source)[name]
            # `pl.config` is meant for users; the other modules in the package's namespace are its rooms.
            if not name.startswith("_") and (name == "config" or not isinstance(value, types.ModuleType)):
                setattr(module, name, value)
        if hasattr(source, "__getattr__"):
            setattr(module, "__getattr__", _absent(module.__name__, source))  # noqa: B010 - a module-level function


def _absent(module: str, source: types.ModuleType) -> Any:
    """The `__getattr__` of a dialect: Palladion's sentence about a name that is not there, in the program's terms."""

    def __getattr__(name: str) -> Any:
        try:
            return getattr(source, name)
        except AttributeError as error:
            text = str(error).replace(f"module {source.__name__!r}", f"module {module!r}")
            raise AttributeError(text, name=name, obj=sys.modules.get(module)) from None

    return __getattr__


class _EmptyLoader(importlib.abc.Loader):
    """A module that imports, and asking it for anything says why it is empty.

    Arguments:
      why: to follow the name asked for. fix: what to do about it.
    """

    def __init__(self, why: str, fix: str) -> None:
        self.why, self.fix = why, fix

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__

        def __getattr__(attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=module)
            message = explain(f"{name}.{attribute} {self.why}.", hint=self.fix)
            raise AttributeError(message, name=attribute, obj=module)

        setattr(module, "__getattr__", __getattr__)  # noqa: B010 - a module-level function


_COMPILER = _EmptyLoader(
    "is part of JAX's Mosaic GPU compiler, which a program on Palladion does not use",
    "take this path only without `palladion.dropin`; Palladion's own GPU compiler is later work",
)
_NO_ABSL = _EmptyLoader("needs the package absl-py, which is not installed", "pip install absl-py")


# --- finding them ---------------------------------------------------------------------------------------------------
class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if fullname in SOURCES and (spec := _palladion_spec(fullname)) is not None:
            return spec
        if fullname.startswith(f"{ROOT}."):
            return _beneath(fullname)
        if fullname in _EMPTY:
            return importlib.machinery.ModuleSpec(fullname, _COMPILER, is_package=fullname == _MOSAIC_GPU)
        if fullname == _TEST_UTILITIES and importlib.util.find_spec("absl") is None:
            return importlib.machinery.ModuleSpec(fullname, _NO_ABSL)
        if fullname.startswith(f"{_MOSAIC_GPU}."):
            raise _not_here(fullname, "JAX's Mosaic GPU compiler")
        if fullname.startswith(f"{_PRIVATE}.") and not _asked_by_jax():
            raise _not_here(fullname, "the inside of JAX's own Pallas")
        return None


def _palladion_spec(fullname: str) -> importlib.machinery.ModuleSpec | None:
    source = importlib.util.find_spec(SOURCES[fullname])
    if source is None:
        return None
    spec = importlib.machinery.ModuleSpec(
        fullname, _Loader(SOURCES[fullname]), origin=source.origin, is_package=fullname == ROOT
    )
    spec.has_location = True  # so that tracebacks and ImportErrors name Palladion's file
    return spec


def _on_disk(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Where JAX has this module of its Pallas package."""
    folders = [os.path.join(folder, "experimental", "pallas") for folder in jax.__path__]
    return importlib.machinery.PathFinder.find_spec(fullname, folders)


def _beneath(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """`jax.experimental.pallas.<something>` that is not Palladion's."""
    first = fullname.removeprefix(f"{ROOT}.").split(".")[0]
    if first == "ops":
        return _on_disk(fullname) if fullname == f"{ROOT}.ops" else None  # below, the package's own path leads on
    if _on_disk(f"{ROOT}.{first}") is None:
        return None  # nobody has it: Python says so
    raise _not_here(fullname, "a part of JAX's Pallas")


def _not_here(module: str, what: str) -> ModuleNotFoundError:
    # Without `name=module`: of an error that names it, `from package import module` would drop the text.
    return ModuleNotFoundError(
        explain(
            f"{module} is {what}, which Palladion does not have; this process runs Pallas programs on Palladion.",
            hint="run the program without `palladion.dropin` (plain `python FILE`), or without this import",
        )
    )


def _asked_by_jax() -> bool:
    """Whether the import statement that runs now stands in JAX itself."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("importlib") and frame.f_code.co_filename != __file__:
            return module == "jax" or (module.startswith("jax.") and not module.startswith(f"{ROOT}."))
        frame = frame.f_back
    return False


# --- devices --------------------------------------------------------------------------------------------------------
_CORE_COUNT = "core_count"


def _core_count(device: Any) -> int:
    """How many cores a device has: `jax.devices()[0].core_count`, by which kernels choose their grids.

    JAX's GPUs say it themselves. In the GPU interpret mode a device stands for a simulated or emulated GPU,
    and has its SMs.

    Raises:
      AttributeError: neither, as without Palladion.
    """
    try:
        return device.__getattr__(_CORE_COUNT)
    except AttributeError:
        params = config.get("interpret")
        if type(params).__name__ not in ("InterpretGPUParams", "EmulateParams"):
            raise
    return executors.simulated_sms(params)


# --- switching it on and off ----------------------------------------------------------------------------------------
_finder = _Finder()


def installed() -> bool:
    """Whether `jax.experimental.pallas` is Palladion in this process."""
    return _finder in sys.meta_path


def install() -> None:
    """Make `jax.experimental.pallas`, `.tpu`, `.triton` and `.mosaic_gpu` Palladion in this process.

    They are then in `sys.modules` and attributes of `jax.experimental`. Doing it twice changes nothing.

    Raises:
      RuntimeError: JAX's own Pallas is loaded already, so programs hold objects of it.
    """
    if installed():
        return
    there = [m for m in (ROOT, *_LOADED_BY_JAX) if m in sys.modules]
    if there:
        raise RuntimeError(
            explain(
                "JAX's own Pallas is already loaded in this process, so Palladion cannot take its place.",
                hint="call palladion.dropin.install() before anything imports jax.experimental.pallas, or run the "
                "program with `palladion run FILE`",
                loaded=", ".join(there),
            )
        )
    sys.meta_path.insert(0, _finder)
    setattr(jax.Device, _CORE_COUNT, property(_core_count))  # its class has no such attribute of its own
    for name in (ROOT, *(f"{ROOT}.{dialect}" for dialect in DIALECTS)):
        importlib.import_module(name)


def uninstall() -> None:
    """Undo `install`: the next import of `jax.experimental.pallas` is JAX's own. Meant for tests."""
    if not installed():
        return
    sys.meta_path.remove(_finder)
    delattr(jax.Device, _CORE_COUNT)
    ours = [m for m in sys.modules if f"{m}.".startswith((f"{ROOT}.", f"{_MOSAIC_GPU}."))]
    ours += [_TEST_UTILITIES] if getattr(sys.modules.get(_TEST_UTILITIES), "__loader__", None) is _NO_ABSL else []
    for name in ours:
        parent, _, attribute = name.rpartition(".")
        vars(sys.modules.get(parent, types.ModuleType(""))).pop(attribute, None)
        del sys.modules[name]


# --- what a program sets before it imports JAX ----------------------------------------------------------------------
class _JaxAgain(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives a program the JAX that is loaded already, as if it were loaded now: with the environment of now."""

    def __init__(self, module: types.ModuleType, before: Mapping[str, str]) -> None:
        self.module, self.spec, self.before = module, module.__spec__, before

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.module.__name__:
            return None
        sys.meta_path.remove(self)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return self.module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec
        for option, value in _changed_options(self.before, os.environ):
            jax.config.update(option, value)


def _jax_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k.startswith("JAX_")}


def _changed_options(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """JAX's options whose environment variable was set since `before`, with the value it asks for."""
    for option, current in dict(jax.config.values).items():
        text = now.get(option.upper())
        if text is None or text == before.get(option.upper()):
            continue
        if isinstance(current, bool):
            yield option, text.lower() not in ("0", "f", "false", "n", "no", "off", "")
        elif isinstance(current, (int, float)):
            yield option, type(current)(text)
        else:
            yield option, text


def follow_environment() -> None:
    """Let `JAX_…` environment variables that a program sets before its first `import jax` have their effect.

    JAX reads them when it is imported, and Palladion has imported it by then. Until a program imports it, `jax` is
    taken out of `sys.modules`; the import puts it back and applies the variables that have changed since.
    """
    module = sys.modules.get("jax")
    if module is None:
        return
    sys.meta_path.insert(0, _JaxAgain(module, _jax_environment()))
    del sys.modules["jax"]


# --- pytest -p palladion.dropin -------------------------------------------------------------------------------------
def pytest_load_initial_conftests() -> None:
    """pytest's hook before the first conftest.py: conftests and tests then import Palladion."""
    install()
    follow_environment()
    # Workers of pytest-xdist load plugins named on the command line after their conftests, but these before.
    plugins = os.environ.get("PYTEST_PLUGINS", "")
    if __name__ not in plugins.split(","):
        os.environ["PYTEST_PLUGINS"] = f"{plugins},{__name__}".strip(",")
