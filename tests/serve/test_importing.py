"""FastAPI without its models of OpenAPI documents until one is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, sys
from types import SimpleNamespace
import pydantic
from capibara.serve.http.importing import import_fastapi
if sys.argv[1] == "deferred":
    before = pydantic.BaseModel.model_config
    import_fastapi()
    assert pydantic.BaseModel.model_config is before
    import_fastapi()
from fastapi.openapi.models import Operation, OpenAPI
built = OpenAPI.__pydantic_complete__
from capibara.serve.http import create_app
from capibara.serve.http.fields import CompletionRequest
app = create_app(SimpleNamespace(name="tiny", adapters=list, statistics=None))
print(json.dumps([built, CompletionRequest.__pydantic_complete__, app.openapi()]))
"""


def described(how: str) -> list[Any]:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, how], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_the_document_is_the_same_and_our_own_models_are_there() -> None:
    built, own, plain = described("plain")
    assert (built, own) == (True, True)
    built, own, document = described("deferred")
    assert (built, own) == (False, True)
    assert document == plain
    assert set(document["paths"]) > {"/v1/completions", "/v1/chat/completions", "/v1/responses"}


def test_the_setting_is_put_back_when_there_is_no_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic import BaseModel

    from capibara.serve.http.importing import import_fastapi

    before = BaseModel.model_config
    monkeypatch.delitem(sys.modules, "fastapi", raising=False)

    class Refuses:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Refuses])
    with pytest.raises(ImportError):
        import_fastapi()
    assert BaseModel.model_config is before
