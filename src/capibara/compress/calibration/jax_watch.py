"""Observe the inputs of a JAX function's linear layers, where they are multiplied by a leaf of its parameters.

The function is traced to a jaxpr, which is evaluated equation by equation with real values. Each value has *places*:
for each element, the leaf and the element that it came from. This needs no rules for individual operations: an
operation only moves a weight if it moves element numbers in the same way, whatever these numbers are, so each
operation on a weight is run on two unrelated numberings (:func:`_moved`). Splitting, slicing, indexing,
concatenation, padding, broadcasting and any other such operation of JAX are followed in this way.

If a ``dot_general`` sums over axes of a leaf, its other operand contains the inputs. Calls are followed (``jit``,
``remat``, functions with custom derivatives), as are the branch taken of a ``cond`` and every step of a ``scan`` or a
``while``. Other uses of a weight are recorded, as the reason why its inputs were not observed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from capibara.compress.calibration.activations import Sums, Unseen, Watched
from capibara.compress.calibration.jax_programs import Programs, bound
from capibara.jax_versions import scan_counts

__all__ = ["watch_jax"]

_MOST = np.iinfo(np.int32).max  # elements of a leaf that can be distinguished


_WAITING = object()  # in the place of an array that is not computed yet

_Places = dict[str, "np.ndarray | None"]


@dataclass(frozen=True)
class _Value:
    """An array on its way through the program.

    Attributes:
      places: by the name of a leaf, which of its elements each element is, int32 like ``array``, negative where it is
        none; ``None`` for the leaf as it was given. NumPy's, for which nothing is compiled.
      made_of: the leaves that it was computed from, if no batch had a part in it, each with the operation that
        changed it; empty for what :attr:`places` tells.
      data: whether it depends on the batch.
    """

    array: Any
    places: _Places = field(default_factory=dict)
    made_of: dict[str, str] = field(default_factory=dict)
    data: bool = False

    def numbers(self, name: str) -> np.ndarray:
        """The places of a leaf's elements."""
        found = self.places[name]
        if found is None:
            found = np.arange(self.array.size, dtype=np.int32).reshape(self.array.shape)
        return found


def watch_jax(
    function: Callable[..., Any], params: Any, batches: Iterator[Any], names: Callable[[tuple[Any, ...]], str]
) -> Watched:
    """The number of batches, the moments by the leaf's name, and the weights that were not observed."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    known, unseen = [], Unseen()
    shapes: dict[str, tuple[int, ...]] = {}
    for path, array in leaves:
        shape = np.shape(array)
        name = names(tuple(_key(p) for p in path))
        watched = len(shape) >= 2 and jax.numpy.issubdtype(jax.numpy.result_type(array), np.floating)
        if watched and 0 < math.prod(shape) <= _MOST:
            shapes[name] = shape
            known.append(_Value(jax.numpy.asarray(array), {name: None}))
            continue
        if watched and math.prod(shape):
            unseen.lose(name, f"it has more than {_MOST} elements")
        known.append(_Value(array))
    sums, count = Sums(), 0
    trace, programs = jax.make_jaxpr(function), Programs()
    for batch in batches:
        closed = trace(params, batch)
        inputs = [*known, *(_Value(x, data=True) for x in jax.tree.leaves(batch))]
        _Evaluation(shapes, sums, unseen, programs).run(closed.jaxpr, closed.consts, inputs)
        count += 1
    return Watched(count, sums, unseen, list(shapes))


def _key(entry: Any) -> Any:
    for kind in ("key", "idx", "name"):
        if hasattr(entry, kind):
            return getattr(entry, kind)
    return entry


class _Evaluation:
    def __init__(
        self, shapes: dict[str, tuple[int, ...]], sums: Sums, unseen: Unseen, programs: Programs
    ) -> None:
        self.shapes, self.sums, self.unseen, self.programs = shapes, sums, unseen, programs

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Value]) -> list[_Value]:
        env: dict[Any, _Value] = dict(zip(jaxpr.constvars, map(_Value, consts), strict=True))
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> _Value:
            return _Value(v.val) if hasattr(v, "val") else env[v]

        # A variable is let go after its last use: the activations of a whole model do not fit beside each other.
        last = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.invars if not hasattr(v, "val")}
        last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not hasattr(v, "val")}
        waiting: list[Any] = []  # operations without weights, until their results are wanted

        def drop(variables: Iterable[Any], now: int) -> None:
            for v in variables:
                if last[v] <= now:
                    env.pop(v, None)

        def flush(now: int) -> None:
            made = {v for e in waiting for v in e.outvars}
            given = (v for e in waiting for v in e.invars if not hasattr(v, "val"))
            inputs = list(dict.fromkeys(v for v in given if v not in made))
            outputs = [v for e in waiting for v in e.outvars if last.get(v, -1) >= now]
            arrays = self.programs.run(waiting, inputs, outputs, [env[v].array for v in inputs])
            for v, array in zip(outputs, arrays, strict=True):
                env[v] = _Value(array, data=env[v].data)
            waiting.clear()
            drop([*inputs, *made.intersection(last)], now - 1)

        for i, eqn in enumerate(jaxpr.eqns):
            values = [read(v) for v in eqn.invars]
            if not (eqn.effects or any(x.places or x.made_of for x in values)):
                waiting.append(eqn)
                one = _Value(_WAITING, data=any(x.data for x in values))
                env.update(dict.fromkeys(eqn.outvars, one))
                continue
            if any(x.array is _WAITING for x in values):
                flush(i)
                values = [read(v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self.apply(eqn, values), strict=True))
            wanted = {v for e in waiting for v in e.invars if not hasattr(v, "val")}
            drop([v for v in eqn.invars if not hasattr(v, "val") and v not in wanted], i)
        if waiting:
            flush(len(jaxpr.eqns))
        return [read(v) for v in jaxpr.outvars]

    def apply(self, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        name = eqn.primitive.name
        if name == "dot_general":
            self.product(eqn, *inputs)
        elif name == "conv_general_dilated":
            self.convolution(eqn, *inputs)
        elif any(x.places or (x.made_of and np.ndim(x.array) > 1) for x in inputs):
            if name == "cond":
                branches = eqn.params["branches"]
                chosen = branches[min(max(int(inputs[0].array), 0), len(branches) - 1)]
                return self.run(chosen.jaxpr, chosen.consts, inputs[1:])
            if name == "scan":
                return self.scan(eqn, inputs)
            if name == "while":
                return self.loop(eqn, inputs)
            if (inner := _inner(eqn)) is not None:
                return self.run(inner.jaxpr, inner.consts, inputs)
        # What no weight goes into that is followed is run as it is, calls and loops as a whole.
        arrays = bound(eqn, [x.array for x in inputs])
        data = any(x.data for x in inputs)
        if not any(x.places or x.made_of for x in inputs):
            return [_Value(x, data=data) for x in arrays]
        places = self.places(eqn, inputs, arrays)
        if data and name not in _PRODUCTS and name not in _ELEMENTWISE and not any(places):
            self.opaque(name, inputs)
        made: dict[str, str] = {}
        if not data:
            # Two weights in one operation, or one that was changed: no element is a leaf's own any more.
            for x in inputs:
                made.update({leaf: name for leaf in x.places if not any(leaf in p for p in places)})
                made.update(x.made_of)
        return [self.value(x, p, made, data, name) for x, p in zip(arrays, places, strict=True)]

    def value(self, array: Any, places: _Places, made_of: dict[str, str], data: bool, name: str) -> _Value:
        """The result of an operation; a vector sliced from a stack (scales, biases) is not a weight matrix."""
        size = np.size(array)
        kept = {n: p for n, p in places.items() if np.ndim(array) > 1 or size == math.prod(self.shapes[n])}
        if not data and len(kept) < len(places):
            made_of = {**made_of, **{n: name for n in places if n not in kept}}
        return _Value(array, kept, made_of, data)

    def opaque(self, name: str, inputs: list[_Value]) -> None:
        """A weight and something of the batch go into what may be a product."""
        for x in inputs:
            if x.data or np.ndim(x.array) < 2:
                continue
            for leaf in (*x.places, *x.made_of):
                self.unseen.lose(leaf, f"it is used in {name}, which is not followed")

    def places(self, eqn: Any, inputs: list[_Value], arrays: list[Any]) -> list[_Places]:
        """Which elements of leaves the results hold."""
        out: list[_Places] = [{} for _ in arrays]
        name = eqn.primitive.name
        if name in _PRODUCTS or name in _ELEMENTWISE:
            return out
        if name in _ROUNDING:
            return [dict(inputs[0].places) if jax.numpy.issubdtype(arrays[0].dtype, np.floating) else {}]
        for leaf in dict.fromkeys(n for x in inputs for n in x.places):
            for found, one in zip(out, _moved(eqn, inputs, leaf), strict=True):
                if one is not None:
                    found[leaf] = one
        return out

    def scan(self, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        p = eqn.params
        body, length = p["jaxpr"], p["length"]
        consts, carried = scan_counts(eqn)
        fixed, carry, moving = (
            inputs[:consts],
            inputs[consts : consts + carried],
            inputs[consts + carried :],
        )
        rows: list[list[Any]] = []
        steps = range(length)
        for i in reversed(steps) if p["reverse"] else steps:
            one = [
                self.value(x.array[i], {n: x.numbers(n)[i] for n in x.places}, x.made_of, x.data, "scan")
                for x in moving
            ]
            out = self.run(body.jaxpr, body.consts, [*fixed, *carry, *one])
            carry = out[:carried]
            rows.append(out[carried:])
        if p["reverse"]:
            rows.reverse()
        return [
            *carry,
            *(_stacked(v.aval, [r[k] for r in rows]) for k, v in enumerate(eqn.outvars[carried:])),
        ]

    def loop(self, eqn: Any, inputs: list[_Value]) -> list[_Value]:
        p = eqn.params
        test, body, first = p["cond_jaxpr"], p["body_jaxpr"], p["cond_nconsts"]
        last = first + p["body_nconsts"]
        state = inputs[last:]
        while bool(self.run(test.jaxpr, test.consts, [*inputs[:first], *state])[0].array):
            state = self.run(body.jaxpr, body.consts, [*inputs[first:last], *state])
        return state

    def product(self, eqn: Any, left: _Value, right: _Value) -> None:
        (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
        sides = ((left, left_sum, left_batch), (right, right_sum, right_batch))
        for (weight, over, batch), (other, summed, shared) in (sides, sides[::-1]):
            # Of two weights it is told by the data which is multiplied and which are the inputs.
            if other.places and not (other.data and not weight.data):
                for leaf in weight.places:
                    self.unseen.lose(leaf, "it is multiplied with another weight before inputs")
                continue
            if other.data:
                for leaf, changed in weight.made_of.items():
                    self.unseen.lose(leaf, f"it is changed by {changed} before its product with inputs")
            if not weight.places:
                continue
            inputs = _three(_as_numpy(other.array), shared, summed)
            for leaf in weight.places:
                places = _three(weight.numbers(leaf), batch, over)
                self.add(leaf, places, inputs)

    def convolution(self, eqn: Any, inputs: _Value, weight: _Value) -> None:
        p = eqn.params
        for leaf, changed in weight.made_of.items():
            if inputs.data:
                self.unseen.lose(leaf, f"it is changed by {changed} before its convolution")
        if not weight.places or (inputs.places and not inputs.data):
            return
        numbers = p["dimension_numbers"]
        grouped = p["feature_group_count"] != 1 or p["batch_group_count"] != 1
        if grouped or any(d != 1 for d in p["lhs_dilation"]):
            for leaf in weight.places:
                self.unseen.lose(leaf, "grouped and transposed convolutions are not one matrix product")
            return
        out_axis, in_axis, *window = numbers.rhs_spec
        patches = jax.lax.conv_general_dilated_patches(
            jax.numpy.asarray(inputs.array, np.float32),
            tuple(weight.array.shape[d] for d in window),
            p["window_strides"],
            p["padding"],
            rhs_dilation=p["rhs_dilation"],
            dimension_numbers=numbers,
            precision=jax.lax.Precision.HIGHEST,
        )
        # Features of patches are counted in the order channels, window.
        rows = np.moveaxis(np.asarray(patches), numbers.out_spec[1], -1)
        for leaf in weight.places:
            places = weight.numbers(leaf).transpose(out_axis, in_axis, *window)
            self.add(leaf, places.reshape(1, len(places), -1), rows.reshape(1, -1, rows.shape[-1]))

    def add(self, leaf: str, places: np.ndarray, inputs: np.ndarray) -> None:
        """Take in inputs [batch, rows, features] of a leaf's elements [batch, outputs, features]."""
        shape = self.shapes[leaf]
        held: Any = (places >= 0).any(2)
        if not held.any():
            return
        first = places[tuple(np.argwhere(held)[0])]
        seen = first >= 0
        where = np.stack(np.unravel_index(first[seen], shape))
        varying = (where != where[:, :1]).any(1)
        axes = tuple(int(a) for a in np.flatnonzero(varying))
        if not axes:  # of one input: along the axis that is known, or else one on which outputs do not lie
            lies = np.stack(np.unravel_index(places[places >= 0], shape))
            fixed = [a for a in range(len(shape)) if (lies[a] == lies[a, 0]).all()]
            axes = self.sums.axes.get(leaf) or tuple(sorted(fixed, key=lambda a: (shape[a] > 1, -a))[:1])
        features = math.prod(shape[a] for a in axes)
        order: Any = np.ravel_multi_index(tuple(where[list(axes)]), tuple(shape[a] for a in axes))
        # All outputs must have the same inputs, each of them once.
        offsets = first[seen] - first[seen][0]
        some = places[held]
        same = (some[:, ~seen] < 0).all() and (some[:, seen] - some[:, seen][:, :1] == offsets).all()
        if not same or len(np.unique(order)) != len(order):
            self.unseen.lose(leaf, "its elements are multiplied in another order than that of a matrix")
            return
        used = held.any(1)
        rows = inputs if used.all() and seen.all() else inputs[used][:, :, seen]
        entries = self.entries(leaf, axes, places[used], held[used]) or [None]
        for entry in dict.fromkeys(entries):
            some = rows if len(set(entries)) == 1 else rows[np.equal(entries, entry)]
            place = None if entry is None else (entry, shape[0])
            self.sums.add(leaf, some.reshape(-1, len(order)), axes, order, features, place)

    def entries(
        self, leaf: str, axes: tuple[int, ...], places: np.ndarray, held: np.ndarray
    ) -> list[int] | None:
        """For each of [batch, outputs, features] the entry of a stack that it belongs to; ``None`` where it is not
        one entry."""
        shape = self.shapes[leaf]
        if len(shape) < 3 or shape[0] < 2 or 0 in axes:
            return None
        out = []
        for place, there in zip(places, held, strict=True):
            of = place[there].max(1) // math.prod(shape[1:])
            if (of != of[0]).any():
                return None
            out.append(int(of[0]))
        return out


def _as_numpy(array: Any) -> np.ndarray:
    found = np.asarray(array)
    return found if found.dtype.kind in "fiub" else np.asarray(jax.numpy.asarray(array, np.float32))


def _three(array: np.ndarray, batch: Sequence[int], over: Sequence[int]) -> np.ndarray:
    """As [batch, the other axes, those summed over]."""
    free = [d for d in range(array.ndim) if d not in batch and d not in over]
    sizes = [math.prod(array.shape[d] for d in some) for some in (batch, free, over)]
    return array.transpose(*batch, *free, *over).reshape(sizes)


def _stacked(aval: Any, rows: list[_Value]) -> _Value:
    """What the steps of a scan gave."""
    if not rows:
        return _Value(jax.numpy.zeros(aval.shape, aval.dtype))
    leaves = dict.fromkeys(n for x in rows for n in x.places)
    none = np.full(rows[0].array.shape if leaves else (), -1, np.int32)
    return _Value(
        jax.numpy.stack([x.array for x in rows]),
        {n: np.stack([x.numbers(n) if n in x.places else none for x in rows]) for n in leaves},
        {n: why for x in rows for n, why in x.made_of.items()},
        any(x.data for x in rows),
    )


_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))
_ROUNDING = frozenset(("convert_element_type", "reduce_precision"))
# They change numbers, and are no products of matrices: what is added to or scaled by the batch is no linear layer.
_ELEMENTWISE = frozenset(
    ("add", "sub", "mul", "div", "rem", "max", "min", "pow", "integer_pow", "neg", "abs", "sign", "exp", "exp2", "log",
     "sqrt", "rsqrt", "square", "tanh", "logistic", "add_any", "eq", "ne", "lt", "le", "gt", "ge", "reduce_sum",
     "reduce_max", "reduce_min", "atan2", "nextafter", "erf", "sin", "cos", "is_finite", "clamp", "stop_gradient")
)  # fmt: skip


def _moved(eqn: Any, inputs: list[_Value], leaf: str) -> list[np.ndarray | None]:
    """For each result the places of a leaf's elements in it; ``None`` where they were not just moved.

    The operation is run on the numbers t of the elements and on −1 − t, with other floats as the least and as the
    largest integer. What it moves comes out as such a pair again, what it fills in as two equal or two extreme
    numbers; anything else was computed.
    """
    kinds = {x.array.dtype for x in inputs if leaf in x.places}
    least, largest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    results: list[list[np.ndarray]] = []
    for extreme in (least, largest):
        arrays = []
        for x in inputs:
            if leaf in x.places:
                numbers = x.numbers(leaf)
                arrays.append(numbers if extreme < 0 else np.where(numbers < 0, largest, -1 - numbers))
            elif jax.numpy.result_type(x.array) in kinds:
                arrays.append(np.full(np.shape(x.array), extreme, np.int32))
            else:
                arrays.append(x.array)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of NaN as a filling of integers
                results.append([np.asarray(x) for x in bound(eqn, [jax.numpy.asarray(a) for a in arrays])])
        except Exception:
            return [None] * len(eqn.outvars)
    out: list[np.ndarray | None] = []
    for one, other in zip(*results, strict=True):
        if one.dtype != np.int32 or other.dtype != np.int32:
            return [None] * len(eqn.outvars)
        found = (other == -1 - one) & (one >= 0)
        if not found.all():
            # What was no element goes in as a negative number or the least, and comes out as that and as the largest.
            filled = (one < 0) & (other == largest)
            if not (found | filled | (one == other)).all() or not (found | filled).any():
                return [None] * len(eqn.outvars)
            one = np.where(found, one, np.int32(-1))
        out.append(one)
    return out


def _inner(eqn: Any) -> Any:
    """What a call calls: a program of an operation's parameters that takes and gives what the operation does."""
    if eqn.primitive.name in ("reduce", "shard_map"):
        return None
    found = []
    for value in eqn.params.values():
        closed = getattr(value, "jaxpr", None) is not None and hasattr(value, "consts")
        jaxpr = value.jaxpr if closed else value
        if not hasattr(jaxpr, "eqns") or not hasattr(jaxpr, "invars"):
            continue
        alike = [_type(v) for v in jaxpr.invars] == [_type(v) for v in eqn.invars]
        if alike and [_type(v) for v in jaxpr.outvars] == [_type(v) for v in eqn.outvars]:
            found.append(value if closed else _Open(jaxpr))
    return found[0] if len(found) == 1 else None


@dataclass(frozen=True)
class _Open:
    jaxpr: Any
    consts: tuple[Any, ...] = ()


def _type(v: Any) -> tuple[Any, Any]:
    return tuple(getattr(v.aval, "shape", ())), getattr(v.aval, "dtype", None)
