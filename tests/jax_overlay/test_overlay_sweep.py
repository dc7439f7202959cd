"""Every public module and name of JAX is the same object through ``capibara.jax``."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import pytest

import capibara.jax

# What Capibara puts in the place of something that JAX has.
REPLACED = {("jax", "config"), ("jax", "numpy")}
OVERLAYS = {"jax", "jax.numpy"}
ADDED = {
    "device_memory_allocated",
    "device_memory_peak",
    "diagnostics",
    "get_backend_info",
    "get_optimization_status",
    "pjit",
    "tpu_v4",
    "utils",
}


def public_modules() -> Iterator[str]:
    def below(path: list[str], prefix: str) -> Iterator[str]:
        for info in pkgutil.iter_modules(path, prefix):
            if info.name.rpartition(".")[2].startswith("_"):
                continue
            yield info.name
            if info.ispkg:
                yield from below(
                    [f"{folder}/{info.name.rpartition('.')[2]}" for folder in path], info.name + "."
                )

    yield "jax"
    yield from below(list(jax.__path__), "jax.")


MODULES = sorted(public_modules())


def quietly(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args)


def attempt(name: str) -> ModuleType | BaseException:
    try:
        return quietly(importlib.import_module, name)
    except Exception as error:
        return error


def test_the_sweep_is_not_empty():
    assert len(MODULES) > 150
    assert {"jax.numpy.linalg", "jax.scipy.stats.norm", "jax.experimental.pallas.tpu"} <= set(MODULES)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", MODULES)
def test_module_and_names_are_jax_s_own(name):
    real, ours = attempt(name), attempt("capibara." + name)
    if isinstance(real, BaseException):
        # Something JAX needs for it is not installed: then both fail, in the same way.
        assert type(ours) is type(real)
        assert str(ours) == str(real)
        return
    assert isinstance(ours, ModuleType)
    if name not in OVERLAYS:
        assert ours is real
    for attribute in dir(real):
        if attribute.startswith("_") or (name, attribute) in REPLACED:
            continue
        value = quietly(getattr, real, attribute)
        assert quietly(getattr, ours, attribute) is value, attribute
        assert attribute in dir(ours)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", MODULES)
def test_attribute_chain_reaches_the_same_object(name):
    if isinstance(attempt(name), BaseException) or isinstance(attempt("capibara." + name), BaseException):
        pytest.skip("not importable here")
    theirs, ours = jax, capibara.jax
    for part in name.split(".")[1:]:
        assert hasattr(ours, part) == hasattr(theirs, part)
        if not hasattr(theirs, part):  # JAX deletes the attribute after use
            return
        theirs, ours = getattr(theirs, part), getattr(ours, part)
    assert ours is theirs or name in OVERLAYS


def star(module: str) -> dict[str, object]:
    namespace: dict[str, object] = {}
    quietly(exec, f"from {module} import *", namespace)
    namespace.pop("__builtins__")
    return namespace


@pytest.mark.parametrize(
    "name", ["", ".numpy", ".nn", ".lax", ".random", ".scipy.special", ".sharding", ".scipy"]
)
def test_star_import_matches(name):
    theirs, ours = star("jax" + name), star("capibara.jax" + name)
    added = set(ours) - set(theirs)
    assert set(theirs) <= set(ours)
    assert added == {"": ADDED, ".numpy": {"random"}}.get(name, set())
    for key, value in theirs.items():
        assert ours[key] is value or ("jax" + name, key) in REPLACED, key


def test_all_and_dir_agree_with_what_is_there():
    module: Any
    for module in (capibara.jax, capibara.jax.numpy):
        for name in module.__all__:
            assert hasattr(module, name), name
            assert name in dir(module), name
    overlay: Any = capibara.jax
    assert {"jit", "config", "pjit"} <= set(overlay.__all__)


def test_a_name_set_in_jax_later_is_seen(monkeypatch):
    marker = object()
    overlay: Any = capibara.jax
    monkeypatch.setattr(jax, "a_name_from_the_future", marker, raising=False)
    assert overlay.a_name_from_the_future is marker
    monkeypatch.setattr(jax, "jit", marker)
    assert capibara.jax.jit is marker


def test_aliased_modules_keep_their_own_spec_and_name():
    for name, module in list(sys.modules.items()):
        if name.startswith("jax.") and module is not None and module.__spec__ is not None:
            assert module.__spec__.name.split(".")[0] == "jax", name
            assert module.__name__.split(".")[0] == "jax", name
