"""Document 1 ("JAX Nativo"): its snippets, under its import paths, as a reader would type them.

Each snippet is the document's own text. What a snippet takes for granted (``large_tensor``,
``input_embeddings``) is given by the test. The kernels, monitors and profilers of the document belong to
``capibara.jax.tpu_v4.backend`` and ``.optimizations`` and are tested with them.
"""

from __future__ import annotations

import builtins
import sys
import textwrap
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec


def run(snippet: str, **given: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "snippet", **given}
    exec(compile(textwrap.dedent(snippet), "document 1", "exec"), namespace)
    return namespace


IMPORTS = """
    import capibara.jax as jax
    import capibara.jax.numpy as jnp
    import capibara.jax.nn as nn

    print(f"Backend JAX activo: {jax.__name__}")
    print(f"Optimizaciones TPU: {hasattr(jax, 'tpu_v4_optimizations')}")
"""


def test_imports(capsys):
    names = run(IMPORTS)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "Backend JAX activo: capibara.jax",
        f"Optimizaciones TPU: {jax.default_backend() == 'tpu'}",
    ]
    assert names["nn"] is jax.nn


def test_basic_operations():
    names = run(
        IMPORTS
        + """
    # Operaciones NumPy compatibles
    x = jnp.array([1, 2, 3, 4])
    y = jnp.square(x)
    z = jnp.sum(y)

    # Operaciones algebraicas optimizadas
    matrix_a = jnp.ones((1000, 1000))
    matrix_b = jnp.ones((1000, 1000))
    result = jnp.dot(matrix_a, matrix_b)  # Optimizado para TPU
    product = result

    # Compilación JIT nativa
    @jax.jit
    def optimized_function(x):
        return jnp.square(x) + jnp.sin(x)

    result = optimized_function(jnp.arange(1000.0))
    """
    )
    assert int(names["z"]) == 30
    np.testing.assert_array_equal(names["product"], np.full((1000, 1000), 1000.0))
    x = np.arange(1000.0)
    np.testing.assert_allclose(names["result"], x**2 + np.sin(x), rtol=1e-6, atol=1e-5)


CORE = """
    from capibara.jax._src.core import (
        TPUv4MeshConfigurations,
        create_tpu_mesh_config,
        tpu_v4_optimization_context
    )
"""


def test_mesh_configurations():
    names = run(
        CORE
        + """
    # Configuraciones mesh predefinidas
    configs = TPUv4MeshConfigurations()
    cultural_config = configs.CULTURAL_ANALYSIS  # (4, 8) mesh
    quantum_config = configs.QUANTUM_CLASSICAL   # (8, 4) mesh
    spiking_config = configs.SPIKING_NEURAL      # (16, 2) mesh

    # Crear configuración mesh personalizada
    custom_mesh = create_tpu_mesh_config(
        mesh_shape=(4, 8),
        optimization_target="inference",  # "inference", "training", "balanced"
        memory_limit_gb=32.0
    )
    """
    )
    assert names["cultural_config"].mesh_shape == (4, 8)
    assert names["quantum_config"].mesh_shape == (8, 4)
    assert names["spiking_config"].mesh_shape == (16, 2)
    assert names["custom_mesh"].mesh_shape == (4, 8)
    assert names["custom_mesh"].optimization_target == "inference"
    assert names["custom_mesh"].memory_limit_gb == 32.0


CONTEXT = """
    # Usar optimizaciones TPU v4 automáticas
    with tpu_v4_optimization_context():
        # Operaciones automáticamente optimizadas para TPU
        x = jnp.random.normal(jax.random.PRNGKey(0), (8192, 8192))
        y = jnp.matmul(x, x.T)  # Usa kernels TPU optimizados
        result = jnp.sum(y)
"""


@pytest.mark.parametrize("size", [128, pytest.param(8192, marks=pytest.mark.slow)])
def test_optimization_context(size):
    names = run(IMPORTS + CORE + CONTEXT.replace("8192", str(size)))
    columns = np.asarray(names["x"], np.float64).sum(axis=0)
    # sum of x xᵀ is the squared length of the column sums
    np.testing.assert_allclose(float(names["result"]), (columns**2).sum(), rtol=1e-2)


SHARDING = """
    from capibara.jax._src.core import with_sharding_constraint

    # Sharding automático para TPU
    def distributed_computation(x):
        # Aplicar constraint de sharding
        x_sharded = with_sharding_constraint(x, ("batch", "hidden"))

        # Operación distribuida automáticamente
        return jnp.matmul(x_sharded, x_sharded.T)

    # Compilar con sharding
    distributed_fn = jax.jit(distributed_computation)
    result = distributed_fn(large_tensor)
"""


def test_sharding():
    x = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    names = run(IMPORTS + SHARDING, large_tensor=x)
    np.testing.assert_allclose(names["result"], x @ x.T, rtol=1e-4, atol=1e-4)


def test_sharding_on_a_mesh():
    """On a mesh (of one device here; eight are emulated in the tests of the mesh presets) the hint is lowered."""
    x = np.ones((8, 4), np.float32)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        names = run(IMPORTS + SHARDING, large_tensor=x)
        text = names["distributed_fn"].lower(x).as_text()
    assert "sharding" in text
    assert names["result"].sharding.mesh == NamedSharding(mesh, PartitionSpec()).mesh


VQ = """
    import capibara.jax as jax
    from capibara.vq.vqbit.vqbit_layer import VQbitLayer

    # VQbit Layer usando JAX nativo
    vqbit = VQbitLayer(
        codebook_size=64,
        embedding_dim=768,
        use_jax_native=True,          # Usar capibara.jax
        use_tpu_optimizations=True    # Optimizaciones TPU activas
    )

    # Forward pass con quantización optimizada
    def vq_forward(x):
        # Usar kernels TPU para quantización
        quantized, indices, metrics = vqbit(x)
        return quantized, metrics

    # Compilar con optimizaciones TPU
    optimized_vq = jax.jit(vq_forward)
    result = optimized_vq(input_embeddings)
"""


def test_vector_quantisation():
    x = np.random.default_rng(1).normal(size=(2, 5, 768)).astype(np.float32)
    names = run(VQ, input_embeddings=x)
    quantized, metrics = names["result"]
    assert quantized.shape == x.shape
    assert quantized.dtype == x.dtype
    assert np.isfinite(quantized).all()
    assert metrics
    # Few vectors mean few different codes: every result row is one of at most ten.
    assert len(np.unique(np.round(np.asarray(quantized).reshape(10, -1), 4), axis=0)) <= 10
    assert names["vqbit"](x)[1].shape == (2, 5)


FALLBACK = """
    # El sistema automáticamente maneja fallbacks
    try:
        # Intentar usar capibara JAX nativo
        import capibara.jax as jax
        backend = "capibara_jax_native"
        print("✅ Usando JAX nativo con optimizaciones TPU")
    except ImportError:
        # Fallback a JAX estándar
        import jax
        backend = "standard_jax"
        print("⚠️ Fallback a JAX estándar")

    # Las APIs son idénticas - código compatible
    x = jax.random.normal(jax.random.PRNGKey(0), (1000, 1000))
    result = jax.numpy.matmul(x, x.T)
"""


@pytest.mark.parametrize("broken", [False, True])
def test_fallback(monkeypatch, broken):
    if broken:
        real_import = builtins.__import__

        def refuse(name, *args):
            if name.startswith("capibara"):
                raise ImportError(name)
            return real_import(name, *args)

        monkeypatch.setattr(builtins, "__import__", refuse)
    names = run(FALLBACK)
    assert names["backend"] == ("standard_jax" if broken else "capibara_jax_native")
    x = np.asarray(names["x"], np.float64)
    np.testing.assert_allclose(names["result"], x @ x.T, rtol=1e-3, atol=1e-2)


def test_backend_info(capsys):
    names = run(
        """
    from capibara.jax import get_backend_info

    # Información del backend activo
    backend_info = get_backend_info()

    print(f"Backend: {backend_info['name']}")
    print(f"TPU optimizations: {backend_info['tpu_optimized']}")
    print(f"Custom kernels: {backend_info['custom_kernels']}")
    print(f"Memory limit: {backend_info['memory_limit_gb']} GB")

    # Verificar capacidades específicas
    has_flash_attention = backend_info['capabilities']['flash_attention']
    has_parallel_scan = backend_info['capabilities']['parallel_scan']
    has_vq_kernels = backend_info['capabilities']['vq_kernels']
    """
    )
    text = capsys.readouterr().out
    assert f"Backend: {jax.default_backend()}" in text
    if jax.default_backend() != "tpu":
        assert "TPU optimizations: False" in text
    for key in ("has_flash_attention", "has_parallel_scan", "has_vq_kernels"):
        assert isinstance(names[key], bool)


def test_debug_mode(capsys):
    flags = (
        "jax_debug_nans",
        "jax_check_tracer_leaks",
        "jax_traceback_filtering",
        "jax_log_compiles",
    )
    before = {name: jax.config.values[name] for name in flags}
    try:
        names = run(
            """
    # Activar modo debug
    import capibara.jax as jax
    import capibara.jax.numpy as jnp
    jax.config.update("jax_debug_mode", True)
    jax.config.update("jax_check_tracer_leaks", True)

    # Logging detallado
    jax.config.update("jax_log_compiles", True)

    # Verificar compilaciones
    @jax.jit
    def debug_function(x):
        print(f"Compilando para shape: {x.shape}")
        return jnp.square(x)

    result = debug_function(jnp.array([1, 2, 3]))
    """
        )
        assert jax.config.values["jax_debug_nans"]
        assert jax.config.values["jax_log_compiles"]
        assert names["jax"].config.jax_debug_mode
        np.testing.assert_array_equal(names["result"], [1, 4, 9])
        assert "Compilando para shape: (3,)" in capsys.readouterr().out
    finally:
        import capibara.jax

        capibara.jax.config.update("jax_debug_mode", False)
        for name, value in before.items():
            jax.config.update(name, value)


def test_migration_is_only_the_imports():
    body = """
    key = random.PRNGKey(42)
    x = random.normal(key, (1000, 1000))
    result = jnp.matmul(x, x.T)
    """
    before = "\n    import jax\n    import jax.numpy as jnp\n    from jax import random\n"
    after = before.replace("import jax", "import capibara.jax", 2).replace("from jax", "from capibara.jax")
    after = after.replace("import capibara.jax\n", "import capibara.jax as jax\n", 1)
    assert "from capibara.jax import random" in after
    old, new = run(before + body), run(after + body)
    assert new["jax"] is sys.modules["capibara.jax"]
    np.testing.assert_array_equal(old["result"], new["result"])


CHECK = """
    from capibara.jax.utils import check_migration_compatibility

    # Verificar código existente
    compatibility = check_migration_compatibility(
        source_code="mi_modelo.py",
        check_imports=True,
        check_functions=True,
        check_performance=True
    )

    if compatibility.is_compatible:
        print("✅ Código compatible con JAX nativo")
    else:
        print("⚠️ Necesita ajustes:")
        for issue in compatibility.issues:
            print(f"   - {issue}")
"""


@pytest.mark.parametrize(
    ("source", "compatible"),
    [
        ("import jax.numpy as jnp\nx = jnp.ones(3)\n", True),
        ("import jax\ny = jax.tree_map(lambda x: x, {})\n", False),
    ],
)
def test_migration_check(tmp_path, monkeypatch, capsys, source, compatible):
    (tmp_path / "mi_modelo.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    names = run(CHECK)
    text = capsys.readouterr().out
    assert names["compatibility"].is_compatible is compatible
    assert ("Necesita ajustes" in text) is not compatible
    if not compatible:
        assert "tree_map" in text


def test_diagnosis(capsys):
    names = run(
        """
    # Verificar instalación
    from capibara.jax import diagnostics

    diagnosis = diagnostics.check_installation()
    if not diagnosis.jax_native_available:
        print("❌ JAX nativo no disponible")
        print(f"Razón: {diagnosis.error_message}")
        print("💡 Usando fallback automático a JAX estándar")
    """
    )
    assert names["diagnosis"].jax_native_available is True
    assert capsys.readouterr().out == ""


def test_optimization_status(capsys):
    try:
        names = run(
            """
    import capibara.jax as jax

    # Verificar optimizaciones activas
    from capibara.jax import get_optimization_status

    status = get_optimization_status()
    print(f"TPU optimizations: {status['tpu_optimized']}")
    print(f"Custom kernels: {status['custom_kernels_active']}")
    print(f"Memory optimization: {status['memory_optimized']}")

    # Activar optimizaciones faltantes
    if not status['tpu_optimized']:
        jax.config.update("enable_tpu_optimizations", True)
    """
        )
        again = names["get_optimization_status"]()
        assert again["tpu_optimized"] is (jax.default_backend() == "tpu")
        assert all(again["reasons"][name] for name in again if name != "reasons")
        assert len(capsys.readouterr().out.splitlines()) == 3
    finally:
        import capibara.jax

        capibara.jax.config.update("enable_tpu_optimizations", False)


@pytest.mark.parametrize(
    "path",
    [
        "numpy",
        "numpy.linalg",
        "numpy.fft",
        "nn",
        "lax",
        "lax.linalg",
        "experimental.array_serialization",
        "experimental.mesh_utils",
        "tpu_v4",
        "_src.core",
    ],
)
def test_the_tree_of_the_document_can_be_imported(path):
    """All of its tree that the installed JAX has; it has no ``experimental.checkpoint`` (it is ``jax.checkpoint``)."""
    names = run(f"import capibara.jax.{path} as module")
    assert names["module"].__name__.endswith(path)
