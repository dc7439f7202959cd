"""Every name that a package offers is there, also those that are imported only when they are asked for."""

from __future__ import annotations

import importlib
import pkgutil

import capibara


def test_packages_that_import_on_demand_have_the_names_that_they_offer() -> None:
    missing, lazy = [], 0
    for module in pkgutil.walk_packages(capibara.__path__, "capibara."):
        package = importlib.import_module(module.name) if module.ispkg else None
        if package is not None and hasattr(package, "_HOMES"):
            lazy += 1
            missing += [f"{module.name}.{name}" for name in set(package.__all__) - set(dir(package))]
    assert lazy
    assert not missing
