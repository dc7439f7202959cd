"""JAX's internal package, for the documented path ``capibara.jax._src.core``; everything else is JAX's."""

from capibara.jax._overlay import guard_rebound_children as _guard
from capibara.jax._overlay import import_from_jax as _import_from_jax
from capibara.jax._overlay import overlay as _overlay

_base = _import_from_jax("jax._src")
_guard(__name__, _base)
_overlay(__name__, _base, {"core": "capibara.jax._src.core"})
