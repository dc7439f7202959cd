"""``capibara serve`` under load, on loopback."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.serve import Engine
from capibara.serve.bench import BenchReport, BenchSettings, bench_serve
from capibara.serve.http import create_app

pytestmark = pytest.mark.slow
# Of overload: when the first texts have ended at the latest, and how long it lasts.
FULL_S, SECONDS = 3.0, 20.0
SIZES: Any = {"input_tokens": (2, 60), "output_tokens": (2, 60)}


@contextlib.contextmanager
def serving(folder: Path, *options: str, **larger: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    settings = {
        "model.vocab_size": 256,
        "model.max_sequence_length": 128,
        "train.sequence_length": 32,
        **larger,
    }
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | settings))
    model.save_pretrained(folder / "tiny")
    command = [
        sys.executable,
        "-m",
        "capibara",
        "serve",
        str(folder / "tiny"),
        "--port",
        "0",
        "--quiet",
        *options,
    ]
    server = subprocess.Popen(
        command, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        found = re.search(r"(http://127\.0\.0\.1:\d+)/v1\n", server.stdout.readline())
        assert found is not None
        while figure(found[1], "capibara:programs_left"):
            time.sleep(0.2)
        yield server, found[1]
    finally:
        server.kill()
        server.communicate()


def figure(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    found = re.search(rf"^{name}{{[^}}]*}} ([\d.e+-]+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_200_clients_for_a_minute(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-batch", "16") as (server, url):
        settings = BenchSettings(0, duration_s=60.0, concurrency=200, cancel=0.1, malformed=0.05, **SIZES)
        report = bench_serve(url, settings)
        print(report)
        assert not report.undeserved, report.undeserved[:3]
        kinds = {answer.kind for answer in report.answers}
        assert kinds == {"text", "cancelled", "malformed"}
        assert len(report.good) > 200
        end = time.monotonic() + 5
        while figure(url, "vllm:num_requests_running") or figure(url, "vllm:num_requests_waiting"):
            assert time.monotonic() < end
            time.sleep(0.1)
        assert figure(url, "vllm:kv_cache_usage_perc") == 0
        assert figure(url, "capibara:compilations_total") == 0
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 0


def test_three_times_as_much_as_it_can_do(tmp_path: Path) -> None:
    # The clients share the processor with the server: a text must take far more of it than being refused twice does.
    larger: Any = {"model.embed_dim": 512, "model.mlp_dim": 1408, "model.num_layers": 7, "model.num_heads": 8}
    options = ("--max-batch", "16", "--max-wait", "0.5")
    with serving(tmp_path, *options, **larger, **{"model.num_kv_heads": 4}) as (_, url):
        sizes: Any = {"input_tokens": (2, 20), "output_tokens": (60, 100)}
        bench_serve(url, BenchSettings(50, concurrency=20, **sizes))  # what is slow at first
        most, over = [], []
        for seed in range(7):  # in turns: what else the machine does comes to both
            most.append(
                bench_serve(url, BenchSettings(0, duration_s=SECONDS, concurrency=20, seed=seed, **sizes))
            )
            # The most that it was seen to do: where something else took the machine meanwhile, it can do more again.
            rate = max(len(report.good) / report.seconds for report in most)
            over.append(
                bench_serve(url, BenchSettings(0, duration_s=SECONDS, rate=3 * rate, seed=seed, **sizes))
            )
        target = 2 * float(np.median([report.milliseconds()["e2e"]["p50"] for report in most]))

        def goodput(report: BenchReport) -> float:
            """Texts a second whose times are those of a server that is busy, and no more.

            While so many requests come: not until its places are taken, nor after the last was sent.
            """
            good = [one for one in report.good if FULL_S < one.ended <= SECONDS]
            return sum(1e3 * one.e2e <= target for one in good) / (SECONDS - FULL_S)

        pairs = [(goodput(one), goodput(other)) for one, other in zip(most, over, strict=True)]
        print(*most, *over, f"target {target:.0f} ms; texts/s, in turns: {pairs}", sep="\n")
        for report in (*most, *over):
            assert not report.undeserved
        for report in over:
            assert sum(answer.status == 429 for answer in report.answers) > 0.3 * len(report.answers)
        assert np.median([other / one for one, other in pairs]) >= 0.95


def test_a_process_that_stands_still_does_not_answer(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-batch", "2") as (server, url):
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(httpx.TimeoutException):
            httpx.get(f"{url}/health", timeout=2)
        server.send_signal(signal.SIGCONT)
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
        body = {"prompt": "x", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200


@pytest.mark.parametrize("how", ["hangs", "ends"])
def test_health_turns_red_when_no_step_finishes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model.vocab_size": 256, "model.max_sequence_length": 128, "train.sequence_length": 32}
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | settings))
    engine = Engine(model, max_batch=2, page_size=16, warm=False)
    config = uvicorn.Config(create_app(engine), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    released = threading.Event()
    try:
        while not server.started:
            time.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        body = {"prompt": "x", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200

        def step(*_: Any, **__: Any) -> Any:
            if how == "ends":
                raise SystemExit("the thread is gone")
            released.wait(60)
            raise RuntimeError("released")

        monkeypatch.setattr(engine._programs, "step", step)
        begun = time.monotonic()
        with httpx.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}, timeout=60):
            while httpx.get(f"{url}/health", timeout=5).status_code == 200:
                assert time.monotonic() - begun < 7
                time.sleep(0.1)
            taken = time.monotonic() - begun
            assert taken < 1 if how == "ends" else 4.5 < taken < 6
            released.set()
    finally:
        released.set()
        server.should_exit = True
        thread.join()
        engine.close()
