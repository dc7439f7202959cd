"""Everything a training run carries from one step to the next, as one value.

Nothing about a run is hidden in an object: the next state is a pure function of this state and a batch. That
is what makes a run resumable (save the value, load the value) and donation safe (the old value is never used
again).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["TrainState"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state between two optimizer steps; a pytree.

    Attributes:
      step: int32 scalar, optimizer steps taken so far.
      params: the model's parameters, a nested dict.
      opt_state: the optimizer's state.
      model_state: what the model updates without gradients (codebook averages …); ``{}`` if nothing.
      key: a typed PRNG key that never changes; step ``t`` uses ``jax.random.fold_in(key, t)``.
      ema: the exponential moving average of the trained parameters, nested like them; None: not kept.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    key: jax.Array
    ema: Any = None

    @classmethod
    def create(
        cls, params: Any, model_state: Any, opt_state: Any, *, seed: int, ema: Any = None
    ) -> TrainState:
        """Build the state before the first step; ``seed`` names the run's randomness (dropout …)."""
        return cls(jnp.int32(0), params, opt_state, model_state, jax.random.key(seed), ema)
