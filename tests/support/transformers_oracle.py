"""What Hugging Face's own models compute, and the record of it for machines that have neither them nor PyTorch.

``python tests/support/transformers_oracle.py`` writes the records anew, one of each family; with families' names as
arguments only theirs.
"""

from __future__ import annotations

import json
import math
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
    from transformers import AutoConfig

    config = AutoConfig.for_model(published.model_type(name), **published.CONFIGS[name])
    kind = class_of(name)
    make = kind._from_config if name in published.ENCODERS else kind.from_config
    model = make(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for tensor, parameter in stored(model).items():
            parameter.copy_(torch.from_numpy(published.draw(tensor, tuple(parameter.shape))))
    return model


def class_of(name: str) -> Any:
    """The class in transformers that loads one of ``published.CONFIGS``."""
    import published
    import transformers

    if name in published.ENCODERS:
        return getattr(transformers, published.CONFIGS[name]["architectures"][0])
    return transformers.AutoModelForCausalLM


def outputs(
    model: Any, tokens: np.ndarray, types: np.ndarray, mask: np.ndarray | None = None
) -> dict[str, Any]:
    """What an encoder gives, by our names: ``hidden`` or ``logits``, and ``pooled`` where there is a pooler."""
    import torch

    given: dict[str, Any] = {"token_type_ids": torch.from_numpy(types)}
    if mask is not None:
        places = np.maximum(mask.cumsum(1) - 1, 0)
        given |= {"attention_mask": torch.from_numpy(mask), "position_ids": torch.from_numpy(places)}
    found = model(torch.from_numpy(tokens), **given)
    base = model.base_model
    pooled = None if base.pooler is None else base(torch.from_numpy(tokens), **given).pooler_output
    seen = {
        "hidden": getattr(found, "last_hidden_state", None),
        "logits": getattr(found, "prediction_logits", getattr(found, "logits", None)),
        "pooled": pooled,
    }
    return {key: value for key, value in seen.items() if value is not None}


def projected(out: Any, draw: Any) -> Any:
    """A scalar loss of an encoder's outputs: values times drawn numbers, summed, by the root of their count."""
    sizes = {key: tuple(value.shape) for key, value in out.items()}
    return sum(
        (out[key] * draw(f"{key} projected", sizes[key])).sum() * math.prod(sizes[key]) ** -0.5
        for key in sorted(out)
    )


def encoder_gradients(
    model: Any, tokens: np.ndarray, types: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """:func:`projected` of an encoder's outputs, and its gradient in every parameter."""
    import published
    import torch

    model.zero_grad()
    loss = projected(outputs(model, tokens, types), lambda *of: torch.from_numpy(published.draw(*of)))
    loss.backward()
    found = stored(model, gradients=True).items()
    return loss.item(), {name: one.numpy().copy() for name, one in found if one is not None}


def stored(model: Any, *, gradients: bool = False) -> dict[str, Any]:
    """The model's parameters and buffers (or their gradients) by their names in files, where each matrix of an expert
    has one.

    What Capibara leaves out, the head of a pair of sentences, is not among them.
    """
    old = model.config.model_type == "mixtral"
    names = (
        {"gate": "w1", "up": "w3", "down": "w2"} if old else {k: f"{k}_proj" for k in ("gate", "up", "down")}
    )
    found = {}
    values = {name: one.grad if gradients else one for name, one in model.named_parameters()}
    kept = model.state_dict()
    values |= {name: one * 0 if gradients else one for name, one in model.named_buffers() if name in kept}
    for name, value in values.items():
        if "seq_relationship" in name:
            continue
        name = name.replace(".mlp.", ".block_sparse_moe.") if old else name
        together = model.config.model_type == "gpt_oss"  # files have them as the model does
        if together or not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = value
            continue
        prefix, _, parts = name.rpartition(".")
        for expert, one in enumerate(value):
            keys = parts.removesuffix("_proj").split("_")
            for key, matrix in zip(keys, one.chunk(len(keys)), strict=True):
                found[f"{prefix}.{expert}.{names[key]}.weight"] = matrix
    return found


def logits(model: Any, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    """Logits of ``tokens``; a ``mask`` is 0 for padding, which is not counted in positions."""
    import torch

    given: dict[str, Any] = {}
    if mask is not None and getattr(model.config, "use_bias", False) and model.config.model_type == "mamba2":
        # Theirs takes the bias of its first projection for what padding before a text gives to the convolution.
        out = np.zeros((*tokens.shape, model.config.vocab_size), np.float32)
        for row, real in enumerate(mask == 1):
            out[row, real] = logits(model, tokens[row : row + 1, real])
        return out
    if mask is not None:
        places = np.maximum(mask.cumsum(1) - 1, 0)
        given = {"attention_mask": torch.from_numpy(mask), "position_ids": torch.from_numpy(places)}
    with torch.no_grad():
        return model(torch.from_numpy(tokens), use_cache=False, **given).logits.numpy()


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


def recorded_facts() -> dict[str, Any]:
    """What is recorded of each model but its logits."""
    files = sorted(GOLDEN.glob("*.json"))
    return {name: fact for file in files for name, fact in json.loads(file.read_text()).items()}


def recorded_logits() -> dict[str, np.ndarray]:
    """The recorded logits, ``"NAME: logits"``."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(GOLDEN.glob("*.npz")):
        with np.load(file) as arrays:
            found |= dict(arrays)
    return found


def record(family: str) -> None:
    """Write the record of a family."""
    import published

    arrays: dict[str, np.ndarray] = {}
    found: dict[str, Any] = {}
    for name in published.CONFIGS:
        if published.model_type(name) != family:
            continue
        model = build(name)
        text = published.tokens(rows=1)
        more: dict[str, Any] = {}
        if name in published.ENCODERS:
            types = published.token_types(published.CONFIGS[name], text.shape)["token_types"]
            loss, grads = encoder_gradients(model, text, types)
            for key, value in outputs(model, text, types).items():
                arrays[f"{name}: {key}"] = value.detach().numpy()[0]
        else:
            loss, grads = gradients(model, text)
            arrays[f"{name}: logits"] = logits(model, text)[0]
            more = {"continued": greedy(model, text[:, :PROMPT], NEW)[0].tolist()}
        found[name] = {
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
            **more,
        }
        print(name, round(loss, 3))
    GOLDEN.mkdir(exist_ok=True)
    np.savez_compressed(GOLDEN / f"{family}.npz", **arrays)  # type: ignore[arg-type]
    (GOLDEN / f"{family}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import published

    for one in sys.argv[1:] or dict.fromkeys(map(published.model_type, published.CONFIGS)):
        record(one)
