"""Composed models against hand-written JAX: what a call costs, and what building and compiling a model costs.

The calls are of a three-layer MLP small enough that dispatch is most of the time, and on NumPy and PyTorch of one of
two layers beside the same arithmetic written by hand. Building and compiling is that of a
12-layer model of the size of GPT-2 small, without ``Repeat`` and without XLA, and the same with 96 layers.

Where ``CAPIBARA_MITHRIL_PYTHON`` names an interpreter that has Mithril, the same is measured there (``_mithril.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["gpt", "run"]

CALLS = 200
"""Calls in one measurement: one alone is shorter than a clock can tell."""


def gpt(layers: int, dimension: int = 768, heads: int = 12, vocab: int = 50257) -> Any:
    """A decoder of GPT-2's sizes: attention and a feed-forward layer with GELU, block after block."""
    from capibara import compose as ml

    def block() -> Any:
        model = ml.Model()
        for key in ("cos", "sin"):
            model.add_input(key, ("sequence", dimension // heads // 2), "float")
        model |= ml.LayerNorm()(input="input", output="normed")
        attention = ml.SelfAttention(dimension, heads)
        model |= attention(input="normed", cos="cos", sin="sin", output="attended")
        model |= ml.Add()(left="input", right="attended", output="middle")
        model |= ml.LayerNorm()(input="middle", output="normed_again")
        model |= ml.Linear(4 * dimension)(input="normed_again", output="wide")
        model |= ml.Gelu()(input="wide", output="active")
        model |= ml.Linear(dimension)(input="active", output="narrow")
        model |= ml.Add()(left="middle", right="narrow", output="output")
        model.expose("output")
        return model

    model = ml.Model()
    model |= ml.Embedding(vocab, dimension)(input="tokens", output="hidden_0")
    model |= ml.Positions()(like="tokens", start=0, output="positions")
    model |= ml.RotaryTable(dimension // heads)(positions="positions", cos="cos", sin="sin")
    for i in range(layers):
        model |= block()(input=f"hidden_{i}", cos="cos", sin="sin", output=f"hidden_{i + 1}")
    model |= ml.LayerNorm()(input=f"hidden_{layers}", output="last")
    model |= ml.Linear(vocab, False)(input="last", output="logits")
    model.expose("logits")
    return model


def run(rounds: int = 40) -> list[dict[str, Any]]:
    """Rows: time of a call of hand-written JAX / time of ours; seconds to build and compile, and how these grow."""
    from capibara.measure import interleaved

    rows = []
    for what, constants in (("MLP of 3 layers", False), ("MLP of 3 layers with a constant", True)):
        for name, ours, hand in _calls(constants):
            table = interleaved({"capibara": _many(ours), "jax.jit": _many(hand)}, rounds, 2)
            print(table)
            rows.append(
                {
                    "what": f"evaluate {name}, {what}",
                    "shape": "8 × 32-64-64-8",
                    "peer": "hand-written jax.jit",
                    "ratio": table.ratio("jax.jit", "capibara"),
                    "microseconds": table["capibara"].median / CALLS * 1e6,
                }
            )
    rows += _portable(rounds)
    ours = {row["what"]: row["ratio"] for row in rows}
    seconds = {layers: _build(layers) for layers in (2, 12, 24, 96)}
    shape = "d 768, 12 heads, vocabulary 50257"
    for layers in (12, 96):
        before = 2 if layers == 12 else 12
        rows.append(
            {
                "what": f"build and compile {layers} layers, without XLA",
                "shape": shape,
                "peer": f"{before} layers, in proportion",
                "ratio": seconds[before] * (layers / before) / seconds[layers],
                "seconds": seconds[layers],
            }
        )
    return rows + _beside_mithril(ours, seconds)


def _portable(rounds: int) -> list[dict[str, Any]]:
    """Calls of NumPy and PyTorch models beside the same arithmetic written by hand, gradients by hand or autograd."""
    from capibara.measure import interleaved

    rows = []
    for library, calls in (("NumPy", _in_numpy()), ("PyTorch", _in_torch())):
        for name, (ours, hand) in calls.items():
            table = interleaved({"capibara": _many(ours), "by hand": _many(hand)}, rounds, 2)
            print(table)
            rows.append(
                {
                    "what": f"evaluate {name}, MLP of 2 layers on {library}",
                    "shape": "8 × 16-16-1",
                    "peer": f"plain {library}",
                    "ratio": table.ratio("by hand", "capibara"),
                    "microseconds": table["capibara"].median / CALLS * 1e6,
                }
            )
    return rows


def _small(backend: Any) -> Any:
    """A compiled MLP, its parameters, its input and the cotangent of its output."""
    from capibara import compose as ml

    model = ml.Model()
    model |= ml.Linear(16)(input="x", output="h")
    model |= ml.Relu()(input="h", output="a")
    model |= ml.Linear(1)(input="a", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [8, 16]})
    params = compiled.randomize_params(0)
    return compiled, params, backend.randn(8, 16), backend.ones(8, 1)


def _in_numpy() -> dict[str, Any]:
    import numpy as np

    from capibara import compose as ml

    compiled, params, x, ones = _small(ml.NumpyBackend())
    w0, b0, w1, b1 = (params[layer][key] for layer in ("linear", "linear_1") for key in ("weight", "bias"))

    def forward() -> Any:
        return np.maximum(x @ w0 + b0, 0) @ w1 + b1

    def gradients() -> Any:
        before = x @ w0 + b0
        hidden = np.maximum(before, 0)
        back = (ones @ w1.T) * (before > 0)
        return hidden @ w1 + b1, (x.T @ back, back.sum(0), hidden.T @ ones, ones.sum(0))

    given = {"x": x}
    return {
        "values": (lambda: compiled.evaluate(params, given), forward),
        "gradients": (lambda: compiled.evaluate(params, given, {"y": ones}), gradients),
    }


def _in_torch() -> dict[str, Any]:
    import torch

    from capibara import compose as ml

    compiled, params, x, ones = _small(ml.TorchBackend())
    w0, b0, w1, b1 = leaves = [
        params[layer][key].detach().requires_grad_(True)
        for layer in ("linear", "linear_1")
        for key in ("weight", "bias")
    ]

    def computed() -> Any:
        return torch.relu(x @ w0 + b0) @ w1 + b1

    def forward() -> Any:
        with torch.no_grad():
            return computed()

    def gradients() -> Any:
        out = computed()
        return out, torch.autograd.grad(out, leaves, ones)

    given = {"x": x}
    return {
        "values": (lambda: compiled.evaluate(params, given), forward),
        "gradients": (lambda: compiled.evaluate(params, given, {"y": ones}), gradients),
    }


def _beside_mithril(ours: dict[str, float], seconds: dict[int, float]) -> list[dict[str, Any]]:
    python = os.environ.get("CAPIBARA_MITHRIL_PYTHON")
    if not python:
        return []
    script = Path(__file__).with_name("_mithril.py")
    done = subprocess.run(
        [python, str(script)], check=True, stdout=subprocess.PIPE, text=True, cwd=script.parent
    )
    theirs = json.loads(done.stdout.splitlines()[-1])
    peer = f"mithril, JAX {theirs['jax']}, Python {theirs['python']}"
    rows = [
        {
            "what": f"build and compile {layers} layers, without XLA",
            "shape": "d 768, 12 heads, vocabulary 50257",
            "peer": peer,
            "ratio": theirs["seconds"][str(layers)] / seconds[layers],
            "ours_seconds": seconds[layers],
            "peer_seconds": theirs["seconds"][str(layers)],
        }
        for layers in (12, 24)
    ]
    for name, ratio in theirs["calls"].items():
        call, _, constant = name.partition(", ")
        what = f"evaluate {call}, MLP of 3 layers{' with a constant' if constant else ''}"
        rows.append(
            {
                "what": f"{what}, each beside its own jax.jit",
                "shape": "8 × 32-64-64-8",
                "peer": peer,
                "ratio": ours[what] / ratio,
                "peer_ratio": ratio,
            }
        )
    return rows


def _build(layers: int) -> float:
    """Seconds to build and compile, the best of a few: what else the machine does only adds."""
    from capibara import compose as ml

    backend = ml.JaxBackend()
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        ml.compile(gpt(layers), backend, shapes={"tokens": [2, 128]})
        best = min(best, time.perf_counter() - start)
    return best


def _many(call: Callable[[], Any]) -> Callable[[], Any]:
    def calls() -> Any:
        result = None
        for _ in range(CALLS):
            result = call()
        return result

    return calls


def _calls(constant: bool) -> list[tuple[str, Callable[[], Any], Callable[[], Any]]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from capibara import compose as ml

    scale = np.linspace(0.5, 1.5, 32).astype("float32")
    model = ml.Model()
    model |= ml.Multiply()(left="input", right="scale" if constant else 1.0, output="scaled")
    model.add(ml.MLP(32, [64, 64], 8), "layers", input="scaled", output="output")
    model.expose("output")
    compiled = ml.compile(
        model, shapes={"input": [8, 32]}, constant_keys={"scale": scale} if constant else None
    )
    params = compiled.randomize_params(0)

    def forward(params: Any, inputs: Any) -> Any:
        h = inputs["input"] * scale if constant else inputs["input"]
        for i in range(3):
            layer = params["layers"][f"layer_{i}"]
            h = h @ layer["weight"] + layer["bias"]
            h = jnp.maximum(h, 0) if i < 2 else h
        return {"output": h}

    def backward(params: Any, inputs: Any, cotangents: Any) -> Any:
        outputs, pull = jax.vjp(lambda p: forward(p, inputs), params)
        return outputs, pull(cotangents)[0]

    inputs, cotangents = {"input": jnp.ones((8, 32))}, {"output": jnp.ones((8, 8))}
    f, b = jax.jit(forward), jax.jit(backward)
    return [
        ("forward", lambda: compiled.evaluate(params, inputs), lambda: f(params, inputs)),
        (
            "forward and backward",
            lambda: compiled.evaluate(params, inputs, cotangents),
            lambda: b(params, inputs, cotangents),
        ),
    ]


if __name__ == "__main__":
    for row in run():
        print(row)
