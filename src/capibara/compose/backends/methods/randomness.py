"""Random arrays. Each backend object has its own random state; global state is neither read nor set.

A method without a key takes the next one from that state; :meth:`Randomness.set_seed` resets it. Two backends of the
same kind with the same seed give the same values. NumPy and PyTorch use the same counter-based generator (Philox) and
agree with each other; JAX uses its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from capibara.compose.backends import philox
from capibara.compose.backends.methods.caller import Caller, as_shape, is_number, is_whole
from capibara.compose.backends.methods.creation import MeshShape, Split
from capibara.compose.dtypes import DTYPES, dtype_name
from capibara.compose.errors import InputError
from capibara.compose.physical.randomness import check_key

__all__ = ["Randomness"]


class Randomness(Caller):
    """Keys, and arrays drawn with them."""

    type: str
    seed: Any
    _key: Any

    def _new_key(self, seed: Any) -> Any:
        raise NotImplementedError

    def set_seed(self, seed: Any) -> None:
        """Reset the random state, from an integer from 0 to 2³² − 1 (or a key)."""
        self._key = self._new_key(seed)
        self.seed = seed

    def get_random_key(self) -> Any:
        """A new key; advances the random state."""
        self._key, own = self._call("split_key", self._key, 2)
        return own

    def split_key(self, key: Any, num: int = 2) -> tuple[Any, ...]:
        """``num`` independent keys from one."""
        if isinstance(num, bool) or not isinstance(num, int) or num < 1:
            raise InputError(f"num={num!r} must be an integer of at least 1")
        return tuple(self._call("split_key", self._key_or_next(key), num))

    def _key_or_next(self, key: Any) -> Any:
        if key is None:
            return self.get_random_key()
        return check_key(key) if self.type == "jax" else philox.check_key(key)

    def random_normal(
        self,
        key: Any = None,
        shape: int | Sequence[int] = (),
        *,
        dtype: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """Normal random values with mean 0 and variance 1, from a key (or the next one)."""
        return self._make(
            "draw_normal",
            self._key_or_next(key),
            as_shape((shape,)),
            dtype=self._float(dtype),
            device_mesh=device_mesh,
            tensor_split=tensor_split,
        )

    def random_uniform(
        self,
        key: Any = None,
        shape: int | Sequence[int] = (),
        low: float = 0.0,
        high: float = 1.0,
        *,
        dtype: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """Random values distributed uniformly over [low, high), from a key (or the next one)."""
        return self._make(
            "draw_uniform",
            self._key_or_next(key),
            as_shape((shape,)),
            low,
            high,
            dtype=self._float(dtype),
            device_mesh=device_mesh,
            tensor_split=tensor_split,
        )

    def randn(
        self,
        *shape: Any,
        dtype: Any = None,
        prng_key: Any = None,
        key: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """Normal random values with mean 0 and variance 1. ``key`` and ``prng_key`` are one argument."""
        return self.random_normal(
            _one_key(prng_key, key),
            as_shape(shape),
            dtype=dtype,
            device_mesh=device_mesh,
            tensor_split=tensor_split,
        )

    def rand(
        self,
        *shape: Any,
        dtype: Any = None,
        prng_key: Any = None,
        key: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """Random values distributed uniformly over [0, 1)."""
        return self.random_uniform(
            _one_key(prng_key, key),
            as_shape(shape),
            dtype=dtype,
            device_mesh=device_mesh,
            tensor_split=tensor_split,
        )

    def rand_uniform(
        self,
        low: float,
        high: float,
        *shape: Any,
        dtype: Any = None,
        prng_key: Any = None,
        key: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """Random values distributed uniformly over [low, high)."""
        if not (is_number(low) and is_number(high)):
            raise InputError(f"rand_uniform: low={low!r:.80} and high={high!r:.80} must be numbers")
        if not low <= high:
            raise InputError(f"rand_uniform: low={low!r:.80} must not be above high={high!r:.80}")
        return self.random_uniform(
            _one_key(prng_key, key),
            as_shape(shape),
            low,
            high,
            dtype=dtype,
            device_mesh=device_mesh,
            tensor_split=tensor_split,
        )

    def randint(
        self,
        low: int,
        high: int,
        *shape: Any,
        dtype: Any = None,
        prng_key: Any = None,
        key: Any = None,
        device_mesh: MeshShape = None,
        tensor_split: Split = None,
    ) -> Any:
        """Integers from ``low`` up to, but not including, ``high``; int32 unless ``dtype`` says otherwise."""
        name = "int32" if dtype is None else dtype_name(dtype)
        kind = DTYPES[name].kind
        if kind != "int":
            raise InputError(f"randint: dtype={name!r} is not a dtype of integers, such as 'int32'")
        if not (is_whole(low) and is_whole(high)):
            raise InputError(f"randint: low={low!r:.80} and high={high!r:.80} must be integers")
        if not low < high:
            raise InputError(f"randint: low={low!r:.80} must be below high={high!r:.80}")
        limits = np.iinfo(name)
        if low < limits.min or high - 1 > limits.max:
            raise InputError(
                f"randint: numbers from low={low:.6g} up to high={high:.6g} do not fit {name}, which goes from "
                f"{limits.min} to {limits.max}"
            )
        return self._make(
            "draw_integers",
            self._key_or_next(_one_key(prng_key, key)),
            as_shape(shape),
            low,
            high,
            dtype=name,
            device_mesh=device_mesh,
            tensor_split=tensor_split,
        )

    def multinomial(
        self, probs: Any, num_samples: int, replacement: bool = False, *, prng_key: Any = None
    ) -> Any:
        """Indices drawn with the probabilities of each row: ``probs [*b, n]`` → ``int32 [*b, num_samples]``.

        Rows need not sum to 1. Without replacement no index occurs twice (Gumbel top-k; Vieira, 2014), and
        ``num_samples`` must not be above n.

        Raises:
            InputError: ``num_samples`` is invalid.
        """
        n = probs.shape[-1] if len(getattr(probs, "shape", ())) else 0
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise InputError(f"num_samples={num_samples!r} must be an integer of at least 1")
        if not n or (not replacement and num_samples > n):
            raise InputError(
                f"multinomial: {num_samples} different indices cannot be drawn from probs of shape "
                f"{tuple(getattr(probs, 'shape', ()))}: draw fewer, or with replacement=True"
            )
        shape = (*probs.shape[:-1], num_samples, n) if replacement else tuple(probs.shape)
        uniform = self.random_uniform(prng_key, shape, 1e-20, 1.0, dtype="float32")
        return self._call("choose", probs, uniform, num_samples, replacement)


def _one_key(first: Any, second: Any) -> Any:
    if first is not None and second is not None:
        raise InputError("prng_key= and key= are the same argument: give one of them")
    return first if second is None else second
