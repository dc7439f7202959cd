"""Will this code run on the installed JAX? A static check of JAX names, keywords and slow patterns.

JAX removes names about three months after it deprecates them, so code that was right for JAX 0.4 fails in
many small places on 0.10. The checker reads source without running it, resolves the JAX object of every dotted name,
and checks whether it exists in the installed JAX. A table of removals since 0.2 provides replacements.

>>> from capibara.migrate import check_migration_compatibility
>>> check_migration_compatibility("import jax.numpy as jnp\\njnp.ones(3)\\n").is_compatible
True
"""

from __future__ import annotations

from capibara.migrate.checker import check_migration_compatibility, check_paths
from capibara.migrate.report import MigrationIssue, MigrationReport
from capibara.migrate.sources import MigrationInputError, MigrationInputTypeError, MigrationPathError

__all__ = [
    "MigrationInputError",
    "MigrationInputTypeError",
    "MigrationIssue",
    "MigrationPathError",
    "MigrationReport",
    "check_migration_compatibility",
    "check_paths",
]
