"""The programs that tuning compares: an operation on the arrays of a spec, with one choice of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.ops.registry import Op
from capibara.ops.tuning import Tuned, forced

__all__ = ["TOLERANCE", "Case", "Parameters", "Programs", "Variant"]

TOLERANCE = {"float64": 1e-9, "float32": 2e-4, "bfloat16": 4e-2, "float16": 1e-2}

Parameters = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True)
class Case:
    """One measurement: an operation, a spec of it, and a dtype."""

    op: Op
    spec: Any
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.op.name}: {self.spec.name}, {self.dtype}"


class Programs:
    """The compiled passes of a case, by implementation and parameters."""

    def __init__(self, case: Case, seed: int) -> None:
        assert case.op.tuning is not None
        assert case.op.face is not None
        self.case, self.tuning, self.face = case, case.op.tuning, case.op.face
        random = np.random.default_rng(seed)
        args, kwargs = self.tuning.arguments(case.spec, random)
        leaves, self._tree = jax.tree.flatten((args, kwargs))
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray | jax.Array)]
        self._static = leaves
        self.arrays = [self._cast(leaves[i]) for i in self._places]
        self._floats = [i for i, x in enumerate(self.arrays) if jnp.issubdtype(x.dtype, jnp.floating)]
        shapes = jax.tree.leaves(jax.eval_shape(self._call, *self.arrays))
        cotangents = [
            self._cast(random.normal(size=x.shape)).astype(x.dtype)
            for x in shapes
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        self.passes = ("forward", "gradient") if self.tuning.differentiable and cotangents else ("forward",)
        self._count = len(self.arrays)
        # Every program takes all of these; the cotangents as arguments, or they would be constants in it.
        self.given = [*self.arrays, *cotangents]

    def _cast(self, x: Any) -> jax.Array:
        return jnp.asarray(x, self.case.dtype if np.issubdtype(x.dtype, np.floating) else x.dtype)

    def filled(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self._static)
        for place, array in zip(self._places, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self._tree, leaves)

    def _call(self, *arrays: Any, **more: Any) -> Any:
        args, kwargs = self.filled(arrays)
        return self.face(*args, **{**kwargs, **more})

    def _forward(self, *given: Any, **more: Any) -> Any:
        return self._call(*given[: self._count], **more)

    def _gradient(self, *given: Any, **more: Any) -> Any:
        arrays, cotangents = given[: self._count], given[self._count :]

        def forward(*floats: Any) -> list[Any]:
            every = list(arrays)
            for i, x in zip(self._floats, floats, strict=True):
                every[i] = x
            leaves = jax.tree.leaves(self._call(*every, **more))
            return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

        out, pull = jax.vjp(forward, *(arrays[i] for i in self._floats))
        return out, pull(list(cotangents))

    def lower(self, which: str, tuned: Tuned | None, **more: Any) -> Any:
        function = self._forward if which == "forward" else self._gradient
        with forced(self.case.op.name, tuned):
            return jax.jit(lambda *given: function(*given, **more)).lower(*self.given)

    def oracle(self) -> list[np.ndarray]:
        """The results of the reference: of the last pass, which has those of the others."""
        return self._results(self.lower(self.passes[-1], None, implementation="reference").compile())

    def _results(self, program: Any) -> list[np.ndarray]:
        leaves = jax.tree.leaves(program(*self.given))
        # NumPy has no arithmetic for bfloat16.
        return [
            np.asarray(x, np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x)
            for x in leaves
        ]

    def difference(self, program: Any, oracle: Sequence[np.ndarray]) -> str | None:
        """How the last pass' results differ from the oracle's by more than rounding; None if they don't."""
        tolerance = {**TOLERANCE, **(self.tuning.tolerance or {})}[self.case.dtype]
        for got, want in zip(self._results(program), oracle, strict=True):
            if not np.issubdtype(want.dtype, np.floating):
                if not np.array_equal(got, want):
                    return f"{np.sum(got != want)} of {want.size} integers differ from the oracle's"
                continue
            scale = np.max(np.abs(want), initial=0.0, where=np.isfinite(want))
            near = np.isclose(got, want, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
            if not near.all():
                with np.errstate(invalid="ignore"):
                    worst = np.max(np.abs(got - want), initial=0.0, where=~near)
                return (
                    f"{np.sum(~near)} of {want.size} elements differ from the oracle's, by up to {worst:.3g}"
                )
        return None


class Variant:
    """An implementation with some parameters, and its compiled passes."""

    def __init__(
        self, programs: Programs, implementation: str, parameters: Parameters, platform: str
    ) -> None:
        self.implementation, self.parameters = implementation, parameters
        self._from = programs
        self._compiled: dict[str, Any] = {}
        chosen = ((implementation, parameters),) if parameters else ()
        self._tuned = Tuned(platform, implementation, chosen)

    def lower(self, which: str) -> Any:
        return self._from.lower(which, self._tuned)

    def program(self, which: str) -> Any:
        if which not in self._compiled:
            self._compiled[which] = self.lower(which).compile()
        return self._compiled[which]

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.parameters)
        return f"{self.implementation} {values or '(heuristic)'}"
