"""Finding, reading and writing settings files: the documented paths, and files that are something else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from capibara.config import (
    ConfigError,
    ConfigFileNotFoundError,
    ModularModelConfig,
    SettingsError,
    list_packaged_configs,
)
from capibara.config.files import line_finder
from capibara.hardware.tomlfile import MAX_FILE_BYTES

DOCUMENTED = "capibara/config/configs_toml/production/tpu_v4.toml"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_packaged_names():
    assert list_packaged_configs() == ["demo", "production/tpu_v4"]


@pytest.mark.parametrize("name", list_packaged_configs())
def test_packaged_files_load(name):
    assert isinstance(ModularModelConfig.from_toml(name), ModularModelConfig)


@pytest.mark.parametrize(
    "name",
    [
        DOCUMENTED,
        f"./{DOCUMENTED}",
        f"src/{DOCUMENTED}",
        "production/tpu_v4.toml",
        "production/tpu_v4",
        "tpu_v4",
    ],
)
def test_documented_path_from_any_directory(name):
    config = ModularModelConfig.from_toml(name)
    assert config.tpu.enabled
    assert config == ModularModelConfig.from_toml("production/tpu_v4")


def test_a_real_file_at_the_documented_path_wins(tmp_path):
    path = tmp_path / DOCUMENTED
    path.parent.mkdir(parents=True)
    path.write_text("[model]\nnum_layers = 2\n")
    assert ModularModelConfig.from_toml(DOCUMENTED).model.num_layers == 2


def test_a_directory_named_like_a_packaged_file_does_not_hide_it(tmp_path):
    (tmp_path / "demo").mkdir()
    assert ModularModelConfig.from_toml("demo") == ModularModelConfig.from_toml("demo.toml")


def test_path_objects_and_home(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text("[train]\nsteps = 7\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ModularModelConfig.from_toml(tmp_path / "mine.toml").train.steps == 7
    assert ModularModelConfig.from_toml("~/mine.toml").train.steps == 7


def test_missing_file_lists_the_packaged_names():
    with pytest.raises(ConfigFileNotFoundError) as caught:
        ModularModelConfig.from_toml("demmo.toml")
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, ConfigError)
    text = str(caught.value)
    assert "'demmo.toml'" in text
    assert "Did you mean 'demo'?" in text
    assert "production/tpu_v4" in text


def test_an_absolute_path_never_means_a_packaged_file():
    with pytest.raises(ConfigFileNotFoundError):
        ModularModelConfig.from_toml(f"/nowhere/{DOCUMENTED}")


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 5000])
def test_names_that_cannot_be_files(name):
    with pytest.raises(ConfigError):
        ModularModelConfig.from_toml(name)


def test_a_directory(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.toml").write_text("")
    with pytest.raises(ConfigError, match=r"'runs' is a directory.*a\.toml"):
        ModularModelConfig.from_toml("runs")


def test_an_empty_file_is_the_defaults(tmp_path):
    (tmp_path / "empty.toml").write_bytes(b"")
    assert ModularModelConfig.from_toml("empty.toml") == ModularModelConfig()


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")
    assert ModularModelConfig.from_toml("bom.toml").train.steps == 3


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x89PNG\r\n\x1a\n", "binary"),
        (b"[model]\nnum_layers = 3\n\0", "NUL"),
        (b"[model]\nname = '\xff'\n", "not UTF-8"),
        (b"[model\n", "not valid TOML"),
        (b"[model]\nnum_layers = \n", "line 2"),
        (b"a = 1\na = 2\n", "not valid TOML"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"a = " + b"1" * 100_000, "not valid TOML"),
        (b"#" * (MAX_FILE_BYTES + 1), "larger than 256 KiB"),
    ],
    ids=["png", "nul", "latin-1", "unclosed", "no value", "twice", "deep", "long number", "huge"],
)
def test_files_that_are_not_settings(tmp_path, data, expected):
    (tmp_path / "odd.toml").write_bytes(data)
    with pytest.raises(ConfigError, match=expected) as caught:
        ModularModelConfig.from_toml("odd.toml")
    assert "odd.toml" in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_named_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="not a regular file"):
        ModularModelConfig.from_toml("pipe.toml")


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
def test_an_endless_device_is_not_read():
    with pytest.raises(ConfigError, match="not a regular file"):
        ModularModelConfig.from_toml("/dev/zero")


def test_errors_name_file_and_line(tmp_path):
    (tmp_path / "mine.toml").write_text(
        "# mine\n[model]\nnum_layers = 3\nnum_heds = 4\n\n"
        "[ model.ssm ]  # a comment\nexpand = 0\n[extra]\na = 1\n"
    )
    with pytest.raises(SettingsError) as caught:
        ModularModelConfig.from_toml("mine.toml")
    text = str(caught.value)
    assert "mine.toml, line 4: model.num_heds" in text
    assert "mine.toml, line 7: model.ssm.expand" in text
    assert "mine.toml, line 8: extra" in text


def test_an_override_is_blamed_instead_of_the_line_it_replaced(tmp_path):
    (tmp_path / "mine.toml").write_text("[model]\nnum_layers = 3\n")
    with pytest.raises(SettingsError, match="override 'num_layers=0'") as caught:
        ModularModelConfig.from_toml("mine.toml", ["num_layers=0"])
    assert "line 2" not in str(caught.value)


def test_line_finder_falls_back_to_the_section_and_the_file():
    find = line_finder("f.toml", "top = 1\n[a]\nb = 2\n[a.c]\nd.e = 3\n")
    assert find("top") == "f.toml, line 1"
    assert find("a.b") == "f.toml, line 3"
    assert find("a.b[2]") == "f.toml, line 3"
    assert find("a.c.d.e") == "f.toml, line 5"
    assert find("a.c.missing") == "f.toml, line 4"
    assert find("nowhere") == "f.toml"


def test_to_toml_replaces_a_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "out.toml"
    path.write_text("old")
    text = ModularModelConfig().to_toml(path)
    assert path.read_text() == text
    assert os.listdir(tmp_path) == ["out.toml"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.toml"
    path.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        ModularModelConfig().to_toml(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["out.toml"]


def test_a_folder_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"cannot write 'no/such/out\.toml'"):
        ModularModelConfig().to_toml("no/such/out.toml")


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_a_config_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("bytes") / "any.toml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        assert isinstance(ModularModelConfig.from_toml(path), ModularModelConfig)


def test_importing_the_rooms_loads_neither_jax_nor_pydantic():
    code = (
        "import sys, capibara.config, capibara.hardware, capibara.measure\n"
        "print(sorted({'jax', 'pydantic', 'numpy'} & set(sys.modules)))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_config_works_without_jax():
    code = (
        "import sys\nsys.modules['jax'] = None\n"
        "from capibara.config import ModularModelConfig, TPUConfig\n"
        "from capibara.hardware import get_chip, get_price\n"
        "c = ModularModelConfig.from_toml('tpu_v4')\n"
        "print(c.tpu.mesh_shape, TPUConfig().get_memory_config()['num_chips'])\n"
        "print(get_chip('v4').name, get_price('v4').region)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["(4,", "8)", "32", "tpu-v4", "us-central2"]


@pytest.mark.parametrize("module", ["capibara.config", "capibara.hardware", "capibara.measure"])
def test_every_exported_name_exists_and_unknown_ones_do_not(module):
    import importlib

    room = importlib.import_module(module)
    for name in room.__all__:
        assert getattr(room, name) is not None
        assert name in dir(room)
    with pytest.raises(AttributeError, match="no_such_name"):
        room.no_such_name
