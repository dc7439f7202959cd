"""Metrics: how good predictions are. None has a gradient.

``pred`` holds scores of classes in the last dimension (``is_pred_one_hot``), class numbers, or with ``is_binary`` the
score of class 1, which counts from above ``threshold``. ``label`` is one-hot or holds class numbers (``int``).
"""

from __future__ import annotations

from typing import ClassVar

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.logical.arguments import choice, whole
from capibara.compose.logical.model import Model
from capibara.compose.primitives.rules import scalar

__all__ = ["AUC", "F1", "Accuracy", "Metric", "Precision", "Recall"]


class Metric(Model):
    """Predictions and labels as class numbers: → ``pred_formatted``, ``label_formatted`` and their difference,
    ``output``."""

    def __init__(
        self,
        threshold: float | None = None,
        is_binary: bool = False,
        is_pred_one_hot: bool = True,
        is_label_one_hot: bool = True,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        scalar("threshold", threshold, optional=True)
        thresholded = is_binary and not is_pred_one_hot
        if thresholded and threshold is None:
            raise WiringError("is_binary=True needs a threshold: from which score on it is class 1")
        if threshold is not None and not thresholded:
            raise WiringError(
                f"threshold={threshold!r} is only used with is_binary=True and is_pred_one_hot=False"
            )
        if thresholded:
            self.add_input("pred", "*b", "float")
            self.add(p.Greater(), "above", left="pred", right=threshold, output="positive")
            self.add(p.Cast("int32"), "classes", input="positive", output="pred_formatted")
        elif is_pred_one_hot:
            self.add_input("pred", "*b classes", None)
            self.add(p.ArgMax(-1), "classes", input="pred", output="pred_formatted")
        else:
            self.add_input("pred", "*b", "int")
            self.add(p.Buffer(), "classes", input="pred", output="pred_formatted")
        if is_label_one_hot:
            self.add_input("label", "*b labels", None)
            self.add(p.ArgMax(-1), "labelled", input="label", output="label_formatted")
        else:
            self.add_input("label", "*b", "int")
            self.add(p.Buffer(), "labelled", input="label", output="label_formatted")
        self.add(p.Subtract(), "difference", left="pred_formatted", right="label_formatted", output="output")
        self.expose("pred_formatted", "label_formatted", "output")


class _Scored(Model):
    def _formatted(
        self, threshold: float | None, is_binary: bool, is_pred_one_hot: bool, is_label_one_hot: bool
    ) -> None:
        self.add(
            Metric(threshold, is_binary, is_pred_one_hot, is_label_one_hot),
            "formatted",
            pred="pred",
            label="label",
            pred_formatted="pred_formatted",
            label_formatted="label_formatted",
            output="difference",
        )


class Accuracy(_Scored):
    """The share of right predictions: ``pred``, ``label`` → ``output []``. NaN of none."""

    def __init__(
        self,
        threshold: float | None = None,
        is_binary: bool = False,
        is_pred_one_hot: bool = True,
        is_label_one_hot: bool = True,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._formatted(threshold, is_binary, is_pred_one_hot, is_label_one_hot)
        self.add(p.Equal(), "right", left="pred_formatted", right="label_formatted", output="hit")
        self.add(p.Cast("int32"), "counted", input="hit", output="count")
        self.add(p.Mean(), "share", input="count", output="output")
        self.expose("output")


class _Score(_Scored):
    """A score of classes; a quotient by 0 counts as 0.

    Args:
        average: "micro" over all predictions; "macro" the mean of the classes that occur as label or prediction;
            "weighted" by how often a class is the label; "none" one number for each class.
        n_classes: how many classes there are; 2 by default if ``is_binary``.
        threshold, is_binary, is_pred_one_hot, is_label_one_hot: see :mod:`capibara.compose.library.metrics`.
    """

    score: ClassVar[str]

    def __init__(
        self,
        average: str = "micro",
        n_classes: int | None = None,
        threshold: float | None = None,
        is_binary: bool = False,
        is_pred_one_hot: bool = True,
        is_label_one_hot: bool = True,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        choice("average", average, ("micro", "macro", "weighted", "none"))
        whole("n_classes", n_classes, optional=True)
        if n_classes is None:
            if not is_binary:
                raise WiringError("n_classes=None: say how many classes there are")
            n_classes = 2
        self._formatted(threshold, is_binary, is_pred_one_hot, is_label_one_hot)
        self.add(
            p.Confusion(n_classes),
            "confusion",
            pred="pred_formatted",
            label="label_formatted",
            output="counts",
        )
        self.add(p.ClassScore(self.score, average), "score", input="counts", output="output")
        self.expose("output")


class Precision(_Score):
    """The share of a class's predictions that are right."""

    __doc__ = f"{__doc__}\n\n{_Score.__doc__}"
    score = "precision"


class Recall(_Score):
    """The share of a class's labels that were found."""

    __doc__ = f"{__doc__}\n\n{_Score.__doc__}"
    score = "recall"


class F1(_Score):
    """The harmonic mean of precision and recall."""

    __doc__ = f"{__doc__}\n\n{_Score.__doc__}"
    score = "f1"


class AUC(Model):
    """Area under the ROC curve of each class against the others: ``pred [n, classes]``, ``label`` → ``output
    [classes]``.

    With ``n_classes=1`` the scores of class 1 of two: ``pred [n]`` → ``output [1]``. NaN where a class never, or
    always, occurs.
    """

    def __init__(self, n_classes: int, is_label_one_hot: bool = True, *, name: str | None = None) -> None:
        super().__init__(name=name)
        whole("n_classes", n_classes)
        alone = n_classes == 1
        self.add_input("pred", ("n",) if alone else ("n", n_classes), "float")
        if is_label_one_hot and not alone:
            self.add_input("label", ("n", n_classes), None)
            self.add(p.ArgMax(-1), "labelled", input="label", output="classes")
            label = "classes"
        else:
            self.add_input("label", ("n",), "int")
            label = "label"
        for i in range(n_classes):
            self.add(p.Equal(), f"is_{i}", left=label, right=1 if alone else i, output=f"positive_{i}")
            score = "pred"
            if not alone:
                score = f"score_{i}"
                self.add(p.Indexer((slice(None), i)), f"column_{i}", input="pred", output=score)
            self.add(p.AUCCore(), f"auc_{i}", pred=score, label=f"positive_{i}", output=f"area_{i}")
        areas = {f"input_{i}": f"area_{i}" for i in range(n_classes)}
        self.add(p.Stack(n_classes), "areas", **areas, output="output")
        self.expose("output")
