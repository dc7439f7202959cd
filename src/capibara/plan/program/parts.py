"""The parts of a model that an operation belongs to, by the frames of its stack and its path in the JAX program."""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable, Iterable

from capibara.plan.program.frames import Frame

__all__ = ["PASSES", "generated_part", "part_of", "pass_of"]

# The last: the compiler does not say.
PASSES = ("forward", "recomputed", "backward", "update", "unknown")
_GENERATED = "<capibara.compose"
# What JAX's transformations write round a path's scopes, and control flow between them.
_AROUND = re.compile(r"\b(p?jit|named|shard_map)\([^()]*\)|\b(jvp|transpose|vmap|remat\d*|checkpoint)\(|\)")
_NOT_A_PART = re.compile(
    r"^(checkpoint|rematted_computation|while|body|cond|closed_call|shard_map|branch_\d+_fun|scan|custom_\w+|pjit|"
    r"remat\d*|core_call|capibara:.*|)$"
)
_LIBRARIES = ("/site-packages/", "/dist-packages/")


def generated_part(frame: Frame, line_of: Callable[[str, int], str] = linecache.getline) -> str:
    """The operation of a Capibara model whose generated code a frame lies in (``"blocks/mlp_gate_product"``), or an
    empty string. ``line_of`` gives the text of a line of a file."""
    if not frame.file.startswith(_GENERATED):
        return ""
    target = line_of(frame.file, frame.line).partition("=")[0].strip()
    body = frame.function.removesuffix("_block") if frame.function != "forward" else ""
    made = target.partition(",")[0] if re.fullmatch(r"[\w, ]+", target) else ""
    made = made.removeprefix(f"{body}_")
    return "/".join(part for part in (body, made) if part)


def part_of(path: str, stack: Iterable[Frame], line_of: Callable[[str, int], str]) -> str:
    """The part of a model: the operation of a Capibara model; or the scopes of the path (``jax.named_scope``, modules
    of Flax); or the operation of :mod:`capibara.ops`; or the innermost function that is no library's.

    Args:
      path: an instruction's ``op_name``.
      stack: its frames, the innermost first.
      line_of: gives the text of a line of a file.
    """
    frames = list(stack)
    for frame in frames:
        if part := generated_part(frame, line_of):
            return part
    scopes = [word for word in _AROUND.sub("", path).split("/")[:-1] if not _NOT_A_PART.match(word)]
    if scopes:
        # A gradient's path has the scopes of what it is the gradient of once more.
        return "/".join(word for word, _ in itertools.groupby(scopes))
    if operation := re.search(r"\bcapibara:(\w+):", path):
        return operation[1]
    own = next((frame for frame in frames if not any(place in frame.file for place in _LIBRARIES)), None)
    frame = own or next(iter(frames), None)
    return frame.function.rpartition(".")[2] if frame is not None else ""


def pass_of(path: str) -> str:
    """One of :data:`PASSES`, by the transformations that a path names; of a program without gradients all is
    ``"update"``."""
    if "rematted_computation" in path:
        return "recomputed"
    if "transpose(" in path:
        return "backward"
    if "jvp(" in path:
        return "forward"
    return "update" if "jit(" in path else "unknown"
