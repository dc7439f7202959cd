"""``capibara serve``: from a folder to an endpoint, and to its end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from small_models import KINDS, SMALL

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError


def folder(path: Path) -> Path:
    """A published model of bytes."""
    settings = {"model.vocab_size": 256, "model.max_sequence_length": 256}
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | settings))
    model.save_pretrained(path / "tiny")
    return path / "tiny"


@pytest.mark.slow
def test_from_a_folder_to_an_endpoint_and_to_its_end(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("a-secret-key\n")
    command = [
        sys.executable,
        "-m",
        "capibara",
        "serve",
        str(folder(tmp_path)),
        "--port",
        "0",
        "--max-batch",
        "2",
    ]
    server = subprocess.Popen(
        [*command, "--api-keys", str(keys), "--quiet"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        found = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+)/v1\n", server.stdout.readline())
        assert found is not None
        url, headers = found[1], {"authorization": "Bearer a-secret-key"}
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert httpx.get(f"{url}/v1/models", headers=headers).json()["data"][0]["id"] == "tiny"
        # What runs when it is told to end is finished.
        body = {"prompt": "x", "max_tokens": 200, "stream": True, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert rest[-2:] == ["data: [DONE]", ""]
        assert '"finish_reason": "length"' in rest[-4]
        assert server.wait(timeout=60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


@pytest.mark.parametrize("again", [False, True])
def test_what_a_drain_leaves_no_time_for_ends_as_it_is(again: bool, tmp_path: Path) -> None:
    """Also where a second Ctrl-C ends the drain."""
    command = [sys.executable, "-m", "capibara", "serve", str(folder(tmp_path)), "--port", "0", "--quiet"]
    server = subprocess.Popen(
        [*command, "--max-batch", "2", "--drain", "600" if again else "0"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        found = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+)/v1\n", server.stdout.readline())
        assert found is not None
        url = f"{found[1]}/v1/completions"
        body = {"prompt": "x", "max_tokens": 250, "n": 64, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            with httpx.stream("POST", url, json=body | {"stream": True}, timeout=120) as answer:
                lines = answer.iter_lines()
                next(lines)
                whole = pool.submit(httpx.post, url, json=body, timeout=120)
                time.sleep(0.5)  # it is there
                server.send_signal(signal.SIGINT)
                if again:
                    time.sleep(0.5)
                    server.send_signal(signal.SIGINT)
                rest = list(lines)
            assert rest[-2:] == ["data: [DONE]", ""]
            texts = whole.result().json()["choices"]
        assert {one["finish_reason"] for one in texts} == {"length"}
        assert len(texts) == 64
        assert sum(len(one["text"]) for one in texts) < 64 * 250
        _, errors = server.communicate(timeout=60)
        assert "Traceback" not in errors
        assert server.returncode == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.thin(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_as_soon_as_it_serves(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "capibara", "serve", str(folder(tmp_path)), "--port", "0"]
    server = subprocess.Popen(
        [*command, "--max-batch", "1", "--quiet"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("serving tiny at ")
        server.send_signal(number)
        assert server.wait(timeout=60) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "allowed"),
    [([], False), (["--allowed-hosts", "here.example"], True), (["--host", "0.0.0.0"], True)],
    ids=["by default", "added", "for other machines"],
)
def test_the_names_that_are_answered(tmp_path: Path, options: list[str], allowed: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "capibara",
        "serve",
        str(folder(tmp_path)),
        "--port",
        "0",
        "--max-batch",
        "1",
    ]
    server = subprocess.Popen(
        [*command, "--quiet", *options],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "CAPIBARA_API_KEYS": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        found = re.fullmatch(r"serving tiny at http://[\d.]+:(\d+)/v1\n", server.stdout.readline())
        assert found is not None
        url = f"http://127.0.0.1:{found[1]}/v1/models"
        assert httpx.get(url).status_code == 200
        for host, code in (("here.example", 200 if allowed else 400), (f"localhost:{found[1]}", 200)):
            assert httpx.get(url, headers={"host": host}).status_code == code
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--port", "70000"], "--port: got 70000, expected 0 to 65535"),
        (["--timeout", "0"], "--timeout: got 0, expected seconds above 0"),
        (["--max-wait", "nan"], "--max-wait: got nan, expected seconds above 0"),
        (["--drain", "-1"], "--drain: got -1, expected a number from 0"),
        (["--allowed-hosts", "example.com,http://b"], "allowed hosts: got 'http://b', expected a name"),
        (["--api-keys", "nowhere.txt"], "--api-keys: 'nowhere.txt' cannot be read"),
        (["--port", "0"], "there is no checkpoint in 'nowhere'"),
    ],
)
def test_arguments_are_checked_first(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "nowhere", *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "export"])
def test_an_archive_that_is_not_there(verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "none.capi")
    assert main([verb, path, *([str(tmp_path / "out")] if verb == "export" else [])]) == 2
    assert (
        f"{path!r}: No such file or directory. Remedy: a .capi file that can be read"
        in capsys.readouterr().err
    )


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["serve", "nowhere", "--port", port]) == 2
    assert "Choose another port" in capsys.readouterr().err
    assert main(["serve", "nowhere", "--host", "[::1]"]) == 2
    assert "Name an address of this machine" in capsys.readouterr().err


def test_a_model_that_makes_vectors_is_served_as_one() -> None:
    import argparse

    from capibara.cli.serve import _application, _served, add_arguments
    from capibara.serve.http import Keys, ServerSettings
    from capibara.serve.loaded import LoadedModel

    settings = {"model.vocab_size": 256, "model.max_sequence_length": 16, "train.sequence_length": 16}
    config = ModularModelConfig.from_dict({}, SMALL | settings | {"model.causal": False})
    model = ModularCapibaraModel(config)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["folder/encoder", "--max-length", "8"])
    loaded = LoadedModel(model, model.params, None, None)
    for given in (["--timeout", "4"], ["--adapter", "a=b"], ["--load-adapters"], ["--draft-model", "c"]):
        with pytest.raises(ConfigError, match=f"^{given[0]}: is of models that write texts"):
            _served(parser.parse_args(["folder/encoder", *given]), loaded)
    served = _served(arguments, loaded)
    assert (served.name, served.max_length) == ("encoder", 8)
    assert "/v1/embeddings" in _application(served, ServerSettings(Keys())).openapi()["paths"]
    served.close()
