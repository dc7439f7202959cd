"""Failures of devices: which may pass, and which devices still answer.

JAX says what failed by the first word of an error (the codes of ``absl::Status``): a lost connection, an aborted or an
internal failure may pass; too little memory or an invalid program will not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError

from capibara.train.checkpoint_files import first_line

__all__ = ["answering", "as_sentence", "error_code", "may_pass"]

_MAY_PASS = frozenset(
    {"UNAVAILABLE", "ABORTED", "INTERNAL", "DATA_LOSS", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"}
)


def answering(
    devices: Sequence[Any] | None = None, *, warn: Callable[[str], None] | None = None
) -> list[Any]:
    """Those of the devices that compute a small sum rightly; by default of all local ones."""
    good = []
    numbers = np.arange(256, dtype=np.float32)
    for device in jax.local_devices() if devices is None else devices:
        try:
            right = float(jnp.sum(jax.device_put(numbers, device))) == float(numbers.sum())
            problem = None if right else "computes a sum wrongly"
        except JaxRuntimeError as error:
            problem = as_sentence(error)
        if problem is None:
            good.append(device)
        elif warn is not None:
            warn(f"{device} is left out: {problem}")
    return good


def error_code(error: RuntimeError) -> str:
    """The first word of an error of JAX's, such as ``UNAVAILABLE``."""
    found = re.match(r"([A-Z_]{3,})(?=:|\s*$)", str(error).lstrip())
    return found[1] if found else "UNKNOWN"


def may_pass(error: RuntimeError) -> bool:
    """Whether another try may succeed."""
    return error_code(error) in _MAY_PASS


def as_sentence(error: BaseException) -> str:
    """The first line of what it says, as a sentence."""
    line = first_line(error)
    return line if line.endswith("!") else line + "."
