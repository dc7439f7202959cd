"""What Hugging Face's own models compute, and the record of it for machines that have neither them nor PyTorch.

``python tests/support/transformers_oracle.py`` writes the record anew.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
GOLDEN = Path(__file__).parents[1] / "families" / "golden"
PROMPT, NEW = 8, 50


def build(name: str) -> Any:
    """The model of one of ``published.CONFIGS``, with the weights that are drawn there."""
    import published
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(published.model_type(name), **published.CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for tensor, parameter in stored(model).items():
            parameter.copy_(torch.from_numpy(published.draw(tensor, tuple(parameter.shape))))
    return model


def stored(model: Any, *, gradients: bool = False) -> dict[str, Any]:
    """The model's parameters (or their gradients) by their names in files, where each matrix of an expert has one."""
    old = model.config.model_type == "mixtral"
    names = (
        {"gate": "w1", "up": "w3", "down": "w2"} if old else {k: f"{k}_proj" for k in ("gate", "up", "down")}
    )
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if gradients else parameter
        name = name.replace(".mlp.", ".block_sparse_moe.") if old else name
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = value
            continue
        prefix, _, parts = name.rpartition(".")
        for expert, one in enumerate(value):
            keys = parts.removesuffix("_proj").split("_")
            for key, matrix in zip(keys, one.chunk(len(keys)), strict=True):
                found[f"{prefix}.{expert}.{names[key]}.weight"] = matrix
    return found


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens), use_cache=False).logits.numpy()


def gradients(model: Any, tokens: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss of the next tokens, and its gradient in every parameter."""
    import torch

    model.zero_grad()
    given = torch.from_numpy(tokens)
    found = model(given[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), given[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: one.numpy().copy() for name, one in stored(model, gradients=True).items()}


def greedy(model: Any, tokens: np.ndarray, count: int) -> np.ndarray:
    """``tokens`` and the likeliest ``count`` tokens after them, without a cache."""
    for _ in range(count):
        following = logits(model, tokens)[:, -1].argmax(-1)
        tokens = np.concatenate([tokens, following[:, None]], axis=1)
    return tokens


def record() -> None:
    """Write the record."""
    import published

    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {}
    for name in published.CONFIGS:
        model = build(name)
        text = published.tokens(rows=1)
        loss, grads = gradients(model, text)
        arrays[f"{name}: logits"] = logits(model, text)[0]
        facts[name] = {
            "config": json.loads(model.config.to_json_string(use_diff=False)),
            "shapes": {tensor: list(one.shape) for tensor, one in stored(model).items()},
            "loss": loss,
            "gradients": {
                tensor: [
                    float((one * published.draw(f"{tensor} projected", one.shape)).sum()),
                    float(np.abs(one).max()),
                ]
                for tensor, one in grads.items()
            },
            "continued": greedy(model, text[:, :PROMPT], NEW)[0].tolist(),
        }
        print(name, round(loss, 3))
    GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN / "logits.npz", **arrays)  # type: ignore[arg-type]
    (GOLDEN / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    record()
