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
        self.add(p.Absolute(), "sizes", input="input", output="size")
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
    """``½ x K xᵀ``: ``input [1, n]``, ``kernel [n, n]`` → ``output [1, 1]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("input", (1, "n"), "float")
        self.add_input("kernel", "n n", "float")
        self.add(p.MatrixMultiply(), "left_product", left="input", right="kernel", output="weighted")
        self.add(p.Transpose((1, 0)), "turned", input="input", output="column")
        self.add(p.MatrixMultiply(), "product", left="weighted", right="column", output="form")
        self.add(p.Multiply(), "half", left="form", right=0.5, output="output")
        self.expose("output")
