"""Compiled programs are kept while the tests of this folder run."""

from compile_cache import compile_once

__all__ = ["compile_once"]
