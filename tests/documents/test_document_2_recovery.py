"""Document 2, "Recovery y Fallbacks": its snippet, as a reader would type it, with a model that fails once."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

SNIPPET = """
    from capibara.jax.tpu_v4.recovery import TpuRecoveryManager

    # Manager recovery automático
    recovery_manager = TpuRecoveryManager(
        auto_recovery=True,
        fallback_to_gpu=True,
        checkpoint_frequency=1000
    )

    # Contexto con recovery automático
    with recovery_manager.recovery_context():
        try:
            # Operación TPU con recovery automático
            result = model.train_step(batch)
        except TpuError as e:
            # Recovery automático activado
            print(f"🔄 TPU error recovered: {e}")
"""


class Model:
    """A reader's own, over two steps."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def train_step(self, batch: Any) -> Any:
        import jax

        if self.fails:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: the device is gone")
        return batch + 1


@pytest.mark.parametrize("fails", [False, True])
def test_recovery(capsys: pytest.CaptureFixture[str], fails: bool) -> None:
    from capibara.jax.tpu_v4.recovery import TpuError

    names: dict[str, Any] = {"__name__": "snippet", "TpuError": TpuError, "model": Model(fails), "batch": 1}
    exec(compile(textwrap.dedent(SNIPPET), "document 2", "exec"), names)
    said = capsys.readouterr().out
    if fails:
        assert said == "🔄 TPU error recovered: UNAVAILABLE: the device is gone\n"
    else:
        assert (names["result"], said) == (2, "")
