"""What can be wrong with a folder of a published model."""

from __future__ import annotations

from capibara.errors import ConfigError

__all__ = ["FamilyError"]


class FamilyError(ConfigError):
    """A model folder is damaged, of an unknown family, or asks for what Capibara does not do."""
