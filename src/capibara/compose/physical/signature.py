"""Signatures of calls, so that a call like an already validated one is not validated again.

The validation of a call (:mod:`.checks`) depends only on names, types, shapes and dtypes. A signature is all of these
in one tuple, read by a function generated for the model, so that equal signatures are validated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from capibara.compose.physical.specs import nest

__all__ = ["reader"]


def reader(
    inputs: Iterable[str], params: Iterable[tuple[str, ...]]
) -> Callable[[Any, Any], tuple[Any, ...] | None]:
    """A function of (params, inputs) that returns their signature.

    It returns None for names that are not the model's, dicts of another type, or values that are not arrays: such
    calls are validated each time.
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
