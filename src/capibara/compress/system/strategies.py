"""Strategies: the codec of a tensor, its rate, and the engine that runs it.

A strategy is a codec's name, or ``"auto"``, which uses the codec with the least error at the requested size. The
engine is independent of it, and does not affect the bytes: the host's compiled code, or JAX. ``"jax"`` is ``"auto"``
on JAX.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.allocation import allocate, everywhere, survey
from capibara.compress.codecs.engine import use_engine
from capibara.compress.codecs.executors import best_executor
from capibara.compress.codecs.protocol import CODECS, get_codec
from capibara.compress.container.index import Entry
from capibara.compress.curves import candidates
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat, to_float
from capibara.compress.models.source import Tensors
from capibara.compress.profile import EXACT
from capibara.compress.system.configuration import OptimizationStrategy, SystemConfiguration
from capibara.compress.system.engines import engine_problem, warn_fallback
from capibara.compress.system.result import CompressedTensor, pack, row_pieces
from capibara.compress.system.tensors import Bits, read_tensor
from capibara.errors import did_you_mean

__all__ = ["Choice", "CompressionStrategy", "StrategySelector", "relative_error"]


@dataclass(frozen=True)
class Choice:
    """The choice for a tensor.

    Attributes:
      strategy: the one that compresses it.
      reason: why this codec and this engine, as text.
    """

    strategy: CompressionStrategy
    reason: str


@dataclass(frozen=True)
class CompressionStrategy:
    """Compresses single tensors.

    Attributes:
      name: ``"auto"``, ``"jax"``, or a codec's name.
      codecs: candidates besides ``lossless``; ``None``: all.
      engine: ``"jax"``, or ``"auto"`` for the host's compiled code, or NumPy if that was not built.
    """

    name: str
    codecs: tuple[str, ...] | None
    engine: str = "auto"

    def plan(self, bits: Bits, ratio: float | None) -> tuple[str, dict[str, Any]]:
        """Choose the codec and its settings to make a tensor ``ratio`` times smaller.

        Lossless without a ratio, unless the strategy is a codec of fixed width (``int8``).

        Raises:
          CompressError: the ratio cannot be met with these codecs, or the one codec needs a ratio.
        """
        if self.codecs == ("exponent",) and candidates("exponent", bits.form, bits.shape):
            return "exponent", {}  # exact as well, and another one that devices decode
        if ratio is None and self.codecs is not None and self.codecs[0] not in EXACT:
            if not bits.form.is_float or len(bits.shape) < 2:
                return "lossless", {}  # as in a file: integers and vectors stay
            return everywhere(_source(bits), self.codecs[0], smallest=0).points["tensor"].codec, {}
        if ratio is None or self.codecs == ("lossless",):
            return "lossless", {}
        if not bits.form.is_float:
            raise CompressError(
                f"ratio: got {ratio}, but numbers of {bits.form.name} are compressed without loss only. "
                "Remedy: ratio=None."
            )
        codecs = self.codecs
        if codecs is None and (some := _some_rows(bits)) is not None:
            chosen = allocate(survey(_source(some), smallest=0), ratio).points.get("tensor")
            codecs = ("lossless" if chosen is None else chosen.codec,)
        found = allocate(survey(_source(bits), codecs=codecs, smallest=0), ratio)
        if (point := found.points.get("tensor")) is None:
            return "lossless", {}
        return point.codec, dict(point.settings)

    def compress(
        self,
        bits: Bits,
        *,
        ratio: float | None = None,
        name: str = "tensor",
        reason: str = "",
        verify: bool = True,
    ) -> CompressedTensor:
        """Compress one tensor.

        Args:
          bits: of :func:`capibara.compress.system.tensors.read_tensor`.
          ratio: original bytes over compressed bytes, above 1; ``None``: as for :meth:`plan`.
          name: stored with the tensor.
          reason: stored with the result.
          verify: decode and compare; otherwise a lossy codec's error is unknown.

        Raises:
          CompressError: the ratio cannot be met; or, as a safeguard, a lossless codec did not restore the values, or
            a lossy one changed or created a NaN or infinity.
        """
        begin = time.perf_counter()
        with use_engine(self.engine):
            codec, settings = self.plan(bits, ratio)
            how, parts = get_codec(codec), []
            length = int(np.prod(bits.shape[1:], dtype=np.int64)) if bits.shape else 1
            for first, rows in row_pieces(bits.shape):
                some = bits.values[first * length : (first + rows) * length]
                shape = (rows, *bits.shape[1:]) if bits.shape else ()
                parts.append((rows, how.encode(some, bits.form, shape, settings)))
            entry, payloads = pack(Entry(name, bits.form, bits.shape, codec, settings), parts)
            seconds = time.perf_counter() - begin
            made = CompressedTensor(
                entry, payloads, bits.kind, bits.device, best_executor().name, reason, None, seconds
            )
            error = 0.0 if codec in EXACT else None
            if verify:
                decoded = made.decode()
                if codec in EXACT and not np.array_equal(bits.values, decoded):
                    raise CompressError(
                        f"{name}: the lossless codec did not restore the values. Please report this."
                    )
                error = relative_error(bits.values, decoded, bits.form)
                if not math.isfinite(error):
                    raise CompressError(
                        f"{name}: {codec} changed a NaN or an infinity, or created one, or changed a tensor of zeros. "
                        "Remedy: strategy='lossless'. Please report this."
                    )
        return CompressedTensor(entry, payloads, bits.kind, bits.device, made.engine, reason, error, seconds)

    def decompress(self, compressed: CompressedTensor) -> np.ndarray:
        """Decode to unsigned integers [count], with this strategy's engine."""
        with use_engine(self.engine):
            return compressed.decode()


def _source(bits: Bits) -> Tensors:
    return Tensors({"tensor": (bits.form, bits.shape)}, lambda _: bits.values)


def _some_rows(bits: Bits) -> Bits | None:
    """Rows of a large tensor, at equal distances, to find out which codec suits it; ``None`` of a small one."""
    if bits.values.size <= _ENOUGH or not bits.shape:
        return None
    rows = bits.values.reshape(bits.shape[0], -1)
    count = max(_ENOUGH // rows.shape[1], 1)
    some = np.ascontiguousarray(rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)])
    return dataclasses.replace(bits, values=some.reshape(-1), shape=(count, *bits.shape[1:]))


def relative_error(before: np.ndarray, after: np.ndarray, form: NumberFormat) -> float:
    """‖after - before‖ / ‖before‖ of two tensors' bits [count], over the values that were finite before.

    0 if these are equal. Infinite if integers differ, if a finite value became NaN or infinite, if all values were
    zero and one changed, or if a NaN or infinity was not restored bit by bit.
    """
    if np.array_equal(before, after):
        return 0.0
    if not form.is_float:
        return math.inf
    runs = [slice(i, i + (1 << 20)) for i in range(0, len(before), 1 << 20)]
    # Squares of float64's largest numbers overflow, and those of its smallest vanish: so they are measured by the
    # largest. Squares of smaller formats fit into float64.
    unit = max((_largest(before[run], form) for run in runs), default=0.0) if form.bits == 64 else 1.0
    lost = whole = 0.0
    for run in runs:
        old, new = _wide(before[run], form), _wide(after[run], form)
        finite = np.isfinite(old)
        if not finite.all():
            if not np.array_equal(before[run][~finite], after[run][~finite]):
                return math.inf
            old, new = old[finite], new[finite]
        if not np.isfinite(new).all():
            return math.inf
        with np.errstate(over="ignore"):  # what is so far away is infinitely far
            lost += float((((new - old) / (unit or 1.0)) ** 2).sum())
        whole += float(((old / (unit or 1.0)) ** 2).sum())
    if lost == 0:  # a zero's sign
        return 0.0
    return math.sqrt(lost / whole) if whole else math.inf


def _wide(bits: np.ndarray, form: NumberFormat) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # quiets NaNs
        return to_float(bits, form).astype(np.float64)


def _largest(bits: np.ndarray, form: NumberFormat) -> float:
    values = _wide(bits, form)
    return float(np.abs(values[np.isfinite(values)]).max(initial=0))


class StrategySelector:
    """Chooses a strategy for each tensor; includes JAX's if JAX works.

    Args:
      config: the settings ``enable_jax``, ``optimization_strategy`` and ``strategy`` are used.
      accelerated: whether JAX runs on something other than the host's processor; by default determined from JAX.

    Attributes:
      strategies: by name: ``"auto"``, ``"jax"`` if JAX is available, and every codec.
    """

    def __init__(self, config: SystemConfiguration | None = None, *, accelerated: bool | None = None) -> None:
        self.config = config or SystemConfiguration()
        self.jax_problem = engine_problem("jax") if self.config.enable_jax else "enable_jax is False"
        self.accelerated = self._is_accelerated() if accelerated is None else accelerated
        self.strategies = {"auto": CompressionStrategy("auto", None)}
        if self.jax_problem is None:
            self.strategies["jax"] = CompressionStrategy("jax", None, "jax")
        for name in CODECS:
            self.strategies[name] = CompressionStrategy(name, (name,))

    def _is_accelerated(self) -> bool:
        if self.jax_problem is not None:
            return False
        import jax

        return jax.default_backend() != "cpu"

    @property
    def jax_available(self) -> bool:
        """Whether JAX is installed, works, and is enabled."""
        return self.jax_problem is None

    def check(self, name: str) -> None:
        """Raise if there is no strategy of that name.

        Raises:
          CompressError: there is none.
        """
        if name not in self.strategies and name != "jax":
            raise CompressError(
                f"strategy: got {name!r:.200}, expected one of {', '.join(self.strategies)}."
                f"{did_you_mean(str(name), self.strategies)}"
            )

    def select(self, tensor: Any, *, strategy: str | None = None) -> Choice:
        """The strategy for a tensor.

        Args:
          tensor: a NumPy, PyTorch or JAX array, or its :class:`Bits`.
          strategy: a name, instead of the configuration's. Without JAX, ``"jax"`` falls back to the host, with one
            warning.

        Raises:
          CompressError: no strategy of that name.
        """
        name = self.config.strategy if strategy is None else strategy
        if name == "jax" and self.jax_problem is not None:
            warn_fallback(
                "jax",
                f"JAX does not run here ({self.jax_problem}): the host's code does the same, to the byte.",
            )
            return Choice(
                self.strategies["auto"], f"JAX was requested but is not available ({self.jax_problem})"
            )
        self.check(name)
        found = self.strategies[name]
        bits = tensor if isinstance(tensor, Bits) else read_tensor(tensor)
        engine, why = self._engine(bits, name)
        return Choice(CompressionStrategy(found.name, found.codecs, engine), why)

    def _engine(self, bits: Bits, name: str) -> tuple[str, str]:
        wanted = self.config.optimization_strategy
        if name == "jax":
            return "jax", "the strategy is 'jax'"
        if self.jax_problem is not None:
            return "auto", f"JAX is not used: {self.jax_problem}"
        if wanted is OptimizationStrategy.JAX_ACCELERATED:
            return "jax", "optimization_strategy is 'jax_accelerated'"
        if wanted is OptimizationStrategy.HOST:
            return "auto", "optimization_strategy is 'host'"
        if self.accelerated and bits.values.nbytes >= _WORTH:
            return "jax", f"JAX has an accelerator, and {bits.values.nbytes} bytes are worth the way there"
        if self.accelerated:
            return "auto", f"{bits.values.nbytes} bytes are not worth the way to the accelerator"
        return (
            "auto",
            "JAX has no accelerator here, and the host's code need not be compiled for each shape",
        )


_ENOUGH = 1 << 16  # numbers that tell one codec from another
_WORTH = 1 << 20  # bytes; less takes longer to launch than to code
