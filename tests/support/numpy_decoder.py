"""The language model in NumPy, float64, written from the papers' formulas and sharing no code with Capibara.

An oracle: slow, plain and sequential. Attention goes position by position (Vaswani et al., 2017; grouped heads:
Ainslie et al., 2023), rotary positions are complex numbers (Su et al., 2021), the state-space recurrence runs
one position after another (Dao and Gu, 2024, equation 1), the quantiser compares all distances (van den Oord et
al., 2017), and each token asks its experts one by one (Shazeer et al., 2017). Settings are read from any object with
the attributes of the ``[model]`` table; parameters and state are nested dicts of arrays under the model's own paths.

The quantiser's straight-through gradient is not the derivative of its output. With ``surrogate`` the oracle computes
the function whose derivative it is: codes stay those of an earlier call, and ``x + (code - x)`` keeps its bracket.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def silu(x: Array) -> Array:
    return x / (1.0 + np.exp(-x))


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0.0)


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: Array, scale: Array, epsilon: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def layer_norm(x: Array, scale: Array, bias: Array, epsilon: float) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def swiglu(x: Array, p: Mapping[str, Any]) -> Array:
    return (silu(x @ p["gate"]["weight"]) * (x @ p["up"]["weight"])) @ p["down"]["weight"]


def mixture(x: Array, p: Mapping[str, Any], settings: Any) -> Array:
    """Each token through the experts with its highest scores, one token and one expert after another."""
    rows = x.reshape(-1, x.shape[-1])
    scores = rows @ p["router"]
    scores = softmax(scores) if settings.router == "softmax" else 1 / (1 + np.exp(-scores))
    out = swiglu(rows, p["shared"]) if settings.shared_dim else np.zeros_like(rows)
    for i, row in enumerate(rows):
        chosen = np.argsort(-scores[i])[: settings.per_token]
        weights = scores[i, chosen] / (scores[i, chosen].sum() if settings.normalise else 1) * settings.scale
        for weight, expert in zip(weights, chosen, strict=True):
            matrices = {key: {"weight": p[key][expert]} for key in ("gate", "up", "down")}
            out[i] += weight * swiglu(row, matrices)
    return out.reshape(x.shape)


def turned(x: Array, theta: float) -> Array:
    """Rotary positions of ``x [batch, sequence, heads, d]``: halves are real and imaginary parts of d/2 numbers."""
    half = x.shape[-1] // 2
    z = x[..., :half] + 1j * x[..., half:]
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    z = z * np.exp(1j * angle)[:, None, :]
    return np.concatenate([z.real, z.imag], axis=-1)


def attention(x: Array, p: Mapping[str, Any], theta: float, window: int | None = None) -> Array:
    """``x [batch, sequence, embed]`` through causal self-attention, one position after another."""
    query, key, value = (np.einsum("btd,dhn->bthn", x, p[k]["weight"]) for k in ("query", "key", "value"))
    shared = query.shape[2] // key.shape[2]
    query = turned(query, theta)
    # Query head h reads key head h // shared.
    key = np.repeat(turned(key, theta), shared, axis=2)
    value = np.repeat(value, shared, axis=2)
    out = np.zeros_like(query)
    for t in range(x.shape[1]):
        start = 0 if window is None else max(0, t - window + 1)
        seen = slice(start, t + 1)
        scores = np.einsum("bhn,bshn->bhs", query[:, t], key[:, seen]) / np.sqrt(query.shape[-1])
        out[:, t] = np.einsum("bhs,bshn->bhn", softmax(scores), value[:, seen])
    return np.einsum("bthn,hnd->btd", out, p["out"]["weight"])


def latent_attention(x: Array, p: Mapping[str, Any], settings: Any) -> Array:
    """``x [batch, sequence, embed]`` through multi-head latent attention, one position after another."""
    s = settings.latent
    rank, plain = s.kv_rank, s.head_dim
    down = x @ p["latent_down"]["weight"]
    latent = rms_norm(down[..., :rank], p["latent_norm"]["scale"], s.epsilon)
    both = np.einsum("btr,rhn->bthn", latent, p["latent_up"]["weight"])
    low = rms_norm(x @ p["query_down"]["weight"], p["query_norm"]["scale"], s.epsilon)
    query = np.einsum("btr,rhn->bthn", low, p["query_up"]["weight"])

    def turned_pairs(x: Array) -> Array:
        halves = np.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)
        # Scores do not depend on the order of features, which is the same in queries and keys.
        return turned(halves, settings.rope_theta)

    shared = turned_pairs(down[:, :, None, rank:])
    query = np.concatenate([query[..., :plain], turned_pairs(query[..., plain:])], axis=-1)
    key = np.concatenate([both[..., :plain], np.repeat(shared, both.shape[2], axis=2)], axis=-1)
    value = both[..., plain:]
    out = np.zeros_like(value)
    for t in range(x.shape[1]):
        scores = np.einsum("bhn,bshn->bhs", query[:, t], key[:, : t + 1]) / np.sqrt(query.shape[-1])
        out[:, t] = np.einsum("bhs,bshn->bhn", softmax(scores), value[:, : t + 1])
    return np.einsum("bthn,hnd->btd", out, p["out"]["weight"])


def causal_conv(x: Array, weight: Array, bias: Array) -> Array:
    """``y[t] = bias + Σ weight[i] x[t - (width - 1) + i]``, zeros before the start; ``x [batch, sequence, …]``."""
    width = len(weight)
    y = np.zeros_like(x) + bias
    for t in range(x.shape[1]):
        for i in range(width):
            if t - (width - 1) + i >= 0:
                y[:, t] += weight[i] * x[:, t - (width - 1) + i]
    return y


def recurrence(x: Array, step: Array, rate: Array, write: Array, read: Array) -> Array:
    """``h ← exp(step·rate) h + step x ⊗ write``, ``y = h · read``, one position after another.

    ``x [batch, sequence, heads, dim]``, ``step [batch, sequence, heads]``, ``rate [heads]``,
    ``write``/``read [batch, sequence, groups, state]``, where each group serves adjacent heads.
    """
    write, read = (np.repeat(v, x.shape[2] // v.shape[2], axis=2) for v in (write, read))
    memory = np.zeros((x.shape[0], *x.shape[2:], write.shape[-1]))
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        memory = np.exp(step[:, t] * rate)[:, :, None, None] * memory
        memory = memory + np.einsum("bh,bhp,bhn->bhpn", step[:, t], x[:, t], write[:, t])
        y[:, t] = np.einsum("bhpn,bhn->bhp", memory, read[:, t])
    return y


def state_space(x: Array, p: Mapping[str, Any], settings: Any, epsilon: float) -> Array:
    """``x [batch, sequence, embed]`` through the selective state-space layer; biases that ``p`` lacks are zero."""

    def project(name: str) -> Array:
        return np.einsum("btd,dhn->bthn", x, p[name]["weight"]) + p[name].get("bias", 0.0)

    def mixed(name: str) -> Array:
        conv = p[f"{name}_conv"]
        found = causal_conv(project(name), conv["weight"], conv.get("bias", np.zeros(())))
        return silu(found) if settings.activation == "silu" else np.maximum(found, 0.0)

    value, write, read = mixed("value"), mixed("write"), mixed("read")
    step = softplus(x @ p["step"]["weight"] + p["step"].get("bias", 0.0) + p["step_bias"])
    step = np.clip(step, settings.step_min, np.inf if settings.step_max is None else settings.step_max)
    y = recurrence(value, step, -np.exp(p["log_rate"]), write, read) + p["skip"] * value
    y = y * silu(project("gate"))
    if settings.norm:
        # Each group's heads by themselves.
        grouped = y.reshape(*x.shape[:2], settings.groups, -1)
        y = rms_norm(grouped, p["norm"]["scale"].reshape(settings.groups, -1), epsilon)
    return y.reshape(*x.shape[:2], -1) @ p["out"]["weight"] + p["out"].get("bias", 0.0)


def nearest(x: Array, codebook: Array) -> Array:
    """Index of the nearest row of ``codebook`` for each vector of ``x [n, d]``."""
    return ((x[:, None, :] - codebook[None, :, :]) ** 2).sum(-1).argmin(-1)


class Decoder:
    """The model. ``surrogate`` holds ``(code, code - x)`` of every quantiser of an earlier :meth:`forward`."""

    def __init__(self, settings: Any, surrogate: list[tuple[Array, Array]] | None = None) -> None:
        self.s = settings
        self.surrogate = surrogate
        self.seen: list[tuple[Array, Array]] = []
        self.commitments: list[float] = []
        self.indices: list[Array] = []

    def forward(self, params: Mapping[str, Any], state: Mapping[str, Any], tokens: Array) -> Array:
        """Logits ``[batch, sequence, vocab]``."""
        s = self.s
        self.seen, self.commitments, self.indices = [], [], []
        table = params["embedding"]["weight"]
        x = table[tokens]
        for kind, p, v in self._layers(params, state):
            normed = rms_norm(x, p[f"{kind}_norm"]["scale"], s.norm_epsilon)
            if kind == "attention" and s.latent.kv_rank:
                x = x + latent_attention(normed, p[kind], s)
            elif kind == "attention":
                x = x + attention(normed, p[kind], s.rope_theta)
            elif kind == "ssm":
                x = x + state_space(normed, p[kind], s.ssm, s.norm_epsilon)
            else:
                x = x + self._quantise(normed, v["vq"]["quantiser"]["codebook"]) @ p["vq"]["out"]["weight"]
            if s.mlp == "none":
                continue
            normed = rms_norm(x, p["mlp_norm"]["scale"], s.norm_epsilon)
            has_experts = "router" in p["mlp"]
            x = x + (mixture(normed, p["mlp"], s.experts) if has_experts else swiglu(normed, p["mlp"]))
        x = rms_norm(x, params["final_norm"]["scale"], s.norm_epsilon)
        return x @ (table.T if s.tie_embeddings else params["head"]["weight"])

    def loss(self, params: Mapping[str, Any], state: Mapping[str, Any], tokens: Array) -> float:
        """Mean of ``-log p(next token)``, in nats, plus the commitment losses."""
        probabilities = softmax(self.forward(params, state, tokens[:, :-1]))
        chosen = np.take_along_axis(probabilities, tokens[:, 1:, None].astype(int), axis=-1)
        return float(-np.log(chosen).mean() + sum(self.commitments))

    def _quantise(self, x: Array, codebook: Array) -> Array:
        if self.surrogate is not None:
            codes, offset = self.surrogate[len(self.commitments)]
            out = x + offset
        else:
            index = nearest(x.reshape(-1, x.shape[-1]), codebook)
            codes = codebook[index].reshape(x.shape)
            self.indices.append(index)
            self.seen.append((codes, codes - x))
            out = codes
        self.commitments.append(self.s.vq.commitment_weight * float(((x - codes) ** 2).mean()))
        return out

    def _layers(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        """``(kind, parameters, state)`` of every block, in order, out of the stacked ones."""
        s = self.s
        first = s.experts.first_dense
        kinds = [s.pattern[i % len(s.pattern)] for i in range(s.num_layers)]
        alike = (
            len(set(kinds[:first])) == 1
        )  # dense blocks of one kind are repeated, others are a turn of their own
        for i, kind in enumerate(kinds[:first]):
            path, row = (("first_blocks",), i) if alike else (("first_blocks", f"layer_{i}"), 0)
            yield kind, *(rows(tree, path, row) for tree in (params, state))
        count = s.num_layers - first
        turn = min(len(s.pattern), count)
        full = count // turn
        for i, kind in enumerate(kinds[first:]):
            group, row = ("blocks", i // turn) if i < full * turn else ("last_blocks", 0)
            members = turn if group == "blocks" else count - full * turn
            path = (group,) if members == 1 else (group, f"layer_{i % turn}")
            yield kind, *(rows(tree, path, row) for tree in (params, state))


def rows(tree: Mapping[str, Any], path: tuple[str, ...], row: int) -> Any:
    """The subtree at ``path`` with the given row of every stacked array; ``{}`` where there is none."""
    for key in path:
        tree = tree.get(key, {})

    def pick(node: Any) -> Any:
        return {k: pick(v) for k, v in node.items()} if isinstance(node, Mapping) else node[row]

    return pick(tree)


def as_float64(tree: Any) -> Any:
    """Nested dicts (and tuples of them) with every array in float64."""
    if isinstance(tree, tuple):
        return tuple(as_float64(v) for v in tree)
    if isinstance(tree, Mapping):
        return {k: as_float64(v) for k, v in tree.items()}
    return np.asarray(tree).astype("float64")
