"""Element-wise operations, shifts and normalisation."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import choice, flag, number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape
from capibara.compose.precision import FLOAT_DTYPES
from capibara.compose.primitives.rules import broadcast3_rule, broadcast_rule, scalar
from capibara.compose.primitives.size_rules import PASSED_ON, SIZE_RULES

__all__ = [
    "Absolute",
    "Add",
    "Buffer",
    "Cast",
    "Ceil",
    "Clip",
    "Cosine",
    "Decay",
    "Divide",
    "Dropout",
    "Elu",
    "Exp",
    "Floor",
    "FloorDivide",
    "Gelu",
    "IsNan",
    "LeakyRelu",
    "Log",
    "Maximum",
    "Minimum",
    "Modulo",
    "Multiply",
    "NanToNum",
    "Negate",
    "NormModifier",
    "Normalise",
    "Power",
    "Reciprocal",
    "Relu",
    "ShiftLeft",
    "ShiftRight",
    "Sigmoid",
    "Sign",
    "Silu",
    "Sine",
    "Softmax",
    "Softplus",
    "Sqrt",
    "Square",
    "StableReciprocal",
    "StopGradient",
    "Subtract",
    "Tanh",
    "Where",
]


class _Unary(Primitive):
    """An operation on each element: ``input [*b]`` → ``output [*b]``."""

    op_name: ClassVar[str | None] = None
    kinds: ClassVar[tuple[str | None, str | None]] = ("float", "float")
    constraints: ClassVar[tuple[Any, ...]] = ()

    def __init__(self, *, name: str | None = None) -> None:
        self._build({}, name)

    def _build(self, attributes: dict[str, Any], name: str | None, op: str | None = None) -> None:
        into, out = self.kinds
        super().__init__(
            op or self.op_name or type(self).__name__.lower(),
            {"input": ("*b", into)},
            {"output": ("*b", out)},
            attributes,
            constraints=self.constraints,
            name=name,
        )


class Relu(_Unary):
    """``max(x, 0)``, with gradient 0 at 0."""


class LeakyRelu(_Unary):
    """``x`` where it is positive, else ``slope * x``; the gradient at 0 is 1 on JAX, else ``slope``."""

    def __init__(self, slope: float = 0.01, *, name: str | None = None) -> None:
        scalar("slope", slope)
        self._build({"slope": float(slope)}, name, "leaky_relu")


class Elu(_Unary):
    """``x`` where it is positive, else ``alpha (exp(x) - 1)`` (Clevert et al., 2016)."""

    def __init__(self, alpha: float = 1.0, *, name: str | None = None) -> None:
        scalar("alpha", alpha)
        self._build({"alpha": float(alpha)}, name)


class Gelu(_Unary):
    """``x Φ(x)`` (Hendrycks and Gimpel, 2016), by its tanh approximation or, with ``approximate=False``, exactly."""

    def __init__(self, approximate: bool = True, *, name: str | None = None) -> None:
        if not isinstance(approximate, bool):
            raise WiringError(f"approximate={approximate!r} must be True or False")
        self._build({} if approximate else {"approximate": False}, name)


class Silu(_Unary):
    """``x sigmoid(x)``."""


class Sigmoid(_Unary):
    """``1 / (1 + exp(-x))``."""


class Tanh(_Unary):
    """``tanh(x)``."""


class Softplus(_Unary):
    """``log(1 + exp(x))``, which does not overflow."""


class Exp(_Unary):
    """``exp(x)``."""


class _Robust(_Unary):
    """An operation with a safe form, that goes on along its tangent below ``threshold``."""

    def __init__(
        self, robust: bool = False, threshold: float | None = None, *, name: str | None = None
    ) -> None:
        number("threshold", threshold, above=True, optional=True)
        if threshold is not None and not robust:
            raise WiringError(f"threshold={threshold!r} is only used with robust=True")
        op = type(self).__name__.lower()
        self._build({"threshold": threshold} if robust else {}, name, f"robust_{op}" if robust else op)


class Log(_Robust):
    """``log(x)``: minus infinity at 0, NaN below.

    ``robust=True``: below ``threshold`` (by default the dtype's smallest normal number) the tangent
    ``log(threshold) + (x - threshold) / threshold``, which is finite with a finite gradient everywhere.
    """


class Sqrt(_Robust):
    """``√x``: NaN below 0, and an infinite gradient at 0.

    ``robust=True``: ``√|x|``, and ``|x| / √threshold`` where ``|x|`` is below ``threshold`` (by default the dtype's
    smallest normal number): finite with a finite gradient everywhere, both 0 at 0.
    """


class Sine(_Unary):
    """``sin(x)``, x in radians."""


class Cosine(_Unary):
    """``cos(x)``, x in radians."""


class _Same(_Unary):
    kinds = ("T", "T")


class _Number(_Unary):
    kinds = ("N", "N")


class Square(_Number):
    """``x²``."""


class Absolute(_Number):
    """``|x|``; the gradient at 0 is 1 on JAX, else 0."""


class Negate(_Number):
    """``-x``."""


class Sign(_Number):
    """-1, 0 or 1; the gradient is 0 everywhere."""


class Floor(_Unary):
    """The largest integer not above ``x``; the gradient is 0 everywhere."""


class Ceil(_Unary):
    """The smallest integer not below ``x``; the gradient is 0 everywhere."""


class Buffer(_Same):
    """The input itself: gives a value another name."""

    constraints = (PASSED_ON,)


class StopGradient(_Same):
    """The input, through which no gradient flows."""

    op_name = "stop_gradient"


class Reciprocal(_Unary):
    """``1 / x``, infinite at 0."""


class StableReciprocal(_Unary):
    """``1 / x``, and where ``|x| < threshold`` the tangent of the nearer side (that of positive x at 0).

    The default threshold is the square root of the dtype's smallest normal number; both value and gradient are
    finite everywhere, in float32 at most about 1e38.
    """

    def __init__(self, threshold: float | None = None, *, name: str | None = None) -> None:
        number("threshold", threshold, above=True, optional=True)
        self._build({"threshold": threshold}, name, "stable_reciprocal")


class NormModifier(_Unary):
    """Folds any number into [1, 5], so that it can be learned as the order of a norm: a triangle wave.

    ``x`` on [1, 5], then down again, with period 8. Gradient ±1; at the corners 1 and 5 it is 0.
    """

    op_name = "norm_modifier"


class Clip(_Number):
    """``min(max(x, low), high)``; None leaves a side open. The gradient is 0 outside and 1 within.

    Integers stay integers: a bound between two of them is cut off at the point.
    """

    def __init__(
        self, low: float | None = None, high: float | None = None, *, name: str | None = None
    ) -> None:
        scalar("low", low, optional=True)
        scalar("high", high, optional=True)
        if low is not None and high is not None and low > high:
            raise WiringError(f"low={low!r} is above high={high!r}")
        # JAX refuses integers that no array could hold; as floats they are what they mean, no limit.
        low, high = (float(v) if isinstance(v, int) and abs(v) >= 2**31 else v for v in (low, high))
        self._build({"low": low, "high": high}, name)


class IsNan(_Unary):
    """Whether each element is NaN."""

    op_name = "is_nan"
    kinds = ("float", "bool")


class NanToNum(_Unary):
    """Replace NaN by ``nan`` and infinities by ``posinf``/``neginf`` (None: the dtype's largest and smallest)."""

    def __init__(
        self,
        nan: float = 0.0,
        posinf: float | None = None,
        neginf: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        scalar("nan", nan)
        scalar("posinf", posinf, optional=True)
        scalar("neginf", neginf, optional=True)
        self._build({"nan": float(nan), "posinf": posinf, "neginf": neginf}, name, "nan_to_num")


class Decay(_Unary):
    """Decay rates from their logarithms: ``-exp(x)``, always negative."""


class _Binary(Primitive):
    """An operation on two arrays, with NumPy's broadcasting: ``left``, ``right`` → ``output``."""

    op_name: ClassVar[str | None] = None
    kinds: tuple[str, str, str] = ("N", "N", "N")

    def __init__(self, *, name: str | None = None) -> None:
        self._build({}, name)

    def _build(self, attributes: dict[str, Any], name: str | None, op: str | None = None) -> None:
        left, right, out = self.kinds
        op = op or self.op_name or type(self).__name__.lower()
        constraints: list[Any] = [(broadcast_rule, ("left", "right", "output"))]
        if op in SIZE_RULES:
            constraints.append((SIZE_RULES[op], ("#left", "#right", "#output")))
        super().__init__(
            op,
            {"left": ("*l", left), "right": ("*r", right)},
            {"output": ("*o", out)},
            attributes,
            constraints=constraints,
            name=name,
        )


class Add(_Binary):
    """``left + right``."""


class Subtract(_Binary):
    """``left - right``."""


class Multiply(_Binary):
    """``left * right``."""


class Divide(_Binary):
    """``left / right``, a float also for integers; infinite or NaN where ``right`` is 0."""

    kinds = ("N", "N", "float")
    takes_dtype = "int"


class FloorDivide(_Binary):
    """``left // right``, rounded down, as in Python. Integers divided by 0 give what the backend gives."""

    op_name = "floor_divide"


class Modulo(_Binary):
    """``left - right * (left // right)``: the remainder with the sign of ``right``, as in Python."""


class Power(_Binary):
    """``left ** right``: base and exponent of one kind.

    Args:
        robust: ``|left|`` is the base and, below ``threshold`` with an exponent under 1, the tangent takes over;
            value and gradient are then finite everywhere (roots of distances, which may be 0). The default
            threshold is the square root of the dtype's smallest normal number.
    """

    def __init__(
        self, robust: bool = False, threshold: float | None = None, *, name: str | None = None
    ) -> None:
        number("threshold", threshold, above=True, optional=True)
        if threshold is not None and not robust:
            raise WiringError(f"threshold={threshold!r} is only used with robust=True")
        if robust:
            self.kinds = ("float", "float", "float")
        self._build({"threshold": threshold} if robust else {}, name, "robust_power" if robust else None)


class Minimum(_Binary):
    """The smaller of the two; NaN if either is. Equal values share the gradient."""


class Maximum(_Binary):
    """The larger of the two; NaN if either is. Equal values share the gradient."""


class ShiftLeft(_Binary):
    """``left << right`` of integers; shifts of 32 or more, or below 0, give what the backend gives."""

    op_name = "shift_left"
    kinds = ("int", "int", "int")


class ShiftRight(_Binary):
    """``left >> right`` of integers, keeping the sign."""

    op_name = "shift_right"
    kinds = ("int", "int", "int")


class Where(Primitive):
    """``input1`` where ``cond`` is true, else ``input2``; all three broadcast.

    The gradient of the value that is not taken is 0, yet a NaN or infinity made *before* it stays one: make the
    argument safe, not the result.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "where",
            {"cond": ("*c", "bool"), "input1": ("*l", "T"), "input2": ("*r", "T")},
            {"output": ("*o", "T")},
            constraints=[(broadcast3_rule(), ("cond", "input1", "input2", "output"))],
            name=name,
        )


class Softmax(Primitive):
    """Softmax over one dimension (the last): ``input [*b]`` → ``output [*b]``. Rows of ``-inf`` alone give NaN."""

    def __init__(self, axis: int = -1, *, name: str | None = None) -> None:
        whole("axis", axis, None)
        shape = "*b d" if axis == -1 else "*b"
        super().__init__(
            "softmax",
            {"input": (shape, "float")},
            {"output": (shape, "float")},
            {} if axis == -1 else {"axis": axis},
            constraints=[] if axis == -1 else [(_has_axis(axis), ("input",))],
            name=name,
        )


def _has_axis(axis: int) -> Any:
    from capibara.compose.primitives.rules import axis_of

    def rule(shape: Any) -> bool:
        dims = shape.dims()
        if dims is None:
            return False
        axis_of(axis, len(dims))
        return True

    return rule


def _in_groups(groups: int, whole: Shape) -> bool:
    dims = whole.dims()
    if not dims or dims[-1].size is None:
        return False
    if dims[-1].size % groups:
        raise ShapeError(f"groups={groups} does not divide the {dims[-1].size} features that are normalised")
    return True


class Normalise(Primitive):
    """Root-mean-square or layer normalisation over the last dimension (with ``dims=2`` over the last two together),
    computed in the accumulation dtype.

    ``kind="rms"``: ``x / sqrt(mean(x²) + epsilon) * scale`` (Zhang and Sennrich, 2019).
    ``kind="layer"``: the mean is taken off first (Ba et al., 2016); add a bias after it for the affine form.
    ``use_scale=False``: without the input ``scale``. ``offset`` is added to the scale: 1 where weights say how far it
    is from 1. ``groups`` (rms only): the last dimension is so many parts, each normalised by itself.
    """

    def __init__(
        self,
        kind: str = "rms",
        epsilon: float = 1e-5,
        use_scale: bool = True,
        *,
        offset: float = 0.0,
        dims: int = 1,
        groups: int = 1,
        name: str | None = None,
    ) -> None:
        choice("kind", kind, ("rms", "layer"))
        number("epsilon", epsilon)
        flag("use_scale", use_scale)
        number("offset", offset)
        if dims not in (1, 2):
            raise WiringError(f"dims={dims!r} must be 1 or 2: the last dimension, or the last two together")
        whole("groups", groups)
        if groups > 1 and (kind, dims) != ("rms", 1):
            raise WiringError(f"groups={groups!r} must be 1 for kind={kind!r} and dims={dims!r}")
        last = "d" if dims == 1 else "e d"
        super().__init__(
            f"{kind}_norm",
            {"input": (f"*b {last}", "float")} | ({"scale": (last, "float")} if use_scale else {}),
            {"output": (f"*b {last}", "float")},
            {"epsilon": float(epsilon)}
            | ({"offset": float(offset)} if offset else {})
            | ({"dims": dims} if dims > 1 else {})
            | ({"groups": groups} if groups > 1 else {}),
            constraints=[(partial(_in_groups, groups), ("input",))] if groups > 1 else [],
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
    """Change the dtype: "float32", "bfloat16" …, "int32", "bool", or for the policy's dtype of sums "accumulate", for
    that of arithmetic "compute".

    Floats become integers by dropping what follows the point; numbers become bools as ``x != 0``.
    """

    def __init__(self, dtype: Any = "accumulate", *, name: str | None = None) -> None:
        dtype = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", None) or str(dtype)
        choice("dtype", dtype, ("accumulate", "compute", *FLOAT_DTYPES, "int32", "bool"))
        accumulate = dtype == "accumulate"
        self.takes_dtype = dtype == "compute"
        super().__init__(
            "cast_up" if accumulate else "cast",
            {"input": ("*b", None)},
            {"output": ("*b", {"int32": "int", "bool": "bool"}.get(dtype, "float"))},
            {} if dtype in ("accumulate", "compute") else {"dtype": dtype},
            constraints=[PASSED_ON] if dtype == "int32" else [],
            accumulates=accumulate,
            name=name,
        )
