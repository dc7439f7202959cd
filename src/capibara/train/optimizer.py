"""AdamW or Lion with warm-up, cosine decay and clipping, from the ``optimizer`` section of a configuration.

The learning rate at step *t* is a function of *t*, of ``optimizer.warmup_steps`` and of ``train.steps``: the
cosine ends where the run is planned to end. A run continued with a larger ``train.steps`` therefore follows the
longer run's curve from its current step, and its learning rate jumps up at that point.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from capibara.errors import ConfigError
from capibara.train import extras

if TYPE_CHECKING:
    import optax

__all__ = ["build_optimizer", "decay_mask", "learning_rate_schedule"]

STACKING_AXES = frozenset({"layers", "layer", "repeat", "blocks"})
"""Logical axes that only stack equal blocks; they do not make a norm's scale a matrix."""


def learning_rate_schedule(config: Any) -> Callable[[Any], Any]:
    """Return step (int) → learning rate: linear warm-up from 0, then a half cosine to the final fraction.

    Raises:
      ConfigError: the warm-up is not shorter than the run.
    """
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps >= steps:
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be below train.steps={steps}. Pass a "
            f"smaller warm-up, e.g. optimizer.warmup_steps={steps // 10}."
        )
    return extras.optax().warmup_cosine_decay_schedule(
        init_value=0.0 if optimizer.warmup_steps else optimizer.learning_rate,
        peak_value=optimizer.learning_rate,
        warmup_steps=optimizer.warmup_steps,
        decay_steps=steps,
        end_value=optimizer.learning_rate * optimizer.final_learning_rate_fraction,
    )


UNDECAYED_NAMES = ("bias", "scale", "skip")
"""Endings of the names of parameters that are not decayed however many axes they have (one value a head …)."""


def decay_mask(params: Any, param_axes: Any | None = None) -> Any:
    """Return a pytree of bools like ``params``: weight decay for matrices, none for scales and biases.

    A parameter with one axis is not decayed, nor is one whose name ends in :data:`UNDECAYED_NAMES`. With
    ``param_axes`` (logical axis names, same structure) an axis that merely stacks equal layers is not counted,
    so the norms of a scanned model are treated like those of an unrolled one.
    """

    def decayed(path: Any, leaf: Any, axes: tuple[str | None, ...] = ()) -> bool | None:
        if leaf is None:  # not trained
            return None
        name = jax.tree_util.keystr(path[-1:], simple=True)
        stacked = sum(axis in STACKING_AXES for axis in axes)
        return leaf.ndim - stacked > 1 and not name.endswith(UNDECAYED_NAMES)

    if param_axes is None:
        return jax.tree_util.tree_map_with_path(decayed, params)
    return jax.tree_util.tree_map_with_path(decayed, params, param_axes, is_leaf=lambda leaf: leaf is None)


def build_optimizer(config: Any, *, param_axes: Any | None = None) -> optax.GradientTransformation:
    """Build the optimizer that ``config.optimizer`` describes.

    Equivalent: ``optax.chain(optax.clip_by_global_norm(c), optax.adamw(schedule, b1, b2, weight_decay=w,
    mask=m))`` (decoupled weight decay: Loshchilov & Hutter, arXiv:1711.05101), or the same around
    ``optax.lion`` (arXiv:2302.06675).

    Raises:
      ConfigError: an unknown optimizer.
    """
    optax = extras.optax()
    settings = config.optimizer
    directions = {"adamw": optax.scale_by_adam, "lion": optax.scale_by_lion}
    if settings.name not in directions:
        raise ConfigError(
            f"optimizer.name={settings.name!r} is not known; it must be one of {', '.join(directions)}."
        )
    clip = (
        optax.identity()
        if not settings.grad_clip_norm
        else optax.clip_by_global_norm(settings.grad_clip_norm)
    )
    return optax.chain(
        clip,
        directions[settings.name](b1=settings.beta1, b2=settings.beta2),
        optax.add_decayed_weights(settings.weight_decay, mask=lambda params: decay_mask(params, param_axes)),
        optax.scale_by_learning_rate(learning_rate_schedule(config)),
    )
