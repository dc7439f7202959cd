"""Count a function's FLOPs from its jaxpr.

Matrix products (``dot_general``) and convolutions are counted, a multiply-add as 2 (of complex numbers as 8).
Elementwise work is not, as is usual for utilisation figures. Loop bodies are multiplied by their trip counts, unlike in
a compiler's cost analysis (XLA counts the body of a loop once). Nothing runs or is compiled, so shapes may be abstract
(``jax.ShapeDtypeStruct``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from capibara.jax_versions import HeldJaxpr

__all__ = ["FlopCount", "ForeignCost", "count_flops", "foreign_flops", "register_foreign_call"]

# (shapes of the arguments, shapes of the results, attributes) → FLOP
ForeignCost = Callable[[list[tuple[int, ...]], list[tuple[int, ...]], Mapping[str, Any]], int]
_FOREIGN: dict[str, ForeignCost] = {}


def register_foreign_call(target: str, cost: ForeignCost) -> None:
    """Register the cost of calling the ``jax.ffi`` target ``target``, which cannot be determined otherwise.

    ``target`` may also be the name of one of Capibara's own primitives that lowers to such a call.
    """
    _FOREIGN[target] = cost


def foreign_flops(
    target: str,
    arguments: list[tuple[int, ...]],
    results: list[tuple[int, ...]],
    attributes: Mapping[str, Any],
) -> int | None:
    """FLOPs of one call of a registered target, from the shapes that it takes and gives.

    None if it was not registered, or these shapes and attributes are not such a call's.
    """
    cost = _FOREIGN.get(target)
    if cost is None:
        return None
    try:
        return int(cost(arguments, results, attributes))
    except (LookupError, ValueError, TypeError, OverflowError):
        return None


# Primitives that do much arithmetic of another kind than products: named, so that nobody reads their absence
# as 0.
_OTHER_WORK = frozenset(
    {
        "cholesky",
        "cholesky_update",
        "custom_call",
        "eig",
        "eigh",
        "ffi_call",
        "fft",
        "geqrf",
        "householder_product",
        "io_callback",
        "lu",
        "pure_callback",
        "qr",
        "schur",
        "svd",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    }
)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one call.

    Attributes:
      total: floating-point operations of matrix products and convolutions.
      by_primitive: the same by primitive.
      unknown: what could not be counted, as text (the trip count of a ``while`` loop; primitives such as ``svd``).
      upper_bound: whether a ``cond`` with unequal branches was counted with its most expensive one.
    """

    total: int
    by_primitive: dict[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    upper_bound: bool = False

    @property
    def exact(self) -> bool:
        """Whether every product and convolution was counted."""
        return not self.unknown and not self.upper_bound

    def __int__(self) -> int:
        return self.total

    def __float__(self) -> float:
        return float(self.total)

    def __str__(self) -> str:
        text = f"{self.total:,} FLOP"
        if self.upper_bound:
            text = f"at most {text}"
        if self.unknown:
            text += f", not counting: {'; '.join(self.unknown)}"
        return text


class _Tally:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unknown: dict[str, None] = {}
        self.upper_bound = False

    def add(self, other: _Tally, times: int = 1) -> None:
        for name, count in other.counts.items():
            self.counts[name] += count * times
        if times:
            self.unknown.update(other.unknown)
            self.upper_bound |= other.upper_bound

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def count_flops(function: Callable[..., Any], *args: Any, **kwargs: Any) -> FlopCount:
    """Count the matrix-product and convolution FLOPs of ``function(*args, **kwargs)``.

    Scan bodies count once per step, as do ``fori_loop`` with known bounds; ``cond`` counts its most expensive branch
    (if the platform decides, that of JAX's default backend), ``shard_map`` counts once per device, a Pallas kernel
    once per grid point, a foreign call as given to :func:`register_foreign_call`. The trip count of a ``while`` loop
    is unknown: its work is omitted and listed in ``unknown``. Count a gradient with ``count_flops(jax.grad(f), …)``,
    which includes the recomputation of ``jax.checkpoint``.

    Args:
      function: a function of arrays.
      *args, **kwargs: its arguments: arrays, pytrees of them, or ``jax.ShapeDtypeStruct``.

    Returns:
      A :class:`FlopCount`; ``int(count)`` and ``float(count)`` return the total.
    """
    import jax

    tally = _Tally()
    _walk(jax.make_jaxpr(function)(*args, **kwargs), tally)
    return FlopCount(tally.total, dict(tally.counts), tuple(tally.unknown), tally.upper_bound)


def _sub_jaxprs(value: Any) -> Iterator[Any]:
    """Every jaxpr in a parameter of a primitive, whatever containers it sits in."""
    from jax.extend.core import ClosedJaxpr, Jaxpr

    if isinstance(value, (ClosedJaxpr, Jaxpr)):
        yield value
    elif isinstance(value, HeldJaxpr):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _sub_jaxprs(item)


def _tally_of(jaxpr: Any) -> _Tally:
    tally = _Tally()
    _walk(jaxpr, tally)
    return tally


def _walk(jaxpr: Any, tally: _Tally) -> None:
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            tally.counts[name] += _dot_flops(equation)
        elif name == "conv_general_dilated":
            tally.counts[name] += _conv_flops(equation)
        elif name == "scan":
            tally.add(_tally_of(params["jaxpr"]), params["length"])
        elif name == "while":
            inside = _tally_of(params["body_jaxpr"])
            inside.add(_tally_of(params["cond_jaxpr"]))
            if inside.total or inside.unknown:
                tally.unknown[
                    f"a while loop of {inside.total:,} FLOP per iteration, with an unknown trip count"
                ] = None
        elif name == "cond" and (branch := _branch_of_platform(params)) is not None:
            tally.add(_tally_of(branch))
        elif (target := params.get("target_name") if name == "ffi_call" else name) in _FOREIGN:
            ins, outs = ([v.aval.shape for v in side] for side in (equation.invars, equation.outvars))
            cost = _FOREIGN[target]
            tally.counts[name] += cost(ins, outs, dict(params.get("attributes") or {}))
        elif name == "cond":
            branches = [_tally_of(branch) for branch in params["branches"]]
            dearest = max(branches, key=lambda branch: branch.total)
            tally.add(dearest)
            tally.upper_bound |= any(branch.total != dearest.total for branch in branches)
        elif name == "shard_map":
            tally.add(_tally_of(params["jaxpr"]), _devices_of(params))
        elif name == "pallas_call":
            _walk_kernel(params, tally)
        elif name == "custom_linear_solve":
            # Holds jaxprs for the transposed problem too, which this call does not run.
            tally.add(_tally_of(params["jaxprs"].solve))
        elif name in _OTHER_WORK:
            tally.unknown[name] = None
        elif name in ("ragged_dot", "ragged_dot_general"):
            tally.unknown[f"{name} (depends on the group sizes)"] = None
        else:
            for value in params.values():
                for inner in _sub_jaxprs(value):
                    tally.add(_tally_of(inner))


def _branch_of_platform(params: dict[str, Any]) -> Any:
    """The branch that ``lax.platform_dependent`` takes here; ``None`` for another kind of ``cond``."""
    import jax

    platforms = params.get("branches_platforms")
    if platforms is None:
        return None
    here = jax.default_backend()
    names = (here, "cuda", "rocm") if here == "gpu" else (here,)
    default = None
    for branch, of in zip(params["branches"], platforms, strict=True):
        if of is None:
            default = branch
        elif any(name in of for name in names):
            return branch
    return default


def _walk_kernel(params: dict[str, Any], tally: _Tally) -> None:
    inside = _tally_of(params["jaxpr"])
    if not inside.total and not inside.unknown:
        return
    grid = getattr(params.get("grid_mapping"), "grid", None)
    if grid is None or not all(isinstance(size, int) for size in grid):
        tally.unknown[f"a Pallas kernel of {inside.total:,} FLOP a grid point, its grid unknown"] = None
    else:
        tally.add(inside, math.prod(grid))


def _devices_of(params: dict[str, Any]) -> int:
    """Over how many devices a ``shard_map`` body runs: the product of its manual mesh axes."""
    sizes = dict(params["mesh"].shape)
    axes = params.get("manual_axes") or sizes
    return math.prod(sizes[axis] for axis in axes)


def _multiply_add(equation: Any) -> int:
    """FLOPs of one: 2, or 8 for complex numbers."""
    return 8 if equation.outvars[0].aval.dtype.kind == "c" else 2


def _dot_flops(equation: Any) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return (
        _multiply_add(equation)
        * math.prod(equation.outvars[0].aval.shape)
        * math.prod(left[axis] for axis in contracting)
    )


def _conv_flops(equation: Any) -> int:
    # Each output number is a sum over the kernel's positions and its input features (already a group's
    # share).
    kernel = equation.invars[1].aval.shape
    out_features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    if not out_features:
        return 0
    numbers = math.prod(equation.outvars[0].aval.shape)
    return _multiply_add(equation) * numbers * (math.prod(kernel) // out_features)
