"""Codecs of fixed width on a real model's matrices: bits and errors, scales and headers included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from minilm import needs_weights, weights

from capibara.compress.codecs.fixed import INT4, INT8, NF4_CODEC, Fixed
from capibara.compress.safetensors_file import SafetensorsFile


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize(
    ("codec", "chosen", "bits", "error"),
    [
        (INT8, {"group": 8, "coded": True, "step": 0.000846}, 8.05, 0.0050),
        (INT4, {"group": 32}, 4.25, 0.085),
        (NF4_CODEC, {"group": 32}, 4.25, 0.077),
        (NF4_CODEC, {"group": 48}, 4.20, 0.081),
    ],
)
def test_bits_and_errors(codec: Fixed, chosen: dict[str, Any], bits: float, error: float) -> None:
    path = weights()
    assert path is not None
    size = count = 0
    lost = whole = 0.0
    with SafetensorsFile(path) as source:
        for name, form, shape in source:
            if len(shape) != 2 or not form.is_float:
                continue
            original = source.read(name).reshape(-1)
            payload = codec.encode(original, form, shape, chosen)
            decoded = codec.decode(memoryview(payload), form, shape, chosen).view("<f4")
            original = original.view("<f4")
            size, count = size + len(payload), count + original.size
            lost += float(np.square(decoded - original, dtype=np.float64).sum())
            whole += float(np.square(original, dtype=np.float64).sum())
    assert size * 8 / count <= bits
    assert (lost / whole) ** 0.5 <= error
