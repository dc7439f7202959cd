"""Kernels and what is fitted with them: support vector machines, regressions, Gaussian processes."""

from __future__ import annotations

import math

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Constant, ones
from capibara.compose.library.layers import Linear
from capibara.compose.logical.arguments import number, whole
from capibara.compose.logical.model import Block, Model

__all__ = [
    "GPRAlpha",
    "GPRLoss",
    "GPRVOuter",
    "GaussProcessRegressionCore",
    "KernelizedSVM",
    "LinearSVM",
    "LogisticRegression",
    "PolynomialKernel",
    "PolynomialRegression",
    "RBFKernel",
]


class RBFKernel(Model):
    """``l_scale² exp(-|x - y|² / (2 sigma²))``: ``input1 [n, d]``, ``input2 [m, d]`` → ``output [n, m]``.

    ``l_scale`` and ``sigma`` are trained, and start at 1.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("input1", "n d", "float")
        self.add_input("input2", "m d", "float")
        self.add_parameter("l_scale", (1,), ones)
        self.add_parameter("sigma", (1,), ones)
        self.add(p.CartesianDifference(), "difference", left="input1", right="input2", output="apart")
        self.add(p.Square(), "squares", input="apart", output="squared")
        self.add(p.Sum(-1), "distance", input="squared", output="distances")
        self.add(p.Square(), "width", input="sigma", output="variance")
        self.add(p.Divide(), "ratio", left="distances", right="variance", output="scaled")
        self.add(p.Multiply(), "half", left="scaled", right=-0.5, output="exponent")
        self.add(p.Exp(), "bell", input="exponent", output="similar")
        self.add(p.Square(), "height", input="l_scale", output="top")
        self.add(p.Multiply(), "kernel", left="top", right="similar", output="output")
        self.expose("output")


class PolynomialKernel(Model):
    """``(input1 input2ᵀ + poly_coef)^degree``: ``input1 [n, d]``, ``input2 [m, d]`` → ``output [n, m]``.

    ``poly_coef`` is trained, and starts at the given value. ``robust`` takes the base's absolute value, so that
    degrees that are not integers have a value everywhere.
    """

    def __init__(
        self, degree: float = 2.0, poly_coef: float = 1.0, robust: bool = False, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        number("degree", degree, above=True)
        self.add_input("input1", "n d", "float")
        self.add_input("input2", "m d", "float")
        self.add_parameter("poly_coef", (), Constant(float(poly_coef)))
        self.add(p.Transpose((1, 0)), "turned", input="input2", output="columns")
        self.add(p.MatrixMultiply(), "product", left="input1", right="columns", output="products")
        self.add(p.Add(), "shifted", left="products", right="poly_coef", output="base")
        self.add(p.Power(robust), "power", left="base", right=float(degree), output="output")
        self.expose("output")


class KernelizedSVM(Model):
    """A linear layer on a kernel: ``kernel(input1, input2) weight + bias`` → ``output [n, 1]``, ``kernel [n, m]``.

    Args:
        kernel: a block with the inputs ``input1 [n, d]`` and ``input2 [m, d]`` and one output ``[n, m]``.
    """

    def __init__(self, kernel: Block, *, name: str | None = None) -> None:
        super().__init__(name=name)
        if not isinstance(kernel, Block) or {"input1", "input2"} - set(kernel.input_keys):
            raise WiringError(f"kernel={kernel!r} must be a block with the inputs input1 and input2")
        if len(kernel.output_keys) != 1:
            raise WiringError(f"kernel={kernel!r} must have one output, it has {kernel.output_keys}")
        self.add_input("input1", "n d", "float")
        self.add_input("input2", "m d", "float")
        more = {k: k for k in kernel.input_keys if k not in ("input1", "input2")}
        self.add(kernel, "map", input1="input1", input2="input2", **more, **{kernel.output_keys[0]: "kernel"})
        self.add(Linear(1), "linear", input="kernel", output="output", weight="weight", bias="bias")
        self.set_shapes(kernel=("n", "m"))
        self.expose("kernel", "output")


class _Scores(Model):
    """A linear layer with one output, and a second output made from it."""

    def __init__(self, after: Block, key: str, name: str | None) -> None:
        super().__init__(name=name)
        self.add_input("input", "*b d", "float")
        self.add(Linear(1), "linear", input="input", output="output", weight="weight", bias="bias")
        self.add(after, "decision", input="output", output=key)
        self.expose(key, "output")


class LinearSVM(_Scores):
    """``input [*b, d]`` → ``output [*b, 1]``, to train with ``HingeLoss``, and its sign, ``decision_output``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(p.Sign(), "decision_output", name)


class LogisticRegression(_Scores):
    """``input [*b, d]`` → ``output [*b, 1]``, the logits, and the probabilities, ``probs_output``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(p.Sigmoid(), "probs_output", name)


class PolynomialRegression(Model):
    """A linear layer on all products of up to ``degree`` features: ``input [*b, d]`` → ``output [*b, dimension]``."""

    def __init__(self, degree: int, dimension: int | None = None, *, name: str | None = None) -> None:
        super().__init__(name=name)
        whole("dimension", dimension, optional=True)
        self.add_input("input", "*b d", "float")
        self.add(p.PolynomialFeatures(degree), "features", input="input", output="products")
        self.add(Linear(dimension), "linear", input="products", output="output", weight="weight", bias="bias")
        self.expose("output")


class GPRAlpha(Model):
    """``(L Lᵀ)⁻¹ label_mu_diff`` by two triangular solutions: ``L [n, n]`` lower, ``label_mu_diff [n, 1]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("label_mu_diff", "n m", "float")
        self.add_input("L", "n n", "float")
        self.add(p.SolveTriangular(), "forward", matrix="L", right="label_mu_diff", output="half")
        self.add(p.SolveTriangular(True), "back", matrix="L", right="half", output="output")
        self.expose("output")


class GPRVOuter(Model):
    """``vᵀ v`` with ``v = L⁻¹ K``: ``K [n, m]``, ``L [n, n]`` lower → ``output [m, m]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("K", "n m", "float")
        self.add_input("L", "n n", "float")
        self.add(p.SolveTriangular(), "forward", matrix="L", right="K", output="v")
        self.add(p.Transpose((1, 0)), "turned", input="v", output="vt")
        self.add(p.MatrixMultiply(), "product", left="vt", right="v", output="output")
        self.expose("output")


class GPRLoss(Model):
    """Negative log likelihood of a Gaussian process: ``½ dᵀ alpha + Σ log diag L + n/2 log 2π``, ``d = labels - mu``.

    ``labels``, ``mu``, ``alpha [n, 1]``, ``L [n, n]`` (the Cholesky factor of the covariance) → ``output []``: a
    scalar, which ``jax.grad`` takes. ``robust``: the logarithm goes on along its tangent near 0.
    """

    def __init__(self, robust: bool = False, *, name: str | None = None) -> None:
        super().__init__(name=name)
        for key in ("labels", "mu", "alpha"):
            self.add_input(key, ("n", 1), "float")
        self.add_input("L", "n n", "float")
        self.add(p.Subtract(), "error", left="labels", right="mu", output="difference")
        self.add(p.Multiply(), "fits", left="difference", right="alpha", output="products")
        self.add(p.Sum(), "fit", input="products", output="energy")
        self.add(p.Multiply(), "half", left="energy", right=0.5, output="data")
        self.add(p.Diagonal(), "diagonal", input="L", output="roots")
        self.add(p.Log(robust), "logs", input="roots", output="log_roots")
        self.add(p.Sum(), "volume", input="log_roots", output="log_volume")
        self.add(p.FullLike(math.log(2 * math.pi) / 2), "constants", input="labels", output="each")
        self.add(p.Sum(), "constant", input="each", output="total")
        self.add(p.Add(), "first", left="data", right="log_volume", output="varying")
        self.add(p.Add(), "second", left="varying", right="total", output="output")
        self.expose("output")


class GaussProcessRegressionCore(Model):
    """Gaussian process regression (Rasmussen and Williams, 2006, algorithm 2.1).

    Inputs: ``label``, ``mu [n, 1]``, ``k [n, n]`` (the kernel between the training points), ``k_star [m, m]``
    (between the
    points to predict) and, with ``test_points``, ``k_cross [n, m]`` (training to prediction) and ``mu_star [m, 1]``;
    without it the points to predict are the training points. The noise variance ``s [1]`` is trained and starts
    at 1. Outputs: ``loss []`` (see :class:`GPRLoss`), ``prediction``, ``confidence [m, 1]`` (the variance of a
    new label).
    """

    def __init__(self, test_points: bool = False, robust: bool = False, *, name: str | None = None) -> None:
        super().__init__(name=name)
        points = "m" if test_points else "n"
        self.add_input("label", ("n", 1), "float")
        self.add_input("mu", ("n", 1), "float")
        self.add_input("k", "n n", "float")
        self.add_input("k_star", (points, points), "float")
        self.add_parameter("s", (1,), ones)
        cross, mean = "k", "mu"
        if test_points:
            cross, mean = "k_cross", "mu_star"
            self.add_input(cross, "n m", "float")
            self.add_input(mean, ("m", 1), "float")
        self.add(p.AddDiagonal(), "noisy", input="k", value="s", output="covariance")
        self.add(p.Cholesky(), "factor", input="covariance", output="L")
        self.add(p.Subtract(), "error", left="label", right="mu", output="difference")
        self.add(GPRAlpha(), "weights", label_mu_diff="difference", L="L", output="alpha")
        self.add(GPRLoss(robust), "likelihood", labels="label", mu="mu", alpha="alpha", L="L", output="loss")
        self.add(p.Transpose((1, 0)), "turned", input=cross, output="rows")
        self.add(p.MatrixMultiply(), "product", left="rows", right="alpha", output="correction")
        self.add(p.Add(), "predicted", left=mean, right="correction", output="prediction")
        self.add(GPRVOuter(), "explained", K=cross, L="L", output="known")
        self.add(p.Subtract(), "left_over", left="k_star", right="known", output="unknown")
        self.add(p.TransposedDiagonal(), "variances", input="unknown", output="spread")
        self.add(p.Absolute(), "sizes", input="spread", output="variance")
        self.add(p.Add(), "with_noise", left="variance", right="s", output="confidence")
        self.expose("loss", "confidence", "prediction")
