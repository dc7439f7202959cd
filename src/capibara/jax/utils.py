"""Helpers that document 1 keeps under ``capibara.jax.utils``; the work is done in ``capibara.migrate``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.migrate import check_migration_compatibility

__all__ = ["check_migration_compatibility"]


def __getattr__(name: str) -> Any:
    # The checker parses Python sources; nobody else should pay for importing it.
    if name == "check_migration_compatibility":
        from capibara.migrate import check_migration_compatibility

        globals()[name] = check_migration_compatibility
        return check_migration_compatibility
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
