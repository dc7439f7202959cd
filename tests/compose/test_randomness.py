"""Seeds and keys: what is taken, and what is refused by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml

X = {"input": np.ones((2, 3), "float32")}


def compiled() -> ml.CompiledModel:
    model = ml.Model()
    model |= ml.Linear(4)(input="input", output="h")
    model |= ml.Dropout(0.5)(input="h", output="y")
    return ml.compile(model, shapes={"input": [2, 3]}, jit=False)


def weight(c: ml.CompiledModel, seed: Any) -> np.ndarray:
    return np.asarray(c.randomize_params(seed)["linear"]["weight"])


@pytest.mark.parametrize(
    "same",
    [7, np.int64(7), np.uint8(7), np.array(7), jnp.int32(7), jax.random.key(7), jax.random.PRNGKey(7)],
    ids=lambda value: type(value).__name__,
)
def test_a_seed_however_written_is_the_key_of_that_number(same: Any) -> None:
    c = compiled()
    np.testing.assert_array_equal(weight(c, same), np.asarray(c.init(jax.random.key(7))["linear"]["weight"]))


def test_seeds_differ_up_to_the_largest() -> None:
    c = compiled()
    drawn = {weight(c, seed).tobytes() for seed in (0, 1, 2**31, 2**32 - 1)}
    assert len(drawn) == 4


@pytest.mark.parametrize(
    "wrong",
    ["a", 1.5, 2**70, 2**32, True, -1, None, np.bool_(True), np.float32(1), [0], np.arange(3), jnp.ones(2)],
    ids=repr,
)
def test_what_is_no_seed_is_refused(wrong: Any) -> None:
    with pytest.raises(ml.InputError, match=r"seed=.* must be an integer from 0 to 4294967295") as caught:
        compiled().randomize_params(wrong)
    assert isinstance(caught.value, ValueError)


def test_a_traced_seed_is_refused_and_a_traced_key_is_taken() -> None:
    c = compiled()
    with pytest.raises(ml.InputError, match="must be an integer"):
        jax.jit(c.randomize_params)(3)
    out = jax.jit(c.randomize_params)(jax.random.key(3))
    np.testing.assert_array_equal(out["linear"]["weight"], weight(c, 3))


@pytest.mark.parametrize("wrong", [0, "a", np.arange(3), jax.random.split(jax.random.key(0), 2)], ids=repr)
@pytest.mark.parametrize("call", ["init", "init_state", "apply", "evaluate"])
def test_what_is_no_key_is_refused(call: str, wrong: Any) -> None:
    c = compiled()
    run = getattr(c, call)
    arguments: Any = {"init": (wrong,), "init_state": (wrong,)}.get(call)
    with pytest.raises(ml.InputError, match=r"key is .*expected one JAX key: key=jax\.random\.key\(0\)"):
        run(*arguments) if arguments else run(c.randomize_params(), X, key=wrong, train=True)
