"""Compiled programs, and the calls that were compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from capibara.compilation.changes import nearest
from capibara.compilation.errors import NotCompiledError
from capibara.compilation.last_call import LastCall
from capibara.compilation.options import Effect
from capibara.compilation.signature import Signature, signature_of

__all__ = ["CompiledCalls", "Program"]

Split = Callable[
    [tuple[Any, ...], dict[str, Any]],
    tuple[tuple[Any, ...], dict[str, Any], tuple[tuple[str, type, Any], ...]],
]


@dataclass(frozen=True)
class Program:
    """One compiled program of a function.

    Attributes:
      function: the function's name.
      signature: what it was compiled for.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      effects: what the options did.
      options: the compiler options that XLA was given.
      notes: what else there is to know: how many products take bfloat16 operands.
      seconds: tracing, lowering and compiling, or reading it from the cache.
      from_cache: whether XLA did not have to compile it.
      compiled: JAX's own object (``jax.stages.Compiled``).
      lowered_text: the program before XLA optimised it, as StableHLO.
    """

    function: str
    signature: Signature
    platform: str
    effects: tuple[Effect, ...]
    options: Mapping[str, Any]
    notes: tuple[str, ...]
    seconds: float
    from_cache: bool
    compiled: Any = field(repr=False)
    lowered_text: Callable[[], str] = field(repr=False)

    def as_text(self) -> str:
        """The program as XLA compiled it, as HLO."""
        return self.compiled.as_text()

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.signature.leaves[:4]))
        more = f" and {len(self.signature.leaves) - 4} more" if len(self.signature.leaves) > 4 else ""
        made = "read from the cache" if self.from_cache else "compiled"
        return f"{self.function}({shapes}{more}) for {self.platform}, {made} in {self.seconds:.2f} s"


class CompiledCalls:
    """A function whose programs exist already: calling it never compiles.

    Attributes:
      programs: one for each entry of ``input_shapes``.
    """

    def __init__(self, programs: tuple[Program, ...], split: Split, names: tuple[str, ...]) -> None:
        self.programs = programs
        self._split, self._names = split, names
        self._known = {program.signature: program for program in programs}
        self._last: LastCall | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result.

        Raises:
          NotCompiledError: there is no program for these arguments; the message says what differs from the nearest one.
        """
        import jax

        dynamic, others, static = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic, others))
        last = self._last
        if last is None or not last.matches(leaves, tree, static):
            signature = signature_of(dynamic, others, static)
            program = self._known.get(signature)
            if program is None:
                changes = nearest(self._known, signature, self._names)
                raise NotCompiledError(
                    f"{self.programs[0].function}: no program was compiled for these arguments. "
                    + "; ".join(map(str, changes[:6]))
                    + ". Add the shape to input_shapes, or call the function that this was compiled from."
                )
            self._last = last = LastCall(leaves, tree, static, program)
        return last.program.compiled(*dynamic, **others)

    def as_text(self) -> str:
        """The first program, as HLO."""
        return self.programs[0].as_text()

    def explain(self) -> str:
        """The programs, the options and their effects."""
        lines: list[str] = []
        for program in self.programs:
            lines += [str(program), *(f"  {each}" for each in (*program.effects, *program.notes))]
        return "\n".join(lines)
