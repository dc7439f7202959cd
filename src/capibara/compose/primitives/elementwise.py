"""Operations on each element, and what shifts or rescales them."""

from __future__ import annotations

from capibara.compose.arguments import choice, number
from capibara.compose.block import Primitive
from capibara.compose.precision import FLOAT_DTYPES
from capibara.compose.shapes import broadcast_rule

__all__ = [
    "Absolute",
    "Add",
    "Cast",
    "Decay",
    "Divide",
    "Dropout",
    "Exp",
    "Gelu",
    "Log",
    "Multiply",
    "Normalise",
    "Relu",
    "Sigmoid",
    "Silu",
    "Softmax",
    "Softplus",
    "Square",
    "Subtract",
    "Tanh",
]


class _Unary(Primitive):
    """An operation on each element: ``input [*b]`` → ``output [*b]``."""

    def __init__(self, *, name: str | None = None) -> None:
        op = type(self).__name__.lower()
        super().__init__(op, {"input": ("*b", "float")}, {"output": ("*b", "float")}, name=name)


class Relu(_Unary):
    """``max(x, 0)``."""


class Gelu(_Unary):
    """``x Φ(x)``, by the tanh approximation of ``jax.nn.gelu``."""


class Silu(_Unary):
    """``x sigmoid(x)``."""


class Sigmoid(_Unary):
    """``1 / (1 + exp(-x))``."""


class Tanh(_Unary):
    """``tanh(x)``."""


class Softplus(_Unary):
    """``log(1 + exp(x))``."""


class Exp(_Unary):
    """``exp(x)``."""


class Log(_Unary):
    """``log(x)``."""


class Square(_Unary):
    """``x²``."""


class Absolute(_Unary):
    """``|x|``."""


class Decay(_Unary):
    """Decay rates from their logarithms: ``-exp(x)``, always negative."""


class _Binary(Primitive):
    """An operation on two arrays, with NumPy's broadcasting: ``left``, ``right`` → ``output``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            type(self).__name__.lower(),
            {"left": ("*l", "T"), "right": ("*r", "T")},
            {"output": ("*o", "T")},
            constraints=[(broadcast_rule, ("left", "right", "output"))],
            name=name,
        )


class Add(_Binary):
    """``left + right``."""


class Subtract(_Binary):
    """``left - right``."""


class Multiply(_Binary):
    """``left * right``."""


class Divide(_Binary):
    """``left / right``."""


class Softmax(Primitive):
    """Softmax over the last dimension: ``input [*b, d]`` → ``output [*b, d]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("softmax", {"input": ("*b d", "float")}, {"output": ("*b d", "float")}, name=name)


class Normalise(Primitive):
    """Root-mean-square or layer normalisation over the last dimension, computed in the accumulation dtype.

    ``kind="rms"``: ``x / sqrt(mean(x²) + epsilon) * scale`` (Zhang and Sennrich, 2019).
    ``kind="layer"``: the mean is taken off first (Ba et al., 2016); add a bias after it for the affine form.
    """

    def __init__(self, kind: str = "rms", epsilon: float = 1e-5, *, name: str | None = None) -> None:
        choice("kind", kind, ("rms", "layer"))
        number("epsilon", epsilon)
        super().__init__(
            f"{kind}_norm",
            {"input": ("*b d", "float"), "scale": ("d", "float")},
            {"output": ("*b d", "float")},
            {"epsilon": float(epsilon)},
            accumulates=True,
            name=name,
        )


class Dropout(Primitive):
    """Zero each element with probability ``rate`` and scale the rest by ``1 / (1 - rate)``, in training only."""

    def __init__(self, rate: float, *, name: str | None = None) -> None:
        number("rate", rate, 0.0, 1.0, below=True)
        super().__init__(
            "dropout",
            {"input": ("*b", "float")},
            {"output": ("*b", "float")},
            {"rate": float(rate)},
            uses_key=True,
            uses_train=True,
            name=name,
        )


class Cast(Primitive):
    """Change the floating dtype: ``dtype`` is "float32", "bfloat16", … or "accumulate" for the policy's."""

    def __init__(self, dtype: str = "accumulate", *, name: str | None = None) -> None:
        choice("dtype", dtype, ("accumulate", *FLOAT_DTYPES))
        accumulate = dtype == "accumulate"
        super().__init__(
            "cast_up" if accumulate else "cast",
            {"input": ("*b", "float")},
            {"output": ("*b", "float")},
            {} if accumulate else {"dtype": dtype},
            accumulates=accumulate,
            name=name,
        )
