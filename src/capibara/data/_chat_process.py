"""The process in which a chat template is rendered. It imports nothing of Capibara, so that it starts fast."""

import json
import sys
from typing import Any


def main() -> None:
    """Read a request from standard input; write ``{"text": …}`` or ``{"error": …}``."""
    request = json.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    try:
        answer = {"text": render(request)}
    except MemoryError:
        answer = {"error": "exceeded its memory"}
    except RecursionError:
        answer = {"error": "calls itself without end"}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error!s:.500}"}
    sys.stdout.buffer.write(json.dumps(answer).encode())


def render(request: dict) -> str:
    """The text of a template."""
    import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what the model wrote; it does not change the text."""

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

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
    pieces, left = [], request["output"]
    for piece in environment.from_string(request["template"]).generate(**request["variables"]):
        left -= len(piece)
        if left < 0:
            raise TemplateError(f"wrote more than {request['output']} characters")
        pieces.append(piece)
    return "".join(pieces)


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
