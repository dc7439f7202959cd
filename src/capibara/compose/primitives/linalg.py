"""Matrix products, factorisations, distances, features, attention over whole matrices."""

from __future__ import annotations

import math

from capibara.compose.logical.arguments import choice, number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape
from capibara.compose.primitives.rules import broadcast_rule, fix, scalar

__all__ = [
    "AddDiagonal",
    "CartesianDifference",
    "Cholesky",
    "Diagonal",
    "DistanceMatrix",
    "Eigvalsh",
    "MatrixMultiply",
    "PolynomialFeatures",
    "PrincipalComponents",
    "ScaledDotProduct",
    "SolveTriangular",
    "TransposedDiagonal",
    "TsnePJoint",
    "ZeroDiagonal",
]


def _batch(left: Shape, right: Shape, output: Shape) -> bool:
    """The dimensions before the matrices broadcast."""
    return broadcast_rule(*(Shape(s.items[:-2]) for s in (left, right, output)))


class MatrixMultiply(Primitive):
    """``left @ right``: ``[*l, n, k] × [*r, k, m]`` → ``[*o, n, m]``; leading dimensions broadcast."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "matmul",
            {"left": ("*l n k", "float"), "right": ("*r k m", "float")},
            {"output": ("*o n m", "float")},
            constraints=[(_batch, ("left", "right", "output"))],
            accumulates=True,
            name=name,
        )


class Cholesky(Primitive):
    """The lower triangle L with ``L Lᵀ = input``: ``[*b, n, n]``, symmetric. NaN where not positive definite."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "cholesky", {"input": ("*b n n", "float")}, {"output": ("*b n n", "float")}, name=name
        )


class Eigvalsh(Primitive):
    """Eigenvalues of a symmetric matrix, rising: ``[*b, n, n]`` → ``[*b, n]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("eigvalsh", {"input": ("*b n n", "float")}, {"output": ("*b n", "float")}, name=name)


class SolveTriangular(Primitive):
    """``matrix x = right`` for x, with a lower triangle (``transposed``: its transpose): ``[n, n]``, ``[n, m]``."""

    def __init__(self, transposed: bool = False, *, name: str | None = None) -> None:
        super().__init__(
            "solve_triangular",
            {"matrix": ("n n", "float"), "right": ("n m", "float")},
            {"output": ("n m", "float")},
            {"transposed": bool(transposed)},
            name=name,
        )


class Diagonal(Primitive):
    """The diagonal: ``[*b, n, n]`` → ``[*b, n]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("diagonal", {"input": ("*b n n", "T")}, {"output": ("*b n", "T")}, name=name)


class TransposedDiagonal(Primitive):
    """The diagonal of a matrix as a column: ``[n, n]`` → ``[n, 1]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "transposed_diagonal", {"input": ("n n", "T")}, {"output": (("n", 1), "T")}, name=name
        )


class AddDiagonal(Primitive):
    """Add a number to the diagonal: ``input [n, n]``, ``value`` (one element) → ``[n, n]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "add_diagonal",
            {"input": ("n n", "float"), "value": ((1,), "float")},
            {"output": ("n n", "float")},
            name=name,
        )


class ZeroDiagonal(Primitive):
    """The matrix with zeros on its diagonal: ``[n, n]`` → ``[n, n]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("zero_diagonal", {"input": ("n n", "T")}, {"output": ("n n", "T")}, name=name)


class CartesianDifference(Primitive):
    """Every row minus every other: ``left [n, d]``, ``right [m, d]`` → ``[n, m, d]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "cartesian_difference",
            {"left": ("n d", "T"), "right": ("m d", "T")},
            {"output": ("n m d", "T")},
            name=name,
        )


class DistanceMatrix(Primitive):
    """``Σ |left_i - right_j|^norm``: ``left [n, d]``, ``right [m, d]``, ``norm []`` → ``[n, m]``.

    The power of the distance, without the root. The gradient where two features are equal is 0.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "distance_matrix",
            {"left": ("n d", "float"), "right": ("m d", "float"), "norm": ((), "float")},
            {"output": ("n m", "float")},
            name=name,
        )


class PolynomialFeatures(Primitive):
    """All products of up to ``degree`` features, without the constant: ``[*b, d]`` → ``[*b, C(d+degree,
    degree) - 1]``.

    In order of their degree, then of the features (as scikit-learn's, with ``include_bias=False``).
    """

    def __init__(self, degree: int, *, name: str | None = None) -> None:
        whole("degree", degree)

        def rule(before: Shape, after: Shape) -> bool:
            dims, out = before.dims(), after.dims()
            if dims is None or out is None:
                return False
            size = dims[-1].size
            return fix(out[-1], None if size is None else math.comb(size + degree, degree) - 1)

        super().__init__(
            "polynomial_features",
            {"input": ("*b d", "float")},
            {"output": ("*b features", "float")},
            {"degree": degree},
            constraints=[(rule, ("input", "output"))],
            name=name,
        )


class PrincipalComponents(Primitive):
    """Directions of largest variance of the rows (Hotelling, 1933), by the singular value decomposition.

    ``input [n, d]`` → ``mean [d]``, ``components [d, count]`` (columns, their largest entry positive),
    ``variances [count]`` (falling). No gradient. ``count`` is at most ``min(n, d)``.
    """

    def __init__(self, count: int, *, name: str | None = None) -> None:
        whole("count", count)

        def rule(rows: Shape) -> bool:
            dims = rows.dims()
            known = [d.size for d in dims or () if d.size is not None]
            if known and min(known) < count:
                from capibara.compose.errors import ShapeError

                raise ShapeError(f"count={count} components of an array with a dimension of {min(known)}")
            return len(known) == 2

        super().__init__(
            "principal_components",
            {"input": ("n d", "float")},
            {
                "mean": (("d",), "float"),
                "components": (("d", count), "float"),
                "variances": ((count,), "float"),
            },
            {"count": count},
            constraints=[(rule, ("input",))],
            name=name,
        )


class TsnePJoint(Primitive):
    """Joint probabilities of t-SNE (van der Maaten and Hinton, 2008): ``input [n, n]`` squared distances →
    ``[n, n]``.

    Around each point a Gaussian whose entropy is ``log(perplexity)``, made symmetric; the sum of all is 1. No
    gradient. A perplexity of ``n - 1`` or more cannot be reached: the Gaussian is then flat.
    """

    def __init__(self, perplexity: float = 20.0, *, name: str | None = None) -> None:
        number("perplexity", perplexity, 1.0)
        super().__init__(
            "tsne_p_joint",
            {"input": ("n n", "float")},
            {"output": ("n n", "float")},
            {"perplexity": float(perplexity)},
            name=name,
        )


class ScaledDotProduct(Primitive):
    """Attention over whole matrices: ``softmax(query keyᵀ scale) value`` (Vaswani et al., 2017).

    ``query [*b, l, e]``, ``key [*b, s, e]``, ``value [*b, s, v]`` → ``output [*b, l, v]``. For long sequences and
    grouped heads use :class:`Attention`.

    Args:
        causal: row i sees columns up to i only.
        scale: by default ``1 / √e``.
        mask: "bool" adds the port ``mask`` (true: seen), "float" one that is added to the scores; both broadcast
            against ``[*b, l, s]``; -inf hides. A row that sees nothing gives 0.
    """

    def __init__(
        self,
        causal: bool = False,
        scale: float | None = None,
        mask: str | None = None,
        *,
        name: str | None = None,
    ) -> None:
        scalar("scale", scale, optional=True)
        choice("mask", mask, ("bool", "float"), optional=True)
        inputs = {
            "query": ("*b l e", "float"),
            "key": ("*b s e", "float"),
            "value": ("*b s v", "float"),
        }
        constraints = []
        if mask is not None:
            inputs["mask"] = ("*m", mask)

            def rule(query: Shape, key: Shape, mask: Shape) -> bool:
                scores = Shape([*query.items[:-1], key.items[-2]])
                return broadcast_rule(mask, scores, scores)

            constraints = [(rule, ("query", "key", "mask"))]
        super().__init__(
            "scaled_dot_product",
            inputs,
            {"output": ("*b l v", "float")},
            {"causal": bool(causal), "scale": scale},
            constraints=constraints,
            name=name,
        )
