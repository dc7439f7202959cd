"""What a layer consists of, in the form that a training step on CPUs takes: compiled kernels with a gradient.

XLA makes one pass over memory of each few elementwise operations, keeps what they computed for the backward pass, and
leaves a product that sums over many rows at two thirds of the speed of others. The kernels here
(:mod:`capibara.native`) read each array once, keep no more than their inputs, and have no forward-mode derivatives;
second derivatives are those of plain JAX. So they run where a function is traced for a gradient
(:func:`training_kernels`); everywhere else, and inside of ``jax.shard_map``, layers are plain JAX.
"""

from capibara.ops.layers.gated import gated, takes_gated
from capibara.ops.layers.norm import rms_norm, takes_rms_norm
from capibara.ops.layers.product import product_transposed, products, takes_products
from capibara.ops.layers.rotate import rotate, takes_rotate
from capibara.ops.layers.wanted import training, training_kernels

__all__ = [
    "gated",
    "product_transposed",
    "products",
    "rms_norm",
    "rotate",
    "takes_gated",
    "takes_products",
    "takes_rms_norm",
    "takes_rotate",
    "training",
    "training_kernels",
]
