"""Models of kernels, scores and distances: compose's, with Mithril's arguments and weights ``[out, in]``."""

from __future__ import annotations

from typing import Any

from capibara import compose
from capibara.compose import TBD
from capibara.compose import primitives as p
from capibara.compose.logical.block import Block
from mithril.model import Model
from mithril.models.renamed import Renamed
from mithril.models.stored import stored

__all__ = [
    "MDS",
    "TSNE",
    "Eigvalsh",
    "GaussProcessRegressionCore",
    "KernelizedSVM",
    "LinearSVM",
    "LogisticRegression",
    "PolynomialFeatures",
    "PolynomialRegression",
    "TSNECore",
    "TsnePJoint",
]


class _Scores(Model):
    def __init__(
        self, input: Any = TBD, weight: Any = TBD, bias: Any = TBD, *, name: str | None = None
    ) -> None:
        super().__init__(name=name, input=input, weight=weight, bias=bias)
        stored(self, self._scores(), turned=("weight",))
        self.set_cout("output")

    def _scores(self) -> Block:
        raise NotImplementedError


class LinearSVM(_Scores):
    """``output = input @ weight.T + bias``, ``weight [1, in]``, and its sign, ``decision_output``."""

    places = "input weight bias output decision_output"

    def _scores(self) -> Block:
        return compose.LinearSVM()


class LogisticRegression(_Scores):
    """``output = input @ weight.T + bias``, ``weight [1, in]``, and the probabilities, ``probs_output``."""

    places = "input weight bias output probs_output"

    def _scores(self) -> Block:
        return compose.LogisticRegression()


class KernelizedSVM(Model):
    """A linear layer on a kernel: ``weight [1, m]``, ``bias [1]``; other inputs of the kernel keep their names."""

    places = "input1 input2 weight bias output"

    def __init__(
        self, kernel: Any, weight: Any = TBD, bias: Any = TBD, *, name: str | None = None, **values: Any
    ) -> None:
        super().__init__(name=name, weight=weight, bias=bias, **values)
        stored(self, compose.KernelizedSVM(kernel), turned=("weight",))


class PolynomialFeatures(Model):
    """All products of up to ``degree`` features: :class:`capibara.compose.PolynomialFeatures`.

    ``degree`` is given when the block is made or when it is connected, ``connect(degree=2)``.
    """

    places = "input degree output"

    def __init__(self, degree: Any = TBD, input: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, input=input)
        self._degree(degree)

    def _degree(self, degree: Any) -> None:
        self.__dict__["_open"] = ["degree"] if degree is TBD else []
        if degree is not TBD:
            self.add(compose.PolynomialFeatures(degree), "inner", input="input", output="output")
            self.expose("output")

    def _joined(self, ports: dict[str, Any]) -> dict[str, Any]:
        if "degree" in ports:
            degree = self._setting("degree", ports.pop("degree"))
            if not self._open:
                Model.__init__(self, name=self.name, **self._values)
            self._degree(degree)
        return super()._joined(ports)


class PolynomialRegression(Model):
    """A :class:`Linear` layer on :class:`PolynomialFeatures`; ``weight [out, products]``."""

    places = "input weight bias output"

    def __init__(
        self,
        degree: int,
        dimension: int | None = None,
        input: Any = TBD,
        weight: Any = TBD,
        bias: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, weight=weight, bias=bias)
        stored(self, compose.PolynomialRegression(degree, dimension), turned=("weight",))


class Eigvalsh(Renamed):
    """Eigenvalues of a symmetric matrix ``K_term``; ``L``, its Cholesky factor, is not read."""

    places = "K_term L threshold output"

    def __init__(self, K_term: Any = TBD, L: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, K_term=K_term, L=L)
        self.add(p.Eigvalsh(), "inner", input="K_term", output="output")
        self.add_input("L", "*b n n", "float")
        self.expose("output")


class GaussProcessRegressionCore(Model):
    """:class:`capibara.compose.GaussProcessRegressionCore` at its training points; the noise ``s [1]`` is an input."""

    places = "label s k k_star mu loss prediction confidence"

    def __init__(self, *, name: str | None = None, **values: Any) -> None:
        super().__init__(name=name, **values)
        core = compose.GaussProcessRegressionCore()
        core.set_differentiability(s=False)
        stored(self, core)
        self.set_cout("prediction")


class TSNECore(Model):
    """:class:`capibara.compose.TSNECore`."""

    places = "distances pred_distances p_joint output"

    def __init__(
        self,
        exact_distances: bool = True,
        calculate_p_joint: bool = False,
        perplexity: float = 20.0,
        distances: Any = TBD,
        pred_distances: Any = TBD,
        p_joint: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, distances=distances, pred_distances=pred_distances, p_joint=p_joint)
        stored(self, compose.TSNECore(exact_distances, calculate_p_joint, perplexity))
        if "distances" not in self.wires:
            self.add_input("distances", "n n", "float")


class _Distances(Model):
    def _encode(self, block: Block) -> None:
        stored(self, block)
        self.set_differentiability(coords=False)


class MDS(_Distances):
    """:class:`capibara.compose.MDS` with ``coords [n, prediction_dim]`` an input: train it with ``trainable_keys``."""

    places = "input coords norm predicted_coords output"

    def __init__(
        self,
        prediction_dim: int,
        input_type: str = "distances",
        input: Any = TBD,
        coords: Any = TBD,
        norm: Any = TBD,
        predicted_coords: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        values = {"input": input, "coords": coords, "norm": norm, "predicted_coords": predicted_coords}
        super().__init__(name=name, **values)
        self._encode(compose.MDS(prediction_dim, input_type))


class TSNE(_Distances):
    """:class:`capibara.compose.TSNE` with ``coords [n, prediction_dim]`` an input, and ``norm``, which is always 2."""

    places = "input norm predicted_coords output"

    def __init__(
        self,
        prediction_dim: int,
        input_type: str = "distances",
        preplexity: float = 20.0,
        calculate_p_joint: bool = False,
        input: Any = TBD,
        norm: Any = TBD,
        predicted_coords: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, norm=norm, predicted_coords=predicted_coords)
        self._encode(compose.TSNE(prediction_dim, input_type, preplexity, calculate_p_joint))
        self.add_input("norm", (), "float")


class TsnePJoint(Renamed):
    """Joint probabilities of t-SNE from ``squared_distances [n, n]``; ``target_perplexity`` is a number."""

    places = "squared_distances target_perplexity threshold output"

    def __init__(
        self, squared_distances: Any = TBD, target_perplexity: Any = TBD, *, name: str | None = None
    ) -> None:
        super().__init__(name=name, squared_distances=squared_distances)
        self._perplexity(target_perplexity)

    def _perplexity(self, number: Any) -> None:
        self.__dict__["_open"] = ["target_perplexity"] if number is TBD else []
        if number is not TBD:
            self.add(p.TsnePJoint(number), "inner", input="squared_distances", output="output")
            self.expose("output")

    def _joined(self, ports: dict[str, Any]) -> dict[str, Any]:
        if "target_perplexity" in ports:
            number = self._setting("target_perplexity", ports.pop("target_perplexity"))
            if not self._open:
                Model.__init__(self, name=self.name, **self._values)
            self._perplexity(number)
        return super()._joined(ports)
