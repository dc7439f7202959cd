"""What is served, and what it takes by arithmetic alone: bytes over the memory's bandwidth, operations over the peak.

The rough figures order meshes and slices before anything is compiled, say where to begin, and are the result where
there is no compiler; then they are labelled so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from capibara.config import ModularModelConfig
from capibara.plan.compiler import Job
from capibara.plan.memory.tiles import padded_bytes
from capibara.plan.sizes import count_text
from capibara.plan.targets import Target
from capibara.plan.time import Part, StepTime
from capibara.plan.validation import MeshSizes
from capibara.sharding import Group

if TYPE_CHECKING:
    from capibara.compose import CompiledModel

__all__ = ["Mesh", "RoughServing", "ServingTask"]

Mesh = tuple[tuple[str, int], ...]

ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
_DECODE = "capibara.plan.workloads.decoding:lower_decode"
_PREFILL = "capibara.plan.workloads.decoding:lower_prefill"
# Tokens that a device reads in one prefill, about: enough to be bound by arithmetic, not by reading the weights.
_GROUP_TOKENS = 1024


def _cached_form(config: ModularModelConfig) -> tuple[CompiledModel, frozenset[Any]]:
    """The decoding form's arrays, and the paths of those states that are the model's own and no cache."""
    model: Any = config.model
    return _specs(model)


@lru_cache(maxsize=16)
def _specs(model: Any) -> tuple[CompiledModel, frozenset[Any]]:
    from capibara.compose import NumpyBackend, compile
    from capibara.core.decoder import build_decoder

    own = compile(build_decoder(model), NumpyBackend())
    return compile(build_decoder(model, cached=True), NumpyBackend()), frozenset(own.states)


@dataclass(frozen=True)
class RoughServing:
    """Figures of one mesh that nothing was compiled for, all of one device; seconds of one step.

    Attributes:
      weights: bytes of parameters. row: bytes of one row's cache. temporaries: bytes within a step, for each row.
      prefill_bytes: bytes within a prefill.
    """

    weights: int
    row: int
    temporaries: int
    prefill_bytes: int

    def hbm_bytes(self, rows: int) -> int:
        """With so many rows on the device."""
        return self.weights + max(self.prefill_bytes, rows * self.temporaries) + rows * self.row

    def capacity(self, limit: int) -> int:
        """Rows that a device has room for."""
        room = limit - self.weights
        each = self.row + self.temporaries
        return max(0, min(room // each, (room - self.prefill_bytes) // self.row))


@dataclass(frozen=True)
class ServingTask:
    """A model, the requests that it answers, and the numbers that it is kept in."""

    config: ModularModelConfig
    dtype: str
    prompt_length: int
    output_length: int

    @property
    def cache_length(self) -> int:
        """Places of the cache that a request needs."""
        return self.prompt_length + self.output_length

    @property
    def title(self) -> str:
        """In a line."""
        m = self.config.model
        count = count_text(_cached_form(self.config)[0].num_params)
        return (
            f"{m.num_layers} × {'/'.join(m.pattern)}, width {m.embed_dim}, {count} parameters in "
            f"{self.dtype}; prompts of {self.prompt_length} tokens, answers of {self.output_length}"
        )

    @property
    def cache_bytes_per_request(self) -> int:
        """Bytes of cache of one request, all devices together, as they are without padding."""
        return sum(math.prod(shape) * size for shape, size, _ in self._cache(1))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(math.prod(s.shape) * self._item(s) for s in self._params())

    def meshes(self, target: Target) -> Iterator[Mesh]:
        """``data × model`` for every number of devices that divides the key-value heads (or the heads)."""
        m = self.config.model
        devices = target.num_devices
        for model in range(1, devices + 1):
            heads = m.num_kv_heads if m.attends and m.num_kv_heads else m.num_heads
            if devices % model == 0 and heads % model == 0:
                yield (("data", devices // model), ("model", model))

    def group(self, rows: int) -> int:
        """Prompts that a device reads at once, of ``rows`` that it holds."""
        return max(1, min(rows, _GROUP_TOKENS // self.prompt_length))

    def decode_job(self, target: Target, mesh: Mesh, rows: int) -> Job:
        """One step of decoding, ``rows`` on each device of the ``data`` axis."""
        return self._job(_DECODE, target, mesh, rows=rows * dict(mesh)["data"])

    def prefill_job(self, target: Target, mesh: Mesh, rows: int) -> Job:
        """The reading of one group of prompts."""
        data = dict(mesh)["data"]
        more = {"group": self.group(rows) * data, "prompt_length": self.prompt_length}
        return self._job(_PREFILL, target, mesh, rows=rows * data, **more)

    def _job(self, builder: str, target: Target, mesh: Mesh, **params: int) -> Job:
        params["cache_length"] = self.cache_length
        given = {"config": self.config.to_dict(), "dtype": self.dtype, **params}
        return Job(builder=builder, params=given, slice=target, mesh=mesh)

    # ---- by arithmetic ------------------------------------------------------------------------------------

    def _params(self) -> list[Any]:
        model, own = _cached_form(self.config)
        return [*model.params.values(), *(spec for path, spec in model.states.items() if path in own)]

    def _item(self, spec: Any) -> int:
        # Codebooks state their own dtype; everything else follows the precision asked for.
        return 4 if "codes" in (spec.axes or ()) else ITEM_SIZES[self.dtype]

    def _cache(self, rows: int) -> Iterator[tuple[tuple[int, ...], int, tuple[str | None, ...]]]:
        model, own = _cached_form(self.config)
        free = {"batch": rows, "cache": self.cache_length}
        for path, spec in model.states.items():
            if path not in own and spec.shape:
                yield spec.sizes(free, "the cache"), ITEM_SIZES[self.dtype], spec.axes or ()

    def rough(self, mesh: Mesh) -> RoughServing:
        """Memory by arithmetic."""
        from capibara.plan.workloads.decoding import serving_rules

        rules, where = serving_rules(), MeshSizes(mesh)
        sizes = dict(mesh)
        m = self.config.model

        def held(shape: tuple[int, ...], axes: Any, item: int, kind: Any) -> int:
            spec = rules.spec(axes or (None,) * len(shape), where, shape, kind=kind)  # type: ignore[arg-type]
            cut = [
                math.prod(sizes[a] for a in ((entry,) if isinstance(entry, str) else entry or ()))
                for entry in (*spec, *(None,) * (len(shape) - len(spec)))
            ]
            return padded_bytes([n // c for n, c in zip(shape, cut, strict=True)], item)

        weights = sum(held(s.shape, s.axes, self._item(s), "parameters") for s in self._params())
        # Of many rows, so that padding is what it is in a batch.
        many = 64 * sizes["data"]
        row = sum(held(shape, axes, item, "activations") for shape, item, axes in self._cache(many)) // 64
        model = sizes["model"]
        # Scores against the vocabulary in float32, the residual stream, and the branch of a block.
        width = 4 * (m.vocab_size // model) + 8 * m.embed_dim
        tokens = self.group(1 << 30) * self.prompt_length
        wide = tokens * (8 * m.embed_dim + 3 * 2 * m.widest_dim // model)
        return RoughServing(weights, max(row, 1), width, wide + self.group(1 << 30) * row)

    def rough_decode(self, target: Target, mesh: Mesh, rows: int) -> StepTime:
        """Seconds of one token by arithmetic: weights and cache are read once, everything is multiplied once."""
        from capibara.core.flops import decoding_flops

        rough = self.rough(mesh)
        flops = decoding_flops(self.config.model, self.cache_length)
        return self._roofline(target, mesh, rows, flops * rows, rough.weights + rows * rough.row)

    def rough_prefill(self, target: Target, mesh: Mesh, rows: int) -> StepTime:
        """Seconds of one group of prompts by arithmetic."""
        from capibara.core.flops import flops_per_token

        tokens = self.group(rows) * self.prompt_length
        flops = flops_per_token(self.config.model, self.prompt_length, training=False) * tokens
        return self._roofline(target, mesh, tokens, flops, self.rough(mesh).weights)

    def _roofline(self, target: Target, mesh: Mesh, tokens: int, flops: float, moved: int) -> StepTime:
        model = dict(mesh)["model"]
        compute = flops / model / target.chip.peak("bfloat16")
        memory = moved / (target.chip.hbm_bandwidth or 1e12)
        # Two all-reduces of the residual stream a layer around a ring.
        m = self.config.model
        links = target.links(dict(mesh))
        ring = Group(model, links.bandwidth, hops=model / 2)
        sent = 2 * m.num_layers * ring.reduce(tokens * m.embed_dim * ITEM_SIZES[self.dtype])
        longest = max(compute, memory)
        return StepTime(
            seconds=longest + sent,
            low=longest,
            high=compute + memory + sent,
            compute=compute if compute >= memory else 0.0,
            memory=memory if memory > compute else 0.0,
            communication=sent,
            hidden=0.0,
            parts=(
                Part("arithmetic at the peak", compute, "estimate"),
                Part("reading weights and cache", memory, "estimate"),
                Part("all-reduces", sent, "estimate"),
            ),
        )
