"""Recognise values in a jaxpr that are affine in a loop's carry, and compute their coefficients.

A step of a scan is interpreted with values that track their dependence on the carry: not at all (a plain array),
affinely (:class:`Affine`), or otherwise (:class:`Other`, with the reason). The coefficients are computed along the
way, as arrays that depend on the step's input only. Nothing is sampled: a primitive without a rule here makes its
result ``Other``, so a step is treated as affine only if each primitive involved is known to be.

A coefficient array is as sparse as the step: an axis of the value that corresponds to an axis of the carry is a
*link* (an elementwise product, a batch); only an axis of the carry that was summed over has its own axis in the
coefficients. ``carry * a`` has two links and coefficients ``a``; ``carry @ m`` has one link, and coefficients ``m``.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax

from capibara.ops.one_device import typed_as

__all__ = ["Affine", "Other", "Term", "bind", "carried", "interpret"]


@dataclass(frozen=True)
class Term:
    """``sum over the inner axes of coefficients × the carry's leaf``.

    Attributes:
      shape: of the leaf. ``links``: for each axis of the value the corresponding axis of the leaf, or None.
      inner: the other axes of the leaf, ascending.
      coefficients: ``[axes of the value or 1 …, inner axes …]``; None: one.
      cleared: some coefficients are 0 because a selection chose a value without the leaf: a product with 0 is
        equivalent only if the leaf is finite.
    """

    shape: tuple[int, ...]
    links: tuple[int | None, ...]
    inner: tuple[int, ...] = ()
    coefficients: Any = None
    cleared: bool = False


@dataclass(frozen=True)
class Affine:
    """A sum of terms, one per leaf of the carry, and an offset (None: zero)."""

    shape: tuple[int, ...]
    dtype: Any
    leaf_dtype: Any
    terms: dict[int, Term]
    offset: Any = None


@dataclass(frozen=True)
class Other:
    """A value whose dependence on the carry is not known to be affine."""

    reason: str


def carried(leaf: int, aval: Any) -> Affine | Other:
    """The leaf of the carry itself."""
    if not jnp.issubdtype(aval.dtype, jnp.number):
        return Other(f"a part of the carry is {aval.dtype}, not numbers")
    shape = tuple(aval.shape)
    return Affine(shape, aval.dtype, aval.dtype, {leaf: Term(shape, tuple(range(len(shape))))})


def bind(eqn: Any, *values: Any) -> list[Any]:
    """Evaluate an equation on plain arrays."""
    values = tuple(typed_as(v.aval, x) for v, x in zip(eqn.invars, values, strict=True))
    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def interpret(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr whose inputs are arrays, :class:`Affine` or :class:`Other`."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))
    for eqn in jaxpr.eqns:
        inputs = [env[v] if not hasattr(v, "val") else v.val for v in eqn.invars]
        env.update(zip(eqn.outvars, _apply(eqn, inputs), strict=True))
    return [env[v] if not hasattr(v, "val") else v.val for v in jaxpr.outvars]


def _apply(eqn: Any, inputs: list[Any]) -> list[Any]:
    if not any(isinstance(x, Affine | Other) for x in inputs):
        return bind(eqn, *inputs)
    name = eqn.primitive.name
    if name in _INLINED:
        inner = eqn.params["jaxpr"]
        return interpret(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
    broken = next((x for x in inputs if isinstance(x, Other)), None)
    if broken is None and name in _RULES and not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.number):
        broken = Other(f"the carry goes through {name!r} to {eqn.outvars[0].aval.dtype}")
    if broken is None and name in _ELEMENTWISE:
        inputs = [_stretched(x, eqn.outvars[0].aval.shape) if isinstance(x, Affine) else x for x in inputs]
    if broken is None and name in _RULES:
        found = _RULES[name](eqn, *inputs)
        if isinstance(found, Affine):
            aval = eqn.outvars[0].aval
            found = replace(found, shape=tuple(aval.shape), dtype=aval.dtype)
        return [found]
    broken = broken or Other(f"the carry goes through {name!r}")
    return [broken] * len(eqn.outvars)


# What only calls another jaxpr. Calls with derivatives of their own are not here: they would be lost.
_INLINED = ("jit", "pjit", "closed_call", "checkpoint", "remat", "remat2")

# Their operands have the shape of the result, or sizes of 1 in it, or are scalars.
_ELEMENTWISE = ("add", "add_any", "sub", "mul", "div", "select_n")

_RULES: dict[str, Callable[..., Affine | Other]] = {}


def _rule(*names: str) -> Callable[[Any], Any]:
    def put(function: Any) -> Any:
        _RULES.update((name, function) for name in names)
        return function

    return put


def _coefficients(term: Term, dtype: Any) -> Any:
    if term.coefficients is not None:
        return term.coefficients
    return jnp.ones((1,) * len(term.links), dtype)


def _full(term: Term, axis: int, size: int, dtype: Any) -> Any:
    """The coefficients, with their true size along an axis of the value."""
    c = _coefficients(term, dtype)
    return jnp.broadcast_to(c, (*c.shape[:axis], size, *c.shape[axis + 1 :]))


def _unlink(term: Term, axis: int, dtype: Any) -> Term:
    """The same term, where an axis of the value has coefficients of its own for each entry of the leaf's axis."""
    leaf_axis = term.links[axis]
    assert leaf_axis is not None
    size, rank = term.shape[leaf_axis], len(term.links)
    inner = tuple(sorted((*term.inner, leaf_axis)))
    at = rank + inner.index(leaf_axis)
    c = jnp.expand_dims(_coefficients(term, dtype), at)
    eye = jnp.eye(size, dtype=dtype).reshape([size if i in (axis, at) else 1 for i in range(c.ndim)])
    links = tuple(None if i == axis else link for i, link in enumerate(term.links))
    # Chosen, not multiplied: a coefficient that is not finite must not spoil the zeros beside it.
    return Term(term.shape, links, inner, jnp.where(eye != 0, c, jnp.zeros((), dtype)), term.cleared)


def _alike(one: Term, other: Term, dtype: Any) -> tuple[Term, Term]:
    """Both terms with the links that they have in common only."""
    for axis in range(len(one.links)):
        if one.links[axis] != other.links[axis]:
            one = one if one.links[axis] is None else _unlink(one, axis, dtype)
            other = other if other.links[axis] is None else _unlink(other, axis, dtype)
    return one, other


def _mapped(x: Affine, change: Callable[[Any, int], Any]) -> Affine:
    """``change(array, number of inner axes)`` of all coefficients and of the offset."""
    terms = {
        i: replace(t, coefficients=change(_coefficients(t, x.dtype), len(t.inner)))
        for i, t in x.terms.items()
    }
    return replace(x, terms=terms, offset=None if x.offset is None else change(x.offset, 0))


def _beside(s: Any, x: Affine, inner: int) -> Any:
    """A plain operand of ``x``, shaped to broadcast against its coefficients."""
    s = jnp.asarray(s)
    shape = s.shape if s.ndim == len(x.shape) else (1,) * len(x.shape)
    return s.reshape(*shape, *(1,) * inner)


@_rule("neg")
def _neg(eqn: Any, x: Affine) -> Affine:
    return _mapped(x, lambda c, _: -c)


@_rule("copy", "copy_p", "optimization_barrier")
def _copy(eqn: Any, *x: Any) -> Affine | Other:
    return x[0] if len(x) == 1 else Other("the carry goes through a barrier with other values")


@_rule("mul")
def _mul(eqn: Any, x: Any, y: Any) -> Affine | Other:
    if isinstance(x, Affine) and isinstance(y, Affine):
        return Other("the carry is multiplied by itself ('mul')")
    x, s = (x, y) if isinstance(x, Affine) else (y, x)
    return _mapped(x, lambda c, inner: c * _beside(s, x, inner))


@_rule("div")
def _div(eqn: Any, x: Any, y: Any) -> Affine | Other:
    if isinstance(y, Affine):
        return Other("something is divided by the carry ('div')")
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return Other("integers of the carry are divided with rounding ('div')")
    return _mapped(x, lambda c, inner: c / _beside(y, x, inner))


def _joined(x: Affine, y: Affine, join: Callable[[Any, Any], Any]) -> Affine:
    terms = dict(x.terms)
    for i, term in y.terms.items():
        if i not in terms:
            terms[i] = term
            continue
        one, other = _alike(terms[i], term, x.dtype)
        both = join(_coefficients(one, x.dtype), _coefficients(other, x.dtype))
        terms[i] = replace(one, coefficients=both, cleared=one.cleared or other.cleared)
    offset = y.offset if x.offset is None else x.offset if y.offset is None else join(x.offset, y.offset)
    return replace(x, terms=terms, offset=offset)


@_rule("add", "add_any")
def _add(eqn: Any, x: Any, y: Any) -> Affine | Other:
    if isinstance(x, Affine) and isinstance(y, Affine):
        return _joined(x, y, jnp.add)
    x, s = (x, y) if isinstance(x, Affine) else (y, x)
    s = jnp.broadcast_to(s, x.shape).astype(x.dtype)
    return replace(x, offset=s if x.offset is None else x.offset + s)


@_rule("sub")
def _sub(eqn: Any, x: Any, y: Any) -> Affine | Other:
    return _add(eqn, x, _neg(eqn, y) if isinstance(y, Affine) else -jnp.asarray(y))


@_rule("select_n")
def _select(eqn: Any, which: Any, *cases: Any) -> Affine | Other:
    if isinstance(which, Affine) or len(cases) != 2:
        return Other("the carry decides what is selected ('select_n')")
    like = next(c for c in cases if isinstance(c, Affine))
    no, yes = (
        c if isinstance(c, Affine) else replace(like, terms={}, offset=jnp.broadcast_to(c, like.shape))
        for c in cases
    )
    terms = {}
    for i in (*no.terms, *(i for i in yes.terms if i not in no.terms)):
        one, other = no.terms.get(i), yes.terms.get(i)
        if one is not None and other is not None:
            one, other = _alike(one, other, like.dtype)
        kept = one or other
        assert kept is not None
        zero = jnp.zeros((), like.dtype)
        low, high = (zero if t is None else _coefficients(t, like.dtype) for t in (one, other))
        chosen = jnp.where(_beside(which, like, len(kept.inner)), high, low)
        cleared = one is None or other is None or one.cleared or other.cleared
        terms[i] = replace(kept, coefficients=chosen, cleared=cleared)
    zero = jnp.zeros(like.shape, like.dtype)
    if no.offset is None and yes.offset is None:
        return replace(like, terms=terms, offset=None)
    low, high = (zero if c.offset is None else c.offset for c in (no, yes))
    return replace(like, terms=terms, offset=jnp.where(which, high, low))


@_rule("convert_element_type")
def _convert(eqn: Any, x: Affine) -> Affine | Other:
    new, old = eqn.outvars[0].aval.dtype, x.dtype
    exact = new == old or (
        jnp.issubdtype(new, jnp.inexact)
        and jnp.issubdtype(old, jnp.inexact)
        and jnp.issubdtype(new, jnp.complexfloating) >= jnp.issubdtype(old, jnp.complexfloating)
        and jnp.promote_types(new, x.leaf_dtype) == new
    )
    if not exact:
        return Other(f"the carry is rounded to {new} ('convert_element_type')")
    return _mapped(x, lambda c, _: c.astype(new))


def _moved(x: Affine, axes: Sequence[int], shape: Sequence[int]) -> Affine:
    """An axis of size 1 for each -1 in ``axes``, else the axis of ``x`` named there; those not named have size 1."""
    terms = {}
    for i, term in x.terms.items():
        for axis, link in enumerate(term.links):
            if link is not None and (axis not in axes or shape[list(axes).index(axis)] != x.shape[axis]):
                term = _unlink(term, axis, x.dtype)
        c = _coefficients(term, x.dtype)
        rank = len(term.links)
        kept = [axis for axis in axes if axis >= 0]
        dropped = [axis for axis in range(rank) if axis not in kept]
        c = jnp.transpose(c, (*dropped, *kept, *range(rank, c.ndim))).reshape(
            *(1 if axis < 0 else c.shape[axis] for axis in axes), *c.shape[rank:]
        )
        links = tuple(None if axis < 0 else term.links[axis] for axis in axes)
        terms[i] = replace(term, links=links, coefficients=c)
    offset = x.offset
    if offset is not None:
        dropped = [axis for axis in range(offset.ndim) if axis not in axes]
        offset = jnp.transpose(offset, (*dropped, *(axis for axis in axes if axis >= 0)))
        offset = offset.reshape([1 if axis < 0 else x.shape[axis] for axis in axes])
        offset = jnp.broadcast_to(offset, tuple(shape))
    return replace(x, shape=tuple(shape), terms=terms, offset=offset)


def _stretched(x: Affine, shape: tuple[int, ...]) -> Affine:
    """An operand of an elementwise operation, in the shape of its result."""
    if x.shape == tuple(shape):
        return x
    return _moved(x, range(len(shape)) if x.shape else [-1] * len(shape), shape)


@_rule("transpose")
def _transpose(eqn: Any, x: Affine) -> Affine:
    axes = eqn.params["permutation"]
    return _moved(x, axes, [x.shape[a] for a in axes])


@_rule("broadcast_in_dim")
def _broadcast(eqn: Any, x: Affine, *sizes: Any) -> Affine:
    shape, places = eqn.params["shape"], list(eqn.params["broadcast_dimensions"])
    return _moved(x, [places.index(i) if i in places else -1 for i in range(len(shape))], shape)


@_rule("reshape", "squeeze", "expand_dims")
def _reshape(eqn: Any, x: Affine, *sizes: Any) -> Affine | Other:
    shape = tuple(eqn.outvars[0].aval.shape)
    real = [i for i, n in enumerate(x.shape) if n != 1]
    if [x.shape[i] for i in real] != [n for n in shape if n != 1] or (
        eqn.params.get("dimensions") and (eqn.primitive.name == "reshape")
    ):
        return Other("the carry is reshaped ('reshape')")
    rest = iter(real)
    return _moved(x, [-1 if n == 1 else next(rest) for n in shape], shape)


@_rule("reduce_sum")
def _reduce_sum(eqn: Any, x: Affine) -> Affine:
    axes = eqn.params["axes"]
    terms = {}
    for i, term in x.terms.items():
        for axis in axes:
            if term.links[axis] is not None:
                term = _unlink(term, axis, x.dtype)
        c = _coefficients(term, x.dtype)
        for axis in axes:
            c = jnp.broadcast_to(c, (*c.shape[:axis], x.shape[axis], *c.shape[axis + 1 :]))
        links = tuple(link for axis, link in enumerate(term.links) if axis not in axes)
        terms[i] = replace(term, links=links, coefficients=jnp.sum(c, axes, dtype=x.dtype))
    return replace(
        x, terms=terms, offset=None if x.offset is None else jnp.sum(x.offset, axes, dtype=x.dtype)
    )


@_rule("dot_general")
def _dot(eqn: Any, x: Any, y: Any) -> Affine | Other:
    if isinstance(x, Affine) and isinstance(y, Affine):
        return Other("the carry is multiplied by itself ('dot_general')")
    first = isinstance(x, Affine)
    value, plain = (x, y) if first else (y, x)
    aval = eqn.outvars[0].aval
    kinds = {value.dtype, plain.dtype, aval.dtype}
    if len(kinds) > 1 and not all(jnp.issubdtype(k, jnp.inexact) for k in kinds):
        return Other(f"the carry is converted to {aval.dtype} ('dot_general')")
    if jnp.promote_types(aval.dtype, value.leaf_dtype) != aval.dtype:
        return Other(f"the carry is rounded to {aval.dtype} ('dot_general')")
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    contracted, batch = ((lc, rc), (lb, rb)) if first else ((rc, lc), (rb, lb))
    letters = iter(string.ascii_letters)
    mine = [next(letters) for _ in value.shape]
    theirs = [next(letters) for _ in jnp.shape(plain)]
    for here, there in (contracted, batch):
        for i, j in zip(here, there, strict=True):
            theirs[j] = mine[i]
    shared = {mine[i] for i in (*contracted[0], *batch[0])}
    outer = [mine[i] for i in batch[0]]
    sides = (mine, theirs) if first else (theirs, mine)
    for side in sides:
        outer += [letter for letter in side if letter not in shared]
    terms = {}
    for i, term in value.terms.items():
        inner: dict[int, str] = {axis: next(letters) for axis in term.inner}
        own = [*mine, *inner.values()]
        c = _coefficients(term, value.dtype)
        for axis in (*contracted[0], *batch[0]):
            c = jnp.broadcast_to(c, (*c.shape[:axis], value.shape[axis], *c.shape[axis + 1 :]))
        for axis in contracted[0]:
            if (link := term.links[axis]) is not None:
                inner[link] = mine[axis]
        inner = dict(sorted(inner.items()))
        spec = f"{''.join(own)},{''.join(theirs)}->{''.join((*outer, *inner.values()))}"
        c = jnp.einsum(
            spec, c, plain, precision=lax.Precision.HIGHEST, preferred_element_type=aval.dtype
        ).astype(aval.dtype)
        link_of = {mine[axis]: link for axis, link in enumerate(term.links)}
        links = tuple(link_of.get(letter) for letter in outer)
        terms[i] = Term(term.shape, links, tuple(inner), c, term.cleared)
    offset = value.offset
    if offset is not None:
        offset = bind(eqn, *((offset, plain) if first else (plain, offset)))[0]
    return replace(value, terms=terms, offset=offset)
