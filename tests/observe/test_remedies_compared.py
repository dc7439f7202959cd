"""How runs of a script with and without a remedy are compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from capibara.errors import CapibaraError
from capibara.observe.bottlenecks import Bottleneck
from capibara.observe.bottlenecks.remedies import Remedy, _measured, _Ran, _run
from capibara.observe.profile.results import write_results

FOUND = Bottleneck("idle", "", "", {}, 0.5)


@pytest.mark.parametrize(
    ("plain", "changed", "same", "said"),
    [
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], True, None),
        # One that differs, but is not the last.
        ([1.0, 1.0, 1.0], [1.0, 2.0, 1.0], False, False),
        # What differs without the remedy as well.
        ([1.0, 2.0, 3.0], [1.5, 2.5, 3.5], False, True),
    ],
)
def test_every_pair_is_compared(
    plain: list[float], changed: list[float], same: bool, said: bool | None, tmp_path: Path
):
    sides = {False: iter(plain), True: iter(changed)}

    def run(remedy: Remedy | None) -> _Ran:
        value = next(sides[remedy is not None])
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npz"
        write_results(path, {"loss": value})
        return _Ran(1.0, f"loss {value}".encode(), (), (), (), path)

    found = _measured(run, FOUND, Remedy("something"), 0.5, 3)
    assert found.same_output is found.same_results is same
    assert any("the output differs first in 1" in note for note in found.notes) is not same
    assert any("loss differs" in note for note in found.notes) is not same
    assert any("two runs of the script as it is differ as well" in note for note in found.notes) is bool(said)


def test_a_remedy_that_waits_for_itself_is_ended(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import threading\nthreading.Event().wait(60)\n")
    with pytest.raises(CapibaraError, match="did not end within 1 s"):
        _run([sys.executable, str(script)], lambda: None, tmp_path, Remedy("x"), compiling=False, limit=1.0)
