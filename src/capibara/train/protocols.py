"""What training asks of a model, of data and of an optimizer: anything that offers it can be trained.

A :class:`capibara.core.ModularCapibaraModel`, the corpora of :func:`capibara.train.load_data` and optax's
transformations do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from capibara.data import Tokenizer

__all__ = ["Batch", "Batches", "DataSource", "Model", "Optimizer"]

Batch = np.ndarray | dict[str, np.ndarray]
"""Tokens alone, or several arrays of the same rows."""


class Model(Protocol):
    """A model that can be trained.

    Further attributes are used if there are any: ``param_axes`` and ``state_axes`` (the logical name of each dimension,
    nested like the parameters and the state), which layouts shard by; ``on_mesh(mesh, rules)``, the same model compiled
    for a mesh; ``trainable`` (a boolean for each parameter), if not all are trained; ``given``, parameters that it has
    already.
    """

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        ...

    def init(self, seed: int) -> tuple[Any, Any]:
        """New parameters, and the state that the model updates without gradients (``{}`` if nothing)."""
        ...

    def loss(
        self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True
    ) -> tuple[Any, tuple[Any, Any]]:
        """``(loss, (new state, metrics))`` of one batch; the metrics have ``cross_entropy``, in nats per token."""
        ...

    def flops_per_token(self, sequence_length: int, training: bool = True) -> float:
        """Floating-point operations of one token, forward and, in training, backward."""
        ...


class Batches(Protocol):
    """An endless sequence of batches, each a function of its number alone.

    If there is ``passes(step)``, how often the data was read before a step, it is shown.
    """

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        ...

    @property
    def sequence_length(self) -> int:
        """Positions of a row, which has one more token for the last target."""
        ...

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0: int32 ``[batch_size, sequence_length + 1]``, or a dict of such."""
        ...


class DataSource(Protocol):
    """What a run trains on and is validated with."""

    @property
    def name(self) -> str:
        """A readable name of the sources."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """What made tokens of the text."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 over all of it, in hexadecimal. A resumed run compares it."""
        ...

    @property
    def unit(self) -> str:
        """What a token is: ``"byte"`` or ``"token"``."""
        ...

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text that a token stands for, on average."""
        ...

    @property
    def highest(self) -> int:
        """The largest token id."""
        ...

    def batches(self, *, batch_size: int, sequence_length: int, seed: int) -> Batches:
        """What a run trains on."""
        ...

    def validation_batches(
        self, *, batch_size: int, sequence_length: int, max_batches: int
    ) -> Sequence[Batch]:
        """What is held out, in fixed batches; none if nothing is."""
        ...


class Optimizer(Protocol):
    """A gradient transformation, as all of optax's are."""

    def init(self, params: Any) -> Any:
        """Its state before the first step."""
        ...

    def update(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """The updates to add to the parameters for these gradients, and the next state."""
        ...
