"""Seeds and keys: what randomness may be given as.

A *seed* is a number that a person writes down; a *key* is JAX's own array. Seeds are kept within 32 bits, because
JAX quietly drops what lies above them while 64-bit integers are off: 2³² would be the same seed as 0.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import InputError

if TYPE_CHECKING:
    import jax

__all__ = ["MAX_SEED", "as_key", "check_key"]

MAX_SEED = 2**32 - 1


def is_key(value: Any) -> bool:
    """Whether a value is one JAX key, of the typed kind or of the old raw one (uint32 ``[words]``)."""
    import jax
    import jax.numpy as jnp

    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return False
    try:
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return shape == ()
    except TypeError:  # another library's dtype
        return False
    return dtype == jnp.uint32 and len(shape) == 1 and shape[0] in (2, 4)


def check_key(key: Any, name: str = "key") -> Any:
    """Return ``key`` if it is one JAX key, traced or not.

    Raises:
        InputError: it is something else.
    """
    if is_key(key):
        return key
    what = f"of shape {tuple(key.shape)} and dtype {key.dtype}" if hasattr(key, "dtype") else repr(key)
    raise InputError(f"{name} is {what}, expected one JAX key: {name}=jax.random.key(0)")


def as_key(seed: Any, name: str = "seed") -> jax.Array:
    """The key of a seed; a key is returned as it is.

    Args:
        seed: an integer from 0 to 2³² − 1 (a Python or NumPy integer), or a JAX key.
        name: what error texts call it.

    Raises:
        InputError: it is neither.
    """
    import jax

    if is_key(seed):
        return seed
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:  # also of an array that is traced
        number = None
    if number is None or not 0 <= number <= MAX_SEED:
        raise InputError(
            f"{name}={seed!r} must be an integer from 0 to {MAX_SEED} (2**32 - 1), or a JAX key such as "
            "jax.random.key(0)"
        )
    return jax.random.key(number)
