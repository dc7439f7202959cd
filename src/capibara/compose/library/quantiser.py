"""A vector-quantised bottleneck: each vector is replaced by its nearest code."""

from __future__ import annotations

from capibara.compose import primitives as p
from capibara.compose.initializers import UnitRows, ones
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.model import Model

__all__ = ["VectorQuantiser"]


class VectorQuantiser(Model):
    """Nearest code of a codebook that follows its inputs by exponential moving averages.

    ``input [*b, dimension]`` → ``output`` of the same shape, ``indices int [*b]`` and the scalars ``commitment``
    (a loss to add), ``perplexity`` and ``usage``. The codebook is state, not a parameter: it moves with the data
    that passes in training, and comes back in the next state (van den Oord et al., 2017, appendix A.1).

    Args:
        codebook_size, dimension: the codebook's shape.
        decay: of the moving averages. commitment_weight: weight of the loss.
        dead_code_threshold: codes used less than this (moving average of a batch's count) are drawn anew from the
            inputs; 0 leaves them. epsilon: smoothing of the counts.
        implementation: of :func:`capibara.ops.vq.nearest_code`.
    """

    def __init__(
        self,
        codebook_size: int,
        dimension: int,
        decay: float = 0.99,
        commitment_weight: float = 0.25,
        dead_code_threshold: float = 0.0,
        epsilon: float = 1e-5,
        implementation: str = "auto",
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        whole("codebook_size", codebook_size)
        whole("dimension", dimension)
        shape, axes = (codebook_size, dimension), ("codes", "embed")
        start = UnitRows(dimension**0.5, salt="codebook")
        self.add_input("input", ("*b", dimension), "float")
        # With unit counts and equal draws (the salt) codebook = sum / count holds from the start.
        self.add_state("codebook", shape, start, axes=axes, dtype="float32")
        self.add_state("cluster_size", (codebook_size,), ones, axes=("codes",), dtype="float32")
        self.add_state("codebook_sum", shape, start, axes=axes, dtype="float32")
        quantise = self.add(
            p.Quantise(decay, commitment_weight, dead_code_threshold, epsilon, implementation),
            "quantise",
            input="input",
            codebook="codebook",
            cluster_size="cluster_size",
            codebook_sum="codebook_sum",
            quantized="output",
            indices="indices",
            commitment="commitment",
            perplexity="perplexity",
            usage="usage",
        )
        for key in ("codebook", "cluster_size", "codebook_sum"):
            self.update_state(key, quantise.port(f"next_{key}"))
        self.expose("output", "indices", "commitment", "perplexity", "usage")
