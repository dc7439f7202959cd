"""What the tests of this folder share: JAX keeps no programs on disk unless a test says so."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def no_cache_of_others() -> Iterator[None]:
    """Whoever runs the tests may have a cache."""
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
