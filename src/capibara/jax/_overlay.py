"""One mechanism that makes ``capibara.jax`` a drop-in for ``jax``.

The problem: ``import capibara.jax.scipy.linalg`` has to hand out JAX's own module. A second copy would hold
second classes, and then ``isinstance``, pickling and JAX's registries quietly stop agreeing.

Two kinds of module solve it:

*Aliases.* For everything Capibara does not add to, ``sys.modules["capibara.jax.X"]`` **is** the module
object ``jax.X``. :class:`AliasFinder` stands first on ``sys.meta_path`` and answers only names below
``capibara.jax.``; it must be first, because the ordinary path finder would follow the aliased parent's
``__path__`` and load the file again under the second name. The module that the import system creates for an
alias is a throw-away which :class:`AliasLoader` replaces in ``sys.modules`` (a documented thing for a loader
to do), so ``__spec__``, ``__name__`` and ``__loader__`` of JAX's module are never written to.

*Overlays.* Where Capibara adds names (``capibara.jax``, ``.numpy``, ``._src`` and ``._src.core``), the
module is Capibara's own. What it does not define is looked up on JAX's module at every access, so a name
that appears later, or that a test replaced in JAX, is seen at once. That lookup is the C-level
``partial(getattr, base)``: no Python frame of Capibara lies between the user and JAX, so JAX's
``DeprecationWarning`` points at the user's line. Only a failed lookup reaches Python code: names added
lazily, and an ``AttributeError`` that suggests the nearest spelling.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any

PREFIX = "capibara.jax."
BASE = "jax."
OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))

# Modules that have another place in JAX than the name suggests. `capibara.jax.numpy.random` is documented
# (`jnp.random.normal(key, shape)`); the module with that signature is `jax.random`.
ELSEWHERE = {"capibara.jax.numpy.random": "jax.random"}


class Added:
    """A name that Capibara adds to a module, or puts in the place of JAX's.

    A descriptor without ``__set__`` on the module's class: Python looks at the module's own dictionary
    first, then here, and only then calls the module's ``__getattr__``, which asks JAX. So it wins over a
    name of JAX's, costs nothing until it is used, and ``import capibara.jax`` does not have to import its
    own children (which would deadlock with a thread that is importing such a child).
    """

    def __init__(self, name: str, where: str | Callable[[], Any]) -> None:
        self.name = name
        self.where = where

    @property
    def always_there(self) -> bool:
        return isinstance(self.where, str)

    def __get__(self, module: ModuleType | None, owner: type) -> Any:
        if module is None:
            return self
        if callable(self.where):
            return self.where()
        path, _, attribute = self.where.partition(":")
        value = importlib.import_module(path)
        if attribute:
            value = getattr(value, attribute)
        vars(module)[self.name] = value
        return value


class Overlay(ModuleType):
    """A module that adds names to another module and forwards everything else to it."""

    __overlay_base__: ModuleType

    @property
    def __all__(self) -> list[str]:
        # Computed, because `from jax import *` also follows what is in jax at that moment.
        base = self.__overlay_base__
        listed = getattr(base, "__all__", None)
        names = set(vars(base) if listed is None else listed)
        if listed is None:
            names = {name for name in names if not name.startswith("_")}
        return sorted(names | _added_names(self))

    def __dir__(self) -> list[str]:
        own = {name for name in vars(self) if not name.startswith("__overlay")}
        return sorted(set(dir(self.__overlay_base__)) | own | _added_names(self))

    def __getattr__(self, name: str) -> Any:
        # Reached only after the module's dictionary, what is added and JAX's module have all failed.
        added = vars(type(self)).get(name)
        if isinstance(added, Added):
            return added.__get__(self, type(self))  # fails again, this time with its own reason
        raise AttributeError(_missing(self, name), name=name, obj=self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle knows no modules; cloudpickle sends plain ones by name, and so must this class.
        return importlib.import_module, (self.__name__,)


def _added_names(module: Overlay) -> set[str]:
    return {
        name for name, value in vars(type(module)).items() if isinstance(value, Added) and value.always_there
    }


def _missing(module: Overlay, name: str) -> str:
    """The text for a name that neither Capibara nor JAX has."""
    base = module.__overlay_base__
    try:
        getattr(base, name)
    except AttributeError as error:
        reason = str(error)
    else:  # JAX gained the name between the two lookups
        reason = f"{name!r} did not exist a moment ago; try again"
    if reason != f"module {base.__name__!r} has no attribute {name!r}":
        # JAX has more to say: what was removed, and what took its place.
        return f"module {module.__name__!r}: {reason}"
    text = f"module {module.__name__!r} (which forwards to {base.__name__!r}) has no attribute {name!r}."
    if name.startswith("__"):
        return text
    from capibara.errors import did_you_mean

    return text + did_you_mean(name, dir(module))


def overlay(name: str, base: ModuleType, added: Mapping[str, str | Callable[[], Any]]) -> None:
    """Turn the module ``name``, which is being imported, into an overlay over ``base``.

    ``added`` maps each name that Capibara adds to ``"module"`` or ``"module:attribute"``, imported at the
    first access; or to a function that is called at every access, for a name that is not always there (it
    raises ``AttributeError`` then, and ``dir`` does not list it). May be called again for the same module
    (``importlib.reload``).
    """
    module = sys.modules[name]
    namespace = vars(module)
    namespace["__overlay_base__"] = base
    namespace["__getattr__"] = functools.partial(getattr, base)
    members = {attribute: Added(attribute, where) for attribute, where in added.items()}
    module.__class__ = type("Overlay", (Overlay,), {"__module__": __name__, **members})


def import_from_jax(name: str) -> ModuleType:
    """Import JAX's module ``name``, but JAX whole before any part of it.

    JAX's import cycles only work when entered at the top; a thread that asks for a part while another
    thread is importing ``jax`` has to wait for that.
    """
    importlib.import_module("jax")
    return importlib.import_module(name)


def _locate(name: str) -> ModuleSpec | None:
    """Where ``name`` would be loaded from. Unlike ``importlib.util.find_spec``, imports no parent of it."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return getattr(loaded, "__spec__", None)
    path = None
    parent, _, _ = name.rpartition(".")
    if parent:
        package = sys.modules.get(parent)
        if package is not None:
            path = getattr(package, "__path__", None)
        elif (spec := _locate(parent)) is not None:
            path = spec.submodule_search_locations
        if path is None:
            return None
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        found = None if find_spec is None else find_spec(name, path, None)
        if found is not None:
            return found
    return None


def _alias(name: str, real: ModuleType) -> None:
    """Register ``real`` under ``name``, and those of its children that the import system would damage.

    After an import the system binds the child on its parent. Some JAX packages rebind that attribute on
    purpose (``jax.experimental.roofline.roofline`` is a function *and* a module); importing such a child
    under the second name must not undo it. A child that is found in ``sys.modules`` is not bound again, so
    exactly these are registered beforehand, together with their parent.
    """
    sys.modules[name] = real
    guard_rebound_children(name, real)


def guard_rebound_children(name: str, real: ModuleType) -> None:
    """Register aliases for children of ``real`` whose attribute on it is something other than the module."""
    start = real.__name__ + "."
    for child_name, child in sys.modules.copy().items():
        if not child_name.startswith(start) or child is None:
            continue
        attribute = child_name[len(start) :]
        if "." not in attribute and vars(real).get(attribute) is not child:
            sys.modules.setdefault(f"{name}.{attribute}", child)


class AliasLoader(Loader):
    """Makes a name below ``capibara.jax.`` mean JAX's module object itself.

    The inspection methods (``get_code`` …) answer for the real file, which is what ``python -m`` needs.
    """

    def __init__(self, real: str, spec: ModuleSpec) -> None:
        self.real = real
        self._real_spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        real = import_from_jax(self.real)
        # Another thread's `from capibara.jax.X import y` may have taken the throw-away out of sys.modules
        # already: it waits until this import ends and then reads y from the object it holds.
        vars(module).update({**vars(real), "__spec__": module.__spec__})
        _alias(name, real)

    def get_code(self, fullname: str) -> CodeType | None:
        return self._inspect("get_code")

    def get_source(self, fullname: str) -> str | None:
        return self._inspect("get_source")

    def get_filename(self, fullname: str) -> str:
        return self._inspect("get_filename")

    def is_package(self, fullname: str) -> bool:
        return self._real_spec.submodule_search_locations is not None

    def _inspect(self, method: str) -> Any:
        function = getattr(self._real_spec.loader, method, None)
        if function is None:
            raise ImportError(f"the loader of {self.real!r} offers no {method}", name=self.real)
        return function(self.real)


class AliasFinder(MetaPathFinder):
    """Finds ``capibara.jax.X``: Capibara's own file if there is one, else JAX's module ``jax.X``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        *parents, _ = fullname[len(PREFIX) :].split(".")
        own = PathFinder.find_spec(fullname, [os.path.join(OWN_FOLDER, *parents)])
        if own is not None and own.loader is not None:
            return own
        real = ELSEWHERE.get(fullname, BASE + fullname[len(PREFIX) :])
        spec = _locate(real)
        if spec is not None:
            found = ModuleSpec(
                fullname,
                AliasLoader(real, spec),
                origin=spec.origin,
                is_package=spec.submodule_search_locations is not None,
            )
            found.submodule_search_locations = spec.submodule_search_locations
            return found
        if own is not None:
            # A folder that holds only a type stub. Without this it would import as an empty namespace
            # package.
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: the installed JAX has no {real!r}", name=fullname
            )
        return None


def install_finder() -> None:
    """Put the finder first on ``sys.meta_path``, once."""
    sys.meta_path[:] = [AliasFinder(), *_other_finders()]


def remove_finder() -> None:
    """Take the finder away again (JAX could not be imported, so there is nothing to alias)."""
    sys.meta_path[:] = _other_finders()


def _other_finders() -> list[Any]:
    # By name, so that a finder of this module before a reload is recognised too.
    return [finder for finder in sys.meta_path if type(finder).__qualname__ != "AliasFinder"]
