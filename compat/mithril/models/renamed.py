"""Blocks of compose whose ports have other names in Mithril: models of one block."""

from __future__ import annotations

from typing import Any, ClassVar

from capibara.compose import TBD, models
from capibara.compose import primitives as p
from capibara.compose.logical.block import Block
from mithril.model import Model

__all__ = [
    "AUCCore",
    "Divide",
    "FloorDivide",
    "GPRAlpha",
    "GPRLoss",
    "GPRVOuter",
    "PolynomialKernel",
    "Power",
    "RBFKernel",
    "ShiftLeft",
    "ShiftRight",
]


class Renamed(Model):
    """A model of one block, with other names for its ports.

    Attributes:
        ports: Mithril's name by compose's.
    """

    ports: ClassVar[dict[str, str]] = {}

    def _hold(self, block: Block) -> None:
        keys = [*block.input_keys, *block.output_keys]
        self.add(block, "inner", **{key: self.ports.get(key, key) for key in keys})
        self.expose(*(self.ports.get(key, key) for key in block.output_keys))


class Divide(Renamed):
    """``numerator / denominator``."""

    ports: ClassVar[dict[str, str]] = {"left": "numerator", "right": "denominator"}
    places = "numerator denominator output"

    def __init__(self, numerator: Any = TBD, denominator: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, numerator=numerator, denominator=denominator)
        self._hold(p.Divide())


class FloorDivide(Renamed):
    """``numerator // denominator``."""

    ports: ClassVar[dict[str, str]] = {"left": "numerator", "right": "denominator"}
    places = "numerator denominator output"

    def __init__(self, numerator: Any = TBD, denominator: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, numerator=numerator, denominator=denominator)
        self._hold(p.FloorDivide())


class Power(Renamed):
    """``base ** exponent``; ``robust``: as :class:`capibara.compose.Power`."""

    ports: ClassVar[dict[str, str]] = {"left": "base", "right": "exponent"}
    places = "base exponent output"

    def __init__(
        self, robust: bool = False, base: Any = TBD, exponent: Any = TBD, *, name: str | None = None
    ) -> None:
        super().__init__(name=name, base=base, exponent=exponent)
        self._hold(p.Power(robust))


class ShiftLeft(Renamed):
    """``input << shift``."""

    ports: ClassVar[dict[str, str]] = {"left": "input", "right": "shift"}
    places = "input shift output"

    def __init__(self, input: Any = TBD, shift: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, input=input, shift=shift)
        self._hold(p.ShiftLeft())


class ShiftRight(Renamed):
    """``input >> shift``."""

    ports: ClassVar[dict[str, str]] = {"left": "input", "right": "shift"}
    places = "input shift output"

    def __init__(self, input: Any = TBD, shift: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, input=input, shift=shift)
        self._hold(p.ShiftRight())


class AUCCore(Renamed):
    """Area under the ROC curve: ``input float [n]``, ``label bool [n]``."""

    ports: ClassVar[dict[str, str]] = {"pred": "input"}
    places = "input label output"

    def __init__(self, input: Any = TBD, label: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, input=input, label=label)
        self._hold(p.AUCCore())


class GPRAlpha(Renamed):
    """:class:`capibara.compose.GPRAlpha`; ``K_term`` is ``L Lᵀ``, and so not read."""

    places = "label_mu_diff L K_term output"

    def __init__(
        self, label_mu_diff: Any = TBD, L: Any = TBD, K_term: Any = TBD, *, name: str | None = None
    ) -> None:
        super().__init__(name=name, label_mu_diff=label_mu_diff, L=L, K_term=K_term)
        self._hold(models.GPRAlpha())
        self.add_input("K_term", "n n", "float")


class GPRVOuter(Renamed):
    """:class:`capibara.compose.GPRVOuter`; ``K_term`` is ``L Lᵀ``, and so not read."""

    places = "K K_term L output"

    def __init__(self, K: Any = TBD, K_term: Any = TBD, L: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, K=K, K_term=K_term, L=L)
        self._hold(models.GPRVOuter())
        self.add_input("K_term", "n n", "float")


class GPRLoss(Renamed):
    """:class:`capibara.compose.GPRLoss`; ``K_term`` is ``L Lᵀ``, and so not read."""

    places = "labels mu L K_term alpha output"

    def __init__(
        self,
        robust: bool = False,
        labels: Any = TBD,
        mu: Any = TBD,
        L: Any = TBD,
        K_term: Any = TBD,
        alpha: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, labels=labels, mu=mu, L=L, K_term=K_term, alpha=alpha)
        self._hold(models.GPRLoss(robust))
        self.add_input("K_term", "n n", "float")


class RBFKernel(Renamed):
    """:class:`capibara.compose.RBFKernel` with ``l_scale`` and ``sigma [1]`` as inputs: give them, or train them with
    ``trainable_keys``."""

    places = "input1 input2 l_scale sigma output"

    def __init__(
        self,
        input1: Any = TBD,
        input2: Any = TBD,
        l_scale: Any = TBD,
        sigma: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input1=input1, input2=input2, l_scale=l_scale, sigma=sigma)
        kernel = models.RBFKernel()
        kernel.set_differentiability(l_scale=False, sigma=False)
        self._hold(kernel)


class PolynomialKernel(Renamed):
    """``(input1 input2ᵀ + poly_coef) ** degree``, ``poly_coef`` and ``degree`` ports: numbers, tensors or inputs."""

    places = "input1 input2 poly_coef degree output"

    def __init__(
        self,
        robust: bool = True,
        input1: Any = TBD,
        input2: Any = TBD,
        poly_coef: Any = TBD,
        degree: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input1=input1, input2=input2, poly_coef=poly_coef, degree=degree)
        self.add_input("input1", "n d", "float")
        self.add_input("input2", "m d", "float")
        self.add_input("poly_coef", (), "float")
        self.add_input("degree", (), "float")
        self.add(p.Transpose((1, 0)), input="input2", output="columns")
        self.add(p.MatrixMultiply(), left="input1", right="columns", output="products")
        self.add(p.Add(), left="products", right="poly_coef", output="base")
        self.add(p.Power(robust), left="base", right="degree", output="output")
        self.expose("output")
