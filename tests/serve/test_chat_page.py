"""The page of a server: what is sent, and a conversation in a browser without a screen."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from small_models import KINDS, SMALL
from web_driver import MISSING, Browser, browser

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.data import FileTokenizer
from capibara.data.tokenizer_file import byte_tokenizer_files
from capibara.serve import Engine
from capibara.serve.engine.programs import Programs
from capibara.serve.http import Keys, ServerSettings, create_app

KEY = "a-key-for-tests"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    settings = {"model.vocab_size": 256, "model.max_sequence_length": 512, "train.sequence_length": 32}
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | settings))
    tokenizer = FileTokenizer(byte_tokenizer_files() | {"chat_template.jinja": TEMPLATE.encode()})
    with Engine(model, tokenizer=tokenizer, name="tiny", max_batch=2, page_size=16, warm=False) as engine:
        yield engine


def serving(engine: Engine, settings: ServerSettings) -> Iterator[str]:
    config = uvicorn.Config(create_app(engine, settings), port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    yield from serving(engine, ServerSettings(Keys([KEY])))


def test_the_page_loads_nothing_from_elsewhere(url: str) -> None:
    kinds = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript"}
    for path, kind in kinds.items():
        answer = httpx.get(url + path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in policy
        assert not re.search(
            r"(https?:)?//[a-z]", re.sub(r"^\s*//.*$|; //.*$", "", answer.text, flags=re.MULTILINE)
        )
        assert "innerHTML" not in answer.text
    assert httpx.get(f"{url}/page.json").json() == {"model": "tiny", "chat": True, "max_length": 512}
    assert "/page.json" not in httpx.get(f"{url}/openapi.json").json()["paths"]


def test_a_server_without_a_page(engine: Engine) -> None:
    for address in serving(engine, ServerSettings(Keys(), page=False)):
        assert httpx.get(address).status_code == 404


@pytest.fixture
def page(tmp_path: Path, url: str) -> Iterator[Browser]:
    with browser(tmp_path / "profile") as page:
        page.open(url)
        yield page


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_conversation(page: Browser, engine: Engine, tmp_path: Path) -> None:
    page.wait(lambda: page.texts("h1") == ["tiny"])
    page.write("#text", "hello\ue007")
    page.wait(lambda: any("wants an API key" in text for text in page.texts("article.error")))
    page.wait(lambda: page.run("return document.activeElement.id") == "key")
    page.write("#key", f"{KEY}\t")
    page.run("document.getElementById('temperature').value = 0; document.getElementById('most').value = 30")
    assert page.texts("#again") == ["Try again"]
    page.click("#again")
    page.wait(lambda: "30 tokens" in " ".join(page.texts(".figures")))
    assert page.texts("article.error") == []
    page.click("#clear")
    # What a user or a model says is text, whatever it is.
    attack = "<img src=x onerror=\"document.title='taken'\"> **bold** `code`"
    page.write("#text", attack + "\ue007")
    page.wait(lambda: "30 tokens" in " ".join(page.texts(".figures")))
    assert page.run("return document.title") == "tiny"
    assert page.run("return document.querySelectorAll('article img').length") == 0
    assert page.texts("article.user strong") == ["bold"]
    first = page.run("return document.querySelectorAll('article.assistant .said')[0].textContent")
    page.write("#text", "and then?\ue007")
    page.wait(lambda: len(page.texts(".figures")) == 2)
    assert len(page.texts("article")) == 4
    page.click("#again")
    page.wait(
        lambda: (
            len(page.texts(".figures")) == 2
            and not page.run("return document.getElementById('again').hidden")
        )
    )
    assert len(page.texts("article")) == 4
    assert page.run("return document.querySelectorAll('article.assistant .said')[0].textContent") == first
    page.size(900, 800)
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_an_answer_comes_bit_by_bit_and_can_be_stopped(
    page: Browser, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Programs.step

    def slow_step(*args: Any, **keywords: Any) -> Any:
        time.sleep(0.1)  # otherwise such a small model has ended before somebody can stop it
        return step(*args, **keywords)

    monkeypatch.setattr(Programs, "step", slow_step)
    page.wait(lambda: page.texts("h1") == ["tiny"])
    page.run(
        "sessionStorage.setItem('capibara-key', arguments[0]); document.getElementById('key').value = arguments[0]",
        KEY,
    )
    page.write("#text", "hello\ue007")

    def length() -> int:
        return page.run("return document.querySelector('article.assistant .said')?.textContent.length ?? 0")

    begun = page.wait(length)
    page.wait(lambda: length() > begun)
    page.click("#stop")
    page.wait(lambda: page.texts("#status") == ["Stopped."])
    ended = length()
    page.wait(lambda: engine.statistics().running == 0)
    assert engine.statistics().finished["cancelled"] >= 1
    assert length() == ended < 400
    assert page.run("return document.getElementById('stop').hidden")


# A server whose answers a test writes.
BY_HAND = """
window.fetch = async (path, options) => {
  window.asked = JSON.parse(options.body).messages;
  if (window.refusal) return Response.json({ error: { message: window.refusal } }, { status: 503 });
  const event = (content) => `data: ${JSON.stringify({ choices: [{ delta: { content } }] })}\\n\\n`;
  return new Response(new ReadableStream({ start(stream) {
    window.say = (content) => stream.enqueue(new TextEncoder().encode(event(content)));
    window.end = () => stream.close();
    options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
  } }));
};
"""


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_an_answer_that_comes_faster_than_it_can_be_drawn(page: Browser) -> None:
    page.wait(lambda: page.texts("h1") == ["tiny"])
    page.size(900, 800)
    page.run(BY_HAND)
    page.write("#text", "hello\ue007")
    page.wait(lambda: page.run("return window.say !== undefined"))
    page.run(
        """
        window.drawn = 0;
        new MutationObserver((all) => { window.drawn += all.filter((one) => one.addedNodes.length).length; })
          .observe(document.querySelector("article.assistant .said"), { childList: true });
        for (let i = 0; i < 3000; ++i) window.say("word ");
        """
    )
    said = "document.querySelector('article.assistant:last-child .said')"
    page.wait(lambda: page.run(f"return {said}.textContent.length") == 5 * 3000)
    assert 1 <= page.run("return window.drawn") < 300
    page.run("window.end()")
    page.wait(lambda: page.run("return document.getElementById('stop').hidden"))
    assert page.run(f"return {said}.textContent") == "word " * 3000

    def end_is_seen() -> bool:
        form = "document.getElementById('form').getBoundingClientRect().top"
        return page.run(f"return {said}.getBoundingClientRect().bottom <= {form}")

    assert end_is_seen()
    # Who scrolls up while an answer is written stays there.
    page.run("window.scrollTo(0, 0); window.say = undefined")
    page.write("#text", "more\ue007")
    page.wait(lambda: page.run("return window.say !== undefined"))
    page.run("window.say('line\\n'.repeat(100))")
    page.wait(lambda: page.run(f"return {said}.textContent.length") == 500)
    assert end_is_seen()
    page.run("window.scrollTo(0, 0); window.say('more')")
    page.wait(lambda: page.run(f"return {said}.textContent.endsWith('more')"))
    assert page.run("return window.scrollY") == 0


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_what_got_no_answer_is_asked_with_what_follows(page: Browser) -> None:
    page.wait(lambda: page.texts("h1") == ["tiny"])
    page.run(BY_HAND + "window.refusal = 'not now';")
    page.write("#text", "hello\ue007")
    page.wait(lambda: any("not now" in text for text in page.texts("article.error")))
    page.run("window.refusal = null")
    page.write("#text", "are you there?\ue007")
    page.wait(lambda: page.run("return window.say !== undefined"))
    assert page.run("return window.asked") == [{"role": "user", "content": "hello\n\nare you there?"}]
    # What is left of an answer when a new conversation begins does not come into it.
    page.click("#clear")
    page.write("#text", "anew\ue007")
    page.wait(lambda: page.run("return window.asked[0].content") == "anew")
    assert page.texts("#status") == [""]
    assert len(page.texts("article")) == 2


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_what_a_proxy_answers(page: Browser) -> None:
    page.wait(lambda: page.texts("h1") == ["tiny"])
    page.run("window.fetch = async () => new Response('<h1>Bad gateway</h1>', { status: 502 })")
    page.write("#text", "hello\ue007")
    page.wait(lambda: page.texts("article.error .said") == ["HTTP status 502, expected 200. Try again."])
    page.run(
        """
        window.asked = 0;
        const headers = { "retry-after": "Wed, 21 Oct 2026 07:28:00 GMT" };
        window.fetch = async () => { ++window.asked; return new Response("", { status: 429, headers }); };
        """
    )
    page.click("#again")
    page.wait(lambda: page.texts("#status") == ["The server is busy. Retrying in 1 s."])
    begun = time.monotonic()
    page.wait(lambda: page.run("return window.asked") >= 3)
    assert time.monotonic() - begun > 1
    page.click("#stop")
    page.wait(lambda: page.texts("#status") == ["Stopped."])


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_many_empty_lines_do_not_hold_the_page_up(page: Browser) -> None:
    page.wait(lambda: page.texts("h1") == ["tiny"])
    page.run(BY_HAND)
    page.write("#text", "hello\ue007")
    page.wait(lambda: page.run("return window.say !== undefined"))
    begun = time.monotonic()
    page.run("window.say('x' + '\\n'.repeat(150_000) + '\u4f60\U0001f9ab')")
    end = "document.querySelector('article.assistant .said').textContent.slice(-3)"
    page.wait(lambda: page.run(f"return {end}") == "\u4f60\U0001f9ab")
    assert time.monotonic() - begun < 8
