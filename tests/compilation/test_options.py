"""Options: validated, visible in the program, and reported or refused where a platform has none."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compilation import (
    CompilationOptionError,
    CompilationOptionWarning,
    TpuCompilationConfig,
    count_compilations,
    create_tpu_optimized_jit,
)
from capibara.compilation.options import compiler_options


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"optimization_level": "agressive"},
            r"optimization_level: got 'agressive'.*Did you mean 'aggressive'",
        ),
        ({"optimization_level": 3}, "optimization_level: got 3, expected one of 'debug'"),
        ({"use_bfloat16": 1}, "use_bfloat16: got 1, expected True or False"),
        ({"cache_compiled_functions": "yes"}, "cache_compiled_functions: got 'yes'"),
        ({"cache_size_gb": 0}, "cache_size_gb: got 0, expected a number of GiB above 0"),
        ({"cache_size_gb": float("inf")}, "cache_size_gb: got inf"),
        ({"cache_size_gb": True}, "cache_size_gb: got True"),
        ({"cache_directory": 3}, "cache_directory: got 3"),
        ({"compiler_options": ["a"]}, "compiler_options: got"),
        ({"compiler_options": {1: 2}}, "compiler_options: got"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CompilationOptionError, match=message):
        TpuCompilationConfig(**settings)


@pytest.mark.parametrize("config", ["aggressive", {"use_bfloat16": True}])
def test_what_is_not_a_configuration_is_refused(config: Any) -> None:
    with pytest.raises(CompilationOptionError, match="expected a TpuCompilationConfig"):
        create_tpu_optimized_jit(config=config)
    with pytest.raises(CompilationOptionError, match="expected a function"):
        create_tpu_optimized_jit("f")  # type: ignore[call-overload]


OPTIONS: list[dict[str, Any]] = [
    {"optimization_level": "debug"},
    {"optimization_level": "aggressive"},
    {"use_bfloat16": True},
    {"enable_async_collective": True},
    {"memory_optimization": True},
    {"cache_compiled_functions": True},
    {"compiler_options": {"xla_a": 1}},
]


@pytest.mark.parametrize(
    ("option", "platform"), list(itertools.product(OPTIONS, ("cpu", "gpu", "tpu", "cuda")))
)
def test_every_option_says_what_it_does_on_every_platform(option: dict[str, Any], platform: str) -> None:
    (name,) = option
    config = TpuCompilationConfig(**option)
    (effect,) = config.effects(platform)
    assert str(effect).startswith(name)
    assert len(effect.text) > 10
    strict = TpuCompilationConfig(**option, strict=True)
    if effect.applied:
        assert strict.effects(platform) == (effect,)
    else:
        assert not effect.options
        assert "no effect on" in config.explain(platform)
        with pytest.raises(CompilationOptionError, match=f"{name}: no effect on .* or set strict=False"):
            strict.effects(platform)


def test_an_unknown_platform_is_refused() -> None:
    with pytest.raises(CompilationOptionError, match="platform: got 'abacus'"):
        TpuCompilationConfig().effects("abacus")


def test_the_users_options_win() -> None:
    config = TpuCompilationConfig(
        optimization_level="aggressive", compiler_options={"xla_backend_optimization_level": 1}
    )
    assert compiler_options(config.effects("cpu"))["xla_backend_optimization_level"] == 1


def code_bytes(config: TpuCompilationConfig) -> int:
    """The size of a program's machine code."""

    def function(x: Any) -> Any:
        for _ in range(6):
            x = jnp.sin(x @ x.T) + jnp.tanh(x)[::-1]
        return x

    jitted = create_tpu_optimized_jit(function, config=config)
    jitted(jnp.ones((16, 16)))
    return len(jitted.programs[0].compiled.runtime_executable().serialize())


def test_levels_change_the_machine_code() -> None:
    slow, fast = (
        code_bytes(TpuCompilationConfig(optimization_level=level)) for level in ("debug", "aggressive")
    )
    plain = code_bytes(TpuCompilationConfig())
    assert abs(slow - fast) > 1000
    # Whatever XLA_FLAGS says, which is one of them.
    assert min(abs(plain - slow), abs(plain - fast)) < 500


def test_an_option_without_effect_is_warned_of_once_and_explained() -> None:
    config = TpuCompilationConfig(memory_optimization=True)
    jitted = create_tpu_optimized_jit(lambda x: x + 1, config=config)
    with pytest.warns(CompilationOptionWarning, match="memory_optimization: no effect on cpu") as caught:
        jitted(jnp.ones(3))
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jitted(jnp.ones(4))
    assert "memory_optimization: no effect on cpu" in jitted.explain()
    with pytest.raises(CompilationOptionError, match="memory_optimization"):
        create_tpu_optimized_jit(
            lambda x: x, config=TpuCompilationConfig(memory_optimization=True, strict=True)
        )(1)


def test_programs_are_kept_on_disk_for_the_next_start(tmp_path: Path) -> None:
    config = TpuCompilationConfig(cache_compiled_functions=True, cache_directory=tmp_path / "a" / "b")

    def new() -> Any:
        def function(x: Any) -> Any:
            return jnp.cos(x) * 3.5

        return create_tpu_optimized_jit(function, config=config)

    first, second = new(), new()
    x = np.ones(5, np.float32)
    first(x)
    jax.clear_caches()
    with count_compilations() as counts:
        second(x)
    assert (counts.compiled, counts.hits) == (0, 1)
    assert [p.from_cache for p in (*first.programs, *second.programs)] == [False, True]
    assert "read from the cache" in second.explain()
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_a_folder_that_cannot_be_used_is_noted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = TpuCompilationConfig(cache_compiled_functions=True, cache_directory=tmp_path / "file" / "x")
    jitted = create_tpu_optimized_jit(lambda x: x + 1, config=config)
    with pytest.warns(CompilationOptionWarning, match="cache_compiled_functions: .* not kept") as caught:
        assert float(jitted(jnp.float32(1))) == 2
    assert caught[0].filename == __file__
    assert "compiled programs are not kept for the next start" in jitted.explain()
