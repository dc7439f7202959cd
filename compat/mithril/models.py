"""``from mithril.models import Linear``: the names of :mod:`capibara.compose.models`."""

from capibara.compose.models import *
from capibara.compose.models import __all__ as __all__
