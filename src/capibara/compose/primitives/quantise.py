"""Vector quantisation."""

from __future__ import annotations

from capibara.compose.logical.arguments import number
from capibara.compose.logical.block import Primitive

__all__ = ["Quantise"]


class Quantise(Primitive):
    """Nearest code of a codebook, with straight-through gradients (van den Oord et al., 2017).

    ``input [*b, d]`` and the codebook's state → ``quantized [*b, d]``, ``indices int [*b]``, the scalars
    ``commitment``, ``perplexity``, ``usage``, and the state after an exponential-moving-average update (in
    training; otherwise as it was).
    """

    def __init__(
        self,
        decay: float = 0.99,
        commitment_weight: float = 0.25,
        dead_code_threshold: float = 0.0,
        epsilon: float = 1e-5,
        implementation: str = "auto",
        *,
        name: str | None = None,
    ) -> None:
        number("decay", decay, 0.0, 1.0)
        number("commitment_weight", commitment_weight)
        number("dead_code_threshold", dead_code_threshold)
        number("epsilon", epsilon)
        super().__init__(
            "quantise",
            {
                "input": ("*b d", "float"),
                "codebook": ("codes d", "float"),
                "cluster_size": (("codes",), "float"),
                "codebook_sum": ("codes d", "float"),
            },
            {
                "quantized": ("*b d", "float"),
                "indices": ("*b", "int"),
                "commitment": ((), "float"),
                "perplexity": ((), "float"),
                "usage": ((), "float"),
                "next_codebook": ("codes d", "float"),
                "next_cluster_size": (("codes",), "float"),
                "next_codebook_sum": ("codes d", "float"),
            },
            {
                "decay": float(decay),
                "commitment_weight": float(commitment_weight),
                "dead_code_threshold": float(dead_code_threshold),
                "epsilon": float(epsilon),
                "implementation": implementation,
            },
            uses_key=True,
            uses_train=True,
            name=name,
        )
