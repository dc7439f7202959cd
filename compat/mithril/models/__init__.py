"""``mithril.models``: every block of Mithril's, and compose's further ones under their own names."""

from __future__ import annotations

from capibara.compose.models import *
from capibara.compose.models import __all__ as _compose_names
from mithril.iokey import IOKey as IOKey
from mithril.model import Model as Model
from mithril.models.fitted import *
from mithril.models.fitted import __all__ as _fitted
from mithril.models.layers import *
from mithril.models.layers import __all__ as _layers
from mithril.models.recurrent import *
from mithril.models.recurrent import __all__ as _recurrent
from mithril.models.refused import REFUSED
from mithril.models.renamed import *
from mithril.models.renamed import __all__ as _renamed
from mithril.models.same import SAME
from mithril.models.shaping import *
from mithril.models.shaping import __all__ as _shaping
from mithril.physical import PhysicalModel as PhysicalModel
from mithril.training import TrainModel as TrainModel

globals().update(SAME | REFUSED)
_own = ["IOKey", "Model", "PhysicalModel", "TrainModel"]
__all__ = list(
    dict.fromkeys(
        [*_compose_names, *SAME, *_layers, *_recurrent, *_renamed, *_fitted, *_shaping, *REFUSED, *_own]
    )
)
