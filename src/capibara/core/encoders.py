"""Refusal of encoders where next-token prediction is needed."""

from __future__ import annotations

from capibara.config.sections import ModelSection
from capibara.errors import ConfigError

__all__ = ["require_decoder"]


def require_decoder(config: ModelSection, purpose: str) -> None:
    """Refuse an encoder.

    Args:
        config: the ``[model]`` section.
        purpose: what is asked for: "the loss of next tokens".

    Raises:
        ConfigError: positions of the model see later ones.
    """
    if not config.causal:
        raise ConfigError(
            f"model.causal: got false, an encoder, but {purpose} needs a decoder: a position of an encoder sees the "
            "tokens after it, so that it cannot predict them. Use capibara.serve.Embedder (capibara embed) or "
            "model.hidden, or a model with causal=true"
        )
