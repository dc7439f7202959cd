"""The same models in Mithril, run by an interpreter that has it (it wants Python 3.12 and an older JAX than today's).

``python benchmarks/_mithril.py`` prints JSON: seconds to build and compile, and ratios of a call to one of JAX alone.
:mod:`benchmarks.compose` starts it where ``CAPIBARA_MITHRIL_PYTHON`` names such an interpreter.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

CALLS, ROUNDS = 200, 20


def gpt(layers: int, dimension: int = 768, heads: int = 12, vocab: int = 50257) -> Any:
    """A decoder of GPT-2's sizes, written with what the library has for it."""
    ml, nn = importlib.import_module("mithril"), importlib.import_module("mithril.models")

    def attention() -> Any:
        model = nn.Model()
        model |= nn.Linear(3 * dimension).connect("input", output="wide")
        sizes = model.input.shape
        model |= nn.Split(3, axis=-1).connect(model.wide, output="parts")
        q, k, v = (
            model.parts[i].reshape((sizes[0], sizes[1], heads, -1)).transpose((0, 2, 1, 3)) for i in range(3)
        )
        model |= nn.ScaledDotProduct().connect(query=q, key=k, value=v, output="mixed")
        model |= nn.Linear(dimension).connect(model.mixed.transpose((0, 2, 1, 3)).reshape(sizes[:3]))
        return model

    def block() -> Any:
        model = nn.Model()
        model += nn.LayerNorm().connect("input")
        model += attention()
        model |= nn.Add().connect("input", model.cout, "middle")
        model += nn.LayerNorm()
        model += nn.Linear(4 * dimension)
        model += nn.Gelu()
        model += nn.Linear(dimension)
        model |= nn.Add().connect("middle", right=model.cout)
        return model

    model = nn.Model()
    model += nn.Embedding(num_embeddings=vocab, dim=dimension).connect("tokens")
    for _ in range(layers):
        model += block()
    model += nn.LayerNorm()
    model += nn.Linear(vocab, use_bias=False).connect(output=ml.IOKey("logits"))
    model.set_differentiability({model.tokens: False})
    return model


def build_seconds(layers: int) -> float:
    """Seconds to build and compile, without XLA."""
    ml = importlib.import_module("mithril")
    backend = ml.JaxBackend()
    start = time.perf_counter()
    ml.compile(gpt(layers), backend, shapes={"tokens": [2, 128]}, data_keys={"tokens"}, jit=False)
    return time.perf_counter() - start


def calls(constant: bool) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Forward, and forward and backward, of an MLP of three layers: here and in JAX alone."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    ml, nn = importlib.import_module("mithril"), importlib.import_module("mithril.models")
    scale = jnp.asarray(np.linspace(0.5, 1.5, 32), "float32")
    model = nn.Model()
    # Its Multiply also takes numbers: that these keys are arrays has to be said.
    left, right = ml.IOKey("input", type=ml.Tensor), ml.IOKey("scale", type=ml.Tensor) if constant else 1.0
    model |= nn.Multiply().connect(left, right, "scaled")
    model |= nn.Linear(64).connect("scaled", weight="w0", bias="b0", output="h0")
    model |= nn.Relu().connect("h0", "a0")
    model |= nn.Linear(64).connect("a0", weight="w1", bias="b1", output="h1")
    model |= nn.Relu().connect("h1", "a1")
    model |= nn.Linear(8).connect("a1", weight="w2", bias="b2", output=ml.IOKey("output"))
    compiled = ml.compile(
        model,
        ml.JaxBackend(),
        shapes={"input": [8, 32]},
        constant_keys={"scale": scale} if constant else {},
        data_keys={"input"},
        jit=True,
    )
    params = compiled.randomize_params()

    def forward(params: Any, data: Any) -> Any:
        h = data["input"] * scale if constant else data["input"]
        for i in range(3):
            h = h @ params[f"w{i}"].T + params[f"b{i}"]
            h = jnp.maximum(h, 0) if i < 2 else h
        return {"output": h}

    def backward(params: Any, data: Any, cotangents: Any) -> Any:
        outputs, pull = jax.vjp(lambda p: forward(p, data), params)
        return outputs, pull(cotangents)[0]

    data, cotangents = {"input": jnp.ones((8, 32))}, {"output": jnp.ones((8, 8))}
    f, b = jax.jit(forward), jax.jit(backward)
    return {
        "forward": (lambda: compiled.evaluate(params, data), lambda: f(params, data)),
        "forward and backward": (
            lambda: compiled.evaluate(params, data, output_gradients=cotangents),
            lambda: b(params, data, cotangents),
        ),
    }


def ratio(theirs: Callable[[], Any], hand: Callable[[], Any]) -> float:
    """Time of JAX alone / time of the library, taking turns; medians."""
    import jax

    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 2):
        for call, kept in zip((theirs, hand), times, strict=True):
            start = time.perf_counter()
            for _ in range(CALLS - 1):
                call()
            jax.block_until_ready(call())
            if turn > 1:
                kept.append(time.perf_counter() - start)
    return statistics.median(times[1]) / statistics.median(times[0])


def main() -> None:
    # Mithril copies models recursively: at 12 layers Python's own limit stops it.
    sys.setrecursionlimit(200_000)
    jax = importlib.import_module("jax")
    result: dict[str, Any] = {"jax": jax.__version__, "python": sys.version.split()[0]}
    result["calls"] = {
        f"{name}{', a constant' if constant else ''}": ratio(*pair)
        for constant in (False, True)
        for name, pair in calls(constant).items()
    }
    result["seconds"] = {layers: build_seconds(layers) for layers in (2, 12, 24)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
