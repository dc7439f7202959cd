"""JAX's internal package, for the documented path ``capibara.jax._src.core``; everything else is JAX's."""

import importlib as _importlib

from capibara.jax._overlay import guard_rebound_children as _guard
from capibara.jax._overlay import overlay as _overlay

_base = _importlib.import_module("jax._src")
_guard(__name__, _base)
_overlay(__name__, _base, {"core": "capibara.jax._src.core"})
