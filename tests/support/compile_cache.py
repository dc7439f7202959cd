"""For folders of tests that would spend nearly all their time compiling the same few tiny programs.

``from compile_cache import compile_once`` in a conftest.py is all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep compiled programs on disk while the tests of this folder run."""
    # Per file, not per folder: pytest ends a folder late, and the files of others must not see these settings.
    folder = tmp_path_factory.getbasetemp() / "compiled"
    folder.mkdir(exist_ok=True)
    settings = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
