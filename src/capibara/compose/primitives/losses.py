"""Losses, one number an element or a row of classes: reduce them with ``Mean`` or ``Sum``, as ``TrainModel`` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import choice, items, number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Dim, Shape, set_size, unify
from capibara.compose.primitives.rules import axis_of, broadcast_rule, scalar

__all__ = [
    "AbsoluteError",
    "BinaryCrossEntropy",
    "CrossEntropy",
    "HingeLoss",
    "HuberLoss",
    "KLDivergence",
    "QuadHingeLoss",
    "QuantileLoss",
    "SquaredError",
]


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise WiringError(f"{name}={value!r} must be True or False")


def _one_sided(given: Shape, target: Shape, output: Shape) -> bool:
    """Broadcasting, of one to the other: two that make a table of all pairs are a mistake in a shape."""
    done = broadcast_rule(given, target, output)
    rows = given.dims(), target.dims(), output.dims()
    left, right, whole = rows
    if done and left and right and whole and not any(_equal(row, whole) for row in (left, right)):
        raise ShapeError(
            f"the input {given} and the target {target} would be compared all with all, as {output}: give the target "
            "the shape of the input, as with Reshape or Squeeze"
        )
    return done


def _equal(left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    roots = [(a.find(), b.find()) for a, b in zip(left, right, strict=False)]
    return len(left) == len(right) and all(
        a is b or (a.size is not None and a.size == b.size) for a, b in roots
    )


class _Loss(Primitive):
    """``input`` and ``target`` (of any kind) → ``output``, one loss an element; either is broadcast to the other."""

    def __init__(self, op: str, attributes: dict[str, Any], name: str | None) -> None:
        super().__init__(
            op,
            {"input": ("*l", "float"), "target": ("*r", None)},
            {"output": ("*o", "float")},
            attributes,
            constraints=[(_one_sided, ("input", "target", "output"))],
            name=name,
        )


class SquaredError(_Loss):
    """``(input - target)²``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("squared_error", {}, name)


class AbsoluteError(_Loss):
    """``|input - target|``; the gradient where they are equal is 1 on JAX, else 0."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("absolute_error", {}, name)


class HuberLoss(_Loss):
    """Half the squared error up to ``delta``, beyond it ``delta (|error| - delta / 2)`` (Huber, 1964)."""

    def __init__(self, delta: float = 1.0, *, name: str | None = None) -> None:
        number("delta", delta, above=True)
        super().__init__("huber_loss", {"delta": float(delta)}, name)


class QuantileLoss(_Loss):
    """``max(q e, (q - 1) e)`` with ``e = target - input`` (Koenker and Bassett, 1978).

    Where ``e`` is 0 the gradient is half of each side's, ``1/2 - q``.
    """

    def __init__(self, quantile: float = 0.5, *, name: str | None = None) -> None:
        number("quantile", quantile, 0.0, 1.0)
        super().__init__("quantile_loss", {"quantile": float(quantile)}, name)


class HingeLoss(_Loss):
    """``max(0, 1 - target * input)`` for targets -1 and 1; the gradient on the margin is half of the inner one."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("hinge_loss", {}, name)


class QuadHingeLoss(_Loss):
    """The square of :class:`HingeLoss`."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("quad_hinge_loss", {}, name)


class KLDivergence(_Loss):
    """``target * log(target / input)``, 0 where the target is 0: sum it over a distribution.

    ``input`` holds the predicted probabilities. ``robust``: logarithms go on along their tangent below
    ``threshold`` (None: the dtype's smallest normal number), so that an input of 0 has a finite loss.
    """

    def __init__(
        self, robust: bool = False, threshold: float | None = None, *, name: str | None = None
    ) -> None:
        _check_robust(robust, threshold)
        super().__init__("kl_divergence", {"robust": robust, "threshold": threshold}, name)


def _check_robust(robust: bool, threshold: float | None) -> None:
    _flag("robust", robust)
    number("threshold", threshold, above=True, optional=True)
    if threshold is not None and not robust:
        raise WiringError(f"threshold={threshold!r} is only used with robust=True")


class BinaryCrossEntropy(_Loss):
    """``-w target log(p) - (1 - target) log(1 - p)`` of probabilities or, ``input_type="logits"``, of logits.

    From logits it is exact for any size of them. From probabilities it is infinite for a certain error, unless
    ``robust`` (see :class:`KLDivergence`). ``pos_weight`` is ``w``, the weight of the positives; "auto" takes the
    number of negatives for each positive in the target (1 without positives).
    """

    def __init__(
        self,
        input_type: str = "probs",
        pos_weight: float | str = 1.0,
        robust: bool = False,
        threshold: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        choice("input_type", input_type, ("probs", "logits"))
        if pos_weight != "auto":
            number("pos_weight", pos_weight)
            pos_weight = float(pos_weight)
        _check_robust(robust, threshold)
        attributes: dict[str, Any] = {"positive_weight": pos_weight}
        if input_type == "probs":
            attributes |= {"robust": robust, "threshold": threshold}
        elif robust:
            raise WiringError("robust=True is for input_type='probs': from logits the loss is always finite")
        super().__init__(f"binary_cross_entropy{'_logits' * (input_type == 'logits')}", attributes, name)


class CrossEntropy(Primitive):
    """``-log p[target]``, one number a row: ``input [n, classes, *s]`` → ``output [n, *s]``.

    Args:
        input_type: what the input holds: "logits" (normalised here, by a log-sum-exp that cannot overflow),
            "probs" or "log_probs".
        weights: a weight for each class; "auto" weighs by how rare a class is in the target,
            ``elements / (classes * count)``; "" for none.
        categorical: the target is a class index (int, ``[n, *s]``, clipped into range), else a distribution shaped
            like the input (``-Σ target log p``).
        robust, threshold: for probabilities, see :class:`KLDivergence`.
        axis: which dimension of the input holds the classes.
    """

    def __init__(
        self,
        input_type: str = "logits",
        weights: Iterable[float] | str = "",
        robust: bool = False,
        threshold: float | None = None,
        categorical: bool = True,
        axis: int = 1,
        *,
        name: str | None = None,
    ) -> None:
        choice("input_type", input_type, ("logits", "probs", "log_probs"))
        _flag("categorical", categorical)
        whole("axis", axis, None)
        _check_robust(robust, threshold)
        if robust and input_type != "probs":
            raise WiringError("robust=True is for input_type='probs': the other types are always finite")
        each: tuple[float, ...] | str | None = None
        if isinstance(weights, str):
            choice("weights", weights, ("", "auto"))
            each = weights or None
        else:
            each = items("weights", weights)
            for value in each:
                scalar("weights", value)
            each = tuple(float(v) for v in each)  # type: ignore[arg-type]

        def rule(rows: Shape, target: Shape, output: Shape) -> bool:
            if not categorical:
                unify(rows, target)
            dims = rows.dims()
            if dims is None:
                return False
            at = axis_of(axis, len(dims))
            if isinstance(each, tuple):
                size = dims[at].find().size
                if size is not None and size != len(each):
                    raise ShapeError(f"{len(each)} weights for {size} classes")
                set_size(dims[at], len(each))
            kept = Shape([d for i, d in enumerate(dims) if i != at])
            unify(output, kept)
            if categorical:
                unify(target, kept)
            return True

        attributes: dict[str, Any] = {"weights": each, "categorical": categorical, "axis": axis}
        if input_type == "probs":
            attributes |= {"robust": robust, "threshold": threshold}
        super().__init__(
            {
                "logits": "cross_entropy_logits",
                "probs": "cross_entropy",
                "log_probs": "cross_entropy_log_probs",
            }[input_type],
            {"input": ("*l", "float"), "target": ("*r", "int" if categorical else None)},
            {"output": ("*o", "float")},
            attributes,
            constraints=[(rule, ("input", "target", "output"))],
            name=name,
        )
