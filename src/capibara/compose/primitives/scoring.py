"""What metrics are made of. None has a gradient."""

from __future__ import annotations

from capibara.compose.logical.arguments import choice, whole
from capibara.compose.logical.block import Primitive

__all__ = ["AUCCore", "ClassScore", "Confusion"]


class Confusion(Primitive):
    """How often each pair of classes occurs: ``pred``, ``label`` int ``[*b]`` → ``output int [label, prediction]``.

    Pairs with a class below 0 or not below ``classes`` are not counted.
    """

    def __init__(self, classes: int, *, name: str | None = None) -> None:
        whole("classes", classes)
        super().__init__(
            "confusion",
            {"pred": ("*b", "int"), "label": ("*b", "int")},
            {"output": ((classes, classes), "int")},
            {"classes": classes},
            name=name,
        )


class ClassScore(Primitive):
    """Precision, recall or F1 from ``input int [c, c]`` of :class:`Confusion`; a quotient by 0 counts as 0.

    ``average``: "micro" over all pairs; "macro" the mean over the classes that occur; "weighted" by how often a
    class is the label; "none" one number for each class.
    """

    takes_dtype = True

    def __init__(self, score: str, average: str = "micro", *, name: str | None = None) -> None:
        choice("score", score, ("precision", "recall", "f1"))
        choice("average", average, ("micro", "macro", "weighted", "none"))
        super().__init__(
            "class_score",
            {"input": ("c c", "int")},
            {"output": (("c",) if average == "none" else (), "float")},
            {"score": score, "average": average},
            name=name,
        )


class AUCCore(Primitive):
    """Area under the ROC curve: ``pred float [n]``, ``label bool [n]`` → ``output []``.

    The chance that a positive scores above a negative, ties half (Mann and Whitney, 1947); NaN if one is missing.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "auc",
            {"pred": (("n",), "float"), "label": (("n",), "bool")},
            {"output": ((), "float")},
            name=name,
        )
