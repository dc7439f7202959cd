"""Changes of loops within compiled programs: several turns at once.

``"batch"`` computes turns that do not depend on one another together, as ``jax.vmap`` does; ``"unroll"`` puts a few
turns into each one of the compiled loop. Both are what the author could write; neither changes what is computed, but
for the order of sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["UNROLLED", "batch", "unroll"]

# Turns of a loop that one of the unrolled loop has.
UNROLLED = 8
# Turns that are computed at once, and bytes of one intermediate array of theirs: these are all there at a time. Who
# wrote a loop may have done so because they do not fit.
_MOST_AT_ONCE, _MOST_BYTES = 1024, 2**28
_OFTEN = 8  # a loop of fewer turns is left as it is


def batch(note: Callable[[str], None], used: Callable[[str], None], place: Callable[[], str]) -> None:
    """Let ``lax.map``, and ``lax.scan`` whose carry stays as it is, compute up to 1,024 turns at once.

    Args:
      note: called with what a loop was left as it is for. used: with what was changed. place: the script's line.
    """
    import jax

    plain_map, plain_scan = jax.lax.map, jax.lax.scan

    def together(name: str, f: Callable[[Any], Any], xs: Any, length: int) -> Any:
        at_once = min(length, _MOST_AT_ONCE, _MOST_BYTES // _widest(f, xs))
        if at_once < 2:
            raise TypeError(f"arrays of two turns take more than {_MOST_BYTES // 2**20} MiB")

        def mapped(xs: Any) -> Any:
            return plain_map(f, xs, batch_size=at_once)

        # What cannot be batched says so when it is traced.
        expected = jax.eval_shape(lambda xs: plain_map(f, xs), xs)
        if _types(jax.eval_shape(mapped, xs)) != _types(expected):
            raise TypeError("together its results have other shapes or dtypes")
        found = mapped(xs)
        used(f"lax.{name}{place()}: {at_once:,} of its {length:,} turns at once")
        return found

    @functools.wraps(plain_map)
    def map_at_once(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
        length = _length(xs)
        if batch_size is None and length >= _OFTEN:
            try:
                return together("map", f, xs, length)
            except Exception as error:
                note(f"lax.map{place()} was left as it is: {_first_line(error)}")
        return plain_map(f, xs, batch_size=batch_size)

    @functools.wraps(plain_scan)
    def scan_at_once(f: Callable[..., Any], init: Any, xs: Any = None, *args: Any, **kwargs: Any) -> Any:
        length = _length(xs)
        if length >= _OFTEN:
            if not _keeps_its_carry(f, init, xs):
                note(f"lax.scan{place()} was left as it is: each turn takes what the one before gave")
            else:
                try:
                    found = together("scan", lambda x: f(init, x)[1], xs, length)
                    # The carry as the loop gives it: with its dtypes.
                    first = jax.eval_shape(lambda: plain_scan(f, init, xs, *args, **kwargs)[0])
                    return jax.tree.map(lambda x, to: jax.numpy.asarray(x, to.dtype), init, first), found
                except Exception as error:
                    note(f"lax.scan{place()} was left as it is: {_first_line(error)}")
        return plain_scan(f, init, xs, *args, **kwargs)

    jax.lax.map, jax.lax.scan = map_at_once, scan_at_once


def unroll(note: Callable[[str], None], used: Callable[[str], None], place: Callable[[], str]) -> None:
    """Let ``lax.scan``, ``lax.map`` and ``lax.fori_loop`` of a fixed number of turns unroll :data:`UNROLLED` of them.

    Args: see :func:`batch`.
    """
    import jax

    plain_map, plain_scan, plain_loop = jax.lax.map, jax.lax.scan, jax.lax.fori_loop

    def said(name: str, length: int) -> None:
        used(f"lax.{name}{place()}: {UNROLLED} of its {length:,} turns in each of the compiled loop")

    @functools.wraps(plain_scan)
    def unrolled_scan(
        f: Callable[..., Any],
        init: Any,
        xs: Any = None,
        length: int | None = None,
        reverse: bool = False,
        unroll: int | bool = 1,
        **more: Any,
    ) -> Any:
        turns = _length(xs) or (length if isinstance(length, int) else 0)
        if unroll in (1, False) and turns >= _OFTEN:
            said("scan", turns)
            unroll = UNROLLED
        return plain_scan(f, init, xs, length, reverse, unroll, **more)

    @functools.wraps(plain_map)
    def unrolled_map(f: Callable[[Any], Any], xs: Any, *, batch_size: int | None = None) -> Any:
        turns = _length(xs)
        if batch_size is not None or turns < _OFTEN:
            return plain_map(f, xs, batch_size=batch_size)
        said("map", turns)
        return plain_scan(lambda _, x: ((), f(x)), (), xs, unroll=UNROLLED)[1]

    @functools.wraps(plain_loop)
    def unrolled_loop(lower: Any, upper: Any, body_fun: Any, init_val: Any, **options: Any) -> Any:
        if options.get("unroll") is None and not options.keys() - {"unroll"}:
            if type(lower) is int and type(upper) is int:
                if upper - lower >= _OFTEN:
                    said("fori_loop", upper - lower)
                    options = {"unroll": UNROLLED}
            else:
                note(f"lax.fori_loop{place()} was left as it is: how many turns it has is known when it runs")
        return plain_loop(lower, upper, body_fun, init_val, **options)

    jax.lax.map, jax.lax.scan, jax.lax.fori_loop = unrolled_map, unrolled_scan, unrolled_loop


def _length(xs: Any) -> int:
    """Turns over arrays; 0 if there are none."""
    import jax
    import numpy as np

    leaves = jax.tree.leaves(xs)
    shape = np.shape(leaves[0]) if leaves else ()
    return int(shape[0]) if shape else 0


def _keeps_its_carry(f: Callable[..., Any], init: Any, xs: Any) -> bool:
    """Whether each turn gives the carry as it got it: then none depends on another."""
    import jax
    import numpy as np

    try:
        carry = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)), init)
        jaxpr = jax.make_jaxpr(f)(carry, _one_turn(xs)).jaxpr
    except Exception:  # the loop itself says what is wrong
        return False
    count = len(jax.tree.leaves(init))
    return all(out is into for out, into in zip(jaxpr.outvars[:count], jaxpr.invars[:count], strict=True))


def _one_turn(xs: Any) -> Any:
    """Shapes and dtypes of what one turn gets."""
    import jax
    import numpy as np

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x)[1:], jax.dtypes.result_type(x)), xs)


def _widest(f: Callable[[Any], Any], xs: Any) -> int:
    """Bytes of the largest array that a turn computes, also in programs within it; at least 1."""
    import jax

    def largest(jaxpr: Any) -> int:
        most = 1
        for one in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            for out in one.outvars:
                dtype = getattr(out.aval, "dtype", None)
                most = max(most, getattr(out.aval, "size", 0) * getattr(dtype, "itemsize", 0))
            for value in one.params.values():
                for inner in value if isinstance(value, tuple | list) else (value,):
                    if hasattr(inner, "eqns") or hasattr(getattr(inner, "jaxpr", None), "eqns"):
                        most = max(most, largest(inner))
        return most

    return largest(jax.make_jaxpr(f)(_one_turn(xs)))


def _types(tree: Any) -> Any:
    import jax

    return jax.tree.structure(tree), [(one.shape, one.dtype) for one in jax.tree.leaves(tree)]


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
