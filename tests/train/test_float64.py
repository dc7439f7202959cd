"""Training and generation in float64: refused without JAX's 64-bit mode, and whole with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_model import TinyModel
from tiny_run import QUICK_COMPILE, TEXT, TINY, python, tiny_config, tiny_corpus

from capibara.cli import main
from capibara.errors import ConfigError
from capibara.serve import find_checkpoint, load_model
from capibara.train import TrainState, make_train_step, train

FLOAT64 = [f"precision.{name}_dtype=float64" for name in ("param", "compute", "accumulate")]


@pytest.mark.parametrize("settings", [FLOAT64[:1] + FLOAT64[2:], FLOAT64[1:], FLOAT64[2:]])
def test_refused_before_anything_is_written(tmp_path: Path, settings: list[str]) -> None:
    config = tiny_config(tmp_path / "run", *settings)
    with pytest.raises(
        ConfigError, match=r"precision\.accumulate_dtype: got 'float64'.*JAX_ENABLE_X64=1"
    ) as caught:
        train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    assert str(caught.value).count("precision.") == len(settings)
    assert not (tmp_path / "run").exists()


def test_the_command_refuses_it_before_it_reads_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path / "no-such-text"), *TINY, *FLOAT64, "--directory", str(tmp_path / "run")]
    assert main(["train", *arguments]) == 2
    assert "JAX_ENABLE_X64=1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_gradients_of_microbatches_are_added_in_float64() -> None:
    with jax.enable_x64(True):
        config = tiny_config("unused", *FLOAT64)

        class Wide(TinyModel):
            def init(self, seed: int) -> Any:
                params, state = super().init(seed)
                return jax.tree.map(lambda leaf: leaf.astype("float64") / 3, params), state

        def gradients(parts: int) -> Any:
            # With plain gradient descent at rate 1 what is taken off is the gradient.
            step = make_train_step(Wide(config), optax.sgd(1.0))
            params, model_state = Wide(config).init(0)
            state = TrainState.create(params, model_state, optax.sgd(1.0).init(params), seed=0)
            rows = np.random.default_rng(0).integers(0, 256, (4, 17), "int32")
            after, _ = step(jax.tree.map(jnp.copy, state), {"tokens": rows.reshape(parts, -1, 17)})
            return jax.tree.map(lambda a, b: np.asarray(a - b), params, after.params)

        whole, parts = gradients(1), gradients(2)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_in_64_bit_mode_a_run_trains_resumes_and_generates(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    run = str(tmp_path / "run")
    script = "import sys; from capibara.cli import main; sys.exit(main(sys.argv[1:]))"
    env = {"JAX_ENABLE_X64": "1", "XLA_FLAGS": QUICK_COMPILE}
    settings = [*TINY, *FLOAT64, "--directory", run, "--json"]
    for steps in (4, 8):
        options = [f"train.steps={steps}", "optimizer.warmup_steps=2"]
        done = python("-c", script, "train", str(tmp_path / "text.txt"), *settings, *options, env=env)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["step"] == steps
    assert report["start_step"] == 4
    generated = ["generate", "--checkpoint", run, "--length", "20", "--json"]
    done = python("-c", script, *generated, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] == 20
    # The arrays are float64 on disk, and are not read as anything else without a word.
    with pytest.raises(ConfigError, match="JAX_ENABLE_X64=1"):
        load_model(find_checkpoint(run))
    with jax.enable_x64(True):
        loaded = load_model(find_checkpoint(run))
        assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {np.dtype("float64")}
        values = np.asarray(jax.tree.leaves(loaded.params)[0])
        assert (values.astype("float32") != values).any()
