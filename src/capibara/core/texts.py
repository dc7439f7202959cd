"""What a batch says of its rows: which tokens are one text, where they stand in it, and which are to be predicted.

A row may hold several texts (packing), or one that is shorter than the row (padding). Then the batch has ``segments``
beside ``tokens``: numbers that are equal where tokens belong to one text, and 0 for padding. A mask of ones and zeros
is such an array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compose.errors import InputError

__all__ = ["Texts", "check_targets", "texts_of"]

_KEYS = ("tokens", "segments", "positions", "weights", "token_types")


@dataclass(frozen=True)
class Texts:
    """A batch whose arrays have been checked; all are ``[batch, sequence]``.

    Attributes:
        tokens: integers.
        segments: integers, or None: each row is one text.
        positions: integers, or None: counted from the start of each text.
        weights: numbers, or None: each token counts alike.
        token_types: integers, or None: all are 0. Only models with ``model.token_types`` have them.
    """

    tokens: Any
    segments: Any = None
    positions: Any = None
    weights: Any = None
    token_types: Any = None

    @property
    def ragged(self) -> bool:
        """Whether the model has to be told of segments and positions."""
        return self.segments is not None or self.positions is not None

    def inputs(self, *, typed: bool = False) -> dict[str, Any]:
        """Inputs of the model, in the form for these rows.

        Args:
            typed: the model has types of tokens.

        Raises:
            InputError: there are types, and the model has none.
        """
        import jax.numpy as jnp

        types: dict[str, Any] = {}
        if typed:
            given = self.token_types
            types["token_types"] = jnp.zeros(self.tokens.shape, jnp.int32) if given is None else given
        elif self.token_types is not None:
            raise InputError("token_types: the model has none (model.token_types=0). Leave them out")
        if not self.ragged:
            return {"tokens": self.tokens} | types
        segments = jnp.ones(self.tokens.shape, jnp.int32) if self.segments is None else self.segments
        positions = _counted(segments) if self.positions is None else self.positions
        return {"tokens": self.tokens, "segments": segments, "positions": positions} | types

    def arrays(self) -> dict[str, Any]:
        """Those that there are, by name."""
        return {name: getattr(self, name) for name in _KEYS if getattr(self, name) is not None}

    def without_last(self) -> Texts:
        """The inputs of the prediction of the next tokens."""
        arrays = (self.tokens, self.segments, self.positions)
        return Texts(*(None if x is None else x[:, :-1] for x in arrays))

    def target_weights(self) -> Any:
        """How much the prediction of each token but the first counts; None: all alike.

        A token that follows one of another text, or padding, cannot be predicted: it counts nothing.
        """
        import jax.numpy as jnp

        weights = None if self.weights is None else jnp.asarray(self.weights)[:, 1:]
        if self.segments is None:
            return weights
        segments = jnp.asarray(self.segments)
        follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
        return jnp.where(follows, 1.0 if weights is None else weights, 0.0)


def _counted(segments: Any) -> Any:
    """Positions from the start of each segment: ``int32 [batch, sequence]``."""
    import jax
    import jax.numpy as jnp

    segments = jnp.asarray(segments)
    places = jnp.arange(segments.shape[1], dtype=jnp.int32)
    changes = jnp.concatenate(
        [jnp.ones_like(segments[:, :1], bool), segments[:, 1:] != segments[:, :-1]], axis=1
    )
    starts = jax.lax.cummax(jnp.where(changes, places, 0), axis=1)
    return places - starts


def texts_of(inputs: Any) -> Texts:
    """Check what a model is given: tokens, or a batch.

    Args:
        inputs: ``int [batch, sequence]``, or a mapping with ``tokens`` and, of the same shape, ``segments``,
            ``positions``, ``weights`` and ``token_types``.

    Raises:
        InputError: a key is missing or unknown, or an array has another kind or shape.
    """
    if not isinstance(inputs, Mapping):
        return Texts(_array("tokens", inputs, "iu", "an integer"))
    if "tokens" not in inputs:
        raise InputError(f"inputs has the keys {list(inputs)}, expected 'tokens': int32 [batch, sequence]")
    if unknown := [key for key in inputs if key not in _KEYS]:
        raise InputError(f"inputs has the unknown key {unknown[0]!r}; its keys can be {', '.join(_KEYS)}")
    tokens = _array("tokens", inputs["tokens"], "iu", "an integer")
    rest: dict[str, Any] = {}
    for key, kinds, said in (
        ("segments", "iub", "an integer"),
        ("positions", "iu", "an integer"),
        ("weights", "iubf", "a number"),
        ("token_types", "iu", "an integer"),
    ):
        if inputs.get(key) is None:
            continue
        rest[key] = _array(key, inputs[key], kinds, said)
        if rest[key].shape != tokens.shape:
            raise InputError(
                f"{key} has shape {tuple(rest[key].shape)}, expected that of tokens, {tuple(tokens.shape)}"
            )
    if "segments" in rest and rest["segments"].dtype == bool:
        rest["segments"] = rest["segments"].astype(np.int32)
    return Texts(tokens, **rest)


def check_targets(shape: tuple[int, ...]) -> None:
    """Refuse tokens of this shape, ``[batch, sequence + 1]``, if none of them is to be predicted.

    Raises:
        InputError: it has no rows, or rows of fewer than two tokens.
    """
    if len(shape) != 2 or 0 in shape or shape[1] < 2:
        raise InputError(
            f"tokens has shape {tuple(shape)}, expected [batch, sequence + 1]: at least one row of at least two "
            "tokens, the last of which is only a target"
        )


def _array(name: str, value: Any, kinds: str, said: str) -> Any:
    try:
        array = value if hasattr(value, "dtype") else np.asarray(value)
    except ValueError as error:  # rows of unequal length
        raise InputError(f"{name} is not an array: {error}; expected int32 [batch, sequence]") from None
    known = {"i": np.integer, "u": np.integer, "b": np.bool_, "f": np.floating}
    # Extended dtypes (bfloat16, float8) are no subtypes of NumPy's: JAX knows them.
    import jax.numpy as jnp

    if not any(jnp.issubdtype(array.dtype, known[kind]) for kind in kinds):
        raise InputError(f"{name} has dtype {array.dtype}, expected {said}: int32 [batch, sequence]")
    if len(array.shape) != 2:
        raise InputError(f"{name} has shape {tuple(array.shape)}, expected [batch, sequence]")
    return array
