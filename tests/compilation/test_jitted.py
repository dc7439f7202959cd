"""Functions with programs of their own: reasons of recompilations, ahead-of-time compilation, options."""

from __future__ import annotations

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from capibara.compilation import (
    CompilationOptionError,
    CompilationOptionWarning,
    NotCompiledError,
    RecompilationWarning,
    TpuCompilationConfig,
    count_compilations,
    create_jitted_forward,
    create_tpu_optimized_jit,
)
from capibara.compilation.signature import settings_now


def apply(params: dict[str, Any], x: Any) -> Any:
    return x * params["w"] + params["b"][0]


PARAMS = {"w": jnp.float32(2.0), "b": [jnp.ones(3)]}
X = jnp.arange(3.0)


def test_calls_share_a_program_and_agree_with_jit() -> None:
    jitted = create_tpu_optimized_jit(apply)
    for _ in range(3):
        np.testing.assert_array_equal(jitted(PARAMS, X), jax.jit(apply)(PARAMS, X))
    other = X + 1
    with count_compilations() as counts:
        jitted(PARAMS, other)
        jitted(PARAMS, np.asarray(X))
    assert len(jitted.programs) == 1
    assert counts.programs == 0
    assert jitted.recompilations == ()


one_device = NamedSharding(
    jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), PartitionSpec()
)


@pytest.mark.parametrize(
    ("params", "x", "reasons"),
    [
        (PARAMS, jnp.zeros((2, 3)), ["x: shape (3,) -> (2, 3)"]),
        (PARAMS, X.astype(jnp.float16), ["x: dtype float32 -> float16"]),
        (
            PARAMS | {"w": 2.0},
            X,
            ["params['w']: weak type False -> True"],
        ),
        (PARAMS | {"b": [jnp.ones(1)]}, X, ["params['b'][0]: shape (3,) -> (1,)"]),
        (PARAMS | {"b": (jnp.ones(3),)}, X, ["arguments: structure"]),
        (PARAMS | {"extra": X}, X, ["params['extra']: structure absent -> float32[3]"]),
        (PARAMS, jax.device_put(X, one_device), ["x: sharding none -> NamedSharding"]),
        (
            PARAMS | {"w": jnp.float16(2)},
            jnp.zeros((5, 3), jnp.int32),
            ["params['w']: dtype float32 -> float16", "x: shape (3,) -> (5, 3)", "x: dtype float32 -> int32"],
        ),
    ],
)
def test_the_reason_of_a_recompilation(params: Any, x: Any, reasons: list[str]) -> None:
    jitted = create_tpu_optimized_jit(apply, config=TpuCompilationConfig(warn_on_recompilation=True))
    jitted(PARAMS, X)
    with pytest.warns(RecompilationWarning) as caught:
        jitted(params, x)
    (found,) = jitted.recompilations
    assert len(found.changes) == len(reasons)
    for change, reason in zip(found.changes, reasons, strict=True):
        assert str(change).startswith(reason)
        assert str(change) in str(caught[0].message)
        assert str(change) in jitted.explain()
    assert len(jitted.programs) == 2
    jitted(PARAMS, X)
    jitted(params, x)
    assert len(jitted.programs) == 2


def test_the_nearest_of_several_programs_is_compared_with() -> None:
    jitted = create_tpu_optimized_jit(lambda a, b: a.sum() + b.sum())
    jitted(jnp.zeros(3), jnp.zeros(4))
    jitted(jnp.zeros((7, 7)), jnp.zeros((8, 8)))
    jitted(jnp.zeros((7, 7)), jnp.zeros((9, 8)))
    last = jitted.recompilations[-1]
    assert [str(change) for change in last.changes] == ["b: shape (8, 8) -> (9, 8)"]
    assert last.known == 2


def test_a_setting_of_jax_is_a_reason() -> None:
    jitted = create_tpu_optimized_jit(lambda x: x @ x)
    jitted(jnp.ones((2, 2)))
    with jax.default_matmul_precision("highest"):
        jitted(jnp.ones((2, 2)))
    (found,) = jitted.recompilations
    assert [(c.where, c.what, c.after) for c in found.changes] == [
        ("jax_default_matmul_precision", "setting", "highest")
    ]


def test_static_arguments() -> None:
    def power(x: Any, n: int, *, mode: str = "plain") -> Any:
        return x**n if mode == "plain" else -(x**n)

    jitted = create_tpu_optimized_jit(power, static_argnums=1, static_argnames="mode")
    np.testing.assert_array_equal(jitted(X, 2), X**2)
    np.testing.assert_array_equal(jitted(X, 3), X**3)
    np.testing.assert_array_equal(jitted(X, 3, mode="minus"), -(X**3))
    assert [[str(c) for c in r.changes] for r in jitted.recompilations] == [
        ["n: static value 2 -> 3"],
        ["mode: static value none -> minus"],
    ]
    with pytest.raises(
        CompilationOptionError, match=r"n: got a static value of type list, .* cannot be hashed"
    ):
        jitted(X, [1])


def test_static_arguments_by_position_or_by_name() -> None:
    def power(x: Any, n: int = 2, mode: str = "plain") -> Any:
        return x**n if mode == "plain" else -(x**n)

    jitted = create_tpu_optimized_jit(power, static_argnums=1, static_argnames="mode")
    np.testing.assert_array_equal(jitted(X, n=3), X**3)
    np.testing.assert_array_equal(jitted(X, 3, "minus"), -(X**3))
    np.testing.assert_array_equal(jitted(X, mode="minus"), -(X**2))
    compiled = create_tpu_optimized_jit(power, static_argnums=1).compile(input_shapes=[(3,)])
    np.testing.assert_array_equal(compiled(X, 2), X**2)


def test_equal_static_values_of_other_types_are_other_programs() -> None:
    jitted = create_tpu_optimized_jit(lambda x, n: x * n, static_argnums=1)
    x = np.arange(3)
    results = [jitted(x, n) for n in (1, 1.0, True, 1)]
    assert [r.dtype.name for r in results] == ["int32", "float32", "int32", "int32"]
    assert len(jitted.programs) == 3
    assert "n: static value 1 -> 1.0" in jitted.explain()
    with pytest.raises(CompilationOptionError, match="n: got a static value of type ndarray"):
        jitted(x, np.ones(2))


def test_a_method() -> None:
    class Scaled:
        factor = 3.0

        @create_tpu_optimized_jit(static_argnums=0)
        def __call__(self, x: Any) -> Any:
            return x * self.factor

        times = create_tpu_optimized_jit(lambda self, x: x * self.factor, static_argnums=0)

    np.testing.assert_array_equal(Scaled().times(X), 3 * X)
    np.testing.assert_array_equal(Scaled()(X), 3 * X)


def test_ahead_of_time_calls_compile_nothing() -> None:
    jitted = create_tpu_optimized_jit(apply)
    compiled = jitted.compile(input_shapes=[(3,), (5, 3)], static_argnums=[0], static_args={0: PARAMS})
    inputs = [jnp.arange(3.0), jnp.ones((5, 3))]
    with count_compilations() as counts:
        results = [function(PARAMS, x) for function in (compiled, jitted) for x in inputs]
        jax.block_until_ready(results)
    assert counts.programs == 0
    np.testing.assert_array_equal(results[0], 2 * np.arange(3.0) + 1)
    assert len(compiled.programs) == 2
    assert jitted.recompilations == ()  # they were asked for
    with pytest.raises(NotCompiledError, match=r"x: shape \(5, 3\) -> \(4, 3\)"):
        compiled(PARAMS, jnp.ones((4, 3)))
    with pytest.raises(NotCompiledError, match="x: dtype float32 -> int32"):
        compiled(PARAMS, jnp.ones(3, jnp.int32))


def test_parameters_are_taken_from_the_model_that_is_used() -> None:
    class Model:
        params = PARAMS

        def apply(self, params: Any, x: Any) -> Any:
            return apply(params, x)

    model, other = Model(), Model()

    def forward(params: Any, x: Any) -> Any:
        return model.apply(params, x)

    def two(params: Any, x: Any) -> Any:
        return model.apply(params, x) + other.apply(params, x)

    compiled = create_tpu_optimized_jit(forward).compile(input_shapes=[(3,)], static_argnums=[0])
    with count_compilations() as counts:
        compiled(PARAMS, X)
    assert counts.programs == 0
    with pytest.raises(
        CompilationOptionError, match=r"the argument 0 has no value, and two uses several models"
    ):
        create_tpu_optimized_jit(two).compile(input_shapes=[(3,)], static_argnums=[0])
    with pytest.raises(
        CompilationOptionError, match=r"uses no model with params and apply\..*static_args=\{0: params\}"
    ):
        create_tpu_optimized_jit(lambda p, x: x).compile(input_shapes=[(3,)], static_argnums=[0])


def test_values_that_are_not_arrays_are_compiled_in() -> None:
    jitted = create_tpu_optimized_jit(lambda x, mode: x + 1 if mode == "up" else x - 1)
    compiled = jitted.compile(input_shapes=[(3,)], static_argnums=[1], static_args={1: "up"})
    np.testing.assert_array_equal(compiled(X, "up"), X + 1)
    np.testing.assert_array_equal(jitted(X, "down"), X - 1)
    assert "static value up -> down" in jitted.explain()


def test_several_inputs() -> None:
    jitted = create_tpu_optimized_jit(lambda a, b: a @ b)
    assert len(jitted.compile(input_shapes=[(2, 3), (3, 4)]).programs) == 1
    described = jax.ShapeDtypeStruct((2, 3), jnp.int32)
    compiled = jitted.compile(input_shapes=[(described, (3, 4)), ((5, 3), (3, 4))])
    assert compiled(jnp.ones((2, 3), jnp.int32), jnp.ones((3, 4))).dtype == jnp.float32
    assert compiled(jnp.ones((5, 3)), jnp.ones((3, 4))).shape == (5, 4)
    with pytest.raises(CompilationOptionError, match="got 3 shapes for a function of 2 inputs"):
        jitted.compile(input_shapes=[(2, 3), (3, 4), (4, 5)])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "expected a list of shapes"),
        ("(3,)", "expected a list of shapes"),
        ([None], "got an entry None"),
        (["a"], "got an entry 'a'"),
        ([(3, -1)], r"got the shape \(3, -1\)"),
        ([(3, "a")], "got an entry"),
    ],
)
def test_bad_shapes(shapes: Any, message: str) -> None:
    with pytest.raises(CompilationOptionError, match=message):
        create_tpu_optimized_jit(lambda x: x).compile(input_shapes=shapes)


def test_donated_arguments_are_aliased_in_the_program_and_gone() -> None:
    jitted = create_tpu_optimized_jit(lambda state, x: (state + x, x.sum()), donate_argnums=0)
    state = jnp.zeros((64, 64))
    result, _ = jitted(state, jnp.ones((64, 64)))
    assert state.is_deleted()
    assert float(result[0, 0]) == 1
    assert jitted.programs[0].compiled.memory_analysis().alias_size_in_bytes == 64 * 64 * 4
    assert "input_output_alias" in jitted.programs[0].as_text()


def test_donation_counts_positions_before_static_ones_are_left_out() -> None:
    jitted = create_tpu_optimized_jit(lambda n, x: x * n, static_argnums=0, donate_argnums=1)
    x = jnp.ones(8)
    jitted(3, x)
    assert x.is_deleted()


def test_inside_other_transformations_it_is_the_function() -> None:
    plain = create_tpu_optimized_jit(lambda x: (x**2).sum())
    np.testing.assert_allclose(jax.grad(plain)(X), 2 * X)
    np.testing.assert_allclose(jax.jit(plain)(X), 5)
    assert plain.programs == ()
    rounding = create_tpu_optimized_jit(lambda x: x @ x, config=TpuCompilationConfig(use_bfloat16=True))
    with pytest.warns(CompilationOptionWarning, match="inside another transformation"):
        jax.jit(rounding)(jnp.ones((2, 2)))


def test_threads_compile_a_program_once() -> None:
    jitted = create_tpu_optimized_jit(lambda x: jnp.sin(x) @ x.T)
    results: list[Any] = []
    x = jnp.ones((16, 16))
    threads = [threading.Thread(target=lambda: results.append(jitted(x))) for _ in range(8)]
    with count_compilations() as counts:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 8
    assert counts.programs == 1
    assert len(jitted.programs) == 1


def test_a_failure_is_raised_again_and_not_kept() -> None:
    ready = False

    def function(x: Any) -> Any:
        if not ready:
            raise ZeroDivisionError("not yet")
        return x + 1

    jitted = create_tpu_optimized_jit(function)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="not yet"):
            jitted(X)
    ready = True
    np.testing.assert_array_equal(jitted(X), X + 1)
    assert jitted.recompilations == ()


def test_an_option_that_xla_does_not_know_is_refused_by_name() -> None:
    config = TpuCompilationConfig(compiler_options={"xla_nonsense": True})
    with pytest.raises(CompilationOptionError, match="No such compile option: 'xla_nonsense'"):
        create_tpu_optimized_jit(lambda x: x, config=config)(X)


def test_create_jitted_forward_compiles_its_shapes_and_reports_others() -> None:
    forward = create_jitted_forward(lambda x: x * 2, [(4, 3), (8, 3)], dtype="int32")
    with count_compilations() as counts:
        forward(np.ones((8, 3), np.int32)).block_until_ready()
    assert counts.programs == 0
    assert forward(jnp.ones((4, 3))).dtype == jnp.float32
    assert "x: dtype int32 -> float32" in forward.explain()


def test_settings_and_contexts_of_jax_that_select_programs() -> None:
    seen: list[Any] = []
    jitted = create_tpu_optimized_jit(lambda x: seen.append(1) or x + 1)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    contexts = [
        lambda: jax.threefry_partitionable(not jax.config.values["jax_threefry_partitionable"]),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.set_mesh(mesh),
        lambda: jax.default_prng_impl("rbg"),
        lambda: jax.debug_key_reuse(True),
    ]
    jitted(X)
    for number, context in enumerate(contexts, 2):
        with context():
            assert (dict(settings_now())["devices of the mesh"] == (jax.devices()[0],)) == (number == 4)
            jitted(X)
            jitted(X)
        assert len(seen) == number
        jitted(X)
        assert len(seen) == number
    assert all(len(one.changes) >= 1 for one in jitted.recompilations)


def test_without_jit_it_is_the_function_and_nans_are_found() -> None:
    jitted = create_tpu_optimized_jit(lambda x: jnp.log(x))
    with jax.disable_jit():
        np.testing.assert_allclose(jitted(X + 1), np.log(np.arange(1.0, 4.0)), rtol=1e-6)
    assert jitted.programs == ()
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="log"):
        jitted(X - 1)


def test_the_functions_attributes_do_not_replace_its_own() -> None:
    class Model:
        config, name = "of the model", "model"

        def __init__(self) -> None:
            self.config = self._programs = self._lock = "of this model"

        def __call__(self, x: Any) -> Any:
            return x + 1

    jitted = create_tpu_optimized_jit(Model())
    np.testing.assert_array_equal(jitted(X), X + 1)
    level = TpuCompilationConfig(optimization_level="debug")
    outer = create_tpu_optimized_jit(create_tpu_optimized_jit(lambda x: x - 1), config=level)
    assert outer.config is level
    np.testing.assert_array_equal(outer(X), X - 1)


def test_donated_by_name_and_counted_from_the_end() -> None:
    for number in (0, -2):
        jitted = create_tpu_optimized_jit(lambda state, x: state + x, donate_argnums=number)
        state = jnp.ones(8)
        jitted(state=state, x=jnp.ones(8))
        assert state.is_deleted()
    last: Any = np.int64(-1)
    jitted = create_tpu_optimized_jit(lambda x, n: x**n, static_argnums=last)
    np.testing.assert_array_equal(jitted(X, 2), X**2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"donate_argnums": 2}, "donate_argnums: got 2 for a function of 2 positional arguments"),
        ({"static_argnums": (0, -3)}, "static_argnums: got -3 .* expected integers from -2 to 1"),
        ({"static_argnums": "n"}, "static_argnums: got 'n', expected an integer"),
        ({"static_argnames": "m"}, "static_argnames: got 'm', expected some of x, n"),
        ({"static_argnames": [3]}, "static_argnames: got 3"),
        ({"static_argnames": "n", "donate_argnums": 1}, r"donate_argnums: got \[1\], which are static"),
    ],
)
def test_arguments_that_the_function_does_not_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompilationOptionError, match=message):
        create_tpu_optimized_jit(lambda x, n: x * n, **options)
    with pytest.raises(CompilationOptionError, match="got -1 for a function of any number of arguments"):
        create_tpu_optimized_jit(lambda *xs: xs, static_argnums=-1)


def test_a_function_that_closes_over_a_traced_value() -> None:
    def loss(w: Any) -> Any:
        return create_tpu_optimized_jit(lambda x: (w * x).sum())(np.ones(3, np.float32))

    assert float(jax.grad(loss)(2.0)) == 3
    assert float(jax.jit(loss)(2.0)) == 6


def test_settings_that_a_later_import_adds_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import config

    before, known = settings_now(), config.trace_context
    monkeypatch.setattr(config, "trace_context", lambda: (*known(), None))
    assert settings_now() == before
