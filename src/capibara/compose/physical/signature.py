"""What a call was given, told in a moment: so that a call like one that was checked is not checked again.

The check of a call (:mod:`.checks`) looks at names, types, shapes and dtypes and at nothing else. A signature is all
of these as one tuple, read by a function that is written for the model, so that equal signatures need one check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from capibara.compose.physical.specs import nest

__all__ = ["reader"]


def reader(
    inputs: Iterable[str], params: Iterable[tuple[str, ...]]
) -> Callable[[Any, Any], tuple[Any, ...] | None]:
    """A function of (params, inputs) that gives their signature.

    It gives None where there are other names than the model's, dicts of another type, or something that is no array:
    such calls are checked each time.
    """
    lines: list[str] = []
    found: list[str] = []
    count = 0

    def array(source: str) -> None:
        nonlocal count
        name = f"a{count}"
        count += 1
        lines.append(f"{name} = {source}")
        found.extend((f"type({name})", f"{name}.shape", f"{name}.dtype"))

    def table(name: str, size: int) -> None:
        lines.append(f"if type({name}) is not dict or len({name}) != {size}: return None")

    keys = list(inputs)
    table("inputs", len(keys))
    for key in keys:
        array(f"inputs[{key!r}]")
    stack: list[tuple[str, dict[str, Any]]] = [("params", nest(dict.fromkeys(params)))]
    while stack:
        name, tree = stack.pop()
        table(name, len(tree))
        for key, below in tree.items():
            if below is None:
                array(f"{name}[{key!r}]")
            else:
                inner = f"d{len(lines)}"
                lines.append(f"{inner} = {name}[{key!r}]")
                stack.append((inner, below))
    body = "".join(f"        {line}\n" for line in lines)
    source = (
        f"def read(params, inputs):\n    try:\n{body}        return ({', '.join(found)}{',' if found else ''})\n"
        "    except (KeyError, AttributeError):\n        return None\n"
    )
    namespace: dict[str, Any] = {}
    exec(source, namespace)
    return namespace["read"]
