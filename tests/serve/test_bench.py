"""The benchmark of endpoints, against a server that answers as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.cli import main
from capibara.errors import ConfigError
from capibara.serve.bench import (
    Answer,
    BenchReport,
    BenchSettings,
    _proxy,
    _Requests,
    bench_serve,
    parse_range,
    read_prompts,
)

TOKENS = 4


class Scripted:
    """A server of events: each text has four tokens, one after the other; what it was asked is kept."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.gone = 0
        self.breaks = False
        self.full, self.refusal = 0, b"429 Too Many Requests"
        self.wait = 0.01
        self.most = self.running = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(
                    next((x for x in head.lower().split(b"\r\n") if b"content-length" in x), b":0").split(
                        b":"
                    )[1]
                )
                content = await reader.readexactly(length)
                if b"/health" in head:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
                else:
                    await self.answer(json.loads(content), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        def chunk(event: Any) -> None:
            data = f"data: {event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))

        bad = (
            body["max_tokens"] < 1 or "no_such_field" in body or "temperature" in body or body["prompt"] == 7
        )
        if bad or self.full > 0:
            self.full -= not bad
            status = b"400 Bad Request" if bad else self.refusal
            writer.write(b"HTTP/1.1 %s\r\nlocation: /elsewhere\r\ncontent-length: 2\r\n\r\n{}" % status)
            return
        self.asked.append(body)
        self.running += 1
        self.most = max(self.most, self.running)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        try:
            for number in range(TOKENS):
                await asyncio.sleep(self.wait * (3 if number == 0 else 1))
                if self.breaks and number == 2:
                    writer.close()
                    return
                chunk({"choices": [{"text": f"{number}\u2028"}]})
                await writer.drain()
            chunk({"choices": [], "usage": {"completion_tokens": TOKENS, "prompt_tokens": 5}})
            chunk("[DONE]")
            writer.write(b"0\r\n\r\n")
        except ConnectionError:
            self.gone += 1
        finally:
            self.running -= 1


@pytest.fixture
def server() -> Iterator[tuple[Scripted, str]]:
    scripted, loop, ready, url = Scripted(), asyncio.new_event_loop(), threading.Event(), []
    ended = asyncio.Event()

    async def serve() -> None:
        listener = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
        url.append(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        ready.set()
        await ended.wait()
        listener.close()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0.05))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield scripted, url[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join()


def test_what_is_asked_and_what_is_measured(server: tuple[Scripted, str]) -> None:
    scripted, url = server
    settings = BenchSettings(12, input_tokens=(10, 20), output_tokens=(1, 7), shared_prefix=6, model="m")
    counted: list[int] = []
    report = bench_serve(f"{url}/v1/", settings, progress=counted.append)
    assert counted == list(range(1, 13))
    assert len(report.good) == len(scripted.asked) == 12
    prompts = [body["prompt"] for body in scripted.asked]
    assert {10 <= len(prompt) <= 20 for prompt in prompts} == {True}
    assert len({prompt[:6] for prompt in prompts}) == 1 < len({prompt[6:] for prompt in prompts})
    assert {(body["model"], body["ignore_eos"]) for body in scripted.asked} == {("m", True)}
    assert {1 <= body["max_tokens"] <= 7 for body in scripted.asked} == {True}
    for one in report.answers:
        assert (one.tokens, one.prompt_tokens, len(one.pieces)) == (TOKENS, 5, TOKENS)
        assert one.ttft > 2 * scripted.wait > 0
        assert one.sent < one.pieces[0] < one.pieces[-1] == one.ended
    found = report.to_json()
    assert found["undeserved"] == 0
    assert found["output_tokens_per_s"] == pytest.approx(12 * TOKENS / report.seconds)
    again = bench_serve(url, settings)
    # They come in any order where they are sent all at once.
    assert sorted(body["prompt"] for body in scripted.asked[12:]) == sorted(prompts)
    assert len(again.good) == 12


def test_most_under_way(server: tuple[Scripted, str]) -> None:
    scripted, url = server
    assert len(bench_serve(url, BenchSettings(12, concurrency=3)).good) == 12
    assert scripted.most == 3
    timed = bench_serve(url, BenchSettings(0, duration_s=0.3, concurrency=2))
    assert 2 < len(timed.answers) < 40


def test_clients_that_go_and_requests_that_are_nonsense(server: tuple[Scripted, str]) -> None:
    _, url = server
    report = bench_serve(url, BenchSettings(60, cancel=0.3, malformed=0.3, output_tokens=(4, 4)))
    kinds = report.to_json()["by_kind_and_status"]
    assert set(kinds) == {"cancelled 200", "malformed 400", "text 200"}
    assert not report.undeserved
    assert len(report.good) == kinds["text 200"] == 60 - kinds["cancelled 200"] - kinds["malformed 400"]


def test_a_full_queue_is_no_fault_and_a_broken_stream_is(server: tuple[Scripted, str]) -> None:
    scripted, url = server
    scripted.full = 3
    report = bench_serve(url, BenchSettings(10))
    assert report.to_json()["by_kind_and_status"] == {"text 200": 7, "text 429": 3}
    assert not report.undeserved
    scripted.breaks = True
    broken = bench_serve(url, BenchSettings(5))
    assert len(broken.undeserved) == 5
    assert not broken.good
    assert math.isnan(broken.milliseconds()["ttft"]["mean"])
    assert "undeserved" in str(broken)


def test_figures_by_their_definitions() -> None:
    answers = [
        Answer("text", 0.0, 1.0, [0.2, 0.6, 1.0], 3, 5, 200),
        Answer("text", 1.0, 2.5, [2.0, 2.5], 2, 5, 200),
        Answer("text", 2.0, 2.1, [2.1], 1, 5, 200),
        Answer("text", 0.0, 9.0, [], 0, 0, 500, "500: broken"),
        Answer("cancelled", 0.0, 9.0, [1.0], 0, 0, 200),
    ]
    report = BenchReport(BenchSettings(ttft_ms=500, tpot_ms=450), tuple(answers), 4.0)
    found = report.milliseconds()
    assert found["ttft"] == pytest.approx({"mean": 1300 / 3, "p50": 200, "p90": 840, "p99": 984})
    assert found["tpot"] == pytest.approx({"mean": 450, "p50": 450, "p90": 490, "p99": 499})
    assert found["itl"]["mean"] == pytest.approx(1300 / 3)
    assert found["e2e"]["p50"] == pytest.approx(1000)
    assert report.goodput() == pytest.approx(2 / 4)
    assert [one.error for one in report.undeserved] == ["500: broken"]


@pytest.mark.parametrize("status", [b"302 Found", b"307 Temporary Redirect"])
def test_a_redirection_is_no_answer(server: tuple[Scripted, str], status: bytes) -> None:
    scripted, url = server
    scripted.full, scripted.refusal = 3, status
    report = bench_serve(url, BenchSettings(3))
    assert [one.status for one in report.undeserved] == [int(status[:3])] * 3


def test_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert _proxy("http://one.example:80") is None
    monkeypatch.setenv("all_proxy", "http://all:1")
    monkeypatch.setenv("https_proxy", "http://secure:2")
    monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
    found = [_proxy(f"{one}:80") for one in ("http://one.example", "https://one.example", "http://localhost")]
    assert found == ["http://all:1", "http://secure:2", None]


def test_times_between_requests_are_those_of_a_poisson_process() -> None:
    drawn = _Requests(BenchSettings(rate=50.0, seed=3))
    gaps = np.array([drawn.gap() for _ in range(20000)])
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)
    assert np.mean(gaps > 1 / 50) == pytest.approx(math.exp(-1), abs=0.02)
    assert _Requests(BenchSettings()).gap() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requests": 0}, "requests=0: expected at least 1, or 0 with duration_s"),
        ({"requests": 0, "duration_s": 1.0}, "rate=inf: expected a finite number, or concurrency"),
        ({"rate": 0.0}, "rate=0.0: expected a number above 0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"input_tokens": (9, 3)}, "input_tokens="),
        ({"cancel": 0.6, "malformed": 0.6}, "cancel=0.6: expected with malformed at most 1"),
        ({"malformed": 2.0}, "malformed=2.0"),
        ({"chat": True}, "prompts="),
        ({"shared_prefix": 64}, "shared_prefix=64"),
    ],
)
def test_what_cannot_be_asked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        BenchSettings(**change)
    assert str(raised.value).startswith(message)


def test_ranges_and_files(tmp_path: Path) -> None:
    assert parse_range("--x", "7") == (7, 7)
    assert parse_range("--x", "7:9") == (7, 9)
    for wrong in ("", "a", "1:2:3", "-1", "1:"):
        with pytest.raises(ConfigError, match="--x: got"):
            parse_range("--x", wrong)
    path = tmp_path / "prompts.jsonl"
    path.write_text('"one\u2028 more"\n\n{"prompt": "two"}\n{"text": "three", "more": 1}\n', encoding="utf-8")
    assert read_prompts(path) == ("one\u2028 more", "two", "three")
    for content, message in (
        ("", "no texts"),
        ("{", "line 1"),
        ('{"prompt": 3}', "line 1"),
        ("[" * 100_000, "line 1"),
        ('"a"\n[]', "line 2"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_prompts(path)


def test_from_the_command_line(
    server: tuple[Scripted, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted, url = server
    picture = tmp_path / "bench.png"
    assert main(["bench-serve", url, "--requests", "6", "--rate", "200", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "6 of 6 requests gave a text" in said
    assert "TTFT" in said
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["bench-serve", url, "--requests", "3", "--json", "--ttft-ms", "0.001"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["texts"], found["goodput_per_s"]) == (3, 0)
    scripted.breaks = True
    assert main(["bench-serve", url, "--requests", "2", "--quiet"]) == 1
    capsys.readouterr()
    assert main(["bench-serve", "http://127.0.0.1:9", "--requests", "2"]) == 2
    assert "nothing answers there (Cannot connect" in capsys.readouterr().err
    for given, message in (
        (["--plot", "nowhere/x.png"], "--plot 'nowhere/x.png': there is no such folder"),
        (["--chat"], "--chat: needs texts to ask"),
        (["--seed", "-1"], "seed=-1: expected a number from 0"),
    ):
        assert main(["bench-serve", "http://127.0.0.1:9", *given]) == 2
        assert message in capsys.readouterr().err
    assert main(["bench-serve", "127.0.0.1"]) == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err
