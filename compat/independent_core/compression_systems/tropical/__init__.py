"""The names of :mod:`capibara.compress.system.monitor`."""
