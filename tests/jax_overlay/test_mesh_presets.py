"""Mesh presets, the optimisation context and sharding by logical names."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from capibara.config.mesh import (
    TPUMeshConfig,
    TPUv4MeshConfigurations,
    create_tpu_mesh_config,
    current_mesh,
    tpu_optimization_settings,
    tpu_v4_optimization_context,
)
from capibara.errors import CapibaraError, ConfigError
from capibara.jax._src import core
from capibara.jax.tpu_v4 import with_sharding_constraint

flags: Any = jax.config  # its flags are attributes that no type checker can know


def test_presets_are_the_documents_meshes():
    configs = TPUv4MeshConfigurations()
    assert configs.CULTURAL_ANALYSIS == (4, 8)
    assert configs.QUANTUM_CLASSICAL == (8, 4)
    assert configs.SPIKING_NEURAL == (16, 2)
    assert all(preset.num_devices == 32 for preset in configs)
    assert "4x8 (data, model)" in str(configs.CULTURAL_ANALYSIS)


def test_a_config_behaves_like_its_shape():
    config = create_tpu_mesh_config((4, 8), "inference", 16.0)
    assert config == (4, 8)
    assert config != (8, 4)
    assert config != "4x8"
    assert hash(config) == hash((4, 8))
    assert tuple(config) == (4, 8)
    assert config[1] == 8
    assert len(config) == 2
    assert create_tpu_mesh_config(TPUv4MeshConfigurations.SPIKING_NEURAL) == (16, 2)
    assert config != create_tpu_mesh_config((4, 8), "training", 16.0)
    assert config == create_tpu_mesh_config((4, 8), "inference", 16.0)
    assert config.memory_limit_bytes == 16 * 2**30


@given(st.lists(st.integers(1, 64), min_size=1, max_size=3))
def test_any_shape_of_positive_sizes_is_accepted(shape):
    config = create_tpu_mesh_config(shape)
    assert config.num_devices == np.prod(shape)
    assert len(config.axis_names) == len(shape)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mesh_shape": (4, 0)}, ["mesh_shape=(4, 0)", "at least 1"]),
        ({"mesh_shape": ()}, ["mesh_shape=()"]),
        ({"mesh_shape": "4x8"}, ["mesh_shape='4x8'", "(4, 8)"]),
        ({"mesh_shape": (4.0, 8)}, ["mesh_shape=(4.0, 8)"]),
        ({"mesh_shape": 32}, ["mesh_shape=32"]),
        ({"mesh_shape": (2, 2, 2, 2)}, ["4 axes", "axis_names"]),
        ({"optimization_target": "inferense"}, ["'inferense'", "Did you mean 'inference'?"]),
        ({"memory_limit_gb": 0}, ["memory_limit_gb=0"]),
        ({"memory_limit_gb": float("nan")}, ["memory_limit_gb=nan"]),
        ({"memory_limit_gb": 1e300}, ["memory_limit_gb=1e+300", "1e18"]),
        ({"memory_limit_gb": 10**400}, ["memory_limit_gb=10"]),
        ({"memory_limit_gb": "32"}, ["memory_limit_gb='32'"]),
        ({"memory_limit_gb": True}, ["memory_limit_gb=True"]),
        ({"axis_names": ("data", "data")}, ["different names"]),
        ({"axis_names": ("data",)}, ["axis_names=('data',)", "2 different"]),
    ],
)
def test_bad_values_are_named(arguments, words):
    with pytest.raises(ConfigError) as caught:
        create_tpu_mesh_config(**{"mesh_shape": (4, 8), **arguments})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_too_few_devices_says_how_to_emulate_them():
    with pytest.raises(ConfigError, match=r"needs 4096 devices.*device_count=4096"):
        create_tpu_mesh_config((64, 64)).build()


PARAMS = {
    "embedding": jax.ShapeDtypeStruct((256, 64), jnp.float32),
    "mlp": {"up": jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)},
    "scale": jax.ShapeDtypeStruct((64,), jnp.float32),
}
AXES = {"embedding": ("vocab", "embed"), "mlp": {"up": ("embed", "mlp")}, "scale": ("embed",)}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        # sizes in bytes, by hand for a 4x8 mesh
        ("training", 256 * 64 * 4 // 32 + 64 * 128 * 2 // 32 + 64 * 4 // 4),
        ("inference", 256 * 64 * 4 // 8 + 64 * 128 * 2 // 8 + 64 * 4),
        ("balanced", 256 * 64 * 4 // 32 + 64 * 128 * 2 // 8 + 64 * 4),
    ],
)
def test_the_target_decides_how_parameters_are_laid_out(target, expected):
    assert create_tpu_mesh_config((4, 8), target).parameter_bytes(PARAMS, AXES) == expected


def test_fits_counts_gradients_and_moments_for_training():
    one = create_tpu_mesh_config((1, 1), "inference")
    held = one.parameter_bytes(PARAMS, AXES)
    gib = held / 2**30
    assert TPUMeshConfig((1, 1), optimization_target="inference", memory_limit_gb=gib).fits(PARAMS, AXES)
    assert not TPUMeshConfig((1, 1), optimization_target="training", memory_limit_gb=3 * gib).fits(
        PARAMS, AXES
    )
    assert TPUMeshConfig((1, 1), optimization_target="training", memory_limit_gb=4 * gib).fits(PARAMS, AXES)


def test_context_changes_nothing_off_tpu_and_says_so():
    before = flags.jax_default_matmul_precision
    with tpu_v4_optimization_context(platform="cpu") as context:
        assert context.active is False
        assert context.settings == {}
        assert "'cpu'" in context.reason
        assert flags.jax_default_matmul_precision == before
    with tpu_v4_optimization_context() as context:
        assert context.platform == jax.default_backend()
        assert context.active is (jax.default_backend() == "tpu")


def test_context_on_a_tpu_sets_the_precision_of_traced_products_and_restores_it():
    def product(x):
        return x @ x

    def precision() -> str:
        return str(jax.make_jaxpr(product)(jnp.ones((2, 2))))

    plain = precision()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in precision()
        with tpu_v4_optimization_context(platform="tpu") as context:
            assert context.active
            assert context.settings == {"jax_default_matmul_precision": "bfloat16"}
            assert "HIGHEST" not in precision()
            assert flags.jax_default_matmul_precision == "bfloat16"
        assert "HIGHEST" in precision()
    assert precision() == plain


def test_context_restores_after_an_exception():
    before = flags.jax_default_matmul_precision
    with pytest.raises(ZeroDivisionError), tpu_v4_optimization_context(platform="tpu"):
        raise ZeroDivisionError
    assert flags.jax_default_matmul_precision == before


@pytest.mark.usefixtures("no_compilation_cache")
def test_settings_exist_only_for_a_tpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tpu_optimization_settings("cpu") == {} == tpu_optimization_settings("gpu")
    settings = tpu_optimization_settings("tpu")
    assert settings["jax_compilation_cache_dir"].startswith(str(tmp_path))
    assert set(settings) <= set(jax.config.values)


def test_off_a_mesh_sharding_is_the_identity():
    x = jnp.ones((4, 6))
    assert current_mesh() is None
    assert with_sharding_constraint(x, ("batch", "hidden")) is x
    assert core.with_sharding_constraint is with_sharding_constraint
    with pytest.raises(CapibaraError, match="2"):
        with_sharding_constraint(x, ("batch", "sequence", "hidden"))


MESH_SETUP = """
import json, warnings
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import capibara.jax as cjax
from capibara.config.mesh import create_tpu_mesh_config, current_mesh
config = create_tpu_mesh_config((2, 4))
mesh = config.build()
"""


def test_sharding_on_an_emulated_mesh(fresh_python):
    """The document's function on 8 devices, under the new and the older way to name a mesh."""
    result = fresh_python(
        MESH_SETUP
        + """
from capibara.jax._src.core import with_sharding_constraint

def distributed(x):
    return with_sharding_constraint(x, ("batch", "hidden")) * 2

x = jnp.arange(64.0).reshape(8, 8)
found = []
with jax.set_mesh(mesh):
    found.append(str(cjax.jit(distributed)(x).sharding.spec))
    assert current_mesh() is mesh
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with mesh:
        assert current_mesh() is mesh
        y = jax.jit(lambda x: distributed(x) + 0)(x)
        found.append(str(y.sharding.spec))
assert current_mesh() is None
assert (np.asarray(y) == np.asarray(x) * 2).all()
found.append(str(with_sharding_constraint(x, NamedSharding(mesh, P("model"))).sharding.spec))
found.append([dict(mesh.shape), len(mesh.devices.ravel())])
print(json.dumps(found))
""",
        devices=8,
    )
    assert result == [
        str(PartitionSpec("data", "model")),
        str(PartitionSpec("data", "model")),
        str(PartitionSpec("model")),
        [{"data": 2, "model": 4}, 8],
    ]


def test_old_pjit_spelling_on_an_emulated_mesh(fresh_python):
    """Decorator factory and direct call, both ways of entering the mesh, one spec for all and one for each."""
    result = fresh_python(
        MESH_SETUP
        + """
def quiet(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    policy = cjax.pjit(in_axis_resources=P("data", "model"), out_axis_resources=P("data", "model"))
assert [w.category for w in caught] == [DeprecationWarning], caught
assert caught[0].filename == "<string>", caught[0].filename
x = np.arange(64.0, dtype=np.float32).reshape(8, 8)

@policy
def double(x):
    "twice"
    return x * 2

try:
    double(x)
except ValueError as error:
    outside = str(error)
with jax.set_mesh(mesh):
    y = double(x)
    z = double(jnp.asarray(x) + 0)  # lives replicated on the mesh: has to be moved
assert y.sharding == NamedSharding(mesh, P("data", "model")) == z.sharding, (y.sharding, z.sharding)
assert len({s.device for s in y.addressable_shards}) == 8
assert y.addressable_shards[0].data.shape == (4, 2)
assert (np.asarray(y) == 2 * x).all()
assert double.__name__ == "double" and double.__doc__ == "twice"

two = quiet(cjax.pjit, lambda n, a, b: (a @ b["w"]) * n, (P("data", None), {"w": P(None, "model")}), P("data", "model"),
            static_argnums=0)
def legacy():
    with mesh:
        return two(3, x, {"w": x.T}), two.lower(3, x, {"w": x.T}).compile().output_shardings
got, compiled = quiet(legacy)
assert np.allclose(got, 3 * (x @ x.T))
assert got.sharding.spec == P("data", "model") == compiled.spec

whole = quiet(cjax.pjit, lambda a: a.sum(), None, None, mesh=mesh)(x)
assert whole.sharding.is_fully_replicated and float(whole) == x.sum()
kept = quiet(cjax.pjit, lambda a: a + 1, out_axis_resources=P("model"), mesh=mesh)(x)
assert kept.sharding.spec == P("model")

errors = []
for bad in (P("nowhere"), "data"):
    try:
        quiet(cjax.pjit, lambda a: a, bad, mesh=mesh)(x)
    except ValueError as error:
        errors.append([type(error).__name__, str(error)])
print(json.dumps([outside, errors]))
""",
        devices=8,
    )
    outside, errors = result
    assert "outside a mesh" in outside
    assert "jax.set_mesh" in outside
    assert [kind for kind, _ in errors] == ["PjitError", "PjitError"]
    assert "nowhere" in errors[0][1]
    assert "'data'" in errors[1][1]
