"""The monitor of :mod:`capibara.compress.system.monitor`."""

from capibara.compress.system.monitor import *
from capibara.compress.system.monitor import __all__ as __all__
