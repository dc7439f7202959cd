"""``from capibara.compose.models import Linear, Model``: every block, under one roof, and under the guide's names.

What other libraries call by another name is here too: ``Clamp`` (``Clip``), ``Exponential`` (``Exp``), ``SiLU``
(``Silu``), ``LogicalXOr`` (``LogicalXor``), ``TensorToList`` (``Unstack``), ``ToList`` and ``ToTuple``
(``Stack``), ``Shape`` (``ShapeOf``). ``Precision`` is the metric here; the precision policy is
:class:`capibara.compose.Precision`.
"""

from capibara.compose import library, primitives
from capibara.compose.library import *  # noqa: F403
from capibara.compose.library import Precision as Precision
from capibara.compose.logical.model import IOKey as IOKey
from capibara.compose.logical.model import Model as Model
from capibara.compose.logical.regions import Remat as Remat
from capibara.compose.logical.regions import Repeat as Repeat
from capibara.compose.primitives import *  # noqa: F403
from capibara.compose.primitives import Clip as Clamp
from capibara.compose.primitives import Exp as Exponential
from capibara.compose.primitives import LogicalXor as LogicalXOr
from capibara.compose.primitives import ShapeOf as Shape
from capibara.compose.primitives import Silu as SiLU
from capibara.compose.primitives import Stack as ToList
from capibara.compose.primitives import Stack as ToTuple
from capibara.compose.primitives import Unstack as TensorToList

__all__ = [
    "Clamp",
    "Exponential",
    "IOKey",
    "LogicalXOr",
    "Model",
    "Remat",
    "Repeat",
    "Shape",
    "SiLU",
    "TensorToList",
    "ToList",
    "ToTuple",
]
__all__ += library.__all__
__all__ += primitives.__all__
