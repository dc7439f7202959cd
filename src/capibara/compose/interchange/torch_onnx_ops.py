"""The operations of :mod:`capibara.compose.backends.torch_ops` as ONNX is to see them.

The PyTorch backend writes some operations in terms of others, so that three backends share one source. A runtime of
ONNX knows convolutions, pooling and recurrences as a whole, and keeps sizes open that a loop in Python would write
in. Those, and what reads a number while it runs, are put otherwise here; the results are the same.
"""

from __future__ import annotations

import builtins
import math
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from capibara.compose.backends import torch_ops
from capibara.compose.backends.batches import any_batch
from capibara.compose.backends.portable import language, windows
from capibara.compose.backends.portable import latent as portable_latent
from capibara.compose.backends.torch_ops import *  # noqa: F403

__all__ = ["ExactNumbers"]
__all__ += torch_ops.__all__

Tensor = torch.Tensor
Row = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


class ExactNumbers(TorchFunctionMode):
    """Numbers in a trace as they are: PyTorch's exporter writes Python's floats in float32, also beside float64, and
    ``torch.as_tensor`` of a size that is left open writes in the size that was traced."""

    ARITHMETIC = frozenset(
        {"add", "sub", "mul", "div", "true_divide", "pow", "rsub", "rdiv", "radd", "rmul", "rpow"}
    )
    OTHERS = frozenset(
        {"eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "where", "remainder", "logaddexp"}
    )
    NAMES = ARITHMETIC | OTHERS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = getattr(func, "__name__", "").strip("_")
        if name == "as_tensor" and isinstance(args[0], torch.SymInt | torch.SymFloat):
            return torch.scalar_tensor(args[0], **options)
        if name == "as_tensor" and isinstance(args[0], float) and options.get("dtype") == torch.float64:
            return torch.tensor(args[0], dtype=torch.float64)
        if name in self.ARITHMETIC and builtins.any(isinstance(a, torch.SymInt) for a in args):
            # Its translation of an array with an open size takes arrays only.
            kind = next((a.dtype for a in args if isinstance(a, Tensor)), torch.int64)
            sizes: list[Any] = list(args)
            for i, size in enumerate(args):
                if isinstance(size, torch.SymInt):
                    sizes[i] = torch.scalar_tensor(sizes[i], dtype=kind)
            args = tuple(sizes)
        if name in self.NAMES and builtins.any(
            isinstance(a, Tensor) and a.dtype == torch.float64 for a in args
        ):
            args = tuple(torch.tensor(a, dtype=torch.float64) if isinstance(a, float) else a for a in args)
        return func(*args, **options)


# ---- windows --------------------------------------------------------------------------------------------------


def _even(padding: Pairs) -> Row | None:
    """One number for each dimension, where both sides have the same."""
    return tuple(a for a, _ in padding) if builtins.all(a == b for a, b in padding) else None


def _padded(x: Tensor, padding: Pairs, fill: float) -> Tensor:
    return functional.pad(x, [n for pair in padding[::-1] for n in pair], value=fill)


def convolution(
    x: Tensor, weight: Tensor, stride: Row, padding: Pairs, dilation: Row, groups: int, accumulate: str
) -> Tensor:
    wide = torch.promote_types(x.dtype, getattr(torch, accumulate))
    run = functional.conv1d if len(stride) == 1 else functional.conv2d
    row = _even(padding)
    given = x.to(wide) if row is not None else _padded(x.to(wide), padding, 0.0)
    return run(given, weight.to(wide), None, stride, row or 0, dilation, groups).to(x.dtype)


@any_batch
def max_pool(x: Tensor, kernel: Row, stride: Row, padding: Pairs, dilation: Row) -> Tensor:
    if not x.dtype.is_floating_point:
        return windows.max_pool(x, kernel, stride, padding, dilation)
    row = _even(padding)
    if row is None or builtins.any(2 * p > k for p, k in zip(row, kernel, strict=True)):
        x, row = _padded(x, padding, -math.inf), (0,) * len(kernel)
    if len(kernel) == 1:  # as an image one pixel high: PyTorch's own for signals closes their length
        wide = functional.max_pool2d(x[:, :, None], (1, *kernel), (1, *stride), (0, *row), (1, *dilation))
        return wide[:, :, 0]
    return functional.max_pool2d(x, kernel, stride, row, dilation)


@any_batch
def avg_pool(
    x: Tensor, kernel: Row, stride: Row, padding: Pairs, dilation: Row, count_padding: bool
) -> Tensor:
    row = _even(padding)
    if (
        row is None
        or builtins.any(d != 1 for d in dilation)
        or builtins.any(2 * p > k for p, k in zip(row, kernel, strict=True))
    ):
        return windows.avg_pool(x, kernel, stride, padding, dilation, count_padding)
    run = functional.avg_pool1d if len(kernel) == 1 else functional.avg_pool2d
    return run(x, kernel, stride, row, False, count_padding)


# ---- recurrences ----------------------------------------------------------------------------------------------


def _recurrence(
    op: str,
    x: Tensor,
    states: tuple[Tensor, ...],
    weights: tuple[Tensor, Tensor],
    bias: Tensor,
    **attributes: Any,
) -> tuple[Tensor, ...]:
    """A recurrence of ONNX over ``x [batch, sequence, in]``, its gates in ONNX' order, and the states at its end."""
    batch, length = x.shape[0], x.shape[1]
    hidden = states[0].shape[-1]
    out = torch.onnx.ops.symbolic_multi_out(
        op,
        (
            x.transpose(0, 1),
            *(w.transpose(0, 1)[None] for w in weights),
            bias[None],
            None,  # every row is as long as the longest
            *(s[None] for s in states),
        ),
        {"hidden_size": hidden, **attributes},
        dtypes=(x.dtype,) * (1 + len(states)),
        shapes=((length, 1, batch, hidden), *((1, batch, hidden) for _ in states)),
    )
    return out[0][:, 0].transpose(0, 1), *(last[0] for last in out[1:])


def _gates(array: Tensor, order: Row) -> Tensor:
    """The gates, side by side in the last dimension, in another order."""
    size = array.shape[-1] // len(order)
    return torch.cat([array[..., i * size : (i + 1) * size] for i in order], -1)


def rnn_scan(x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return _recurrence("RNN", x, (hidden,), (w_ih, w_hh), torch.cat([bias, torch.zeros_like(bias)]))


def lstm_scan(
    x: Tensor, hidden: Tensor, cell: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor
) -> tuple[Tensor, ...]:
    order = (0, 3, 1, 2)  # input, output, forget, candidate
    both = torch.cat([_gates(bias, order), torch.zeros_like(bias)])
    return _recurrence("LSTM", x, (hidden, cell), (_gates(w_ih, order), _gates(w_hh, order)), both)


def gru_scan(
    x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor, bias_h: Tensor
) -> tuple[Tensor, ...]:
    order = (1, 0, 2)  # update, reset, candidate
    both = torch.cat([_gates(bias, order), _gates(bias_h, order)])
    weights = _gates(w_ih, order), _gates(w_hh, order)
    return _recurrence("GRU", x, (hidden,), weights, both, linear_before_reset=1)


# ---- what reads a number while it runs ------------------------------------------------------------------------


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    position: Tensor,
    sinks: Tensor | None = None,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the backend's, but for a cache that is too short: a graph cannot refuse it, and the last rows are lost."""
    new, places = query.shape[1], key_cache.shape[2]
    columns = torch.arange(places, device=query.device)
    from_new = columns - position
    written = ((from_new >= 0) & (from_new < new))[None, None, :, None]
    source = from_new.clamp(0, new - 1)

    def merged(cache: Tensor, rows: Tensor) -> Tensor:
        return torch.where(written, rows.to(cache.dtype).index_select(1, source).transpose(1, 2), cache)

    key_cache, value_cache = merged(key_cache, key), merged(value_cache, value)
    rows = position + torch.arange(new, device=query.device)[:, None]
    seen = columns[None, :] <= rows
    if window is not None:
        seen = seen & (columns[None, :] > rows - window)
    keys, values = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    return language.attend(query, keys, values, seen, softcap, scale, sinks), key_cache, value_cache


def cached_latent_attention(
    query: Tensor,
    latent: Tensor,
    rotary_key: Tensor,
    weight: Tensor,
    cache: Tensor,
    position: Tensor,
    window: int | None,
    softcap: float | None,
    accumulate: str,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`cached_attention`: it cannot refuse a cache that is too short."""
    options = window, softcap, accumulate, scale
    slots = portable_latent.slots_from(query, position)
    return portable_latent.decoded(query, latent, rotary_key, weight, cache, slots, *options)
