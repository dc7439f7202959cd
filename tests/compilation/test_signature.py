"""What selects a program, against JAX's own ``jit``: as many programs for the same calls, and a reason for each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compilation import count_compilations, create_tpu_optimized_jit
from capibara.compilation.changes import differences
from capibara.compilation.signature import argument_names, signature_of

DTYPES = ("float32", "float16", "int32", "bool")
SHAPES = ((), (1,), (2,), (2, 3))

leaves = st.one_of(
    st.builds(lambda s, d: np.ones(s, d), st.sampled_from(SHAPES), st.sampled_from(DTYPES)),
    st.builds(lambda s, d: jnp.asarray(np.ones(s, d)), st.sampled_from(SHAPES), st.sampled_from(DTYPES)),
    st.sampled_from([1, 2, 1.5, True, 2j]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("ab"), inner, min_size=1, max_size=2),
        st.lists(inner, min_size=1, max_size=2),
        st.lists(inner, min_size=1, max_size=2).map(tuple),
    ),
    max_leaves=3,
)
calls = st.lists(st.tuples(trees, leaves), min_size=2, max_size=4)


@settings(max_examples=8)
@given(calls)
def test_as_many_programs_as_jit_compiles(sequence: list[tuple[Any, Any]]) -> None:
    def first(tree: Any, x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf, tree), x

    def second(tree: Any, x: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf, tree), x

    plain, ours = jax.jit(first), create_tpu_optimized_jit(second)
    with count_compilations() as counts:
        for call in sequence:
            plain(*call)
    for call in sequence:
        result, expected = ours(*call), plain(*call)
        assert jax.tree.structure(result) == jax.tree.structure(expected)
        for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert (one.dtype, one.shape, one.weak_type) == (other.dtype, other.shape, other.weak_type)
            np.testing.assert_array_equal(one, other)
    # JAX reads programs with the same code from memory: it may compile fewer, and never more.
    assert len(ours.programs) >= counts.programs
    assert len(ours.recompilations) == len(ours.programs) - 1
    assert all(one.changes for one in ours.recompilations)


@settings(max_examples=100)
@given(trees, trees)
def test_no_differences_between_equal_signatures_and_only_those(one: Any, other: Any) -> None:
    before, after = signature_of((one,), {}), signature_of((other,), {})
    found = differences(before, after, ("tree",))
    assert (found == ()) == (before == after)
    back = differences(after, before, ("tree",))
    assert sorted((c.where, c.what, c.before, c.after) for c in found) == sorted(
        (c.where, c.what, c.after, c.before) for c in back
    )


def test_names_of_arguments() -> None:
    def function(a: Any, b: Any, *rest: Any, c: Any) -> None:
        """Only its signature counts."""

    assert argument_names(function, 4) == ("a", "b", "rest[0]", "rest[1]")
    assert argument_names(function, 1) == ("a",)
    assert argument_names(max, 2) == ("argument 0", "argument 1")
    signature = signature_of((1, {"x": [2, 3]}), {"c": (4,)})
    assert signature.paths(("a", "b")) == ("a", "b['x'][0]", "b['x'][1]", "c[0]")
