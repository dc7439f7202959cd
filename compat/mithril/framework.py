"""``mithril.framework``: the names that models are annotated with."""

from capibara.compose import TBD as TBD
from capibara.compose import Connection as Connection
from capibara.compose import Tensor as Tensor
from capibara.compose import functional as functional
from mithril.iokey import IOKey as IOKey
from mithril.model import Model as Model
from mithril.physical import PhysicalModel as PhysicalModel

__all__ = ["TBD", "Connection", "IOKey", "Model", "PhysicalModel", "Tensor", "functional"]
