"""Products of a few rows with what lies between them in one call of a compiled kernel.

Decoding a few texts waits for memory, from which every weight is read. Between two products a norm or an activation of
a few rows takes microseconds, and waking threads for the next product as long again: memory stands still meanwhile. The
kernel (``thin_chain.cc``) computes a whole sequence of products with matrices of numbers or codes, RMS norms, gates
``silu(a) * b`` and additions; its threads stay, and a thread that has to wait for others brings what it will read next
into its cache.

The sequences are found in the equations of a traced function: see :mod:`capibara.ops.linalg.joined`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from capibara.measure.flops import register_foreign_call
from capibara.ops.linalg.few_rows import thin_product
from capibara.ops.linalg.joined import Flat, Step, Value, joined, named
from capibara.ops.linalg.panel_operations import columns_of
from capibara.ops.linalg.quantised_native import FEW, CodesProduct, codes_product
from capibara.ops.one_device import compile_calls, native_call

__all__ = ["chained"]

_PRODUCT, _ADD, _GATE, _NORM, _CODES = range(5)  # as thin_chain.cc counts them
_NUMBERS = 4  # of each operation
_MATRIX_NUMBERS = 6  # of each matrix in codes
_PRODUCTS = thin_product, codes_product
_primitive = Primitive("capibara_thin_chain")
_primitive.multiple_results = True
compile_calls(_primitive)


def chained(function: Callable[..., Any]) -> Callable[..., Any]:
    """:func:`~capibara.ops.linalg.joined.joined`, with sequences of products and what lies between them as one call.

    For programs for one CPU device. The results are those of ``function`` up to rounding; a row's do not depend on the
    others.
    """
    return joined(function, _arrange)


@dataclass(eq=False)
class _Op:
    """An operation on rows: what it takes and gives, and the equations that it is."""

    kind: int
    a: Value
    b: Value
    number: int  # whether a matrix is transposed, or the bits of epsilon
    out: Value
    steps: list[Step]
    matrix: CodesProduct | None = None  # in codes, which ``b`` is
    beside: tuple[Value, ...] = ()  # its scales, levels and table

    @property
    def is_product(self) -> bool:
        return self.kind in (_PRODUCT, _CODES)

    @property
    def weights(self) -> tuple[Value, ...]:
        """What is no row."""
        return (self.b, *self.beside) if self.is_product or self.kind == _NORM else ()


@dataclass(eq=False)
class _Chain:
    ops: list[_Op] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def __call__(self, flat: Flat) -> None:
        made = {id(op.out): n for n, op in enumerate(self.ops)}
        given: dict[int, tuple[int, Any]] = {}
        pairs: list[list[Value]] = []
        for op in self.ops:
            pairs.append([_root(op.a), op.b if op.weights else _root(op.b)])
            for n, value in enumerate((*pairs[-1], *op.beside)):
                if id(value) in made or id(value) in given:
                    continue
                if value.step is not None:
                    flat.compute(value.step)
                array = value.array
                if op.kind == _NORM and n == 1:
                    # As it is if it may be: it may be a part of a matrix in codes, too.
                    whole = jnp.size(array)
                    array = array if jnp.shape(array) in ((whole,), (1, whole)) else jnp.reshape(array, -1)
                elif n == 0 or not op.weights:
                    array = jnp.reshape(array, _rows(value))
                given[id(value)] = len(given), array
        count = len(given)
        place = {key: count + n for key, n in made.items()} | {key: n for key, (n, _) in given.items()}
        ops: list[int] = []
        matrices: list[int] = []
        for op, (a, b) in zip(self.ops, pairs, strict=True):
            number = op.number
            if (matrix := op.matrix) is not None:
                number = len(matrices) // _MATRIX_NUMBERS
                sizes = matrix.problem.inner, matrix.problem.group, int(matrix.across)
                matrices += [*(place[id(value)] for value in op.beside), *sizes]
            ops += [op.kind, place[id(a)], place[id(b)], number]
        with named(self.ops[0].steps[0].scope):
            found = _primitive.bind(
                *(array for _, array in given.values()),
                attributes=(
                    ("rows", _rows(self.ops[0].out)[0]),
                    ("ops", tuple(ops)),
                    ("matrices", tuple(matrices)),
                    ("outputs", tuple(count + n for n in self.outputs)),
                ),
            )
        for n, array in zip(self.outputs, found, strict=True):
            out = self.ops[n].out
            out.array = jnp.reshape(array, out.aval.shape)
        for op in self.ops:
            for step in op.steps:
                step.done = True


def _arrange(flat: Flat, results: Sequence[Value]) -> None:
    """Find the sequences, and have each computed as one."""
    users: dict[int, list[Step]] = {}
    for step in flat.steps:
        for value in step.ins:
            users.setdefault(id(value), []).append(step)
    wanted = set(map(id, results))
    find = _Finder(users, wanted)
    chains: dict[tuple[int, int], _Chain] = {}
    # How many chains have to be computed before a value; of one that a chain makes, before that chain.
    before: dict[int, int] = {}
    made: set[int] = set()

    def level(value: Value) -> int:
        return before.get(id(_root(value)), 0)

    for step in flat.steps:
        group = step.together or [step]
        if step is not group[0]:
            continue
        ops = [op for one in group if (op := find.op(one)) is not None]
        if len(ops) != len(group):
            for one in group:
                needs = [level(v) + (id(_root(v)) in made) for v in one.ins]
                before |= dict.fromkeys(map(id, one.outs), max(needs, default=0))
            continue
        at = max(level(value) for op in ops for value in (op.a, op.b, *op.beside))
        if any(id(_root(value)) in made for op in ops for value in op.weights):
            at += 1
        for op in ops:
            before[id(op.out)] = at
            made.add(id(op.out))
            chains.setdefault((at, _rows(op.out)[0]), _Chain()).ops.append(op)
    for chain in chains.values():
        if len(chain.ops) < 2 or not any(op.is_product for op in chain.ops):
            continue
        own = {id(step) for op in chain.ops for step in op.steps}
        views: list[Step] = []

        def leaves(value: Value, own: set[int], views: list[Step]) -> bool:
            """Whether who is not of the chain uses it."""
            found = id(value) in wanted
            for user in users.get(id(value), []):
                if id(user) in own:
                    continue
                if _is_view(user) and not leaves(user.outs[0], own, views):
                    views.append(user)
                else:
                    found = True
            return found

        chain.outputs = [n for n, op in enumerate(chain.ops) if leaves(op.out, own, views)]
        for step in views:
            step.done = True
        for op in chain.ops:
            for step in op.steps:
                step.chain = chain


class _Finder:
    """Recognises operations by the equations that they are traced to."""

    def __init__(self, users: Mapping[int, list[Step]], wanted: set[int]) -> None:
        self._users, self._wanted = users, wanted
        self._products: set[int] = set()

    def op(self, step: Step) -> _Op | None:
        """The operation whose last equation this is."""
        name = step.eqn.primitive.name
        if step.eqn.primitive is thin_product and len(step.outs) == 1:
            self._products.add(id(step.outs[0]))
            a, b = step.ins
            return _Op(_PRODUCT, a, b, int(step.eqn.params["transposed"]), step.outs[0], [step])
        if step.eqn.primitive is codes_product:
            what: CodesProduct = step.eqn.params["what"]
            a, b, *beside = step.ins
            if a.aval.shape[0] > FEW or 0 in (*a.aval.shape, what.columns):
                return None
            self._products.add(id(step.outs[0]))
            return _Op(_CODES, a, b, 0, step.outs[0], [step], what, tuple(beside))
        if name not in ("add", "mul") or step.outs[0].aval.dtype != jnp.float32 or not step.outs[0].aval.ndim:
            return None
        a, b = step.ins
        if name == "mul":
            return self._norm(step, a, b) or self._norm(step, b, a) or self._gate(step, a, b)
        if _alike(a, b) and (self._of_product(a) or self._of_product(b)):
            return _Op(_ADD, a, b, 0, step.outs[0], [step])
        return None

    def _of_product(self, value: Value) -> bool:
        return id(_root(value)) in self._products

    def _only(self, value: Value, *names: str) -> Step | None:
        """The equation of a value that one other equation alone uses."""
        step = value.step
        if step is None or step.eqn.primitive.name not in names or id(value) in self._wanted:
            return None
        return step if len(self._users[id(value)]) == 1 else None

    def _gate(self, step: Step, a: Value, b: Value) -> _Op | None:
        for gate, other in ((a, b), (b, a)):
            made = self._only(gate, "jit", "pjit")
            if made is None or not _alike(gate, other) or not self._of_product(other):
                continue
            inner = made.eqn.params["jaxpr"].jaxpr
            if len(made.ins) == 1 and self._of_product(made.ins[0]) and _is_silu(inner):
                return _Op(_GATE, made.ins[0], other, 0, step.outs[0], [made, step])
        return None

    def _norm(self, step: Step, normed: Value, scale: Value) -> _Op | None:
        width = step.outs[0].aval.shape[-1]
        if scale.aval.shape[-1:] != (width,):
            return None
        while (made := scale.step) is not None and made.eqn.primitive.name in ("broadcast_in_dim", "reshape"):
            # Another shape of the same numbers may be what a matrix in codes has for its scales.
            if math.prod(made.ins[0].aval.shape) != width or made.ins[0].aval.shape[-1:] != (width,):
                break
            # As many numbers as columns may be one for each row.
            along = made.eqn.params.get("broadcast_dimensions")
            if along is not None and along[-1:] != (scale.aval.ndim - 1,):
                return None
            scale = made.ins[0]
        if scale.aval.size != width or scale.aval.dtype != jnp.float32 or not self._is_multiplied(step):
            return None
        by = self._only(normed, "mul")
        if by is None:
            return None
        for x, inverse in (by.ins, by.ins[::-1]):
            steps = self._inverse_root(x, inverse)
            if steps is not None and _alike(x, step.outs[0]):
                epsilon = _number(steps[1].ins[1])
                bits = int(np.float32(epsilon).view(np.int32))
                return _Op(_NORM, x, scale, bits, step.outs[0], [*steps, by, step])
        return None

    def _inverse_root(self, x: Value, inverse: Value) -> list[Step] | None:
        """The equations of one over the root of the mean of squares and epsilon."""
        root = self._only(inverse, "rsqrt")
        total = None if root is None else self._only(root.ins[0], "add")
        mean = None if total is None else self._only(total.ins[0], "div")
        if root is None or total is None or mean is None or _number(total.ins[1]) is None:
            return None
        steps, value = [root, total, mean], mean.ins[0]
        while (view := self._only(value, "broadcast_in_dim", "reshape")) is not None:
            steps.append(view)
            value = view.ins[0]
        added = self._only(value, "reduce_sum")
        square = None if added is None else self._only(added.ins[0], "square")
        if added is None or square is None or square.ins[0] is not x:
            return None
        shape = x.aval.shape
        rows = math.prod(shape[:-1])
        if added.eqn.params["axes"] != (len(shape) - 1,) or _number(mean.ins[1]) != shape[-1]:
            return None
        return [*steps, added, square] if math.prod(inverse.aval.shape) == rows else None

    def _is_multiplied(self, step: Step) -> bool:
        """Whether products are what a result is for."""
        return any(
            user.eqn.primitive in _PRODUCTS or (_is_view(user) and self._is_multiplied(user))
            for user in self._users.get(id(step.outs[0]), [])
        )


def _rows(value: Value) -> tuple[int, int]:
    """The number of rows, and their width."""
    shape = value.aval.shape
    return math.prod(shape[:-1]), shape[-1]


def _is_view(step: Step) -> bool:
    """Whether an equation gives the same rows in another shape."""
    if step.eqn.primitive.name not in ("reshape", "squeeze", "broadcast_in_dim"):
        return False
    before, after = step.ins[0].aval, step.outs[0].aval
    return bool(before.ndim and after.ndim) and _rows(step.ins[0]) == _rows(step.outs[0])


def _root(value: Value) -> Value:
    """The value whose rows these are, before views of them."""
    while value.step is not None and _is_view(value.step):
        value = value.step.ins[0]
    return value


def _alike(a: Value, b: Value) -> bool:
    return a.aval.shape == b.aval.shape and a.aval.dtype == b.aval.dtype == jnp.float32


def _number(value: Value) -> float | None:
    """A constant of the program."""
    if value.step is not None or isinstance(value.array, jax.Array) or np.size(value.array) != 1:
        return None
    return float(np.asarray(value.array).reshape(()))


def _is_silu(jaxpr: Any) -> bool:
    names = [eqn.primitive.name for eqn in jaxpr.eqns]
    if names != ["logistic", "mul"]:
        return False
    (x,), (logistic, product) = jaxpr.invars, jaxpr.eqns
    return (
        logistic.invars[0] is x
        and set(map(id, product.invars)) == {id(x), id(logistic.outvars[0])}
        and jaxpr.outvars[0] is product.outvars[0]
    )


def _codes_shape(arrays: Sequence[Any], attributes: Mapping[str, Any], codes: int, which: int) -> list[int]:
    """Of a matrix in codes: ``[inner, columns]`` as the product has them."""
    at = which * _MATRIX_NUMBERS
    *_, inner, _, across = attributes["matrices"][at : at + _MATRIX_NUMBERS]
    rows = arrays[codes].shape[0]
    return [rows, inner] if across else [inner, rows]


def _described(arrays: Sequence[Any], attributes: Mapping[str, Any]) -> list[tuple[int, int]]:
    """The shapes of what a call gives."""
    widths, ops = [array.shape[-1] for array in arrays], attributes["ops"]
    for kind, a, b, number in (ops[i : i + _NUMBERS] for i in range(0, len(ops), _NUMBERS)):
        if kind == _CODES:
            widths.append(_codes_shape(arrays, attributes, b, number)[1])
        else:
            widths.append(columns_of(arrays[b], transposed=bool(number)) if kind == _PRODUCT else widths[a])
    return [(attributes["rows"], widths[n]) for n in attributes["outputs"]]


@_primitive.def_abstract_eval
def _shapes(*arrays: Any, attributes: tuple[tuple[str, Any], ...]) -> list[Any]:
    return [arrays[0].update(shape=shape) for shape in _described(arrays, dict(attributes))]


def _on_cpu(*arrays: jax.Array, attributes: tuple[tuple[str, Any], ...]) -> list[jax.Array]:
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in _described(arrays, dict(attributes))]
    return list(native_call("capibara_thin_chain", out, *arrays, **dict(attributes)))


mlir.register_lowering(_primitive, mlir.lower_fun(_on_cpu, multiple_results=True), platform="cpu")


def _flops(ins: Sequence[Any], _: Any, attributes: Mapping[str, Any]) -> int:
    ops, rows, total = attributes["ops"], attributes["rows"], 0
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ins]
    for kind, _, b, number in (ops[i : i + _NUMBERS] for i in range(0, len(ops), _NUMBERS)):
        if kind == _PRODUCT:
            total += 2 * rows * math.prod(ins[b])
        elif kind == _CODES:
            total += 2 * rows * math.prod(_codes_shape(arrays, attributes, b, number))
    return total


register_foreign_call("capibara_thin_chain", _flops)
