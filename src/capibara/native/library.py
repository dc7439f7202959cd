"""The library's functions as XLA calls them: registered once a process, and not before they are needed."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from capibara.native.build import LIBRARY, source_digest
from capibara.native.loading import REMEDY, open_library

__all__ = ["TARGETS", "call", "call_in_place", "call_one_by_one", "isa", "problem"]

TARGETS = (
    "capibara_attention_forward",
    "capibara_attention_backward",
    "capibara_attention_bias",
    "capibara_codes_product",
    "capibara_gated",
    "capibara_gated_backward",
    "capibara_grouped_outer",
    "capibara_grouped_product",
    "capibara_max_plus",
    "capibara_max_plus_argmax",
    "capibara_paged_attention",
    "capibara_products",
    "capibara_products_of_matrices",
    "capibara_products_of_rows",
    "capibara_recurrence",
    "capibara_rms_norm",
    "capibara_rms_norm_backward",
    "capibara_selective_scan",
    "capibara_selective_scan_backward",
    "capibara_thin_chain",
    "capibara_thin_product",
    "capibara_turned",
    "capibara_write_rows",
    "capibara_zeros",
)


def _interface() -> int | None:
    """The version of XLA's foreign function interface that this jaxlib speaks, as the library says its own."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8", errors="replace")
    found = [re.search(rf"^#define XLA_FFI_API_{part} (\d+)\s*$", text, re.M) for part in ("MAJOR", "MINOR")]
    return None if None in found else sum(int(m[1]) * f for m, f in zip(found, (1000, 1), strict=True) if m)


@cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    """The library with its targets registered, or the reason why there is none."""
    library, reason = open_library(LIBRARY, source_digest())
    if library is None:
        return None, reason
    try:
        speaks = library.capibara_native_interface()
    except AttributeError as error:
        return None, f"the native library {LIBRARY} does not load ({error}): {REMEDY}"
    here = _interface()
    # Checked here and not left to XLA, which would fail to start at all with a target it cannot take.
    if here is None or speaks // 1000 != here // 1000 or speaks > here:
        said = "unknown" if here is None else f"{here // 1000}.{here % 1000}"
        return None, (
            f"the native library was built for version {speaks // 1000}.{speaks % 1000} of XLA's foreign function "
            f"interface, this jaxlib's is {said}: {REMEDY}"
        )
    for name in TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library, None


def problem() -> str | None:
    """Why native kernels cannot run here; ``None`` when they can."""
    reason = _load()[1]
    if reason is not None:
        return reason
    try:
        devices = jax.device_count("cpu")
    except RuntimeError as error:
        return f"JAX has no CPU here ({error})"
    if devices > 1:
        # XLA cannot look into a foreign call: it would gather sharded arrays before it.
        return f"there are {devices} CPU devices, and XLA partitions its own operations only"
    return None


def isa() -> str | None:
    """The instruction set whose kernels run here (``"avx2"`` …); ``None`` without the library."""
    library, _ = _load()
    return None if library is None else library.capibara_native_isa().decode()


Attribute = int | float | tuple[int, ...]


def call(target: str, out: Sequence[jax.ShapeDtypeStruct], *arrays: Any, **attributes: Attribute) -> Any:
    """Call ``target``; ints, also in tuples, are passed as int64, floats as float32.

    ``vmap`` adds leading axes to every array.
    """
    return _call("broadcast_all", target, out, arrays, attributes)


def call_one_by_one(
    target: str, out: Sequence[jax.ShapeDtypeStruct], *arrays: Any, **attributes: Attribute
) -> Any:
    """:func:`call`, which under ``vmap`` calls once for each element."""
    return _call("sequential", target, out, arrays, attributes)


def call_in_place(target: str, array: Any, *arrays: Any) -> Any:
    """:func:`call` with one result, which takes the place of the first array where that is not needed any more."""
    out = [jax.ShapeDtypeStruct(array.shape, array.dtype)]
    return _call("sequential", target, out, (array, *arrays), {}, {0: 0})[0]


def _call(
    vmap_method: str,
    target: str,
    out: Sequence[jax.ShapeDtypeStruct],
    arrays: tuple[Any, ...],
    attributes: dict[str, Attribute],
    aliases: dict[int, int] | None = None,
) -> Any:
    reason = problem()
    if reason is not None:
        raise NotImplementedError(reason)
    typed = {name: _typed(value) for name, value in attributes.items()}
    options: dict[str, Any] = {"vmap_method": vmap_method, "input_output_aliases": aliases}
    return jax.ffi.ffi_call(target, tuple(out), **options)(*arrays, **typed)


def _typed(value: Attribute) -> Any:
    if isinstance(value, tuple):
        return np.array(value, np.int64)
    return np.int64(value) if isinstance(value, int) else np.float32(value)
