"""A cache of compiled programs that is a test's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from capibara.compilation import persistent_cache
from capibara.compilation.persistent_cache import cache_folder

__all__ = ["SETTINGS", "own_cache"]

SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@contextlib.contextmanager
def own_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache's folder, below a home of the test; JAX itself is told of none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    monkeypatch.setattr(persistent_cache, "_MIN_SECONDS", 0.0)
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax_cache.reset_cache()
    try:
        yield cache_folder()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax_cache.reset_cache()
