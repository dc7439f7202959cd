"""What can be wrong with text, and with what turns it into tokens."""

from __future__ import annotations

from capibara.errors import ConfigError

__all__ = ["ChatTemplateError", "DocumentError", "TokenizerError"]


class DocumentError(ConfigError):
    """A file of documents is damaged, or its lines are not documents."""


class TokenizerError(ConfigError):
    """A tokenizer's files are missing, damaged or too large, or text cannot be encoded with it."""


class ChatTemplateError(ConfigError):
    """A chat template refuses the messages, is invalid, or exceeds its limits of time, memory or output.

    Attributes:
      number: of several conversations the one that it refused, from 0; None if it is not one's fault.
    """

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number
