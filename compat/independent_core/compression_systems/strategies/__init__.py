"""The names of :mod:`capibara.compress.system.strategies`."""
