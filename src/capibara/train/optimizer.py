"""The optimizer and its learning rate, from the ``optimizer`` section of a configuration.

The learning rate at step *t* is a function of *t*, of ``optimizer.warmup_steps`` and of ``train.steps``: it
falls until the run is planned to end. A run continued with a larger ``train.steps`` therefore follows the
longer run's curve from its current step, and its learning rate jumps up at that point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from capibara.errors import ConfigError
from capibara.train import extras

if TYPE_CHECKING:
    import optax

__all__ = [
    "build_optimizer",
    "decay_mask",
    "is_orthogonal",
    "learning_rate_schedule",
    "muon_dimensions",
    "named_optimizer",
]

STACKING_AXES = frozenset({"layers", "layer", "repeat", "blocks"})
"""Logical axes that only stack equal blocks; they do not make a norm's scale a matrix."""


def learning_rate_schedule(config: Any) -> Callable[[Any], Any]:
    """Return step (int) → learning rate: linear warm-up from 0, then down to the final fraction as the settings say.

    Equivalent: ``optax.warmup_cosine_decay_schedule(…)``, or ``optax.join_schedules`` of two of ``linear_schedule`` and
    ``constant_schedule``.

    Raises:
      ConfigError: the warm-up is not shorter than the run.
    """
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps >= steps:
        raise ConfigError(
            f"optimizer.warmup_steps={optimizer.warmup_steps} must be below train.steps={steps}. Pass a "
            f"smaller warm-up, e.g. optimizer.warmup_steps={steps // 10}."
        )
    optax, peak, warmup = extras.optax(), optimizer.learning_rate, optimizer.warmup_steps
    last = peak * optimizer.final_learning_rate_fraction
    if optimizer.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0 if warmup else peak,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=steps,
            end_value=last,
        )
    after = optax.constant_schedule(peak)
    if optimizer.schedule == "linear":
        after = optax.linear_schedule(peak, last, steps - warmup)
    return (
        optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
    )


UNDECAYED_NAMES = ("bias", "scale", "sinks", "skip")
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


def muon_dimensions(params: Any, param_axes: Any | None = None) -> Any:
    """The sides of each matrix that Muon makes orthogonal; None for all other parameters of a layer.

    With ``param_axes`` a weight's axes other than the residual stream's belong to one side (all heads of a projection
    together), and axes that stack layers or experts to neither; the tables of tokens and short convolutions are left
    out. Without, every array of two dimensions is a matrix.

    Returns:
      Nested like ``params``: an ``optax.contrib.MuonDimensionNumbers`` or None for each.
    """
    optax = extras.optax()
    known = dict(
        jax.tree_util.tree_leaves_with_path(param_axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    )

    def sides(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "ndim"):  # not trained, or what optax puts in the place of what others update
            return None
        if param_axes is None:
            return optax.contrib.MuonDimensionNumbers() if leaf.ndim == 2 else None
        axes = known.get(path, ())
        if not is_orthogonal([jax.tree_util.keystr((key,), simple=True) for key in path], axes):
            return None
        inside = _layer_axes(axes)
        # The rank of an adapter has no name: it is a side of its own.
        stream = next((n for side in (None, "embed", "latent") for n in inside if axes[n] == side), inside[0])
        return optax.contrib.MuonDimensionNumbers((stream,), tuple(n for n in inside if n != stream))

    return jax.tree_util.tree_map_with_path(
        sides, params, is_leaf=lambda leaf: leaf is None or isinstance(leaf, optax.MaskedNode)
    )


def is_orthogonal(path: Sequence[str], axes: Sequence[str | None]) -> bool:
    """Whether Muon makes the update of this parameter orthogonal; others are updated as by Adam.

    Args:
      path: its keys. axes: logical names of its dimensions.
    """
    names = {axes[n] for n in _layer_axes(axes)}
    matrix = len(_layer_axes(axes)) > 1 and not names & {"vocab", "conv", "sequence"}
    table = any(key.endswith("embedding") for key in path)  # of positions, whose axis has no name
    return matrix and not table and not path[-1].endswith(UNDECAYED_NAMES)


def _layer_axes(axes: Sequence[str | None]) -> list[int]:
    """Which dimensions belong to a single layer (or expert)."""
    return [n for n, axis in enumerate(axes) if axis not in STACKING_AXES and axis != "experts"]


def build_optimizer(config: Any, *, param_axes: Any | None = None) -> optax.GradientTransformation:
    """Build the optimizer that ``config.optimizer`` describes.

    Equivalent: ``optax.chain(optax.clip_by_global_norm(c), optax.adamw(schedule, b1, b2, weight_decay=w,
    mask=m))`` (decoupled weight decay: Loshchilov & Hutter, arXiv:1711.05101), or the same around ``optax.lion``
    (arXiv:2302.06675), ``optax.adafactor`` (arXiv:1804.04235), ``optax.contrib.muon`` with updates as large as AdamW's
    (``consistent_rms=0.2``: Liu et al., arXiv:2502.16982) and Adam with Nesterov's momentum for all other parameters,
    or ``optax.trace``.

    Raises:
      ConfigError: an unknown optimizer.
    """
    settings = config.optimizer
    return named_optimizer(
        settings.name,
        learning_rate_schedule(config),
        betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay,
        grad_clip_norm=settings.grad_clip_norm,
        param_axes=param_axes,
    )


def named_optimizer(
    name: str,
    schedule: Callable[[Any], Any],
    *,
    betas: tuple[float, float],
    weight_decay: float,
    grad_clip_norm: float,
    param_axes: Any | None = None,
) -> optax.GradientTransformation:
    """One of the optimizers of :func:`build_optimizer`.

    Args:
      name: as ``optimizer.name``. schedule: step → learning rate. betas: as ``optimizer.beta1`` and ``beta2``.
      weight_decay: decoupled, on matrices. grad_clip_norm: the largest global norm; 0: not clipped.
      param_axes: logical names of the parameters' dimensions, if there are any.

    Raises:
      ConfigError: an unknown optimizer.
    """
    optax = extras.optax()
    beta1, beta2 = betas
    directions: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": lambda: optax.scale_by_adam(b1=beta1, b2=beta2),
        "lion": lambda: optax.scale_by_lion(b1=beta1, b2=beta2),
        "adafactor": lambda: optax.chain(
            optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
        ),
        # As a direction: its own rate is 1, and what it returns is what it would subtract.
        "muon": lambda: optax.chain(
            optax.contrib.muon(
                1.0,
                beta=beta1,
                adam_b1=beta1,
                adam_b2=beta2,
                muon_weight_dimension_numbers=lambda params: muon_dimensions(params, param_axes),
                consistent_rms=0.2,
            ),
            optax.scale(-1.0),
        ),
        "sgd": lambda: optax.trace(decay=beta1) if beta1 else optax.identity(),
    }
    if name not in directions:
        raise ConfigError(f"optimizer.name={name!r} is not known; it must be one of {', '.join(directions)}.")
    return optax.chain(
        optax.clip_by_global_norm(grad_clip_norm) if grad_clip_norm else optax.identity(),
        directions[name](),
        optax.add_decayed_weights(weight_decay, mask=lambda params: decay_mask(params, param_axes)),
        optax.scale_by_learning_rate(schedule),
    )
