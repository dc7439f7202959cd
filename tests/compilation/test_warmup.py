"""Warm-up: what is called and compiled, in which order, counted; in the background; kept on disk."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compilation import (
    CompilationOptionError,
    TpuWarmupManager,
    count_compilations,
    create_tpu_optimized_jit,
)


class Model:
    def __init__(self) -> None:
        self.called: list[tuple[int, ...]] = []
        self._jitted = jax.jit(lambda x: jnp.sin(x) * 1.25)

    def forward(self, x: Any) -> Any:
        self.called.append(x.shape)
        return self._jitted(x)


def test_each_shape_with_each_batch_size_smallest_first(tmp_path: Path) -> None:
    model = Model()
    manager = TpuWarmupManager(warmup_steps=3, cache_directory=tmp_path)
    inputs = [jnp.zeros((batch, length)) for batch in (2, 8) for length in (3, 5)]
    report = manager.warmup_model(model, [(8, 5), (2, 3)], [8, 2])
    order = [(2, 3), (2, 5), (8, 3), (8, 5)]
    assert model.called == [shape for shape in order for _ in range(3)]
    assert [one.shape for one in report.shapes] == order
    assert [one.compiled for one in report.shapes[1:]] == [1, 1, 1] or report.compiled >= 4
    assert all(one.step_seconds is not None for one in report.shapes)
    with count_compilations() as counts:
        for x in inputs:
            model.forward(x)
    assert counts.programs == 0
    assert str(report).startswith(f"4 of 4 shapes: {report.compiled} programs compiled")


def test_the_order_given(tmp_path: Path) -> None:
    model = Model()
    TpuWarmupManager(progressive_warmup=False, cache_directory=tmp_path).warmup_model(model, [(9, 9), (1, 2)])
    assert model.called == [(9, 9), (1, 2)]


def test_the_next_start_reads_from_disk(tmp_path: Path) -> None:
    manager = TpuWarmupManager(cache_directory=tmp_path)
    first = manager.warmup_model(Model(), [(3, 2), (4, 2)])
    assert first.compiled >= 2
    assert first.hits == 0
    jax.clear_caches()
    second = manager.warmup_model(Model(), [(3, 2), (4, 2)])
    assert second.compiled == 0
    assert second.hits == first.compiled
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_functions_with_programs_of_their_own_are_compiled_ahead(tmp_path: Path) -> None:
    jitted = create_tpu_optimized_jit(lambda x: x * 2)
    TpuWarmupManager(cache_directory=tmp_path).warmup_model(jitted, [(2, 3), (4, 3)], dtype="int32")
    assert len(jitted.programs) == 2
    assert jitted.recompilations == ()
    with count_compilations() as counts:
        jitted(jnp.zeros((4, 3), jnp.int32))
    assert counts.compiled <= 1  # the zeros
    assert len(jitted.programs) == 2


def test_several_inputs_and_inputs_of_the_users_own(tmp_path: Path) -> None:
    seen: list[Any] = []
    manager = TpuWarmupManager(cache_directory=tmp_path)
    manager.warmup_model(lambda a, b: seen.append((a.shape, b.shape)), [((1, 4), (1, 6))], batch_sizes=[3])
    assert seen == [((3, 4), (3, 6))]
    manager.warmup_model(seen.append, [(2, 5)], make_input=lambda shape: {"tokens": shape})
    assert seen[-1] == {"tokens": (2, 5)}


def test_in_the_background(tmp_path: Path) -> None:
    go, model = threading.Event(), Model()

    def function(x: Any) -> Any:
        assert go.wait(30)
        return model.forward(x)

    report = TpuWarmupManager(cache_directory=tmp_path).warmup_model(
        function, [(2, 2), (3, 3)], background=True
    )
    assert not report.done
    with pytest.raises(TimeoutError, match="0 of 2 shapes were done"):
        report.wait(0.01)
    go.set()
    assert report.wait(30) is report
    assert [one.shape for one in report.shapes] == [(2, 2), (3, 3)]
    assert report.done


def test_a_background_warm_up_can_be_stopped(tmp_path: Path) -> None:
    go = threading.Event()
    report = TpuWarmupManager(cache_directory=tmp_path).warmup_model(
        lambda x: go.wait(30), [(1,), (2,), (3,)], background=True
    )
    report.stop()
    go.set()
    report.wait(30)
    assert len(report.shapes) <= 1


@pytest.mark.parametrize("background", [False, True])
def test_what_the_model_raises_is_raised(tmp_path: Path, background: bool) -> None:
    def broken(x: Any) -> Any:
        raise ZeroDivisionError("of the model")

    manager = TpuWarmupManager(cache_directory=tmp_path)
    with pytest.raises(ZeroDivisionError, match="of the model"):
        manager.warmup_model(broken, [(2,)], background=background).wait(30)


def test_the_progress_bar(tmp_path: Path) -> None:
    stream = io.StringIO()
    manager = TpuWarmupManager(cache_directory=tmp_path)
    manager.warmup_model(Model(), [(2, 2), (3, 3)], progress=True, stream=stream)
    assert "warm-up" in stream.getvalue()
    assert "2/2" in stream.getvalue()
    quiet = io.StringIO()
    manager.warmup_model(Model(), [(2, 2)], stream=quiet)
    assert quiet.getvalue() == ""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TpuWarmupManager(compilation_cache_size_gb=-1), "compilation_cache_size_gb: got -1"),
        (lambda: TpuWarmupManager(warmup_steps=0), "warmup_steps: got 0"),
        (lambda: TpuWarmupManager(warmup_steps=True), "warmup_steps: got True"),
        (lambda: TpuWarmupManager(progressive_warmup=1), "progressive_warmup: got 1"),  # type: ignore[arg-type]
        (lambda: TpuWarmupManager().warmup_model(3, [(1,)]), "model: got 3"),
        (lambda: TpuWarmupManager().warmup_model(Model(), []), r"input_shapes: got \[\]"),
        (
            lambda: TpuWarmupManager().warmup_model(Model(), [(2, -2)]),
            r"input_shapes: got the shape \(2, -2\)",
        ),
        (lambda: TpuWarmupManager().warmup_model(Model(), [(2,)], []), "batch_sizes: got none"),
        (
            lambda: TpuWarmupManager().warmup_model(Model(), [jax.ShapeDtypeStruct((2,), "float32")]),
            "input_shapes: got an entry ShapeDtypeStruct.* make_input",
        ),
        (lambda: TpuWarmupManager().warmup_model(Model(), [(2,)], [0]), "batch_sizes: got 0"),
        (lambda: TpuWarmupManager().warmup_model(Model(), [()], [1]), "a scalar has no axis"),
        (lambda: TpuWarmupManager().warmup_model(Model(), [{"a": (1,)}]), "input_shapes: got an entry"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(CompilationOptionError, match=message):
        make()


def test_sizes_of_numpy_and_programs_of_other_threads(tmp_path: Path) -> None:
    jitted = create_tpu_optimized_jit(lambda x: x + 1)
    jitted.compile(input_shapes=[tuple(np.array([3, 4]))])
    assert jitted.programs[0].signature.leaves[0].shape == (3, 4)

    def model(x: Any) -> None:
        """Compiles nothing itself."""
        thread = threading.Thread(target=lambda: jax.jit(lambda x: x * 3.5)(np.ones(x.shape)))
        thread.start()
        thread.join()

    sizes: Any = np.array([4])
    with count_compilations() as all_threads:
        report = TpuWarmupManager(cache_directory=tmp_path).warmup_model(
            model, [(2, 3)], sizes, make_input=np.ones
        )
    assert [one.shape for one in report.shapes] == [(4, 3)]
    assert all_threads.programs == 1
    assert report.compiled == 0
