"""The operations that models are made of: what each takes, what it gives, and how the shapes go together.

Nothing here says how an operation is computed: the backend has a function of the same name
(:mod:`capibara.compose.backends.jax_ops`). In the shapes ``*b`` stands for any leading dimensions.
"""

from capibara.compose.primitives.elementwise import (
    Absolute,
    Add,
    Cast,
    Decay,
    Divide,
    Dropout,
    Exp,
    Gelu,
    Log,
    Multiply,
    Normalise,
    Relu,
    Sigmoid,
    Silu,
    Softmax,
    Softplus,
    Square,
    Subtract,
    Tanh,
)
from capibara.compose.primitives.products import Dense, Lookup, Merge, Project, Unembed
from capibara.compose.primitives.quantise import Quantise
from capibara.compose.primitives.sequence import (
    Attention,
    CachedAttention,
    CachedConv,
    CausalConv,
    ContinuedScan,
    Positions,
    RotaryTable,
    Rotate,
    SelectiveScan,
)
from capibara.compose.primitives.shaping import Concat, GroupMerge, Mean, Sum

__all__ = [
    "Absolute",
    "Add",
    "Attention",
    "CachedAttention",
    "CachedConv",
    "Cast",
    "CausalConv",
    "Concat",
    "ContinuedScan",
    "Decay",
    "Dense",
    "Divide",
    "Dropout",
    "Exp",
    "Gelu",
    "GroupMerge",
    "Log",
    "Lookup",
    "Mean",
    "Merge",
    "Multiply",
    "Normalise",
    "Positions",
    "Project",
    "Quantise",
    "Relu",
    "RotaryTable",
    "Rotate",
    "SelectiveScan",
    "Sigmoid",
    "Silu",
    "Softmax",
    "Softplus",
    "Square",
    "Subtract",
    "Sum",
    "Tanh",
    "Unembed",
]
