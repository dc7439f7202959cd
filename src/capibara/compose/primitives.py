"""The operations that models are made of: what each takes, what it gives, and how the shapes go together.

A row here says nothing of how an operation is computed: the backend has a function of the same name
(:mod:`capibara.compose.backends.jax_ops`). In the shapes ``*b`` stands for any leading dimensions.
"""

from __future__ import annotations

from typing import Any

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.model import Primitive
from capibara.compose.shapes import Dim, Shape, broadcast_rule, set_size, unify

__all__ = [
    "Absolute",
    "Add",
    "Attention",
    "CachedAttention",
    "CachedConv",
    "Cast",
    "CausalConv",
    "Concat",
    "ContinuedScan",
    "Decay",
    "Dense",
    "Divide",
    "Dropout",
    "Exp",
    "Gelu",
    "GroupMerge",
    "Log",
    "Lookup",
    "Mean",
    "Merge",
    "Multiply",
    "Normalise",
    "Positions",
    "Project",
    "Quantise",
    "Relu",
    "RotaryTable",
    "Rotate",
    "SelectiveScan",
    "Sigmoid",
    "Silu",
    "Softmax",
    "Softplus",
    "Square",
    "Subtract",
    "Sum",
    "Tanh",
    "Unembed",
]

FLOAT, INT = "float", "int"


class _Unary(Primitive):
    """An operation on each element: ``input [*b]`` → ``output [*b]``."""

    def __init__(self, *, name: str | None = None) -> None:
        op = type(self).__name__.lower()
        super().__init__(op, {"input": ("*b", FLOAT)}, {"output": ("*b", FLOAT)}, name=name)


class Relu(_Unary):
    """``max(x, 0)``."""


class Gelu(_Unary):
    """``x Φ(x)``, by the tanh approximation of ``jax.nn.gelu``."""


class Silu(_Unary):
    """``x sigmoid(x)``."""


class Sigmoid(_Unary):
    """``1 / (1 + exp(-x))``."""


class Tanh(_Unary):
    """``tanh(x)``."""


class Softplus(_Unary):
    """``log(1 + exp(x))``."""


class Exp(_Unary):
    """``exp(x)``."""


class Log(_Unary):
    """``log(x)``."""


class Square(_Unary):
    """``x²``."""


class Absolute(_Unary):
    """``|x|``."""


class Decay(_Unary):
    """Decay rates from their logarithms: ``-exp(x)``, always negative."""


class _Binary(Primitive):
    """An operation on two arrays, with NumPy's broadcasting: ``left``, ``right`` → ``output``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            type(self).__name__.lower(),
            {"left": ("*l", "T"), "right": ("*r", "T")},
            {"output": ("*o", "T")},
            constraints=[(broadcast_rule, ("left", "right", "output"))],
            name=name,
        )


class Add(_Binary):
    """``left + right``."""


class Subtract(_Binary):
    """``left - right``."""


class Multiply(_Binary):
    """``left * right``."""


class Divide(_Binary):
    """``left / right``."""


class Softmax(Primitive):
    """Softmax over the last dimension: ``input [*b, d]`` → ``output [*b, d]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("softmax", {"input": ("*b d", FLOAT)}, {"output": ("*b d", FLOAT)}, name=name)


class Dense(Primitive):
    """Matrix product with a weight: ``input [*b, in] @ weight [in, out]`` → ``output [*b, out]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "dense",
            {"input": ("*b in", FLOAT), "weight": ("in out", FLOAT)},
            {"output": ("*b out", FLOAT)},
            accumulates=True,
            constrain_output=True,
            name=name,
        )


class Project(Primitive):
    """Product onto several heads at once: ``[*b, in] × [in, heads, dim]`` → ``[*b, heads, dim]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "project",
            {"input": ("*b in", FLOAT), "weight": ("in heads dim", FLOAT)},
            {"output": ("*b heads dim", FLOAT)},
            accumulates=True,
            constrain_output=True,
            name=name,
        )


class Merge(Primitive):
    """The product that joins heads again: ``[*b, heads, dim] × [heads, dim, out]`` → ``[*b, out]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "merge",
            {"input": ("*b heads dim", FLOAT), "weight": ("heads dim out", FLOAT)},
            {"output": ("*b out", FLOAT)},
            accumulates=True,
            constrain_output=True,
            name=name,
        )


class Lookup(Primitive):
    """Rows of a table: ``table [vocab, d]``, ``indices int [*b]`` → ``output [*b, d]``. Clips indices in range."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "lookup",
            {"table": ("vocab d", FLOAT), "indices": ("*b", INT)},
            {"output": ("*b d", FLOAT)},
            constrain_output=True,
            name=name,
        )


class Unembed(Primitive):
    """Scores against every row of a table: ``[*b, d] × table [vocab, d]`` → ``[*b, vocab]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "unembed",
            {"input": ("*b d", FLOAT), "table": ("vocab d", FLOAT)},
            {"output": ("*b vocab", FLOAT)},
            accumulates=True,
            constrain_output=True,
            name=name,
        )


class Normalise(Primitive):
    """Root-mean-square or layer normalisation over the last dimension, computed in the accumulation dtype.

    ``kind="rms"``: ``x / sqrt(mean(x²) + epsilon) * scale`` (Zhang and Sennrich, 2019).
    ``kind="layer"``: the mean is taken off first (Ba et al., 2016); add a bias after it for the affine form.
    """

    def __init__(self, kind: str = "rms", epsilon: float = 1e-5, *, name: str | None = None) -> None:
        if kind not in ("rms", "layer"):
            raise WiringError(f"kind={kind!r} must be 'rms' or 'layer'")
        super().__init__(
            f"{kind}_norm",
            {"input": ("*b d", FLOAT), "scale": ("d", FLOAT)},
            {"output": ("*b d", FLOAT)},
            {"epsilon": float(epsilon)},
            accumulates=True,
            name=name,
        )


class Positions(Primitive):
    """Positions of a row of tokens: ``like [*b, sequence]``, ``start int []`` → ``start + arange(sequence)``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "positions",
            {"like": ("*b sequence", "T"), "start": ((), INT)},
            {"output": (("sequence",), INT), "end": ((), INT)},
            name=name,
        )


def _half(whole: Shape, half: Shape) -> bool:
    a, b = whole.dims(), half.dims()
    if not a or not b:
        return False
    full, part = a[-1], b[-1]
    if full.size is not None:
        if full.size % 2:
            raise ShapeError(f"rotary positions need an even head size, not {full.size}")
        set_size(part, full.size // 2)
        return True
    if part.size is not None:
        set_size(full, part.size * 2)
        return True
    return False


class RotaryTable(Primitive):
    """Cosines and sines for rotary positions (Su et al., 2021): ``positions int [*p]`` → ``[*p, dim / 2]`` each."""

    def __init__(self, dim: int, theta: float = 10000.0, *, name: str | None = None) -> None:
        if dim < 2 or dim % 2:
            raise ShapeError(f"dim={dim!r}: rotary positions need an even head size of at least 2")
        super().__init__(
            "rotary_table",
            {"positions": ("*p", INT)},
            {"cos": (("*p", dim // 2), FLOAT), "sin": (("*p", dim // 2), FLOAT)},
            {"dim": int(dim), "theta": float(theta)},
            accumulates=True,
            name=name,
        )


class Rotate(Primitive):
    """Rotary positions: turn the two halves of each head by its position's angles.

    ``input [*b, sequence, heads, dim]``, ``cos``/``sin [sequence, dim / 2]`` → the same shape as ``input``.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "rotate",
            {
                "input": ("*b sequence heads dim", FLOAT),
                "cos": ("sequence half", FLOAT),
                "sin": ("sequence half", FLOAT),
            },
            {"output": ("*b sequence heads dim", FLOAT)},
            constraints=[(_half, ("input", "cos"))],
            name=name,
        )


def _grouped(query: Shape, key: Shape) -> bool:
    q, k = query.dims(), key.dims()
    if q is None or k is None or q[-2].size is None or k[-2].size is None:
        return False
    if k[-2].size == 0 or q[-2].size % k[-2].size:
        raise ShapeError(f"{q[-2].size} query heads cannot share {k[-2].size} key heads: not a multiple")
    return True


class Attention(Primitive):
    """Scaled dot-product attention through :func:`capibara.ops.attention.flash_attention`.

    ``query [batch, sequence, heads, dim]``, ``key``/``value [batch, sequence, kv_heads, dim]`` → like ``query``;
    each key head serves ``heads / kv_heads`` query heads (Ainslie et al., 2023).
    """

    def __init__(
        self,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(
            "attention",
            {
                "query": ("batch sequence heads dim", FLOAT),
                "key": ("batch context kv_heads dim", FLOAT),
                "value": ("batch context kv_heads dim", FLOAT),
            },
            {"output": ("batch sequence heads dim", FLOAT)},
            {"causal": bool(causal), "window": window, "softcap": softcap},
            constraints=[(_grouped, ("query", "key"))],
            name=name,
        )


class CachedAttention(Primitive):
    """Causal attention of new tokens over a cache of the earlier ones.

    The new keys and values are written at ``position``; a query sees everything up to itself. Returns the output
    and the caches with the new rows. The cache must be long enough: ``position + sequence ≤ cache``.
    """

    def __init__(
        self, window: int | None = None, softcap: float | None = None, *, name: str | None = None
    ) -> None:
        cache = "batch cache kv_heads dim"
        super().__init__(
            "cached_attention",
            {
                "query": ("batch sequence heads dim", FLOAT),
                "key": ("batch sequence kv_heads dim", FLOAT),
                "value": ("batch sequence kv_heads dim", FLOAT),
                "key_cache": (cache, FLOAT),
                "value_cache": (cache, FLOAT),
                "position": ((), INT),
            },
            {
                "output": ("batch sequence heads dim", FLOAT),
                "next_key_cache": (cache, FLOAT),
                "next_value_cache": (cache, FLOAT),
            },
            {"window": window, "softcap": softcap},
            constraints=[(_grouped, ("query", "key"))],
            name=name,
        )


class CausalConv(Primitive):
    """Depthwise causal convolution: ``input [batch, sequence, *c]``, ``weight [width, *c]``, ``bias [*c]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "causal_conv",
            {"input": ("batch sequence *c", FLOAT), "weight": ("width *c", FLOAT), "bias": ("*c", FLOAT)},
            {"output": ("batch sequence *c", FLOAT)},
            name=name,
        )


class CachedConv(Primitive):
    """:class:`CausalConv` that goes on from the last ``width - 1`` inputs, and returns the newest ones."""

    def __init__(self, *, name: str | None = None) -> None:
        tail = "batch tail *c"
        super().__init__(
            "cached_conv",
            {
                "input": ("batch sequence *c", FLOAT),
                "weight": ("width *c", FLOAT),
                "bias": ("*c", FLOAT),
                "tail": (tail, FLOAT),
            },
            {"output": ("batch sequence *c", FLOAT), "next_tail": (tail, FLOAT)},
            name=name,
        )


_SCAN_INPUTS: dict[str, tuple[Any, str | None]] = {
    "input": ("batch sequence heads dim", FLOAT),
    "step": ("batch sequence heads", FLOAT),
    "rate": (("heads",), FLOAT),
    "write": ("batch sequence groups state", FLOAT),
    "read": ("batch sequence groups state", FLOAT),
}


class SelectiveScan(Primitive):
    """Selective state-space recurrence through :func:`capibara.ops.scan.selective_scan`, from a zero state.

    ``h[t] = exp(step[t] rate) h[t-1] + step[t] input[t] ⊗ write[t]``; ``output[t] = h[t] · read[t]``
    (Dao and Gu, 2024). ``input [batch, sequence, heads, dim]``, ``step [batch, sequence, heads]``,
    ``rate [heads]``, ``write``/``read [batch, sequence, groups, state]``.
    """

    def __init__(self, chunk_length: int = 64, *, name: str | None = None) -> None:
        super().__init__(
            "selective_scan",
            _SCAN_INPUTS,
            {"output": ("batch sequence heads dim", FLOAT)},
            {"chunk_length": int(chunk_length)},
            name=name,
        )


class ContinuedScan(Primitive):
    """:class:`SelectiveScan` that goes on from a given state ``[batch, heads, dim, state]`` and returns the next."""

    def __init__(self, chunk_length: int = 64, *, name: str | None = None) -> None:
        memory = ("batch heads dim state", FLOAT)
        super().__init__(
            "continued_scan",
            {**_SCAN_INPUTS, "memory": memory},
            {"output": ("batch sequence heads dim", FLOAT), "next_memory": memory},
            {"chunk_length": int(chunk_length)},
            name=name,
        )


class GroupMerge(Primitive):
    """Make the last two dimensions one: ``[*b, heads, dim]`` → ``[*b, heads · dim]``."""

    def __init__(self, *, name: str | None = None) -> None:
        def rule(pair: Shape, merged: Shape) -> bool:
            a, b = pair.dims(), merged.dims()
            if a is None or b is None or a[-1].size is None or a[-2].size is None:
                return False
            set_size(b[-1], a[-1].size * a[-2].size)
            return True

        super().__init__(
            "group_merge",
            {"input": ("*b heads dim", "T")},
            {"output": ("*b merged", "T")},
            constraints=[(rule, ("input", "output"))],
            name=name,
        )


class Dropout(Primitive):
    """Zero each element with probability ``rate`` and scale the rest by ``1 / (1 - rate)``, in training only."""

    def __init__(self, rate: float, *, name: str | None = None) -> None:
        if not 0.0 <= rate < 1.0:
            raise WiringError(f"rate={rate!r} must be at least 0 and less than 1")
        super().__init__(
            "dropout",
            {"input": ("*b", FLOAT)},
            {"output": ("*b", FLOAT)},
            {"rate": float(rate)},
            uses_key=True,
            uses_train=True,
            name=name,
        )


class Quantise(Primitive):
    """Nearest code of a codebook, with straight-through gradients (van den Oord et al., 2017).

    ``input [*b, d]`` and the codebook's state → ``quantized [*b, d]``, ``indices int [*b]``, the scalars
    ``commitment``, ``perplexity``, ``usage``, and the state after an exponential-moving-average update (in
    training; otherwise as it was).
    """

    def __init__(
        self,
        decay: float = 0.99,
        commitment_weight: float = 0.25,
        dead_code_threshold: float = 0.0,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(
            "quantise",
            {
                "input": ("*b d", FLOAT),
                "codebook": ("codes d", FLOAT),
                "cluster_size": (("codes",), FLOAT),
                "codebook_sum": ("codes d", FLOAT),
            },
            {
                "quantized": ("*b d", FLOAT),
                "indices": ("*b", INT),
                "commitment": ((), FLOAT),
                "perplexity": ((), FLOAT),
                "usage": ((), FLOAT),
                "next_codebook": ("codes d", FLOAT),
                "next_cluster_size": (("codes",), FLOAT),
                "next_codebook_sum": ("codes d", FLOAT),
            },
            {
                "decay": float(decay),
                "commitment_weight": float(commitment_weight),
                "dead_code_threshold": float(dead_code_threshold),
            },
            uses_key=True,
            uses_train=True,
            name=name,
        )


class Cast(Primitive):
    """Change the floating dtype: ``dtype`` is "float32", "bfloat16", … or "accumulate" for the policy's."""

    def __init__(self, dtype: str = "accumulate", *, name: str | None = None) -> None:
        accumulate = dtype == "accumulate"
        super().__init__(
            "cast_up" if accumulate else "cast",
            {"input": ("*b", FLOAT)},
            {"output": ("*b", FLOAT)},
            {} if accumulate else {"dtype": dtype},
            accumulates=accumulate,
            name=name,
        )


def _reduced(axis: int | None) -> Any:
    def rule(whole: Shape, reduced: Shape) -> bool:
        dims = whole.dims()
        if dims is None:
            return False
        if axis is None:
            unify(reduced, Shape())
            return True
        if not -len(dims) <= axis < len(dims):
            raise ShapeError(f"axis={axis} is outside an array of {len(dims)} dimensions")
        unify(reduced, Shape([d for i, d in enumerate(dims) if i != axis % len(dims)]))
        return True

    return rule


class _Reduce(Primitive):
    def __init__(self, axis: int | None = None, *, name: str | None = None) -> None:
        op = type(self).__name__.lower()
        super().__init__(
            op,
            {"input": ("*b", "T")},
            {"output": ("*o", "T")},
            {"axis": axis},
            constraints=[(_reduced(axis), ("input", "output"))],
            name=name,
        )


class Sum(_Reduce):
    """Sum over one dimension, or over all (``axis=None``)."""


class Mean(_Reduce):
    """Mean over one dimension, or over all (``axis=None``)."""


class Concat(Primitive):
    """Join arrays along one dimension: ports ``input_0``, ``input_1`` … → ``output``."""

    def __init__(self, count: int, axis: int = 0, *, name: str | None = None) -> None:
        if count < 1:
            raise WiringError(f"count={count!r} must be at least 1")

        def rule(*shapes: Shape) -> bool:
            rows = [s.dims() for s in shapes[:-1]]
            rank = next((len(r) for r in [*rows, shapes[-1].dims()] if r is not None), None)
            if rank is None:
                return False
            if not -rank <= axis < rank:
                raise ShapeError(f"axis={axis} is outside an array of {rank} dimensions")
            at = axis % rank
            shared = [Dim() for _ in range(rank)]
            own = [Dim() for _ in shapes]
            for shape, dim in zip(shapes, own, strict=True):
                unify(shape, Shape([*shared[:at], dim, *shared[at + 1 :]]))
            sizes = [d.find().size for d in own[:-1]]
            if any(s is None for s in sizes):
                return False
            set_size(own[-1], sum(s for s in sizes if s is not None))
            return True

        keys = tuple(f"input_{i}" for i in range(count))
        super().__init__(
            "concat",
            {k: (f"*b{i}", "T") for i, k in enumerate(keys)},
            {"output": ("*o", "T")},
            {"axis": int(axis)},
            constraints=[(rule, (*keys, "output"))],
            name=name,
        )
