"""The settings of the compression system: checked by name, kept in a file, read back as they were."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.codecs.protocol import CODECS
from capibara.compress.errors import CompressError
from capibara.compress.system.configuration import OptimizationStrategy, SystemConfiguration
from capibara.errors import CapibaraError, ConfigError


def test_the_documented_defaults() -> None:
    config = SystemConfiguration()
    assert config.enable_jax is True
    assert config.jax_backend == "auto"
    assert config.jax_memory_fraction == 0.75
    assert config.jax_compilation_cache_size == 128
    assert config.jax_enable_x64 is False
    assert config.jax_parallel_devices == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_jax", 1),
        ("jax_backend", "cuda"),
        ("jax_memory_fraction", 0),
        ("jax_memory_fraction", 1.01),
        ("jax_memory_fraction", float("nan")),
        ("jax_memory_fraction", True),
        ("jax_memory_fraction", "0.5"),
        ("jax_compilation_cache_size", -1),
        ("jax_compilation_cache_size", 1.5),
        ("jax_enable_x64", None),
        ("jax_parallel_devices", 0),
        ("jax_parallel_devices", True),
        ("optimization_strategy", "fast"),
        ("strategy", ""),
        ("strategy", 3),
        ("strategy", "nope"),
        ("target_compression_ratio", 1),
        ("target_compression_ratio", float("inf")),
        ("target_compression_ratio", "4"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SystemConfiguration(**{name: value})
    assert str(caught.value).startswith(f"{name}: got {value!r}, expected ")
    assert isinstance(caught.value, CapibaraError)
    assert isinstance(caught.value, ValueError)


def test_a_backend_that_was_nearly_right() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'gpu'"):
        SystemConfiguration(jax_backend="gpus")


def test_a_strategy_that_was_nearly_right() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'lossless'") as caught:
        SystemConfiguration(strategy="losless")
    assert isinstance(caught.value, CompressError)  # as an unknown strategy is everywhere
    for name in ("auto", "jax", *CODECS):
        assert SystemConfiguration(strategy=name).strategy == name


@pytest.mark.parametrize("values", [5, None, "enable_jax", [("enable_jax", True)]])
def test_what_is_no_mapping_of_settings(values: Any) -> None:
    with pytest.raises(ConfigError, match=f"values: got {type(values).__name__}, expected a mapping"):
        SystemConfiguration.from_dict(values)


configurations = st.builds(
    SystemConfiguration,
    enable_jax=st.booleans(),
    jax_backend=st.sampled_from(["auto", "cpu", "gpu", "tpu"]),
    jax_memory_fraction=st.floats(0, 1, exclude_min=True),
    jax_compilation_cache_size=st.integers(0, 10**6),
    jax_enable_x64=st.booleans(),
    jax_parallel_devices=st.integers(1, 4096),
    optimization_strategy=st.sampled_from(list(OptimizationStrategy)),
    strategy=st.sampled_from(["auto", "jax", "lossless"]),
    target_compression_ratio=st.none() | st.floats(1.01, 1e6),
)


@settings(deadline=None, max_examples=50)
@given(config=configurations)
def test_saved_and_loaded(tmp_path_factory: pytest.TempPathFactory, config: SystemConfiguration) -> None:
    path = tmp_path_factory.mktemp("settings") / "system.toml"
    config.save(path)
    assert SystemConfiguration.load(path) == config
    assert SystemConfiguration.from_dict(config.to_dict()) == config


def test_every_setting_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "system.toml"
    SystemConfiguration(target_compression_ratio=4).save(path)
    text = path.read_text()
    for field in dataclasses.fields(SystemConfiguration):
        assert f"{field.name} = " in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("jax_backnd = 'cpu'", "Did you mean 'jax_backend'"),
        ("jax_backend = 'cuda'", "jax_backend: got 'cuda'"),
        ("jax_backend = ", "system.toml"),
        ("jax_backend = '\x00'", "system.toml"),
        ("strategy = 'losless'", "Did you mean 'lossless'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "system.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"system\.toml") as caught:
        SystemConfiguration.load(path)
    assert words in str(caught.value)


def test_bad_bytes_large_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "system.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"system\.toml"):
        SystemConfiguration.load(path)
    path.write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="not a file of settings"):
        SystemConfiguration.load(path)
    with pytest.raises(FileNotFoundError):
        SystemConfiguration.load(tmp_path / "none.toml")
