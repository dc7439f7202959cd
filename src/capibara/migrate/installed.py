"""Look up dotted names in the installed JAX: whether they exist, and whether they warn.

Names are looked up for real, with ``getattr`` and ``import``, but only inside the ``jax`` and ``jaxlib``
packages: the user's file is never executed. JAX answers for a removed name with an ``AttributeError`` that
often says what to use instead, and for a deprecated one with a ``DeprecationWarning``; both texts are kept.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import warnings
from dataclasses import dataclass
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, Literal

__all__ = ["ROOTS", "InstalledAPI", "Lookup", "installed_api"]

ROOTS = ("jax", "jaxlib")

# present: it exists. deprecated: it exists and warns. missing: it does not exist. unknown: it cannot be
# determined (the module exists but needs something that is not installed).
Status = Literal["present", "deprecated", "missing", "unknown"]


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of looking up one dotted name.

    Attributes:
        path: the longest part of the name that was looked at; when missing, its last component is absent.
        status: see ``Status``.
        message: JAX's own words (deprecation text, or the text of the AttributeError), or empty.
        value: the object, when there is one.
        parent: the object that should have held the last component.
        on_module: whether that parent is a module.
    """

    path: str
    status: Status
    message: str = ""
    value: Any = None
    parent: Any = None
    on_module: bool = True


class InstalledAPI:
    """Lookups in the installed ``jax`` and ``jaxlib``, each done once."""

    def __init__(self) -> None:
        self.versions = {root: str(importlib.import_module(root).__version__) for root in ROOTS}
        self._lookups: dict[str, Lookup] = {}
        self._modules: dict[str, ModuleType | Exception] = {}

    @property
    def version(self) -> tuple[int, ...]:
        """The installed JAX version as numbers, such as ``(0, 10, 2)``."""
        return tuple(int(part) for part in re.findall(r"\d+", self.versions["jax"])[:3])

    def exists(self, path: str) -> bool:
        return self.lookup(path).status in ("present", "deprecated")

    def module(self, path: str) -> ModuleType | Exception:
        """Import a module of JAX; return the exception when that fails."""
        if path not in self._modules:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    self._modules[path] = importlib.import_module(path)
                except (
                    Exception
                ) as error:  # an import may fail in any way; the reason is judged by the caller
                    self._modules[path] = error
        return self._modules[path]

    def is_module(self, path: str) -> bool | None:
        """Whether ``import path`` works; None when the module exists but cannot be imported here."""
        found = self.module(path)
        if isinstance(found, ModuleType):
            return True
        if isinstance(found, ModuleNotFoundError) and found.name and found.name.split(".")[0] in ROOTS:
            return False
        if isinstance(found, ImportError) and re.search(r"removed|deprecated|no longer", str(found)):
            return False
        return None

    def module_error(self, path: str) -> str:
        found = self.module(path)
        return str(found) if isinstance(found, Exception) else ""

    def lookup(self, path: str) -> Lookup:
        """Look up a dotted name, importing submodules on the way where an attribute is absent."""
        parts = path.split(".")
        found = Lookup(parts[0], "present", value=self.module(parts[0]))
        prefix = parts[0]
        for name in parts[1:]:
            prefix = f"{prefix}.{name}"
            known = self._lookups.get(prefix)
            if known is None:
                known = self._lookups[prefix] = self._step(found, prefix, name)
            found = known
            if found.status in ("missing", "unknown"):
                break
        return found

    def _step(self, parent: Lookup, path: str, name: str) -> Lookup:
        """Look up one more component below a name that is there."""
        holder = parent.value
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value = getattr(holder, name)
                # JAX warns of a deprecated name once in a process: its module __getattr__ is cached. Ask the
                # function under the cache, so that the answer does not depend on what ran before.
                own = vars(holder) if isinstance(holder, ModuleType) else {}
                uncached = getattr(own.get("__getattr__"), "__wrapped__", None)
                if uncached is not None and not caught and name not in own:
                    uncached(name)
            except AttributeError as error:
                value, failure = None, str(error)
            except Exception as error:  # a property that needs a device, say: nothing can be concluded
                return Lookup(path, "unknown", str(error), parent=holder)
            else:
                failure = None
        on_module = isinstance(holder, ModuleType)
        if failure is not None:
            # What an object carries can change while a program runs (`client` is None until it is connected);
            # what modules, classes, functions and the config carry does not.
            if not isinstance(holder, _SETTLED) and parent.path != "jax.config":
                return Lookup(path, "unknown", failure, parent=holder)
            if on_module:
                is_module = self.is_module(path)
                if is_module:
                    return Lookup(path, "present", value=self.module(path), parent=holder)
                if is_module is None:
                    return Lookup(path, "unknown", self.module_error(path), parent=holder)
            return Lookup(path, "missing", failure, parent=holder, on_module=on_module)
        texts = [
            str(w.message) for w in caught if issubclass(w.category, (DeprecationWarning, FutureWarning))
        ]
        if texts:
            return Lookup(path, "deprecated", texts[0], value, holder, on_module)
        if parent.status == "deprecated":  # whatever hangs on a deprecated name goes with it
            return Lookup(parent.path, "deprecated", parent.message, value, holder, on_module)
        return Lookup(path, "present", "", value, holder, on_module)

    def public_names(self, holder: Any) -> list[str]:
        """Candidates for suggestions: the names in ``dir()``, without private ones."""
        return [name for name in dir(holder) if not name.startswith("_")]

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - one instance per process, see installed_api()
    def signature(self, path: str) -> inspect.Signature | None:
        """The signature of a callable, or None if it is not reliable.

        Reliable means that it lists every accepted keyword (no ``**kwargs``).
        """
        found = self.lookup(path)
        if found.status not in ("present", "deprecated") or not callable(found.value):
            return None
        try:
            signature = inspect.signature(found.value)
        except (ValueError, TypeError):
            return None
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        return None if inspect.Parameter.VAR_KEYWORD in kinds else signature

    def config_options(self) -> set[str]:
        """The option names that ``jax.config.update`` accepts with the modules imported so far."""
        return set(self.lookup("jax.config").value.values)


_SETTLED = (ModuleType, type, FunctionType, SimpleNamespace, type(functools.lru_cache(len)))


@functools.lru_cache(maxsize=1)
def installed_api() -> InstalledAPI:
    """The one :class:`InstalledAPI` of this process."""
    return InstalledAPI()
