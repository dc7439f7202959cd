"""Blocks of language models against PyTorch, and that every primitive stands in some table of references."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from primitive_table import Case, check, draw, run, table
from torch_oracle import functional as F
from torch_oracle import torch

from capibara import compose as ml

p: Any = ml.primitives
HERE = Path(__file__).parent

Q, K, V = draw(2, 5, 4, 6), draw(2, 5, 2, 6, seed=1), draw(2, 5, 2, 6, seed=2)
SCAN = {
    "input": draw(2, 5, 4, 3),
    "step": draw(2, 5, 4, low=0.1),
    "rate": -draw(4, low=0.2),
    "write": draw(2, 5, 2, 3, seed=1),
    "read": draw(2, 5, 2, 3, seed=2),
}
SEGMENTS = np.array([[1, 1, 1, 2, 0], [0, 0, 5, 5, 5]])
NIBBLES = np.random.default_rng(0).integers(0, 16, (6, 6)).astype("uint8")
# Dettmers et al. (2023), appendix E.
NF4 = [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]  # fmt: skip
LATENT = {
    "query": Q[:, :3],
    "latent": draw(2, 3, 5),
    "rotary_key": draw(2, 3, 1, 2),
    "weight": draw(5, 4, 7),
    "cache": draw(2, 1, 7, 7),
}
POINTS = np.array([3, 0, 7, 1])
# One token of each of two sequences, of which the second takes no part, and two of at most three of a third.
STEP = {"starts": np.array([2, 0, 1]), "counts": np.array([1, 0, 2])}
PIECES = [(0, 0, 1, 2), (2, 2, 2, 1)]  # sequence, first column, count, tokens before
PAGES = {"page_table": np.array([[3, 1], [-1, -1], [4, 0]]), **STEP}
SLOTS = {"slots": np.array([1, -1, 3]), **STEP}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    softcap: float | None = None,
) -> torch.Tensor:
    """Softmax attention of grouped heads, from its definition."""
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def band(rows: int, columns: int, start: int = 0, window: int | None = None) -> torch.Tensor:
    """What row ``start + i`` sees: columns up to itself, the last ``window`` of them."""
    back = torch.arange(start, start + rows)[:, None] - torch.arange(columns)
    return (back >= 0) & (back < (columns if window is None else window))


def cached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    at, length = int(position), key.shape[1]
    before = (cache.swapaxes(1, 2) for cache in (key_cache, value_cache))
    keys, values = (
        torch.cat([cache[:, :at], new, cache[:, at + length :]], 1)
        for cache, new in zip(before, (key, value), strict=True)
    )
    seen = band(length, keys.shape[1], at)
    return attend(query, keys, values, seen), keys.swapaxes(1, 2), values.swapaxes(1, 2)


def ragged_cached(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """One token after another."""
    caches = [cache.swapaxes(1, 2).clone() for cache in (key_cache, value_cache)]
    seen = torch.zeros(*slots.shape, key_cache.shape[2], dtype=torch.bool)
    for row, places in enumerate(slots.tolist()):
        for i, place in enumerate(places):
            seen[row, i, : max(place, 0) + 1] = True
            if place >= 0:
                for cache, new in zip(caches, (key, value), strict=True):
                    cache[row, place] = new[row, i]
    out = attend(query, caches[0], caches[1], seen[:, None])
    return out, caches[0].swapaxes(1, 2), caches[1].swapaxes(1, 2)


def latent(
    query: torch.Tensor, key_value: torch.Tensor, rotary_key: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Keys of 4 features for each head and 2 that all share."""
    shared = rotary_key.expand(-1, -1, key_value.shape[2], -1)
    return attend(query, torch.cat([key_value[..., :4], shared], -1), key_value[..., 4:], seen)


def ragged_cached_latent(
    query: torch.Tensor,
    latent_: torch.Tensor,
    rotary_key: torch.Tensor,
    weight: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after another; keys and values of every place."""
    cache = cache[:, 0].clone()
    seen = torch.zeros(*slots.shape, cache.shape[1], dtype=torch.bool)
    for row, places in enumerate(slots.tolist()):
        for i, place in enumerate(places):
            seen[row, i, : max(place, 0) + 1] = True
            if place >= 0:
                cache[row, place] = torch.cat([latent_[row, i], rotary_key[row, i, 0]])
    key_value = torch.einsum("blr,rhd->blhd", cache[..., :-2], weight)
    return latent(query, key_value, cache[:, :, None, -2:], seen[:, None]), cache[:, None]


def kept(
    pool: torch.Tensor, new: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A pool with the new rows of every sequence, and what it then holds of each."""
    pool, size, held = pool.clone(), pool.shape[1], []
    for sequence, first, count, start in PIECES:
        for i in range(count):
            at = start + i
            pool[table[sequence, at // size], at % size] = new[0, first + i]
        places = [(int(table[sequence, at // size]), at % size) for at in range(start + count)]
        held.append(torch.stack([pool[place] for place in places])[None])
    return pool, held


def paged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    **step: Any,
) -> tuple[torch.Tensor, ...]:
    out = torch.zeros_like(query)
    keys, values = kept(key_pages, key, page_table), kept(value_pages, value, page_table)
    for (_, first, count, start), k, v in zip(PIECES, keys[1], values[1], strict=True):
        here = slice(first, first + count)
        out[:, here] = attend(query[:, here], k, v, band(count, start + count, start))
    return out, keys[0], values[0]


def paged_latent(
    query: torch.Tensor,
    latent_: torch.Tensor,
    rotary_key: torch.Tensor,
    weight: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    **step: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_zeros(*query.shape[:3], 3)
    pool, held = kept(pages, torch.cat([latent_[:, :, None], rotary_key], -1), page_table)
    for (_, first, count, start), rows in zip(PIECES, held, strict=True):
        here = slice(first, first + count)
        key_value = torch.einsum("blr,rhd->blhd", rows[:, :, 0, :-2], weight)
        seen = band(count, start + count, start)
        out[:, here] = latent(query[:, here], key_value, rows[..., -2:], seen)
    return out, pool


def from_slots(states: torch.Tensor, of: Any, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``of(columns, state)`` of each sequence, whose state is taken from its slot and put back."""
    states = states.clone()
    for sequence, first, count, _ in PIECES:
        here, slot = slice(first, first + count), int(SLOTS["slots"][sequence])
        out[:, here], states[slot] = (
            x if i == 0 else x[0] for i, x in enumerate(of(here, states[slot : slot + 1].clone()))
        )
    return out, states


def paged_conv(
    input: torch.Tensor, tails: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **step: Any
) -> Any:
    def of(here: slice, tail: torch.Tensor) -> Any:
        return convolve(input[:, here], weight, bias, tail)

    return from_slots(tails, of, torch.zeros_like(input))


def paged_scan(
    memories: torch.Tensor, rate: torch.Tensor, slots: Any, starts: Any, counts: Any, **x: torch.Tensor
) -> Any:
    def of(here: slice, memory: torch.Tensor) -> Any:
        return scan(rate=rate, memory=memory, **{k: v[:, here] for k, v in x.items()})

    return from_slots(memories, of, torch.zeros_like(x["input"]))


def convolve(input: torch.Tensor, weight: torch.Tensor, bias: Any = 0, tail: Any = None) -> Any:
    width, length = weight.shape[0], input.shape[1]
    zeros = input.new_zeros(input.shape[0], width - 1, *input.shape[2:])
    before = zeros if tail is None else tail
    whole = torch.cat([before, input], 1)
    out = sum(whole[:, i : i + length] * weight[i] for i in range(width)) + bias
    return out if tail is None else (out, whole[:, length:])


def runs(segments: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Row, number, start and end of each segment."""
    found = []
    for row, numbers in enumerate(segments.tolist()):
        cuts = [i for i in range(len(numbers) + 1) if i in (0, len(numbers)) or numbers[i] != numbers[i - 1]]
        found += [(row, numbers[a], a, b) for a, b in pairwise(cuts)]
    return found


def convolve_apart(segments: torch.Tensor, input: torch.Tensor, **x: Any) -> torch.Tensor:
    """Each segment by itself."""
    out = torch.zeros_like(input)
    for row, _, a, b in runs(segments):
        out[row, a:b] = convolve(input[row : row + 1, a:b], **x)[0]
    return out


def convolve_ragged(slots: torch.Tensor, input: torch.Tensor, tail: torch.Tensor, **x: Any) -> Any:
    """Each row by itself, without its padding."""
    out, after = torch.zeros_like(input), []
    for row, real in enumerate(slots >= 0):
        some, end = convolve(input[row : row + 1, real], tail=tail[row : row + 1], **x)
        out[row, real] = some[0]
        after.append(end)
    return out, torch.cat(after)


def scan_apart(segments: torch.Tensor, rate: torch.Tensor, **x: torch.Tensor) -> torch.Tensor:
    """Each segment by itself, from a zero state; padding gives zeros."""
    out = torch.zeros_like(x["input"])
    for row, number, a, b in runs(segments):
        if number:
            out[row, a:b] = scan(rate=rate, **{k: v[row : row + 1, a:b] for k, v in x.items()})[0]
    return out


def scan_ragged(slots: torch.Tensor, step: torch.Tensor, **x: torch.Tensor) -> Any:
    return scan(step=step * (slots >= 0)[..., None], **x)


def scan(
    input: torch.Tensor,
    step: torch.Tensor,
    rate: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    memory: Any = None,
) -> Any:
    """The recurrence, one position after another."""
    group = input.shape[2] // write.shape[2]
    write, read = write.repeat_interleave(group, 2), read.repeat_interleave(group, 2)
    state = torch.zeros(*input[:, 0].shape, write.shape[-1]).double() if memory is None else memory
    rows = []
    for t in range(input.shape[1]):
        fresh = (step[:, t, :, None] * input[:, t])[..., None] * write[:, t, :, None]
        state = torch.exp(step[:, t] * rate)[..., None, None] * state + fresh
        rows.append((state * read[:, t, :, None]).sum(-1))
    out = torch.stack(rows, 1)
    return out if memory is None else (out, state)


def turned(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = input.chunk(2, -1)
    turn = torch.complex(cos, sin)[:, None] * torch.complex(a, b)
    return torch.cat([turn.real, turn.imag], -1)


def ranked(pred: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The share of pairs in the right order, ties half."""
    pairs = pred[label][:, None] - pred[~label]
    return ((pairs > 0).double() + (pairs == 0).double() / 2).mean().detach()


def angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    turn = positions[:, None].double() * 100.0 ** -(torch.arange(3).double() / 3)
    return torch.cos(turn), torch.sin(turn)


COUNTS = np.array([[3, 1, 0], [2, 0, 1], [0, 0, 0]])
CASES = {
    "attention": Case(
        p.Attention, {"query": Q, "key": K, "value": V}, lambda **x: attend(**x, seen=band(5, 5))
    ),
    "attention_free": Case(
        lambda: p.Attention(causal=False, softcap=0.7),
        {"query": Q, "key": K[:, :3], "value": V[:, :3]},
        lambda **x: attend(**x, seen=torch.tensor(True), softcap=0.7),
    ),
    "attention_window": Case(
        lambda: p.Attention(window=2),
        {"query": Q, "key": K, "value": V},
        lambda **x: attend(**x, seen=band(5, 5, window=2)),
    ),
    "cached_attention": Case(
        p.CachedAttention,
        {
            "query": Q[:, :2],
            "key": K[:, :2],
            "value": V[:, :2],
            "key_cache": draw(2, 2, 7, 6, seed=3),
            "value_cache": draw(2, 2, 7, 6, seed=4),
            "position": np.array(3),
        },
        cached,
    ),
    "segment_attention": Case(
        lambda: p.SegmentAttention(window=3),
        {"query": Q, "key": K, "value": V, "segments": SEGMENTS},
        lambda segments, **x: attend(
            **x, seen=(band(5, 5, window=3) & (segments[:, :, None] == segments[:, None]))[:, None]
        ),
    ),
    "ragged_cached_attention": Case(
        p.RaggedCachedAttention,
        {
            "query": Q[:, :3],
            "key": K[:, :3],
            "value": V[:, :3],
            "key_cache": draw(2, 2, 7, 6, seed=3),
            "value_cache": draw(2, 2, 7, 6, seed=4),
            "slots": np.array([[-1, 4, 5], [0, -1, 1]]),
        },
        ragged_cached,
    ),
    "paged_attention": Case(
        lambda: p.PagedAttention(2, 1, 3),
        {
            "query": Q[:1],
            "key": K[:1],
            "value": V[:1],
            "key_pages": draw(5, 2, 2, 6, seed=3),
            "value_pages": draw(5, 2, 2, 6, seed=4),
            **PAGES,
        },
        paged,
    ),
    "paged_latent_attention": Case(
        lambda: p.PagedLatentAttention(2, 1, 3),
        {
            "query": Q[:1],
            "latent": draw(1, 5, 5),
            "rotary_key": draw(1, 5, 1, 2),
            "weight": draw(5, 4, 7),
            "pages": draw(5, 2, 1, 7),
            **PAGES,
        },
        lambda latent, **x: paged_latent(latent_=latent, **x),
    ),
    "paged_conv": Case(
        lambda: p.PagedConv(2, 1, 3),
        {
            "input": draw(1, 5, 3),
            "weight": draw(4, 3),
            "bias": draw(3),
            "tails": draw(4, 3, 3, seed=1),
            **SLOTS,
        },
        paged_conv,
    ),
    "paged_scan": Case(
        lambda: p.PagedScan(2, 1, 3, 2),
        {**{k: v if k == "rate" else v[:1] for k, v in SCAN.items()}, "memories": draw(4, 4, 3, 3), **SLOTS},
        paged_scan,
    ),
    "paged_positions": Case(
        lambda: p.PagedPositions(2, 1, 3),
        {"like": np.zeros((1, 5)), "starts": STEP["starts"]},
        lambda like, starts: torch.tensor([[2, 0, 1, 2, 3]]),
        gradient=False,
    ),
    "latent_attention": Case(
        lambda: p.LatentAttention(window=3),
        {"query": Q, "key_value": draw(2, 5, 4, 7), "rotary_key": draw(2, 5, 1, 2)},
        lambda **x: latent(**x, seen=band(5, 5, window=3)),
    ),
    "segment_latent_attention": Case(
        p.SegmentLatentAttention,
        {"query": Q, "key_value": draw(2, 5, 4, 7), "rotary_key": draw(2, 5, 1, 2), "segments": SEGMENTS},
        lambda segments, **x: latent(
            **x, seen=(band(5, 5) & (segments[:, :, None] == segments[:, None]))[:, None]
        ),
    ),
    "cached_latent_attention": Case(
        p.CachedLatentAttention,
        LATENT | {"position": np.array(3)},
        lambda latent, position, **x: ragged_cached_latent(
            latent_=latent, slots=(position + torch.arange(3)).expand(2, -1), **x
        ),
    ),
    "ragged_cached_latent_attention": Case(
        p.RaggedCachedLatentAttention,
        LATENT | {"slots": np.array([[-1, 4, 5], [0, -1, 1]])},
        lambda latent, **x: ragged_cached_latent(latent_=latent, **x),
    ),
    "causal_conv": Case(
        p.CausalConv, {"input": draw(2, 5, 3), "weight": draw(4, 3), "bias": draw(3)}, convolve
    ),
    "cached_conv": Case(
        p.CachedConv,
        {"input": draw(2, 5, 3), "weight": draw(4, 3), "bias": draw(3), "tail": draw(2, 3, 3, seed=1)},
        convolve,
    ),
    "conv_without_bias": Case(
        lambda: p.CausalConv(use_bias=False), {"input": draw(2, 5, 3), "weight": draw(4, 3)}, convolve
    ),
    "segment_conv": Case(
        p.SegmentConv,
        {"input": draw(2, 5, 2, 3), "weight": draw(3, 2, 3), "bias": draw(2, 3), "segments": SEGMENTS},
        convolve_apart,
    ),
    "ragged_cached_conv": Case(
        lambda: p.RaggedCachedConv(use_bias=False),
        {
            "input": draw(3, 5, 3),
            "weight": draw(4, 3),
            "tail": draw(3, 3, 3, seed=1),
            "slots": np.array([[-1, 4, -1, 5, -1], [-1, -1, -1, -1, -1], [0, 1, 2, 3, 4]]),
        },
        convolve_ragged,
    ),
    "segment_scan": Case(lambda: p.SegmentScan(2), {**SCAN, "segments": SEGMENTS}, scan_apart),
    "ragged_continued_scan": Case(
        lambda: p.RaggedContinuedScan(3),
        {**SCAN, "memory": draw(2, 4, 3, 3), "slots": np.array([[-1, 4, -1, 5, -1], [0, 1, 2, -1, -1]])},
        scan_ragged,
    ),
    "selective_scan": Case(lambda: p.SelectiveScan(2), SCAN, scan),
    "continued_scan": Case(lambda: p.ContinuedScan(3), {**SCAN, "memory": draw(2, 4, 3, 3)}, scan),
    "rotary_table": Case(lambda: p.RotaryTable(6, 100.0), {"positions": POINTS}, angles, gradient=False),
    "rotate": Case(
        p.Rotate, {"input": draw(2, 5, 3, 4), "cos": draw(5, 2), "sin": draw(5, 2, seed=1)}, turned
    ),
    "rotate_by_row": Case(
        lambda: p.Rotate(by_row=True),
        {"input": draw(2, 5, 3, 4), "cos": draw(2, 5, 2), "sin": draw(2, 5, 2, seed=1)},
        lambda input, cos, sin: torch.stack([turned(*row) for row in zip(input, cos, sin, strict=True)]),
    ),
    "rotate_neighbours": Case(
        lambda: p.Rotate(partial=True, interleaved=True, last=True),
        {"input": draw(2, 5, 3, 7), "cos": draw(5, 2), "sin": draw(5, 2, seed=1)},
        lambda input, cos, sin: torch.cat(
            [input[..., :3], turned(input[..., [3, 5, 4, 6]], cos, sin)[..., [0, 2, 1, 3]]], -1
        ),
    ),
    "ragged_positions": Case(
        p.RaggedPositions,
        {"segments": np.array([[0, 1, 1, 0], [1, 1, 1, 1]]), "start": np.array([3, 0])},
        lambda segments, start: (
            torch.tensor([[0, 3, 4, 0], [0, 1, 2, 3]]),
            torch.tensor([[-1, 3, 4, -1], [0, 1, 2, 3]]),
            torch.tensor([5, 4]),
        ),
        gradient=False,
    ),
    "positions": Case(
        p.Positions,
        {"like": draw(2, 4), "start": np.array(3)},
        lambda like, start: (start + torch.arange(4), start + 4),
        gradient=False,
    ),
    "dense": Case(
        p.Dense, {"input": draw(2, 3, 4), "weight": draw(4, 5)}, lambda input, weight: input @ weight
    ),
    "project": Case(
        p.Project,
        {"input": draw(2, 3, 4), "weight": draw(4, 2, 5)},
        lambda input, weight: torch.tensordot(input, weight, 1),
    ),
    "merge": Case(
        p.Merge,
        {"input": draw(2, 3, 2, 4), "weight": draw(2, 4, 5)},
        lambda input, weight: torch.tensordot(input, weight, 2),
    ),
    "quantised_product": Case(
        lambda: p.QuantisedProduct("int8", (2, 3), (4,), 4),
        {"input": draw(2, 5, 2, 3), "codes": np.arange(-12, 12).reshape(4, 6), "scales": draw(4, 2)},
        lambda input, codes, scales: input.flatten(-2) @ (codes * scales.repeat_interleave(4, 1)[:, :6]).T,
        rtol=1e-5,  # sums are float32
    ),
    "quantised_product_of_four_bits": Case(
        lambda: p.QuantisedProduct("nf4", (5,), (2, 3), 4),
        {"input": draw(2, 5), "codes": NIBBLES[:, ::2] | NIBBLES[:, 1::2] << 4, "scales": draw(6, 2)},
        lambda input, codes, scales: (
            input
            @ (
                torch.tensor(NF4)[NIBBLES[:, :5].astype("int64")].double()
                * scales.repeat_interleave(4, 1)[:, :5]
            ).T
        ).unflatten(-1, (2, 3)),
        rtol=1e-5,
    ),
    "unembed": Case(
        p.Unembed, {"input": draw(2, 3, 4), "table": draw(6, 4)}, lambda input, table: input @ table.T
    ),
    "lookup": Case(
        p.Lookup,
        {"table": draw(6, 4), "indices": np.array([[0, 5, 5], [9, -3, 2]])},
        lambda table, indices: F.embedding(indices.clamp(0, 5), table),
    ),
    "group_merge": Case(p.GroupMerge, {"input": draw(3, 4, 2)}, lambda input: input.flatten(-2)),
    "rms_norm": Case(
        lambda: p.Normalise("rms", 0.01),
        {"input": draw(3, 4), "scale": draw(4)},
        lambda input, scale: F.rms_norm(input, (4,), scale, 0.01),
    ),
    "layer_norm": Case(
        lambda: p.Normalise("layer", 0.01),
        {"input": draw(3, 4), "scale": draw(4)},
        lambda input, scale: F.layer_norm(input, (4,), scale, None, 0.01),
    ),
    "layer_norm_of_two_dimensions": Case(
        lambda: p.Normalise("layer", 0.01, offset=1.0, dims=2),
        {"input": draw(3, 2, 4), "scale": draw(2, 4)},
        lambda input, scale: F.layer_norm(input, (2, 4), scale + 1, None, 0.01),
    ),
    "rms_norm_of_two_dimensions": Case(
        lambda: p.Normalise("rms", 0.01, offset=1.0, dims=2),
        {"input": draw(3, 2, 4), "scale": draw(2, 4)},
        lambda input, scale: F.rms_norm(input, (2, 4), scale + 1, 0.01),
    ),
    "rms_norm_in_groups": Case(
        lambda: p.Normalise("rms", 0.01, groups=3),
        {"input": draw(2, 6), "scale": draw(6)},
        lambda input, scale: F.rms_norm(input.reshape(2, 3, 2), (2,), None, 0.01).reshape(2, 6) * scale,
    ),
    "cast_to_compute": Case(lambda: p.Cast("compute"), {"input": draw(2, 3)}, lambda input: input),
    "rows": Case(p.Rows, {"input": draw(3, 4, 2)}, lambda input: input.reshape(-1, 2)),
    "zero_state": Case(
        lambda: p.ZeroState(5),
        {"input": draw(3, 4)},
        lambda input: torch.zeros(3, 5).double(),
        gradient=False,
    ),
    "auc": Case(
        p.AUCCore,
        {"pred": np.array([0.1, 0.4, 0.4, 0.8, 0.4, -1.0]), "label": np.array([1, 0, 1, 1, 0, 0]) > 0},
        ranked,
        gradient=False,
    ),
    "class_score": Case(
        lambda: p.ClassScore("precision", "none"),
        {"input": COUNTS},
        lambda input: input.diagonal().double() / input.sum(0).clamp(min=1),
        gradient=False,
    ),
    "class_score_macro": Case(
        lambda: p.ClassScore("recall", "macro"),
        {"input": COUNTS},
        lambda input: torch.tensor((3 / 4 + 0 / 3 + 0) / 3).double(),
        gradient=False,
    ),
}


@pytest.fixture(scope="module")
def found() -> Any:
    return run(CASES)


@pytest.mark.thin(12)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, found: Any) -> None:
    check(f"language/{name}", CASES[name], found[name])


# ---- nothing is left out ----------------------------------------------------------------------------------

# Primitives whose outputs are random, many or of no fixed sign: where their references are, and under what name.
ELSEWHERE = {
    "Dropout": ("test_randomness", "Dropout"),
    "PagedCodesAttention": ("test_paged_codes", "PagedCodesAttention"),
    "PrincipalComponents": ("test_library_metrics", "PrincipalComponents"),
    "Quantise": ("test_library", "VectorQuantiser"),
    "RandInt": ("test_library_arrays", "RandInt"),
    "Randn": ("test_library_arrays", "Randn"),
    "RandomUniform": ("test_library_arrays", "RandomUniform"),
    "Route": ("test_library_metrics", "Route"),
    "TsnePJoint": ("test_library_metrics", "TsnePJoint"),
}


def test_every_primitive_has_a_reference() -> None:
    """A new primitive needs a row in a table; those run on all backends (``test_three_backends``)."""
    cases = [c for t in ("elements", "arrays", "operations") for c in table(t).CASES.values()] + list(
        CASES.values()
    )
    there = {type(case.make()).__name__ for case in cases}
    missing = set(p.__all__) - there - set(ELSEWHERE)
    assert not missing, f"no row for {sorted(missing)}"
    assert not set(ELSEWHERE) & there
    assert set(ELSEWHERE) <= set(p.__all__)
    for where, name in ELSEWHERE.values():
        assert name in (HERE / f"{where}.py").read_text(encoding="utf-8"), (where, name)
