"""Penalties on the size of parameters, each a scalar. See ``TrainModel.add_regularization``."""

from __future__ import annotations

from capibara.compose import primitives as p
from capibara.compose.logical.model import Model

__all__ = ["L1", "L2", "QuadraticFormRegularizer"]


class L1(Model):
    """``Σ |x|``: ``input [*b]`` → ``output []``; the gradient at 0 is 0."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("input", "*b", "float")
        # Not Absolute, whose gradient at 0, where biases start, is 1 on JAX.
        self.add(p.Sign(), "signs", input="input", output="sign")
        self.add(p.Multiply(), "sizes", left="input", right="sign", output="size")
        self.add(p.Sum(), "total", input="size", output="output")
        self.expose("output")


class L2(Model):
    """``½ Σ x²``: ``input [*b]`` → ``output []``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("input", "*b", "float")
        self.add(p.Square(), "squares", input="input", output="square")
        self.add(p.Sum(), "total", input="square", output="sum")
        self.add(p.Multiply(), "half", left="sum", right=0.5, output="output")
        self.expose("output")


class QuadraticFormRegularizer(Model):
    """``½ x K xᵀ``: ``input``, a row ``[1, n]`` or a column ``[n, 1]``, and ``kernel [n, n]`` → ``output []``.

    The weight of :class:`~.kernels.KernelizedSVM` is such a column.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("input", "rows columns", "float")
        self.add_input("kernel", "n n", "float")
        self.add(p.Reshape((1, -1)), "row", input="input", output="flat")
        self.add(p.MatrixMultiply(), "left_product", left="flat", right="kernel", output="weighted")
        self.add(p.Multiply(), "product", left="weighted", right="flat", output="terms")
        self.add(p.Sum(), "total", input="terms", output="form")
        self.add(p.Multiply(), "half", left="form", right=0.5, output="output")
        self.expose("output")
