"""Every public name says what it does and what its arguments mean."""

import dataclasses
import importlib
import inspect
import re
import types

import pytest

NAMESPACES = (
    "palladion",
    "palladion.tpu",
    "palladion.triton",
    "palladion.mosaic_gpu",
    "palladion.cpu",
    "palladion.fuser",
)


def own_doc(name: str, value: object) -> str:
    """The docstring written for a name: not one that `dataclass` or a base class supplies."""
    if inspect.isclass(value):
        doc = value.__dict__.get("__doc__") or ""
        # dataclass writes "Name(field: type = default)" where there is none.
        return "" if doc.startswith(f"{value.__name__}(") else doc
    if inspect.isroutine(value) or isinstance(value, types.ModuleType):
        return inspect.getdoc(value) or ""
    # A constant is explained by its type (an enum, a block dimension) or by a docstring of its own.
    return inspect.getdoc(value) or own_doc(name, type(value))


def arguments(value: object) -> list[str]:
    """Names of what a user passes: parameters of a function, fields of a dataclass."""
    if inspect.isclass(value):
        if not dataclasses.is_dataclass(value):
            return []
        return [f.name for f in dataclasses.fields(value) if f.init and not f.name.startswith("_")]
    if not inspect.isfunction(value):
        return []
    return [p for p in inspect.signature(value).parameters if not p.startswith("_")]


def public(namespace: str) -> dict[str, object]:
    module = importlib.import_module(namespace)
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_public_name_has_a_docstring(namespace):
    names = public(namespace)
    assert names
    ours = {name: v for name, v in names.items() if not type(v).__module__.startswith("jax")}  # not JAX's own objects
    silent = [name for name, value in ours.items() if len(own_doc(name, value).split()) < 3]
    assert not silent, f"without a docstring in {namespace}: {', '.join(silent)}"


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_every_argument_is_explained(namespace):
    unexplained = []
    for name, value in public(namespace).items():
        if not getattr(value, "__module__", "").startswith("palladion"):
            continue  # JAX's own, re-exported
        doc = own_doc(name, value)
        missing = [a for a in arguments(value) if not re.search(rf"\b{re.escape(a)}\b", doc)]
        if missing:
            unexplained.append(f"{name}: {', '.join(missing)}")
    assert not unexplained, "\n".join(unexplained)
