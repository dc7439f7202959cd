"""The import name ``mithril`` for :mod:`capibara.compose`, where no package of that name is installed.

It stands at the end of the import path, after every installed package, so that a real ``mithril`` always wins.
``capibara doctor`` says which of the two answers. Nothing but names lives here.
"""

from capibara.compose import *
from capibara.compose import __all__, models

__all__ = [*__all__, "models"]
