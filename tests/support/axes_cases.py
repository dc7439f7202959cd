"""Training over combinations of mesh axes, against one device: ``python axes_cases.py few|all``.

Every case is a layout of a small ``ModularCapibaraModel``: mesh axes, accumulation, rematerialisation, how the
optimizer is sharded. It takes a few steps with AdamW; the loss and gradient norm of each step and the parameters after
the last are compared with those of one device without any of it. Prints a line of JSON: for each case the largest
differences, of losses and norms relative to the one device's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from tiny_run import tiny_config

from capibara.core import ModularCapibaraModel
from capibara.train import TpuDistributedTrainer

STEPS = 4
LORA = ("finetune.method=lora", "finetune.rank=4")
ATTENTION = ("model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.embed_dim=32")
MODELS: dict[str, tuple[str, ...]] = {
    "attention": ATTENTION,
    "local": (
        *ATTENTION,
        "model.pattern=['local','attention']",
        "model.window=5",
        "model.attention_sinks=true",
    ),
    "ssm": (*ATTENTION, "model.pattern=['ssm','attention']"),
    "vq": (*ATTENTION, "model.pattern=['vq','attention']"),
    "experts": (*ATTENTION, "model.experts.count=4", "model.experts.per_token=2", "model.experts.dim=16"),
    "packed": ATTENTION,
    "deep": (*ATTENTION, "model.num_layers=4"),
    "deep packed": (*ATTENTION, "model.num_layers=4", "model.tie_embeddings=false"),
    "deep ssm": (*ATTENTION, "model.num_layers=4", "model.pattern=['ssm','attention']"),
    "deep vq": (
        *ATTENTION,
        "model.num_layers=4",
        "model.pattern=['vq','attention']",
        "model.vq.dead_code_threshold=0",
    ),
    "deep experts": (
        *ATTENTION,
        "model.num_layers=4",
        "model.experts.count=4",
        "model.experts.per_token=2",
        "model.experts.dim=16",
    ),
    "deep adapters": (*ATTENTION, "model.num_layers=4", *LORA),
    "deep adapters in four bits": (*ATTENTION, "model.num_layers=4", *LORA, "finetune.base=nf4"),
    "deep experts, adapters": (
        *ATTENTION,
        "model.num_layers=4",
        "model.experts.count=4",
        "model.experts.per_token=2",
        "model.experts.dim=16",
        *LORA,
    ),
    "deep pairs": (*ATTENTION, "model.num_layers=4", "finetune.objective=dpo"),
    "deep pairs, adapters": (*ATTENTION, "model.num_layers=4", "finetune.objective=dpo", *LORA),
    "small": ("model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2", "model.embed_dim=16"),
}
"""Settings by kind of block; ``packed`` has rows of several texts."""

# name: (kind of model, mesh axes, options of the trainer)
Case = tuple[str, dict[str, int], dict[str, Any]]
CASES: dict[str, Case] = {
    "data": ("attention", {"data": 8}, {}),
    "data, accumulation": ("attention", {"data": 4}, {"gradient_accumulation_steps": 2}),
    "data, optimizer sharded": ("attention", {"data": 8}, {"optimizer_sharding": True}),
    "fsdp": ("attention", {"fsdp": 8}, {"use_gradient_checkpointing": True}),
    "data × fsdp": ("attention", {"data": 2, "fsdp": 4}, {"gradient_accumulation_steps": 2}),
    "tensor": ("attention", {"model": 4}, {}),
    "data × tensor, offload": ("attention", {"data": 2, "model": 4}, {"activation_offloading": True}),
    "fsdp × tensor, remat, accumulation": (
        "attention",
        {"fsdp": 4, "model": 2},
        {"gradient_accumulation_steps": 2, "use_gradient_checkpointing": True},
    ),
    "context": ("attention", {"context": 8}, {}),
    "data × context": ("attention", {"data": 2, "context": 4}, {"gradient_accumulation_steps": 2}),
    "fsdp × context × tensor": (
        "attention",
        {"fsdp": 2, "context": 2, "model": 2},
        {"use_gradient_checkpointing": True},
    ),
    "small, fsdp × context × tensor": ("small", {"fsdp": 2, "context": 2, "model": 2}, {}),
    "packed, data × context": ("packed", {"data": 2, "context": 4}, {"use_gradient_checkpointing": True}),
    "packed, data × tensor": ("packed", {"data": 4, "model": 2}, {"gradient_accumulation_steps": 2}),
    "local, context × tensor": ("local", {"context": 4, "model": 2}, {}),
    "ssm, data × tensor": ("ssm", {"data": 4, "model": 2}, {"optimizer_sharding": True}),
    "ssm, fsdp × context": ("ssm", {"fsdp": 2, "context": 4}, {}),
    "vq, data × fsdp": ("vq", {"data": 4, "fsdp": 2}, {}),
    "vq, data × context": ("vq", {"data": 4, "context": 2}, {}),
    "experts, expert": ("experts", {"expert": 4}, {}),
    "experts, data × expert × tensor": (
        "experts",
        {"data": 2, "expert": 2, "model": 2},
        {"gradient_accumulation_steps": 2, "use_gradient_checkpointing": True},
    ),
    "experts, fsdp × expert × context": ("experts", {"fsdp": 2, "expert": 2, "context": 2}, {}),
    "pipeline": ("deep", {"pipeline": 4}, {"gradient_accumulation_steps": 4}),
    "pipeline × data": ("deep", {"pipeline": 2, "data": 4}, {"gradient_accumulation_steps": 4}),
    "pipeline × fsdp": ("deep", {"pipeline": 2, "fsdp": 4}, {"gradient_accumulation_steps": 2}),
    "deep, fsdp": ("deep", {"fsdp": 4}, {"gradient_accumulation_steps": 2}),
    "packed, pipeline × data × tensor, remat": (
        "deep packed",
        {"pipeline": 2, "data": 2, "model": 2},
        {"gradient_accumulation_steps": 4, "use_gradient_checkpointing": True},
    ),
    "pipeline × context": ("deep", {"pipeline": 2, "context": 4}, {"gradient_accumulation_steps": 2}),
    "ssm, pipeline × data": (
        "deep ssm",
        {"data": 4, "pipeline": 2},
        {"optimizer_sharding": True, "gradient_accumulation_steps": 2},
    ),
    "vq, pipeline": ("deep vq", {"pipeline": 2}, {}),
    "vq, pipeline × fsdp": ("deep vq", {"pipeline": 2, "fsdp": 2}, {}),
    "experts, pipeline × expert": (
        "deep experts",
        {"pipeline": 2, "expert": 4},
        {"gradient_accumulation_steps": 4},
    ),
    "adapters, pipeline": ("deep adapters", {"pipeline": 4}, {"gradient_accumulation_steps": 4}),
    "adapters, pipeline × data × tensor": (
        "deep adapters",
        {"pipeline": 2, "data": 2, "model": 2},
        {"gradient_accumulation_steps": 2, "use_gradient_checkpointing": True},
    ),
    "adapters in four bits, pipeline × fsdp": (
        "deep adapters in four bits",
        {"pipeline": 2, "fsdp": 4},
        {"gradient_accumulation_steps": 2},
    ),
    "experts with adapters, pipeline × expert": (
        "deep experts, adapters",
        {"pipeline": 2, "expert": 4},
        {"gradient_accumulation_steps": 4},
    ),
    "pairs, pipeline": ("deep pairs", {"pipeline": 4}, {"gradient_accumulation_steps": 4}),
    "pairs, pipeline × data × tensor": (
        "deep pairs",
        {"pipeline": 2, "data": 2, "model": 2},
        {"gradient_accumulation_steps": 4},
    ),
    "pairs with adapters, fsdp": ("deep pairs, adapters", {"fsdp": 4}, {"gradient_accumulation_steps": 2}),
    "pairs with adapters, pipeline × fsdp": (
        "deep pairs, adapters",
        {"pipeline": 2, "fsdp": 4},
        {"gradient_accumulation_steps": 2},
    ),
    "pipeline × tensor": ("deep", {"pipeline": 4, "model": 2}, {"gradient_accumulation_steps": 8}),
}
FEW = ("small, fsdp × context × tensor",)


# The same over 4 processes of 8 devices: process 0 has the first 8 of a mesh. The axes written first go over processes.
SPREAD: dict[str, Case] = {
    "data × fsdp × tensor, accumulation": (
        "attention",
        {"data": 2, "fsdp": 4, "model": 4},
        {"gradient_accumulation_steps": 2},
    ),
    "pipeline × data × tensor": (
        "deep",
        {"pipeline": 4, "data": 4, "model": 2},
        {"gradient_accumulation_steps": 4},
    ),
    "experts, expert × fsdp × context": (
        "experts",
        {"expert": 4, "fsdp": 2, "context": 4},
        {"gradient_accumulation_steps": 2, "use_gradient_checkpointing": True},
    ),
}


def batches(kind: str, steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(steps):
        batch = {"tokens": random.integers(0, 64, (16, 17)).astype("int32")}
        if "packed" in kind:
            batch["segments"] = np.sort(random.integers(1, 4, (16, 17)), axis=1).astype("int32")
            batch["weights"] = random.uniform(0.0, 1.0, (16, 17)).astype("float32")
        if "pairs" in kind:
            batch["segments"] = np.sort(random.integers(0, 3, (16, 17)), axis=1)[:, ::-1].astype("int32")
            batch["weights"] = random.integers(0, 2, (16, 17)).astype("float32")
            batch["reference"] = random.normal(-20, 4, (16, 2)).astype("float32")
        found.append(batch)
    return found


def whole(leaf: Any) -> np.ndarray:
    """All of an array, of which other processes may hold parts."""
    return np.asarray(leaf if leaf.is_fully_addressable else process_allgather(leaf, tiled=True))


def run(kind: str, axes: dict[str, int], options: dict[str, Any], steps: int = STEPS) -> Any:
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    mesh = jax.sharding.Mesh(devices, tuple(axes))
    config = tiny_config(
        "unused",
        *MODELS[kind],
        "model.vocab_size=64",
        "train.batch_size=16",
        f"train.steps={max(steps, 10)}",
        "optimizer.warmup_steps=0",
        "precision.compute_dtype=float32",
    )
    model = ModularCapibaraModel(config)
    first = model.init(0)[0]
    if config.finetune.base != "none":  # drawn, the weights would be codes of nothing
        first = model.params = model.with_adapters(model.without_adapters().init(0)[0])
    trainer = TpuDistributedTrainer(model, mesh, **options)
    seen = []
    report = trainer.train(
        batches(kind, steps), on_step=lambda step, metrics: seen.append(metrics["grad_norm"])
    )
    params = {
        jax.tree_util.keystr(path, simple=True, separator="."): whole(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(trainer.params)
    }
    moved = max(
        float(np.max(np.abs(a - np.asarray(b))))
        for a, b in zip(params.values(), jax.tree.leaves(first), strict=True)
    )
    text = trainer.lower(batches(kind)[0]).as_text() if {"context", "pipeline"} & axes.keys() else ""
    facts = {"moved": moved, "permutes": text.count("collective_permute")}
    parts = sum(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(trainer.params))
    facts["part"] = parts / sum(x.size for x in params.values())
    return np.array(report.losses), np.array(seen), params, facts


def main(names: Any) -> dict[str, Any]:
    alone: dict[str, Any] = {}
    out = {}
    for name in names:
        kind, axes, options = CASES[name]
        if kind not in alone:
            alone[kind] = run(kind, {"data": 1}, {})
        losses, norms, params, _ = alone[kind]
        got_losses, got_norms, got, facts = run(kind, axes, options)
        gap = {key: float(np.max(np.abs(got[key] - params[key]))) for key in params}
        worst = max(gap, key=lambda key: gap[key])
        out[name] = {
            "loss": float(np.max(np.abs(got_losses / losses - 1))),
            "norm": float(np.max(np.abs(got_norms / norms - 1))),
            "params": gap[worst],
            "worst": worst,
            **facts,
        }
        print(name, out[name], file=sys.stderr, flush=True)
    return out


if __name__ == "__main__":
    assert jax.device_count() == 8
    chosen = FEW if sys.argv[1] == "few" else CASES if sys.argv[1] == "all" else sys.argv[1:]
    print("RESULT", json.dumps(main(chosen)))
