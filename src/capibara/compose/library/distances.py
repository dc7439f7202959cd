"""Points from their distances: multidimensional scaling, t-SNE; and principal components."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.initializers import Normal
from capibara.compose.logical.arguments import choice, number, whole
from capibara.compose.logical.model import Model

__all__ = ["MDS", "PCA", "TSNE", "EncoderDistanceMatrix", "MDSCore", "TSNECore"]

INPUTS = ("distances", "powered_distances", "points")


class EncoderDistanceMatrix(Model):
    """Distances of order ``norm`` (a scalar, folded into [1, 5] by ``NormModifier``): ``input1``, ``input2`` →
    ``[n, m]``.

    With ``get_final_distance=False`` without the root: ``Σ |x - y|^norm``. ``robust``: a root with a finite gradient
    at 0.
    """

    def __init__(
        self, get_final_distance: bool = True, robust: bool = True, *, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.add_input("input1", "n d", "float")
        self.add_input("input2", "m d", "float")
        self.add_input("norm", (), "float")
        powered = "powered" if get_final_distance else "output"
        self.add(p.NormModifier(), "order", input="norm", output="used")
        self.add(p.DistanceMatrix(), "matrix", left="input1", right="input2", norm="used", output=powered)
        if get_final_distance:
            self.add(p.Reciprocal(), "inverse", input="used", output="root")
            self.add(p.Power(robust), "distance", left="powered", right="root", output="output")
        self.expose("output")


class MDSCore(Model):
    """The stress of predicted distances: ``(Σ |D - D'|^p / Σ D^p)^(1/p)``, p being ``norm`` folded into [1, 5].

    ``distances [n, n]`` hold D or, with ``exact_distances=False``, ``D^p``; ``pred_distances`` always hold ``D'^p``.
    """

    def __init__(self, exact_distances: bool = True, robust: bool = True, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("distances", "n n", "float")
        self.add_input("pred_distances", "n n", "float")
        self.add_input("norm", (), "float")
        self.add(p.NormModifier(), "order", input="norm", output="used")
        self.add(p.Reciprocal(), "inverse", input="used", output="root")

        def power(name: str, base: str, exponent: str, output: str) -> None:
            self.add(p.Power(robust), name, left=base, right=exponent, output=output)

        power("predicted", "pred_distances", "root", "guess")
        if exact_distances:
            power("powers", "distances", "used", "powered")
            exact, powered = "distances", "powered"
        else:
            power("roots", "distances", "root", "exact")
            exact, powered = "exact", "distances"
        self.add(p.Subtract(), "error", left=exact, right="guess", output="difference")
        self.add(p.Absolute(), "size", input="difference", output="miss")
        power("misses", "miss", "used", "missed")
        self.add(p.Sum(), "total_miss", input="missed", output="above")
        self.add(p.Sum(), "total", input=powered, output="below")
        self.add(p.StableReciprocal(), "scale", input="below", output="per_total")
        self.add(p.Multiply(), "ratio", left="above", right="per_total", output="share")
        power("stress", "share", "root", "output")
        self.expose("output")


class TSNECore(Model):
    """The loss of t-SNE (van der Maaten and Hinton, 2008): the divergence of the joint probabilities.

    ``distances [n, n]`` (squared, with ``exact_distances=False``) and ``pred_distances [n, n]``, the *squared*
    distances of
    the predicted points → ``output []``. Without ``calculate_p_joint`` the input ``p_joint [n, n]`` has the joint
    probabilities, and the distances are only asked for their shape.
    """

    def __init__(
        self,
        exact_distances: bool = True,
        calculate_p_joint: bool = False,
        perplexity: float = 20.0,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        number("perplexity", perplexity, 1.0)
        self.add_input("pred_distances", "n n", "float")
        if calculate_p_joint:
            self.add_input("distances", "n n", "float")
            squared = "distances"
            if exact_distances:
                squared = "squared"
                self.add(p.Square(), "squares", input="distances", output=squared)
            self.add(p.TsnePJoint(perplexity), "joint", input=squared, output="p_joint")
        else:
            self.add_input("p_joint", "n n", "float")
        self.add(p.Add(), "heavy", left="pred_distances", right=1.0, output="tail")
        self.add(p.Reciprocal(), "student", input="tail", output="similar")
        self.add(p.ZeroDiagonal(), "others", input="similar", output="weights")
        self.add(p.Sum(), "total", input="weights", output="sum")
        self.add(p.Divide(), "normal", left="weights", right="sum", output="q_joint")
        self.add(p.ZeroDiagonal(), "pairs", input="p_joint", output="target")
        self.add(p.KLDivergence(), "divergence", input="q_joint", target="target", output="each")
        self.add(p.Sum(), "loss", input="each", output="output")
        self.expose("output")


class _DistanceEncoder(Model):
    """Trained coordinates ``coords [n, prediction_dim]`` whose distances are compared with those of the input."""

    def __init__(
        self,
        core: Model,
        prediction_dim: int,
        input_type: str,
        init: Callable[..., Any] | None,
        order: float | None,
        name: str | None,
    ) -> None:
        super().__init__(name=name)
        whole("prediction_dim", prediction_dim)
        choice("input_type", input_type, INPUTS)
        self.add_input("input", "n m" if input_type == "points" else "n n", "float")
        self.add_parameter("coords", ("n", prediction_dim), init or Normal(0.1))
        norm: Any = order
        if order is None:
            self.add_input("norm", (), "float")
            norm = "norm"
        distances = "input"
        if input_type == "points":
            matrix = EncoderDistanceMatrix(get_final_distance=False)
            self.add(matrix, "given", input1="input", input2="input", norm=norm, output="powered")
            distances = "powered"
        matrix = EncoderDistanceMatrix(get_final_distance=False)
        self.add(matrix, "found", input1="coords", input2="coords", norm=norm, output="predicted")
        more = {"norm": norm} if order is None else {}
        if "distances" in core.input_keys:
            more["distances"] = distances
        elif "p_joint" in core.input_keys:
            more["p_joint"] = "input"
        self.add(core, "core", pred_distances="predicted", **more, output="output")
        self.add(p.Buffer(), "copy", input="coords", output="predicted_coords")
        self.expose("predicted_coords", "output")


class MDS(_DistanceEncoder):
    """Multidimensional scaling: trained ``coords [n, prediction_dim]`` with the input's distances; see
    :class:`MDSCore`.

    ``input_type`` says what ``input`` holds: "distances" or "powered_distances" ``[n, n]``, or "points" ``[n, m]``.
    ``norm`` is an input. Outputs: ``output []``, the stress, and ``predicted_coords``.
    """

    def __init__(
        self,
        prediction_dim: int,
        input_type: str = "distances",
        *,
        init: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        core = MDSCore(exact_distances=input_type == "distances")
        super().__init__(core, prediction_dim, input_type, init, None, name)


class TSNE(_DistanceEncoder):
    """t-SNE: trained ``coords [n, prediction_dim]`` whose neighbours are the input's; see :class:`TSNECore`.

    ``input_type`` says what ``input`` holds: "distances" or "powered_distances" (squared) ``[n, n]``, or "points"
    ``[n, m]``. Distances are Euclidean. With ``calculate_p_joint=False`` the input holds the joint probabilities
    ``[n, n]`` themselves, made once beforehand by ``TsnePJoint``. Outputs: ``output []``, the loss, and
    ``predicted_coords``.
    """

    def __init__(
        self,
        prediction_dim: int,
        input_type: str = "distances",
        perplexity: float = 20.0,
        calculate_p_joint: bool = True,
        *,
        init: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        if not calculate_p_joint:
            choice("input_type", input_type, ("distances",))
        core = TSNECore(input_type == "distances", calculate_p_joint, perplexity)
        super().__init__(core, prediction_dim, input_type, init, 2.0, name)


class PCA(Model):
    """Principal components: ``input [n, d]`` → ``output [n, count]``, the rows along the directions of largest
    variance.

    Also ``components [d, count]``, ``mean [d]``, ``variances [count]`` and ``reconstruction [n, d]``.
    Gradients flow through
    the projection, not through the directions.
    """

    def __init__(self, count: int, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("input", "n d", "float")
        self.add(
            p.PrincipalComponents(count),
            "fit",
            input="input",
            mean="mean",
            components="components",
            variances="variances",
        )
        self.add(p.Subtract(), "centred", left="input", right="mean", output="offset")
        self.add(p.MatrixMultiply(), "projected", left="offset", right="components", output="output")
        self.add(p.Transpose((1, 0)), "turned", input="components", output="rows")
        self.add(p.MatrixMultiply(), "back", left="output", right="rows", output="flat")
        self.add(p.Add(), "restored", left="flat", right="mean", output="reconstruction")
        self.expose("components", "mean", "variances", "reconstruction", "output")
