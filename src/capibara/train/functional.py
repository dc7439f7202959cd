"""A pair of functions, ``init`` and ``apply``, as a model that can be trained; and what other frameworks make of one.

The step knows parameters as one pytree, the model's other state as another, and a loss as a pure function of both. So a
framework is a way of getting these from its objects, and of putting trained parameters back: see
:mod:`capibara.train.frameworks`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import ConfigError
from capibara.train.losses import cross_entropy, mean_loss, parts_of

__all__ = ["FunctionModel", "arguments_for", "of_pair", "takes"]

_GUESSED = "embed"  # the logical axis of an array's largest dimension, where the model names none


@dataclass(frozen=True, eq=False)
class FunctionModel:
    """A model whose forward pass is a pure function; a :class:`capibara.train.protocols.Model`.

    Attributes:
      make: ``(key, inputs) -> (parameters, state)``; ``inputs`` are zeros like those of ``example``, None without one.
      call: ``(parameters, state, inputs, key, train) -> (outputs, next state)``.
      loss_of: ``(outputs, targets) ->`` one loss for each target, or their mean.
      example: shapes and dtypes of the inputs of one microbatch, if parameters are made from them.
      axes: logical names of the parameters' dimensions, nested like them; None: only the largest is ever sharded.
      finish: ``(parameters, state) ->`` the model in the form in which it came.
      given: the parameters of a module that has some, which training begins with.
    """

    make: Callable[[Any, Any], tuple[Any, Any]]
    call: Callable[[Any, Any, Any, Any, bool], tuple[Any, Any]]
    loss_of: Callable[[Any, Any], Any] = cross_entropy
    example: Any = None
    axes: Any = None
    finish: Callable[[Any, Any], Any] = field(default=lambda params, state: params)
    given: Any = None

    def init(self, seed: Any) -> tuple[Any, Any]:
        """New parameters and state, from an integer or a key."""
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        inputs = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.example)
        return self.make(key, inputs)

    def loss(
        self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True
    ) -> tuple[Any, tuple[Any, Any]]:
        """``(loss, (next state, metrics))`` of a batch, see :func:`capibara.train.losses.parts_of`."""
        parts = parts_of(batch)
        outputs, after = self.call(params, state, parts.inputs, key, train)
        value = mean_loss(self.loss_of, outputs, parts)
        return value, (after, {"cross_entropy": value} if self.loss_of is cross_entropy else {})

    def apply(self, params: Any, inputs: Any, *, state: Any, key: Any = None, train: bool = False) -> Any:
        """The outputs for ``inputs``."""
        return self.call(params, state, inputs, key, train)[0]

    @cached_property
    def _shapes(self) -> Any:
        return jax.eval_shape(lambda: self.init(0))[0]

    @property
    def param_axes(self) -> Any:
        """Logical names of the parameters' dimensions."""
        if self.axes is not None:
            return self.axes
        return jax.tree.map(_largest, self._shapes)

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self._shapes))

    def flops_per_token(self, sequence_length: int, training: bool = True) -> float:
        """Two operations for each parameter, six in training: of a model of dense layers."""
        return (6.0 if training else 2.0) * self.num_params


def _largest(leaf: Any) -> tuple[str | None, ...]:
    if not leaf.shape:
        return ()
    at = max(range(len(leaf.shape)), key=lambda i: leaf.shape[i])
    return tuple(_GUESSED if i == at else None for i in range(len(leaf.shape)))


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in
        return False


def arguments_for(function: Callable[..., Any], inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a function is called with the inputs of a batch: a mapping whose keys are its parameters by name."""
    if isinstance(inputs, Mapping) and inputs and all(takes(function, str(key)) for key in inputs):
        return (), dict(inputs)
    return (inputs,), {}


def of_pair(init: Callable[..., Any], apply: Callable[..., Any], **more: Any) -> FunctionModel:
    """A model from ``init(key)`` or ``init(key, inputs)`` and ``apply(params, inputs)``.

    ``apply`` may also have the parameters ``key`` (a key in training, None otherwise) and ``train`` (a boolean), which
    are then given by name.

    Args:
      more: attributes of :class:`FunctionModel`.

    Raises:
      ConfigError: one of them is not a function.
    """
    for name, function in (("init", init), ("apply", apply)):
        if not callable(function):
            raise ConfigError(
                f"model: {name} is {type(function).__name__}, expected a function: (init, apply) with init(key) and "
                "apply(params, inputs)"
            )
    try:
        count = sum(
            p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            for p in inspect.signature(init).parameters.values()
        )
    except (TypeError, ValueError):
        count = 1
    by_name = [name for name in ("key", "train") if takes(apply, name)]

    def make(key: Any, inputs: Any) -> tuple[Any, Any]:
        if count > 1 and inputs is None:
            raise ConfigError(
                "model: init takes inputs, and there are none yet. Call trainer.init(batch) first"
            )
        return (init(key, inputs) if count > 1 else init(key)), {}

    def call(params: Any, state: Any, inputs: Any, key: Any, train: bool) -> tuple[Any, Any]:
        given = {"key": key if train else None, "train": train}
        args, named = arguments_for(apply, inputs)
        return apply(params, *args, **named, **{name: given[name] for name in by_name}), state

    return FunctionModel(make=make, call=call, **more)
