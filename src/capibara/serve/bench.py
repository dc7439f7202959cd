"""How an endpoint with OpenAI's API answers under load: times to the first token and between tokens, and goodput.

Requests come as a Poisson process, or all at once. Of each is noted when its pieces arrive. The figures are those of
vLLM's benchmark: *TTFT*, from sending to the first token; *TPOT*, the time of a token after the first, on average over
a text; *ITL*, the time between two pieces that come one after the other; *E2E*, from sending to the end. *Goodput*
counts the texts in which all of these stay below the targets (Zhong et al., DistServe, arXiv:2401.09670).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np

from capibara.errors import ConfigError, MissingExtraError

__all__ = [
    "Answer",
    "BenchReport",
    "BenchSettings",
    "bench_serve",
    "parse_range",
    "plot_bench",
    "read_prompts",
]

_PERCENTILES = (50, 90, 99)
_LARGEST = 1 << 20  # bytes of a line of the answer


@dataclass(frozen=True)
class BenchSettings:
    """What is asked.

    Attributes:
      requests: how many; 0: as many as come in ``duration_s``.
      duration_s: seconds in which requests are sent; ``None``: until all are.
      rate: requests a second, as a Poisson process; infinite: all at once.
      concurrency: most that are under way; ``None``: any.
      input_tokens: least and most letters of a prompt, each about a token. output_tokens: of tokens that are written.
        Both are drawn evenly.
      prompts: texts to send, over and over, in place of random tokens.
      shared_prefix: so many first tokens are the same in all prompts.
      chat: ask ``/v1/chat/completions``, with ``prompts``; otherwise ``/v1/completions``.
      model, key: as clients name them.
      ignore_eos: texts are as long as they may be; a field of vLLM and Capibara.
      cancel: part of the requests whose client goes away after some pieces. malformed: part that no server may take.
      ttft_ms, tpot_ms, e2e_ms: targets of goodput; ``None``: none.
      timeout_s: after which an answer counts as failed. seed: of all that is drawn.
    """

    requests: int = 100
    duration_s: float | None = None
    rate: float = math.inf
    concurrency: int | None = None
    input_tokens: tuple[int, int] = (64, 64)
    output_tokens: tuple[int, int] = (64, 64)
    prompts: tuple[str, ...] = ()
    shared_prefix: int = 0
    chat: bool = False
    model: str | None = None
    key: str | None = None
    ignore_eos: bool = True
    cancel: float = 0.0
    malformed: float = 0.0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        def refuse(name: str, expected: str) -> None:
            raise ConfigError(f"{name}={getattr(self, name)!r}: expected {expected}.")

        if self.requests < 0 or (self.requests == 0 and self.duration_s is None):
            refuse("requests", "at least 1, or 0 with duration_s")
        for name in ("duration_s", "rate", "timeout_s", "ttft_ms", "tpot_ms", "e2e_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                refuse(name, "a number above 0")
        if self.requests == 0 and math.isinf(self.rate) and self.concurrency is None:
            refuse("rate", "a finite number, or concurrency, where requests=0")
        if self.seed < 0:
            refuse("seed", "a number from 0")
        if self.concurrency is not None and self.concurrency < 1:
            refuse("concurrency", "at least 1")
        for name in ("input_tokens", "output_tokens"):
            least, most = getattr(self, name)
            if not 1 <= least <= most:
                refuse(name, "(least, most) with 1 <= least <= most")
        for name in ("cancel", "malformed"):
            if not 0 <= getattr(self, name) <= 1:
                refuse(name, "a part from 0 to 1")
        if self.cancel + self.malformed > 1:
            refuse("cancel", "with malformed at most 1")
        if self.chat and not self.prompts:
            refuse("prompts", "texts, which chat needs")
        if not 0 <= self.shared_prefix < self.input_tokens[0] and self.shared_prefix:
            refuse("shared_prefix", "fewer tokens than the shortest prompt has")


@dataclass
class Answer:
    """What came back for one request; seconds since the benchmark began.

    Attributes:
      kind: ``"text"``, ``"cancelled"`` by the client, or ``"malformed"``.
      sent, ended: when. pieces: when each piece with text or tokens came. tokens: as the server counts them.
      status: of HTTP; 0 if there was none. error: what went wrong.
    """

    kind: str
    sent: float
    ended: float = 0.0
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    status: int = 0
    error: str | None = None

    @property
    def good(self) -> bool:
        """A whole text."""
        return self.kind == "text" and self.error is None and self.status == 200

    @property
    def deserved(self) -> bool:
        """Whether the request got what it deserves: a text, 429 when there is no room, 4xx for nonsense."""
        if self.kind == "malformed":
            return 400 <= self.status < 500
        return (self.status == 200 and self.error is None) or self.status == 429

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.sent if self.pieces else math.nan

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Of the tokens after the first; undefined for one."""
        return (
            (self.ended - self.pieces[0]) / (self.tokens - 1) if self.tokens > 1 and self.pieces else math.nan
        )


@dataclass(frozen=True)
class BenchReport:
    """The figures.

    Attributes:
      settings: what was asked. answers: all of them, in the order in which they were sent.
      seconds: from the first request to the last answer.
    """

    settings: BenchSettings
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.good]

    @property
    def undeserved(self) -> list[Answer]:
        """Answers that should have been others."""
        return [answer for answer in self.answers if not answer.deserved]

    def goodput(self) -> float:
        """Texts a second that met all targets."""
        s = self.settings

        def met(answer: Answer) -> bool:
            times = ((answer.ttft, s.ttft_ms), (answer.tpot, s.tpot_ms), (answer.e2e, s.e2e_ms))
            return all(target is None or math.isnan(x) or 1e3 * x <= target for x, target in times)

        return sum(map(met, self.good)) / self.seconds

    def milliseconds(self) -> dict[str, dict[str, float]]:
        """Mean and percentiles by figure; NaN where there are none."""
        good = self.good
        gaps = [b - a for one in good for a, b in zip(one.pieces, one.pieces[1:], strict=False)]
        every = {
            "ttft": [one.ttft for one in good],
            "tpot": [one.tpot for one in good],
            "itl": gaps,
            "e2e": [one.e2e for one in good],
        }
        found = {}
        for name, seconds in every.items():
            known = 1e3 * np.asarray([x for x in seconds if not math.isnan(x)])
            if not len(known):
                found[name] = {"mean": math.nan, **{f"p{p}": math.nan for p in _PERCENTILES}}
                continue
            values = np.percentile(known, _PERCENTILES)
            shares = {f"p{p}": float(v) for p, v in zip(_PERCENTILES, values, strict=True)}
            found[name] = {"mean": float(known.mean()), **shares}
        return found

    def to_json(self) -> dict[str, Any]:
        good = self.good
        return {
            "seconds": self.seconds,
            "requests": len(self.answers),
            "texts": len(good),
            "by_kind_and_status": {
                f"{kind} {status}": count
                for (kind, status), count in sorted(Counter((a.kind, a.status) for a in self.answers).items())
            },
            "undeserved": len(self.undeserved),
            "errors": sorted({a.error for a in self.undeserved if a.error})[:10],
            "requests_per_s": len(good) / self.seconds,
            "output_tokens_per_s": sum(a.tokens for a in good) / self.seconds,
            "input_tokens_per_s": sum(a.prompt_tokens for a in good) / self.seconds,
            "goodput_per_s": self.goodput(),
            "milliseconds": self.milliseconds(),
        }

    def __str__(self) -> str:
        found = self.to_json()
        lines = [
            f"{found['texts']} of {found['requests']} requests gave a text, in {self.seconds:.1f} s",
            f"  {found['requests_per_s']:.2f} texts/s, {found['output_tokens_per_s']:.1f} tokens/s written, "
            f"{found['input_tokens_per_s']:.1f} read; goodput {found['goodput_per_s']:.2f} texts/s",
            f"  {'':6}{'mean':>10}" + "".join(f"{f'p{p}':>10}" for p in _PERCENTILES) + "   ms",
        ]
        for name, row in found["milliseconds"].items():
            lines.append(f"  {name.upper():6}" + "".join(f"{value:10.1f}" for value in row.values()))
        lines.append(
            "  " + ", ".join(f"{count} {what}" for what, count in found["by_kind_and_status"].items())
        )
        if found["undeserved"]:
            lines.append(f"  {found['undeserved']} undeserved: {'; '.join(found['errors'])[:500]}")
        return "\n".join(lines)


class _Requests:
    """Draws requests."""

    def __init__(self, settings: BenchSettings) -> None:
        self._s, self._random = settings, np.random.default_rng(settings.seed)
        self._prefix = self._letters(settings.shared_prefix)
        self._number = 0

    def gap(self) -> float:
        """Seconds until the next one."""
        return 0.0 if math.isinf(self._s.rate) else float(self._random.exponential(1 / self._s.rate))

    def _letters(self, count: int) -> str:
        return "".join(chr(97 + int(x)) for x in self._random.integers(0, 26, count))

    def next(self) -> tuple[str, dict[str, Any], int]:
        """Its kind, its body, and after how many pieces the client goes away."""
        s, random = self._s, self._random
        drawn = random.random()
        kind = "cancelled" if drawn < s.cancel else "malformed" if drawn < s.cancel + s.malformed else "text"
        length, most = (int(random.integers(a, b + 1)) for a, b in (s.input_tokens, s.output_tokens))
        prompt = self._prefix + self._letters(length - s.shared_prefix)
        if s.prompts:
            prompt = s.prompts[self._number % len(s.prompts)]
        self._number += 1
        body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": most}
        body |= {"messages": [{"role": "user", "content": prompt}]} if s.chat else {"prompt": prompt}
        if s.model is not None:
            body["model"] = s.model
        if s.ignore_eos:
            body["ignore_eos"] = True
        if kind == "malformed":
            wrong: tuple[dict[str, Any], ...] = (
                {"max_tokens": -1},
                {"temperature": "hot"},
                {"messages" if s.chat else "prompt": 7},
                {"no_such_field": 1},
            )
            body |= wrong[int(random.integers(len(wrong)))]
        return kind, body, int(random.integers(1, max(2, most // 2)))


def bench_serve(
    url: str, settings: BenchSettings, *, progress: Callable[[int], object] | None = None
) -> BenchReport:
    """Send requests to an endpoint, and measure.

    Args:
      url: ``http://host:port``, with or without ``/v1``.
      progress: called with the number of answers so far.

    Raises:
      ConfigError: the URL is none, or nothing listens there.
      MissingExtraError: the package ``aiohttp`` is not installed.
    """
    try:
        import aiohttp
    except ImportError:
        raise MissingExtraError("aiohttp", "serve", "measuring an endpoint") from None
    base = url.rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise ConfigError(f"url={url!r:.200}: expected http://HOST:PORT or https://…")
    return asyncio.run(_bench(aiohttp, base, settings, progress))


def _proxy(base: str) -> str | None:
    """The proxy that the environment names for an address."""
    proxies, parts = getproxies(), urlsplit(base)
    if not proxies or proxy_bypass(parts.hostname or ""):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")


async def _require_server(aiohttp: Any, client: Any, base: str) -> None:
    try:
        whole = aiohttp.ClientTimeout(total=10)
        async with client.get(f"{base}/health", timeout=whole, allow_redirects=False) as response:
            await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ConfigError(
            f"url={base!r:.200}: nothing answers there ({str(error) or type(error).__name__}). Start the server first"
        ) from None


async def _bench(
    aiohttp: Any, base: str, settings: BenchSettings, progress: Callable[[int], object] | None
) -> BenchReport:
    requests, answers = _Requests(settings), []
    room = None if settings.concurrency is None else asyncio.Semaphore(settings.concurrency)
    headers = {"authorization": f"Bearer {settings.key}"} if settings.key else {}
    # Connections are used again for less time than servers keep them: who asks on one that is being closed gets none.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    forever = aiohttp.ClientTimeout(total=None, sock_connect=settings.timeout_s)
    path = f"{base}/v1/{'chat/' if settings.chat else ''}completions"
    done = 0
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=forever, proxy=_proxy(base)
    ) as client:
        await _require_server(aiohttp, client, base)
        begun = time.perf_counter()

        async def one(kind: str, body: dict[str, Any], pieces: int) -> None:
            nonlocal done
            answer = Answer(kind, time.perf_counter() - begun)
            answers.append(answer)
            try:
                async with asyncio.timeout(settings.timeout_s):
                    await _ask(client, path, body, answer, begun, pieces)
            except (aiohttp.ClientError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
                # The last three: an event of another shape than the API's.
                answer.error = f"{type(error).__name__}: {error}"[:200]
            finally:
                answer.ended = answer.ended or time.perf_counter() - begun
                if room is not None:
                    room.release()
                done += 1
                if progress is not None:
                    progress(done)

        tasks: list[asyncio.Task[None]] = []
        due = 0.0
        while settings.requests == 0 or len(tasks) < settings.requests:
            due += requests.gap()
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - begun)))
            if room is not None:
                await room.acquire()
            if settings.duration_s is not None and time.perf_counter() - begun > settings.duration_s:
                break
            tasks.append(asyncio.create_task(one(*requests.next())))
        await asyncio.gather(*tasks)
        return BenchReport(settings, tuple(answers), time.perf_counter() - begun)


async def _lines(response: Any) -> AsyncIterator[bytes]:
    """The lines of a stream as they come, without their ends."""
    held = b""
    async for content in response.content.iter_any():
        *whole, held = (held + content).split(b"\n")
        if len(held) > _LARGEST:
            raise ValueError("a line of the stream is too long")
        for line in whole:
            yield line
    yield held


async def _ask(
    client: Any, path: str, body: dict[str, Any], answer: Answer, begun: float, pieces: int
) -> None:
    async with client.post(path, json=body, allow_redirects=False) as response:
        answer.status = response.status
        if response.status != 200:
            told = b""
            async for content in response.content.iter_any():
                told += content
                if len(told) > _LARGEST:
                    break
            answer.error = f"{response.status}: {told[:640].decode('utf-8', 'replace')[:160]}"
            if answer.deserved:
                answer.error = None
            return
        ended = False
        async for line in _lines(response):
            if not line.startswith(b"data:"):
                continue
            content = line[5:].strip()
            if content == b"[DONE]":
                ended = True
                break
            event = json.loads(content)
            if not isinstance(event, dict):
                raise ValueError(f"an event is no object: {content[:160].decode('utf-8', 'replace')}")
            if "error" in event:
                raise ValueError(str(event["error"])[:160])
            now = time.perf_counter() - begun
            if usage := event.get("usage"):
                answer.tokens, answer.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            choices = event.get("choices") or []
            said = [c.get("text") or (c.get("delta") or {}).get("content") for c in choices]
            if any(said):
                answer.pieces.append(now)
                if answer.kind == "cancelled" and len(answer.pieces) >= pieces:
                    return
        if not ended:
            raise ValueError("the stream ended without [DONE]")
        answer.ended = answer.pieces[-1] if answer.pieces else time.perf_counter() - begun


def plot_bench(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Draw when texts came, and how long they took, as a PNG file.

    Raises:
      MissingExtraError: matplotlib is not installed. OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train", "the plot of a benchmark") from None
    import io

    from capibara.files import replace_file

    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    times, shares = figure.subplots(2, 1)
    good = report.good
    sent = [one.sent for one in good]
    times.plot(sent, [1e3 * one.ttft for one in good], ".", label="first token (TTFT)")
    times.plot(sent, [1e3 * one.e2e for one in good], ".", label="whole text (E2E)")
    times.set(xlabel="sent after, s", ylabel="ms", yscale="log", title=str(report).splitlines()[0])
    times.legend()
    gaps = [b - a for one in good for a, b in zip(one.pieces, one.pieces[1:], strict=False)]
    for name, values in (
        ("TTFT", [one.ttft for one in good]),
        ("TPOT", [one.tpot for one in good]),
        ("ITL", gaps),
    ):
        known = np.sort(1e3 * np.asarray([x for x in values if not math.isnan(x)]))
        shares.plot(known, np.linspace(0, 100, len(known)), label=name)
    shares.set(xlabel="ms", ylabel="% of them at most", xscale="log")
    shares.legend()
    for axes in (times, shares):
        axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    replace_file(Path(path), content.getvalue())


def read_prompts(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The texts of a JSONL file: strings, or objects with ``prompt`` or ``text``.

    Raises:
      ConfigError: it cannot be read, or a line is something else.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")  # others may be within strings
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset {os.fspath(path)!r}: cannot be read ({error}).") from None
    found: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        text = value.get("prompt", value.get("text")) if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"dataset {os.fspath(path)!r}, line {number}: expected a JSON string, or an object with prompt or text."
            )
        found.append(text)
    if not found:
        raise ConfigError(f"dataset {os.fspath(path)!r}: there are no texts.")
    return tuple(found)


def parse_range(name: str, text: str) -> tuple[int, int]:
    """``"64"`` or ``"16:256"``.

    Raises:
      ConfigError: it is neither.
    """
    parts: Sequence[str] = text.split(":")
    if len(parts) > 2 or not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise ConfigError(f"{name}: got {text!r:.60}, expected a number or LEAST:MOST, as 16:256.")
    numbers = [int(part) for part in parts]
    return numbers[0], numbers[-1]
