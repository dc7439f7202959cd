"""Capibara: write a JAX model once, then plan, train, serve and compress it.

Importing this package loads nothing heavy: each room (``capibara.compose``, ``capibara.train`` …) is
imported by name when it is needed, so ``import capibara.jax`` costs what ``import jax`` costs.
"""

from capibara.startup import prepare as _prepare

__version__ = "0.1.0"

_prepare()
del _prepare
