"""``mithril.utils``: sequences of different lengths for unrolled networks."""

from mithril.utils import utils as utils

__all__ = ["utils"]
