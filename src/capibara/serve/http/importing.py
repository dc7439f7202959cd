"""FastAPI as a start needs it: most of the time of its import goes into models that only its OpenAPI document has."""

from __future__ import annotations

import sys

__all__ = ["import_fastapi"]


def import_fastapi() -> None:
    """Import FastAPI, whose models of OpenAPI are built when they are first used: pydantic's ``defer_build``.

    A model that another thread defines meanwhile is built at its first use, too.
    """
    if "fastapi" in sys.modules:
        return
    from pydantic import BaseModel

    before = BaseModel.model_config
    BaseModel.model_config = {**before, "defer_build": True}
    try:
        import fastapi  # noqa: F401
    finally:
        BaseModel.model_config = before
