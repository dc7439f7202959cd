"""Codecs on MiniLM's trained weights, with and without calibration, at equal bytes and on held-out text.

The matrices of two of the encoder's six layers (12) are coded, and nothing else. ``low_rank`` and four bits with error
feedback (GPTQ, with our own scales) have sizes of their own, and uniform rounding gets as many bytes, each tensor with
a step of its own; with calibration it is compared with itself without at 2, 3 and 4 bits too. The error is that of
the layers' outputs on text that calibration has not seen, sqrt(Σ‖Δy‖² / Σ‖y‖²); the cosine that of whole sentence
embeddings.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import numpy as np

from benchmarks._minilm import encode, find_model, hidden, windows

__all__ = ["run"]


def _round_trip(codec: str, weight: np.ndarray, settings: dict[str, Any]) -> tuple[np.ndarray, int]:
    from capibara.compress.codecs.protocol import get_codec
    from capibara.compress.formats import get_format

    form = get_format("F32")
    payload = get_codec(codec).encode(weight.reshape(-1).view(np.uint32), form, weight.shape, settings)
    back = get_codec(codec).decode(memoryview(payload), form, weight.shape, {})
    return back.view(np.float32).reshape(weight.shape), len(payload)


def _uniform(weight: np.ndarray, size: int, more: dict[str, Any]) -> tuple[np.ndarray, int]:
    """The finest rounding that takes no more bytes."""
    scale = float(np.sqrt((weight.astype(np.float64) ** 2).mean()))
    low, high = -8.0, 6.0
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (
            (low, middle)
            if _round_trip("uniform", weight, {"step": scale * 2.0**middle, **more})[1] <= size
            else (middle, high)
        )
    return _round_trip("uniform", weight, {"step": scale * 2.0**high, **more})


def run(
    steps: tuple[float, ...] = (0.5, 1.0),
    widths: tuple[float, ...] = (2.0, 3.0, 4.0),
    layers: tuple[int, ...] = (1, 4),
    calibration: int = 128,
    held_out: int = 48,
) -> list[dict[str, Any]]:
    """Rows of ratios: the peer's output error / that of the codec, so that above 1 the codec is the better."""
    from safetensors.numpy import load_file

    from capibara.compress.calibration.activations import collect

    folder = find_model()
    params = {k: v for k, v in load_file(folder / "model.safetensors").items() if v.dtype == np.float32}
    tokens = windows(folder, calibration + held_out)
    batches = [tokens[i : i + 32] for i in range(0, calibration, 32)]
    known = collect(hidden, batches, params)
    test = collect(hidden, [tokens[calibration:]], params)
    names = [n for n in known if n.startswith(tuple(f"encoder.layer.{i}." for i in layers))]
    original = encode(params, tokens[calibration:])

    def measure(
        codec: str, settings: dict[str, Any], calibrated: bool, sizes: dict[str, int] | None
    ) -> dict[str, Any]:
        """Code all matrices; with ``sizes`` by uniform rounding to those."""
        new, bytes_of, wrong, whole = dict(params), {}, 0.0, 0.0
        for name in names:
            w = np.ascontiguousarray(params[name])
            more = known[name].settings() if calibrated else {"input_axes": list(known[name].axes)}
            if sizes is not None:
                new[name], bytes_of[name] = _uniform(w, sizes[name], more)
            else:
                new[name], bytes_of[name] = _round_trip(codec, w, {**settings, **more})
            power = float(((w @ test[name].second) * w).sum())
            wrong += test[name].error(w, new[name]) ** 2 * power
            whole += power
        cosine = float((encode(new, tokens[calibration:]) * original).sum(1).mean())
        count = sum(params[n].size for n in names)
        return {
            "error": math.sqrt(wrong / whole),
            "cosine": cosine,
            "bits": 8 * sum(bytes_of.values()) / count,
            "bytes": bytes_of,
        }

    def row(what: str, found: dict[str, Any], name: str, peer: dict[str, Any]) -> dict[str, Any]:
        return {
            "what": what,
            "shape": f"{len(names)} matrices, {found['bits']:.2f} bits",
            "peer": name,
            "ratio": peer["error"] / found["error"],
            "error": found["error"],
            "peer error": peer["error"],
            "cosine": found["cosine"],
            "peer cosine": peer["cosine"],
        }

    rows = []
    for bits in widths:
        sizes = {n: int(params[n].size * bits / 8) for n in names}
        found, plain = (measure("uniform", {}, calibrated, sizes) for calibrated in (True, False))
        rows.append(row("uniform calibrated", found, "uniform plain at equal bytes", plain))
    four = measure("int4", {"group": 64}, True, None)
    found = measure("uniform", {}, True, four["bytes"])
    rows.append(row("uniform calibrated", found, "four bits with error feedback (GPTQ) at equal bytes", four))
    for settings, codec in (
        *(({"relative_step": s}, "low_rank") for s in steps),
        ({"pattern": "2:4"}, "sparse"),
        ({"density": 0.5}, "sparse"),
    ):
        for calibrated in (False, True) if codec == "low_rank" else (True,):
            found = measure(codec, settings, calibrated, None)
            if codec == "low_rank":
                peer = measure("uniform", {}, calibrated, found["bytes"])
                name = f"uniform {'calibrated' if calibrated else 'plain'} at equal bytes"
            else:
                peer, name = measure(codec, settings, False, None), "the same by magnitude"
            text = ", ".join(f"{k} {v}" for k, v in settings.items())
            rows.append(row(f"{codec} {'calibrated' if calibrated else 'plain'}, {text}", found, name, peer))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibration", type=int, default=128, help="windows of 64 tokens")
    for row in run(calibration=parser.parse_args().calibration):
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})
