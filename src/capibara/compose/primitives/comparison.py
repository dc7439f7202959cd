"""Comparisons and logical operations."""

from __future__ import annotations

from capibara.compose.primitives.elementwise import _Binary, _Unary

__all__ = [
    "Equal",
    "Greater",
    "GreaterEqual",
    "Less",
    "LessEqual",
    "LogicalAnd",
    "LogicalNot",
    "LogicalOr",
    "LogicalXor",
    "NotEqual",
]


class _Compare(_Binary):
    kinds = ("T", "T", "bool")


class Equal(_Compare):
    """``left == right``; NaN equals nothing."""


class NotEqual(_Compare):
    """``left != right``; NaN differs from everything."""

    op_name = "not_equal"


class Less(_Compare):
    """``left < right``."""


class LessEqual(_Compare):
    """``left <= right``."""

    op_name = "less_equal"


class Greater(_Compare):
    """``left > right``."""


class GreaterEqual(_Compare):
    """``left >= right``."""

    op_name = "greater_equal"


class _Logic(_Binary):
    kinds = ("bool", "bool", "bool")


class LogicalAnd(_Logic):
    """Both are true."""

    op_name = "logical_and"


class LogicalOr(_Logic):
    """At least one is true."""

    op_name = "logical_or"


class LogicalXor(_Logic):
    """Exactly one is true."""

    op_name = "logical_xor"


class LogicalNot(_Unary):
    """The opposite."""

    op_name = "logical_not"
    kinds = ("bool", "bool")
