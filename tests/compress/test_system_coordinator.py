"""The coordinator: tensors of every kind come back as they were, what happened is counted, what is wrong is said."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.container import Archive
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.system.configuration import OptimizationStrategy, SystemConfiguration
from capibara.compress.system.coordinator import JAX_COMPONENTS, SystemIntegrationCoordinator
from capibara.compress.system.engines import FallbackWarning
from capibara.compress.system.monitor import MetricType, UnifiedPerformanceMonitor
from capibara.compress.system.result import CompressedTensor
from capibara.compress.system.tensors import TensorTypeError

RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def system() -> Iterator[SystemIntegrationCoordinator]:
    with SystemIntegrationCoordinator() as made:
        yield made


@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "float32",
        "float16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
    ],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 5), (40, 7)])
def test_arrays_of_numpy_come_back(
    system: SystemIntegrationCoordinator, dtype: str, shape: tuple[int, ...]
) -> None:
    array = RANDOM.normal(size=shape) * 50
    array = np.asarray(array > 0 if dtype == "bool" else array.astype(np.int64).astype(dtype))
    made = system.compress(array)
    back = system.decompress(made)
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert made.relative_error == 0
    assert made.kind == "numpy"


def test_arrays_that_lie_otherwise_in_memory(system: SystemIntegrationCoordinator) -> None:
    base = RANDOM.normal(size=(30, 40)).astype(np.float32)
    for array in (base.T, base[::3, ::-2], np.asfortranarray(base), base.astype(">f4"), np.float64(1.5)):
        back = system.decompress(system.compress(array))
        np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "bool", "float8_e4m3fn"])
def test_arrays_of_jax_come_back(system: SystemIntegrationCoordinator, dtype: str) -> None:
    array = jnp.asarray(RANDOM.normal(size=(33, 9))).astype(dtype)
    back = system.decompress(system.compress(array))
    assert isinstance(back, jax.Array)
    assert (back.dtype, back.devices()) == (array.dtype, array.devices())
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


def test_wide_arrays_of_jax_stay_wide(system: SystemIntegrationCoordinator) -> None:
    with jax.enable_x64(True):
        array = jnp.asarray(RANDOM.normal(size=100))
    assert array.dtype == np.float64
    back = system.decompress(system.compress(array))
    assert back.dtype == np.float64
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize(
    "dtype",
    ["float64", "float32", "bfloat16", "float16", "int64", "int8", "uint8", "bool", "float8_e5m2", "uint32"],
)
def test_tensors_of_pytorch_come_back(system: SystemIntegrationCoordinator, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = (torch.from_numpy(RANDOM.normal(size=(12, 34))) * 20).abs().to(getattr(torch, dtype))
    back = system.decompress(system.compress(tensor.T))
    assert (back.dtype, back.shape) == (tensor.dtype, (34, 12))
    assert back.contiguous().view(torch.uint8).equal(tensor.T.contiguous().view(torch.uint8))


def test_a_parameter_of_pytorch(system: SystemIntegrationCoordinator) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(8, 8)
    assert torch.equal(system.decompress(system.compress(layer.weight)), layer.weight)


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 99), ratio=st.floats(2.2, 12))
def test_a_ratio_is_met(system: SystemIntegrationCoordinator, seed: int, ratio: float) -> None:
    values = np.random.default_rng(seed).normal(size=(160, 128)).astype(np.float32)
    made = system.compress(values, ratio=ratio)
    assert made.compression_ratio >= ratio * 0.98
    error = np.linalg.norm(system.decompress(made) - values) / np.linalg.norm(values)
    assert made.relative_error == pytest.approx(error, rel=1e-5)
    assert 0 < error < 1


def test_what_is_saved_is_an_archive(system: SystemIntegrationCoordinator, tmp_path: Path) -> None:
    values = RANDOM.normal(size=(50, 60)).astype(np.float32)
    made = system.compress(values, name="layer.weight")
    path = tmp_path / "tensor.capi"
    made.save(path)
    assert path.stat().st_size == made.compressed_bytes
    with Archive(path) as archive:
        np.testing.assert_array_equal(archive.read("layer.weight").view(np.float32), values)
    loaded = CompressedTensor.load(path)
    assert (loaded.entry, loaded.kind, loaded.relative_error) == (made.entry, "numpy", None)
    np.testing.assert_array_equal(system.decompress(loaded), values)


def test_tensors_of_several_chunks(
    system: SystemIntegrationCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capibara.compress.system.result.CHUNK", 1000)
    values = RANDOM.normal(size=(50, 64)).astype(np.float32)
    made = system.compress(values)
    assert [c.rows for c in made.entry.chunks] == [15, 15, 15, 5]
    np.testing.assert_array_equal(system.decompress(made), values)


def test_damage_is_found(system: SystemIntegrationCoordinator) -> None:
    data = system.compress(RANDOM.normal(size=(20, 30))).to_bytes()
    for at in range(0, len(data), 61):
        changed = bytearray(data)
        changed[at] ^= 4
        with pytest.raises(ArchiveError):
            system.decompress(CompressedTensor.from_bytes(bytes(changed)))
    for end in range(0, len(data), 97):
        with pytest.raises(ArchiveError):
            CompressedTensor.from_bytes(data[:end])


def test_an_archive_of_two_tensors_is_not_one(tmp_path: Path) -> None:
    from capibara.compress.container import ArchiveWriter
    from capibara.compress.formats import get_format

    with ArchiveWriter(tmp_path / "two.capi") as archive:
        for name in "ab":
            archive.add(name, np.zeros(3, np.uint8), get_format("U8"), (3,))
    with pytest.raises(ArchiveError, match="holds 2 tensors"):
        CompressedTensor.load(tmp_path / "two.capi")


def test_decompressing_to_another_kind(system: SystemIntegrationCoordinator) -> None:
    values = RANDOM.normal(size=(6, 5)).astype(np.float32)
    made = system.compress(values)
    assert isinstance(system.decompress(made, kind="jax"), jax.Array)
    assert system.decompress(made, kind="jax") is system.decompress(made, kind="jax")  # the pool's
    torch = pytest.importorskip("torch")
    assert torch.equal(system.decompress(made, kind="torch"), torch.from_numpy(values))
    with pytest.raises(CompressError, match="kind: got 'tensorflow'"):
        system.decompress(made, kind="tensorflow")


def test_the_components_and_the_status(system: SystemIntegrationCoordinator) -> None:
    assert set(JAX_COMPONENTS) <= set(system.components)
    assert len(JAX_COMPONENTS) == 9
    status = system.get_system_status()
    assert json.loads(json.dumps(status)) == status
    assert set(JAX_COMPONENTS) <= set(status["components"])
    assert status["state"] == "running"
    assert status["jax"] == {"enabled": True, "available": True, "in_use": True, "problem": None}
    before = status["counts"]["compressed"]
    system.compress(np.zeros(10))
    assert system.get_system_status()["counts"]["compressed"] == before + 1
    with pytest.raises(CompressError, match="Did you mean 'jax_memory_pool'"):
        system.get_component("jax_memory_pol")
    with pytest.raises(TypeError):
        system.components["more"] = 1  # pyright: ignore[reportIndexIssue]


def test_what_happened_is_measured() -> None:
    monitor = UnifiedPerformanceMonitor()
    with SystemIntegrationCoordinator(monitor=monitor) as system:
        made = system.compress(RANDOM.normal(size=(100, 100)).astype(np.float32))
        system.decompress(made)
    assert made.seconds is not None
    assert monitor.latest(MetricType.COMPRESSION_TIME) == pytest.approx(made.seconds * 1e3)
    assert monitor.latest(MetricType.COMPRESSION_RATIO) == pytest.approx(made.compression_ratio)
    assert monitor.latest(MetricType.RELATIVE_ERROR) == 0
    assert monitor.latest(MetricType.DECOMPRESSION_TIME) is not None


def test_shut_down() -> None:
    system = SystemIntegrationCoordinator()
    array = jnp.arange(12.0)
    made = system.compress(array)
    system.decompress(made)
    assert system.get_component("jax_memory_pool").held_bytes == array.nbytes
    system.shutdown()
    system.shutdown()
    assert system.get_component("jax_memory_pool").held_bytes == 0
    assert system.get_system_status()["state"] == "shut down"
    for call in (
        lambda: system.compress(array),
        lambda: system.decompress(made),
        lambda: system.compress_model({}),
    ):
        with pytest.raises(CompressError, match="shut down"):
            call()
    np.testing.assert_array_equal(made.decode().view(np.float32), array)  # results stay valid


def test_without_jax_by_configuration() -> None:
    with (
        warnings.catch_warnings(),
        SystemIntegrationCoordinator(SystemConfiguration(enable_jax=False)) as system,
    ):
        warnings.simplefilter("error")
        assert not set(JAX_COMPONENTS) & set(system.components)
        assert system.get_system_status()["jax"]["problem"] == "enable_jax is False"
        with pytest.raises(CompressError, match="It needs JAX: enable_jax is False"):
            system.get_component("jax_memory_pool")
        values = RANDOM.normal(size=(9, 9))
        np.testing.assert_array_equal(system.decompress(system.compress(values)), values)


def test_a_backend_that_is_not_here_warns_once() -> None:
    config = SystemConfiguration(jax_backend="tpu")
    with pytest.warns(FallbackWarning, match="jax_backend: no tpu here") as heard:
        SystemIntegrationCoordinator(config).shutdown()
    assert [Path(w.filename).name for w in heard] == [Path(__file__).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        system = SystemIntegrationCoordinator(config)
    assert system.get_component("jax_device_manager").platform == "cpu"


def test_strategies_of_the_configuration() -> None:
    values = RANDOM.normal(size=(160, 128)).astype(np.float32)
    config = SystemConfiguration(strategy="uniform", target_compression_ratio=5.0)
    with SystemIntegrationCoordinator(config) as system:
        made = system.compress(values)
        assert made.codec == "uniform"
        assert made.compression_ratio == pytest.approx(5, rel=0.02)
        assert system.compress(np.arange(99)).codec == "lossless"  # integers have no ratio to meet
        assert system.compress(values, strategy="lossless").relative_error == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.compress([1.0, 2.0]), "tensor: got builtins.list"),
        (lambda s: s.compress(None), "tensor: got builtins.NoneType"),
        (lambda s: s.compress(np.zeros(3), ratio=1), "ratio: got 1"),
        (lambda s: s.compress(np.zeros(3, int), ratio=4), "without loss only"),
        (lambda s: s.compress(np.zeros((9, 9)), strategy="losless"), "Did you mean 'lossless'"),
        (
            lambda s: s.compress(np.zeros((9, 9)), strategy="lossless", ratio=3),
            "compression has no target ratio",
        ),
        (lambda s: s.compress(np.zeros((9, 9), np.complex64)), "complex64"),
        (lambda s: s.compress(np.array(["a"])), "expected one of"),
        (lambda s: s.decompress(b"abc"), "compressed: got bytes"),
        (lambda s: s.get_component("gpu"), "component: got 'gpu'"),
        (lambda s: SystemIntegrationCoordinator(cast(Any, {"enable_jax": True})), "config: got dict"),
        (
            lambda s: SystemIntegrationCoordinator(SystemConfiguration(strategy="best")),
            "strategy: got 'best'",
        ),
        (lambda s: SystemIntegrationCoordinator(monitor=cast(Any, 3)), "monitor: got int"),
    ],
)
def test_bad_arguments(system: SystemIntegrationCoordinator, call: Any, words: str) -> None:
    with pytest.raises(CompressError) as caught:
        call(system)
    assert words in str(caught.value)


def test_what_is_not_a_tensor_is_a_type_error(system: SystemIntegrationCoordinator) -> None:
    with pytest.raises(TensorTypeError):
        system.compress("weights")
    with pytest.raises(TypeError):
        system.compress("weights")
    with pytest.raises(CompressError, match="outside of jit"):
        jax.jit(lambda x: system.compress(x) and x)(jnp.ones(3))


def test_a_damaged_payload_says_whose(system: SystemIntegrationCoordinator) -> None:
    made = system.compress(RANDOM.normal(size=(40, 50)), name="layer")
    broken = CompressedTensor(made.entry, (made.payloads[0][:-1] + b"\x00\x01",))
    with pytest.raises(DamagedError, match="layer"):
        system.decompress(broken)


@pytest.mark.parametrize("wanted", list(OptimizationStrategy))
def test_the_same_bytes_from_every_engine(wanted: OptimizationStrategy) -> None:
    values = np.random.default_rng(5).normal(size=(64, 70)).astype(np.float32)
    with SystemIntegrationCoordinator(SystemConfiguration(enable_jax=False)) as plain:
        expected = plain.compress(values).payloads
    with SystemIntegrationCoordinator(SystemConfiguration(optimization_strategy=wanted)) as system:
        made = system.compress(values)
        assert made.payloads == expected
        assert (made.engine == "jax") == (wanted is OptimizationStrategy.JAX_ACCELERATED)
        np.testing.assert_array_equal(system.decompress(made), values)


def test_a_whole_model() -> None:
    tree = {"weight": RANDOM.normal(size=(80, 64)).astype(np.float32), "bias": np.zeros(80, np.float32)}
    with SystemIntegrationCoordinator() as system:
        back = system.compress_model(tree).decompress()
        assert {name: a.tobytes() for name, a in back.items()} == {
            name: a.tobytes() for name, a in tree.items()
        }
        assert system.monitor.latest(MetricType.COMPRESSION_TIME) is not None
    with SystemIntegrationCoordinator(SystemConfiguration(target_compression_ratio=3.0)) as system:
        lossy = system.compress_model(tree).decompress()
    assert 0 < np.linalg.norm(lossy["weight"] - tree["weight"]) < 0.3 * np.linalg.norm(tree["weight"])


@pytest.mark.parametrize("given", [{}, {"target_compression_ratio": 4.0}])
def test_exact_strategies_are_taken_as_they_are(given: dict[str, Any]) -> None:
    values = np.random.default_rng(0).normal(size=(90, 90)).astype(np.float32)
    with SystemIntegrationCoordinator(SystemConfiguration(strategy="exponent", **given)) as system:
        made = system.compress(values)
        assert made.codec == "exponent"
        np.testing.assert_array_equal(system.decompress(made), values)
        assert system.compress(values.astype(np.float64)).codec == "lossless"  # which it has no windows for
        assert {t.codec for t in system.compress_model({"w": values}).stats.tensors} == {"exponent"}
        with pytest.raises(CompressError, match="ratio: got 2, but 'exponent'"):
            system.compress(values, ratio=2)


@pytest.mark.parametrize("name", ["", 5, "a\nb"])
def test_a_name_that_no_file_can_hold(name: object) -> None:
    with SystemIntegrationCoordinator() as system, pytest.raises(CompressError, match="name: got"):
        system.compress(np.zeros(3, np.float32), name=name)  # type: ignore[arg-type]


def test_a_codec_that_knows_its_width_needs_no_ratio() -> None:
    values = np.random.default_rng(0).normal(size=(64, 128)).astype("float32")
    with SystemIntegrationCoordinator(SystemConfiguration(enable_jax=False)) as system:
        for codec in ("int8", "int4", "nf4"):
            made = system.compress(values, strategy=codec)
            assert made.entry.codec == codec
            assert 0 < np.abs(system.decompress(made) - values).max() < 1
        for codec in ("uniform", "low_rank"):
            with pytest.raises(CompressError, match=r"Remedy: a ratio|step|rank"):
                system.compress(values, strategy=codec)
        assert system.compress(values[0], strategy="int8").entry.codec == "lossless"
