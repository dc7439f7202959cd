"""Operations on each element: arithmetic, activations, comparisons, logic. Two arguments broadcast as in NumPy."""

from __future__ import annotations

from typing import Any

from capibara.compose.backends.methods.caller import Caller

__all__ = ["Elementwise"]


class Elementwise(Caller):
    """Functions of one element, or of two."""

    def abs(self, input: Any) -> Any:
        """``|x|``; its gradient at 0 is 1 on JAX, else 0."""
        return self._call("absolute", input)

    def sign(self, input: Any) -> Any:
        """−1, 0 or 1."""
        return self._call("sign", input)

    def sin(self, input: Any) -> Any:
        """Sine."""
        return self._call("sine", input)

    def cos(self, input: Any) -> Any:
        """Cosine."""
        return self._call("cosine", input)

    def tan(self, input: Any) -> Any:
        """Tangent."""
        return self._call("tangent", input)

    def tanh(self, input: Any) -> Any:
        """Hyperbolic tangent."""
        return self._call("tanh", input)

    def exp(self, input: Any) -> Any:
        """``exp(x)``."""
        return self._call("exp", input)

    def expm1(self, input: Any) -> Any:
        """``exp(x) - 1``, accurate near 0."""
        return self._call("expm1", input)

    def log(self, input: Any) -> Any:
        """Natural logarithm."""
        return self._call("log", input)

    def log1p(self, input: Any) -> Any:
        """``log(1 + x)``, accurate near 0."""
        return self._call("log1p", input)

    def log2(self, input: Any) -> Any:
        """Logarithm to base 2."""
        return self._call("log2", input)

    def sqrt(self, input: Any) -> Any:
        """Square root."""
        return self._call("sqrt", input)

    def rsqrt(self, input: Any) -> Any:
        """``1 / sqrt(x)``."""
        return self._call("rsqrt", input)

    def square(self, input: Any) -> Any:
        """``x²``."""
        return self._call("square", input)

    def negative(self, input: Any) -> Any:
        """``-x``."""
        return self._call("negate", input)

    def reciprocal(self, input: Any) -> Any:
        """``1 / x``."""
        return self._call("reciprocal", input)

    def floor(self, input: Any) -> Any:
        """Rounded down."""
        return self._call("floor", input)

    def ceil(self, input: Any) -> Any:
        """Rounded up."""
        return self._call("ceil", input)

    def round(self, input: Any) -> Any:
        """Rounded to the nearest integer, halves to the even one."""
        return self._call("round_even", input)

    def relu(self, input: Any) -> Any:
        """``max(x, 0)``."""
        return self._call("relu", input)

    def sigmoid(self, input: Any) -> Any:
        """``1 / (1 + exp(-x))``."""
        return self._call("sigmoid", input)

    def silu(self, input: Any) -> Any:
        """``x sigmoid(x)``."""
        return self._call("silu", input)

    def softplus(self, input: Any) -> Any:
        """``log(1 + exp(x))``."""
        return self._call("softplus", input)

    def isnan(self, input: Any) -> Any:
        """Where x is NaN."""
        return self._call("is_nan", input)

    def isinf(self, input: Any) -> Any:
        """Where x is infinite."""
        return self._call("is_infinite", input)

    def isfinite(self, input: Any) -> Any:
        """Where x is neither infinite nor NaN."""
        return self._call("is_finite", input)

    def logical_not(self, input: Any) -> Any:
        """Not."""
        return self._call("logical_not", input)

    def stop_gradient(self, input: Any) -> Any:
        """x, as a constant for gradients."""
        return self._call("stop_gradient", input)

    def gelu(self, input: Any, approximate: bool = True) -> Any:
        """``x Φ(x)``, by its tanh approximation or exactly."""
        return self._call("gelu", input, approximate=approximate)

    def leaky_relu(self, input: Any, slope: Any = 0.01) -> Any:
        """x above 0, ``slope x`` below."""
        return self._call("leaky_relu", input, slope)

    def elu(self, input: Any, alpha: float = 1.0) -> Any:
        """x above 0, ``alpha (exp(x) - 1)`` below."""
        return self._call("elu", input, alpha)

    def softmax(self, input: Any, dim: int = -1) -> Any:
        """Softmax over one dimension."""
        return self._call("softmax", input, dim)

    def log_softmax(self, input: Any, dim: int = -1) -> Any:
        """Logarithm of the softmax over one dimension."""
        return self._call("log_softmax", input, dim)

    def clip(self, input: Any, low: float | None = None, high: float | None = None) -> Any:
        """Limit values to [``low``, ``high``]."""
        return self._call("clip", input, low, high)

    def where(self, cond: Any, input1: Any, input2: Any) -> Any:
        """``input1`` where ``cond``, ``input2`` elsewhere."""
        return self._call("where", cond, input1, input2)

    def divide(self, left: Any, right: Any) -> Any:
        """``left / right``; integers become the backend's float."""
        return self._call("true_divide", left, right, dtype=self._float(None))

    def add(self, left: Any, right: Any) -> Any:
        """``left + right``."""
        return self._call("add", left, right)

    def subtract(self, left: Any, right: Any) -> Any:
        """``left - right``."""
        return self._call("subtract", left, right)

    def multiply(self, left: Any, right: Any) -> Any:
        """``left * right``."""
        return self._call("multiply", left, right)

    def floor_divide(self, left: Any, right: Any) -> Any:
        """``left // right``."""
        return self._call("floor_divide", left, right)

    def modulo(self, left: Any, right: Any) -> Any:
        """``left % right``, with the sign of ``right``."""
        return self._call("modulo", left, right)

    def power(self, left: Any, right: Any) -> Any:
        """``left ** right``."""
        return self._call("power", left, right)

    def minimum(self, left: Any, right: Any) -> Any:
        """The smaller."""
        return self._call("minimum", left, right)

    def maximum(self, left: Any, right: Any) -> Any:
        """The larger."""
        return self._call("maximum", left, right)

    def equal(self, left: Any, right: Any) -> Any:
        """``left == right``."""
        return self._call("equal", left, right)

    def not_equal(self, left: Any, right: Any) -> Any:
        """``left != right``."""
        return self._call("not_equal", left, right)

    def less(self, left: Any, right: Any) -> Any:
        """``left < right``."""
        return self._call("less", left, right)

    def less_equal(self, left: Any, right: Any) -> Any:
        """``left <= right``."""
        return self._call("less_equal", left, right)

    def greater(self, left: Any, right: Any) -> Any:
        """``left > right``."""
        return self._call("greater", left, right)

    def greater_equal(self, left: Any, right: Any) -> Any:
        """``left >= right``."""
        return self._call("greater_equal", left, right)

    def logical_and(self, left: Any, right: Any) -> Any:
        """Both."""
        return self._call("logical_and", left, right)

    def logical_or(self, left: Any, right: Any) -> Any:
        """Either."""
        return self._call("logical_or", left, right)

    def logical_xor(self, left: Any, right: Any) -> Any:
        """Exactly one."""
        return self._call("logical_xor", left, right)
