"""Fixtures of several test files."""

from __future__ import annotations

import pytest

from capibara.observe.profile import events


@pytest.fixture(params=["compiled", "jax.profiler"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both readers of a trace's events: compiled code, and JAX's own, which is the oracle."""
    if request.param == "jax.profiler":
        monkeypatch.setattr(events, "_compiled", lambda: None)
    elif events._compiled() is None:
        pytest.skip("the native library is not built")
    return request.param
