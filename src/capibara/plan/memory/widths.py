"""One device's share of a model's widths."""

from __future__ import annotations

from dataclasses import dataclass

from capibara.config import ModularModelConfig
from capibara.config.sections import ModelSection
from capibara.plan.memory.arguments import item_size, part_of
from capibara.sharding import Layout

__all__ = ["Mixture", "Widths", "widths"]


@dataclass(frozen=True)
class Mixture:
    """One device's share of a mixture of experts.

    Attributes:
      count: experts of the model. rows: of products with experts, in which a token is as often as it uses experts,
        on a mesh with an ``expert`` axis those of all devices along it.
      held: experts whose matrices the device multiplies with. inner: their width. shared: that of the shared layer.
      top: experts a token.
    """

    count: int
    rows: int
    held: int
    inner: int
    shared: int
    top: int


@dataclass(frozen=True)
class Widths:
    """One device's share of the model's widths, and bytes a number.

    ``scan``: heads of a state-space block, channels a head, and states a channel. ``kept_products``: bytes a number of
    matrix products whose results are kept for the backward pass; 0: those of the compute dtype.
    """

    tokens: int
    stream: int
    inner: int
    queries: int
    keys: int
    head: int
    own: dict[str, int]
    words: int
    compute: int
    accumulate: int
    mixture: Mixture | None = None
    scan: tuple[int, int, int] = (0, 0, 0)
    kept_products: int = 0

    @property
    def one_dtype(self) -> bool:
        """Whether nothing is cast between computing and accumulating."""
        return self.compute == self.accumulate

    def values(self, width: float) -> int:
        """Bytes of one value of this width for every token, in the compute dtype."""
        return int(self.tokens * width * self.compute)

    def products(self, width: float) -> int:
        """Bytes of one matrix product of this width for every token, kept for the backward pass."""
        return int(self.tokens * width * (self.kept_products or self.compute))


def widths(config: ModularModelConfig, layout: Layout, rows: int) -> Widths:
    """The shares of a device.

    Args:
      rows: sequences of a microbatch, on all devices.
    """
    m, p = config.model, config.precision

    def share(sizes: tuple[int, ...], *names: str) -> tuple[int, ...]:
        return part_of(sizes, names, layout.mesh, layout.rules, "activations")

    mine, length = share((rows, config.train.sequence_length), "batch", "sequence")
    head = m.resolved_head_dim
    channels = share((m.ssm.expand * m.embed_dim,), "mlp")[0]
    return Widths(
        tokens=mine * length,
        stream=m.embed_dim,
        inner=share((m.feedforward_dim,), "mlp")[0],
        queries=share((m.num_heads,), "heads")[0] * head,
        keys=_keys(m, share((m.num_kv_heads,), "kv_heads")[0]),
        head=head,
        own={"ssm": channels, "vq": m.embed_dim},
        words=share((m.vocab_size,), "vocab")[0],
        compute=item_size(p.compute_dtype),
        accumulate=item_size(p.accumulate_dtype),
        mixture=_mixture(config, layout, mine * length) if m.experts.count else None,
        scan=(max(1, channels // m.ssm.head_dim), m.ssm.head_dim, m.ssm.state_dim),
    )


def _mixture(config: ModularModelConfig, layout: Layout, tokens: int) -> Mixture:
    m, e = config.model, config.model.experts
    shape = (e.count, m.embed_dim, m.resolved_expert_dim)
    held, _, inner = part_of(shape, ("experts", None, "mlp"), layout.mesh, layout.rules)
    return Mixture(
        count=e.count,
        rows=tokens * (e.count // held) * e.per_token,
        held=held,
        inner=inner,
        top=e.per_token,
        shared=part_of((e.shared_dim or 0,), ("mlp",), layout.mesh, layout.rules)[0] if e.shared_dim else 0,
    )


def _keys(model: ModelSection, heads: int) -> int:
    """Features of the keys of so many heads; of latent attention half of keys, values and the latents together."""
    latent = model.latent
    if latent.kv_rank is None:
        return heads * model.resolved_head_dim
    latents = latent.kv_rank + latent.rotary_dim + (latent.query_rank or 0)
    return (heads * (model.resolved_head_dim + latent.value_dim) + latents) // 2
