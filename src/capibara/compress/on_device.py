"""Load tensors of an archive directly to a device: the encoded bytes are transferred, the device decodes them.

For the codec ``"exponent"``, whose codes all have one length (:mod:`capibara.compress.codecs.exponent`).
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compress.codecs.exponent import EXPONENT, Parts
from capibara.compress.container import Archive
from capibara.compress.entropy import planes
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat
from capibara.errors import MissingExtraError

if TYPE_CHECKING:
    import jax

__all__ = ["expand", "read_on_device"]


def _fields(data: Any, count: int, width: int) -> Any:
    """uint32 [count] of packed bytes: plane by plane, a byte to each of its numbers, shifted to its place."""
    import jax.numpy as jnp

    out, at = jnp.zeros(count, jnp.uint32), 0
    for size, shift in planes(width):
        length = (count * size + 7) // 8
        part = data[at : at + length].astype(jnp.uint32)
        at += length
        if size >= 8:
            places = np.arange(0, size, 8, dtype=np.uint32)
            plane = (part.reshape(count, -1) << places).sum(1, dtype=jnp.uint32)
        else:
            places = np.arange(0, 8, size, dtype=np.uint32)
            plane = ((part[:, None] >> places) & np.uint32((1 << size) - 1)).reshape(-1)[:count]
        out |= plane << np.uint32(shift)
    return out


def expand(parts: Parts, form: NumberFormat, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """The tensor of :meth:`capibara.compress.codecs.exponent.Exponent.parts`; can be called under ``jax.jit``.

    Args:
      parts: with NumPy, JAX or traced arrays.
      form: BF16 or F32.
      shape: of the tensor.

    Returns:
      The tensor, bfloat16 or float32, and the number of escaped elements: if it is not ``len(parts.escaped)``, the
      payload is damaged and the tensor invalid.
    """
    import jax.numpy as jnp
    from jax import lax

    count = math.prod(shape)
    dtype, whole = (jnp.bfloat16, jnp.uint16) if form.name == "BF16" else (jnp.float32, jnp.uint32)
    if count == 0:
        return jnp.zeros(shape, dtype), jnp.int32(0)
    if parts.width == 0:
        # Stored in one plane, as it were, of the numbers' own width.
        numbers = _fields(jnp.asarray(parts.rest), count, form.bits)
        return lax.bitcast_convert_type(numbers.astype(whole), dtype).reshape(shape), jnp.int32(0)
    codes = _fields(jnp.asarray(parts.codes), count, parts.width)
    odd = codes == (1 << parts.width) - 1
    order = jnp.cumsum(odd, dtype=jnp.int32)
    rows = codes.reshape(-1, parts.length) + jnp.asarray(parts.bases).astype(jnp.uint32)[:, None]
    exponents = rows.reshape(-1) & np.uint32(255)
    if len(parts.escaped):
        listed = jnp.asarray(parts.escaped).astype(jnp.uint32)[jnp.clip(order - 1, 0, len(parts.escaped) - 1)]
        exponents = jnp.where(odd, listed, exponents)
    rest = _fields(jnp.asarray(parts.rest), count, form.mantissa + 1)
    numbers = rest & np.uint32((1 << form.mantissa) - 1)
    numbers |= exponents << np.uint32(form.mantissa)
    numbers |= (rest >> np.uint32(form.mantissa)) << np.uint32(form.bits - 1)
    return lax.bitcast_convert_type(numbers.astype(whole), dtype).reshape(shape), order[-1]


def read_on_device(archive: Archive, name: str, *, device: Any = None) -> jax.Array:
    """Read a tensor that was written with the codec ``"exponent"``; the device decodes it.

    Args:
      archive: open.
      name: which tensor.
      device: a device or sharding; JAX's default one otherwise.

    Returns:
      [shape of the tensor], bfloat16 or float32, bit for bit equal to the original.

    Raises:
      MissingExtraError: JAX is not installed.
      CompressError: another codec; :meth:`Archive.read` decodes those.
      DamagedError: a payload has the wrong checksum, or is not what the codec writes.
      KeyError: there is no tensor of that name.
    """
    try:
        import jax
        import jax.numpy as jnp
    except ImportError as error:
        raise MissingExtraError("jax", "train", "read_on_device") from error
    entry = archive[name]
    if entry.codec != "exponent":
        raise CompressError(
            f"{name}: got the codec {entry.codec!r}, expected 'exponent'. Remedy: archive.read(name), or write it with "
            "codec='exponent'."
        )
    made = []
    for shape, payload in archive.payloads(name):
        parts = EXPONENT.parts(payload, entry.format, shape, entry.settings)
        arrays = jax.device_put((parts.bases, parts.codes, parts.rest, parts.escaped), device)
        one, found = _compiled()(*arrays, parts.width, parts.length, entry.format, shape)
        if int(found) != len(parts.escaped):
            raise DamagedError(f"{name}: the number of escapes differs from the header's: it is damaged")
        made.append(one)
    if len(made) == 1:
        return made[0].reshape(entry.shape)
    return jnp.concatenate(made).reshape(entry.shape)


@cache
def _compiled() -> Any:
    import jax

    def work(bases: Any, codes: Any, rest: Any, escaped: Any, *static: Any) -> tuple[jax.Array, jax.Array]:
        width, length, form, shape = static
        return expand(Parts(width, length, bases, codes, rest, escaped), form, shape)

    return jax.jit(work, static_argnums=(4, 5, 6, 7))
