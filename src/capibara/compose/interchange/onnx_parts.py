"""What the export to ONNX needs around the trace: the weights as tensors, names, and silence.

For :mod:`.export_onnx`.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from capibara.compose.errors import InputError
from capibara.compose.physical.compiled import CompiledModel
from capibara.compose.physical.specs import ArraySpec, shape_text

__all__ = ["Path", "flat", "quiet", "rename", "tensors_of"]

Path = tuple[str, ...]


def tensors_of(
    compiled: CompiledModel, what: str, given: Mapping[str, Any] | None, specs: Mapping[Path, ArraySpec]
) -> dict[Path, Any]:
    """Copies of the arrays, by path, in the model's dtypes; exactly the model's."""
    import torch

    argument = {"parameter": "params", "state": "state"}[what]
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        raise InputError(
            f"{argument} must be a dict of arrays nested as the model's, not {type(given).__name__}"
        )
    found: dict[Path, Any] = {}

    def walk(at: Path, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk((*at, key), inner)
        else:
            found[at] = value

    walk((), given)
    missing = [".".join(p) for p in specs if p not in found]
    unknown = [".".join(map(str, p)) for p in found if p not in specs]
    if missing or unknown:
        text = "; ".join(
            f"{word} {', '.join(names[:8])}"
            for word, names in (("missing", missing), ("unknown", unknown))
            if names
        )
        raise InputError(
            f"{argument} must hold the model's {len(specs)} {what}s, nested by name: {text}. "
            + (
                "Those of a new model are randomize_params()"
                if what == "parameter"
                else "A new one is init_state()"
            )
        )
    out = {}
    for path, spec in specs.items():
        name = ".".join(path)
        value = found[path]
        tensor = compiled.backend.as_input(value)
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"{what} {name!r} is {type(value).__name__}, expected an array of {spec.dtype}")
        shape = tuple(tensor.shape)
        if spec.shape is not None and (
            len(shape) != len(spec.shape)
            or any(isinstance(n, int) and n != m for n, m in zip(spec.shape, shape, strict=True))
        ):
            raise InputError(f"{what} {name!r} has shape {shape}, expected {shape_text(spec.shape)}")
        out[path] = tensor.detach().cpu().to(getattr(torch, spec.dtype)).clone().contiguous()
    return out


def flat(tree: Any, at: Path = ()) -> dict[Path, Any]:
    if not isinstance(tree, Mapping):
        return {at: tree}
    return {p: v for key, value in tree.items() for p, v in flat(value, (*at, key)).items()}


def rename(proto: Any, names: Mapping[str, str]) -> None:
    """Give initialisers other names; values of the graph that have those already get a number."""
    graph = proto.graph
    fixed = {v.name for v in (*graph.input, *graph.output)}
    taken = fixed | {n for node in graph.node for n in node.output} | {i.name for i in graph.initializer}
    there = {i.name for i in graph.initializer}
    table: dict[str, str] = {}
    for old, new in names.items():
        if old not in there:
            continue
        if new in fixed:  # it cannot be given away: the weight gets a longer name
            new = f"{new}.weight"
        if new in taken:
            other = new
            while other in taken:
                other += "_"
            table[new] = other
            taken.add(other)
        table[old] = new

    def walk(part: Any) -> None:
        for value in (*part.initializer, *part.value_info):
            value.name = table.get(value.name, value.name)
        for node in part.node:
            node.input[:] = [table.get(n, n) for n in node.input]
            node.output[:] = [table.get(n, n) for n in node.output]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    walk(attribute.g)
                for inner in attribute.graphs:
                    walk(inner)

    walk(graph)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says of itself: a type that it still uses, packages that it could use."""
    loggers = {logging.getLogger(name): 0 for name in ("torch.onnx", "onnxscript", "onnx_ir")}
    try:
        for logger in loggers:
            loggers[logger] = logger.level
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*LeafSpec", category=FutureWarning)
            # A size that two inputs share has one name, which is what was asked for.
            warnings.filterwarnings("ignore", message=r"# The axis name", category=UserWarning)
            yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)
