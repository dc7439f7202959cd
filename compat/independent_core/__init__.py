"""The import name ``independent_core`` for :mod:`capibara.compress`, where no package of that name is installed.

It stands at the end of the import path, after every installed package, so that a real ``independent_core`` always
wins. ``capibara doctor`` says which of the two answers. Nothing but names lives here.
"""

from capibara import __version__ as __version__
