"""Ready-made blocks, from single layers to the blocks of a language model."""

from capibara.compose.library.attention import SelfAttention
from capibara.compose.library.layers import MLP, Embedding, LayerNorm, Linear, RMSNorm, SwiGLU
from capibara.compose.library.quantiser import VectorQuantiser
from capibara.compose.library.ssm import StateSpace

__all__ = [
    "MLP",
    "Embedding",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "SelfAttention",
    "StateSpace",
    "SwiGLU",
    "VectorQuantiser",
]
