"""Numbers that several rooms, with JAX and without, have to agree on."""

from __future__ import annotations

__all__ = ["NF4"]

# T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), appendix E: eight quantiles of the normal
# distribution below zero and nine from zero on, scaled to ±1.
NF4 = (-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
       0.07958030, 0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0)  # fmt: skip
