"""Greedy texts of an engine with their scores, and how to compare them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.serve import Engine, Request, Sampling

__all__ = ["same_texts", "written_texts"]

Text = tuple[list[int], list[float]]


def written_texts(
    engine: Engine, prompts: Sequence[tuple[int, ...]], *, logprobs: int | None = 0, tokens: int = 8
) -> list[Text]:
    """The tokens that follow each prompt, and their log-probabilities. All requests are submitted at once."""
    options: dict[str, Any] = {"max_tokens": tokens, "logprobs": logprobs, "ignore_eos": True}
    asked = [Request(prompt, sampling=Sampling(temperature=0.0), **options) for prompt in prompts]
    found = []
    for stream in [engine.submit(one) for one in asked]:
        pieces = list(stream)
        found.append(
            (
                [token for piece in pieces for token in piece.tokens],
                [score.logprob for piece in pieces for score in piece.scores],
            )
        )
    return found


def same_texts(got: Sequence[Text], want: Sequence[Text]) -> None:
    """Assert equal tokens and, up to rounding, scores: timing decides which requests share a step."""
    for (tokens, scores), (same, others) in zip(got, want, strict=True):
        assert tokens == same
        np.testing.assert_allclose(scores, others, rtol=0, atol=2e-5)
