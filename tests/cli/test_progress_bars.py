"""Progress where standard error is no terminal, and the settings of Python while a server starts."""

from __future__ import annotations

import gc
import io
import sys

import pytest

from capibara.cli import serve
from capibara.cli._archives import progress_bar
from capibara.cli._bundles import say_compiled


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [None, io.StringIO(), Terminal()])
def test_a_bar_is_drawn_on_a_terminal_alone(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("loading", 10) as step:
        step("a", 10)
    say_compiled(1, 2)
    if stream is not None:
        assert ("loading" in stream.getvalue()) == stream.isatty()
        assert ("compiled 1 of 2" in stream.getvalue()) == stream.isatty()


@pytest.mark.parametrize("collects", [True, False])
def test_a_start_leaves_pythons_settings_as_they_were(collects: bool) -> None:
    before = gc.isenabled(), sys.getswitchinterval()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(KeyError), serve._undisturbed():
            assert not gc.isenabled()
            assert sys.getswitchinterval() < before[1]
            raise KeyError
        assert gc.isenabled() == collects
        assert sys.getswitchinterval() == before[1]
    finally:
        (gc.enable if before[0] else gc.disable)()
