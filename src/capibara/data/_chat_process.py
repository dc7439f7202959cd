"""The process in which a chat template is rendered. It imports nothing of Capibara, so that it starts fast."""

import json
import sys
from typing import Any


def main() -> None:
    """Read a request from standard input; write ``{"rendered": [[text, spans], …]}`` or ``{"error": …}``."""
    request = json.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    done: list[Any] = []
    try:
        render(request, done)
        answer: dict[str, Any] = {"rendered": done}
    except MemoryError:
        answer = {"error": "exceeded its memory"}
    except RecursionError:
        answer = {"error": "calls itself without end"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error!s:.500}", "number": len(done)}
    sys.stdout.buffer.write(json.dumps(answer).encode())


def render(request: dict, done: list) -> None:
    """Append each text of a template, with what of it is marked."""
    import datetime
    import secrets

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # No message can have them: they are drawn anew each time.
    begin, end = (f"\x00{secrets.token_hex(16)}\x00" for _ in range(2))
    marks = False

    class Generation(Extension):
        """``{% generation %}`` marks what the model wrote; it does not change the text."""

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            nonlocal marks
            marks = True
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return begin + caller() + end

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: object, ensure_ascii: bool = False, indent: int | None = None, **options: object
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)  # pyright: ignore[reportArgumentType]

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    _limit(request["memory"], request["seconds"])
    left = request["output"]
    template = environment.from_string(request["template"])
    for variables in request["several"]:
        pieces = []
        for piece in template.generate(**variables):
            left -= len(piece)
            if left < 0:
                raise TemplateError(f"wrote more than {request['output']} characters")
            pieces.append(piece)
        text = "".join(pieces)
        done.append([*_without_marks(text, begin, end)] if marks else [text, None])


def _without_marks(text: str, begin: str, end: str) -> tuple[str, list[tuple[int, int]]]:
    """The text, and from where to where it was marked."""
    plain, spans, length = [], [], 0
    for number, part in enumerate(text.split(begin)):
        inside, found, outside = part.partition(end)
        if number and found:
            spans.append((length, length + len(inside)))
        plain += [inside, outside]
        length += len(inside) + len(outside)
    return "".join(plain), spans


def _limit(memory: int, seconds: int) -> None:
    try:
        import resource
    except ImportError:  # Windows: the parent still ends it after its time
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
