"""The names of :mod:`capibara.compress.system` and of :mod:`capibara.compress.model_api`, module by module."""
