"""Document 3 ("Configuración TPU"): its snippets, under its import paths, as a reader would type them.

The snippets use names that the document never imports (``mesh_utils``, ``Mesh``, ``jax``, ``self``); the test
gives them. Two things in it cannot be right as printed and are tested as what their reader plainly wants:
``jax.devices('tpu')`` on a machine without one, and ``PartitionSpec(data=…)``, which never took keywords.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import jax
import numpy as np
import pytest
from emulation import emulated
from jax.sharding import PartitionSpec


def run(snippet: str, **given: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "snippet", **given}
    exec(compile(textwrap.dedent(snippet), "document 3", "exec"), namespace)
    return namespace


CONFIG = """
    from capibara.config.tpu_config import TPUConfig

    # Configuración TPU v4-32
    tpu_config = TPUConfig(
        num_chips=32,
        topology='4x8',
        memory_per_chip=32 * 1024**3,  # 32GB HBM
        flops_per_chip=275e12,  # 275 TFLOPS
        compute_dtype='bfloat16',
        param_dtype='float32'
    )
"""

IMPORTS = """
    import capibara.jax as jax
    import capibara.jax.numpy as jnp
    from capibara.jax.experimental import mesh_utils
    from capibara.jax.sharding import Mesh, PartitionSpec
"""


def test_basic_configuration():
    config = run(CONFIG)["tpu_config"]
    assert config.num_chips == 32
    assert config.mesh_shape == (4, 8)
    assert config.memory_per_chip == 34_359_738_368
    assert config.use_mixed_precision


def test_precision_and_memory():
    names = run(
        IMPORTS
        + CONFIG
        + """
    # Configuración de memoria
    memory_config = tpu_config.get_memory_config()

    # Aplicar configuración
    if memory_config['use_mixed_precision']:
        compute_dtype = jnp.bfloat16
        param_dtype = jnp.float32
    """
    )
    assert names["compute_dtype"] is jax.numpy.bfloat16
    assert names["param_dtype"] is jax.numpy.float32


POLICY = """
    # Configuración de precisión
    if tpu_config.use_mixed_precision:
        policy = jax.pjit(
            in_axis_resources=PartitionSpec('data', 'model'),
            out_axis_resources=PartitionSpec('data', 'model')
        )
"""


def test_the_pjit_policy_is_a_deprecated_decorator():
    with pytest.warns(DeprecationWarning, match="in_shardings"):
        names = run(IMPORTS + CONFIG + POLICY)
    double = names["policy"](lambda x: 2 * x)
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        result = double(np.ones((2, 4), np.float32))
    np.testing.assert_array_equal(result, np.full((2, 4), 2.0))
    assert result.sharding.spec == PartitionSpec("data", "model")


def test_mesh_sharding_and_policy_on_32_emulated_devices(tmp_path):
    """The document's mesh is 4x8: the snippets run whole on 32 devices that XLA makes of one CPU."""
    script = tmp_path / "document_3.py"
    script.write_text(
        textwrap.dedent(
            IMPORTS
            + CONFIG
            + """
    import json, warnings
    warnings.simplefilter("ignore")
    tensor_shape = (64, 256)

    # Crear mesh para sharding
    devices = mesh_utils.create_device_mesh((4, 8))
    mesh = Mesh(devices, axis_names=('data', 'model'))

    # Obtener especificación de sharding
    sharding_spec = tpu_config.get_sharding_spec(tensor_shape)
    """
            + POLICY
            + """
    x = jax.device_put(jnp.ones(tensor_shape), jax.NamedSharding(mesh, sharding_spec))
    with mesh:
        y = policy(lambda x: x * 2)(x)
    print(json.dumps([str(sharding_spec), str(y.sharding.spec), x.addressable_shards[0].data.shape,
                      len(y.addressable_shards), float(y.sum())]))
    """
        )
    )
    environment = {
        **os.environ,
        "XLA_FLAGS": emulated(32),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    spec = str(PartitionSpec("data", "model"))
    assert json.loads(done.stdout.splitlines()[-1]) == [spec, spec, [16, 32], 32, 2.0 * 64 * 256]


DYNAMIC = """
    def get_sharding_spec(self, tensor_shape: tuple) -> PartitionSpec:
        if len(tensor_shape) == 2:
            return PartitionSpec('data', 'model')
        elif len(tensor_shape) == 3:
            return PartitionSpec('data', None, 'model')
        else:
            return PartitionSpec('data', *[None] * (len(tensor_shape) - 2), 'model')
"""


@pytest.mark.parametrize("shape", [(64, 256), (64, 10, 256), (64, 3, 5, 256), (4, 1, 1, 1, 8)])
def test_dynamic_sharding_is_the_method_of_the_document(shape):
    names = run(IMPORTS + CONFIG + DYNAMIC)
    assert names["tpu_config"].get_sharding_spec(shape) == names["get_sharding_spec"](None, shape)


PROFILE = """
    from typing import Any, Dict

    def profile_tpu_usage(self) -> Dict[str, Any]:
        with jax.profiler.trace("/tmp/tpu_trace"):
            memory_stats = jax.device_memory_allocated()
            memory_peak = jax.device_memory_peak()
            device_count = len(jax.devices('tpu'))
            device_utilization = jax.device_get(jax.device_count())

            return {
                'memory_allocated': memory_stats,
                'memory_peak': memory_peak,
                'device_count': device_count,
                'device_utilization': device_utilization
            }
"""


@pytest.mark.slow
def test_profile_snippet_on_the_devices_there_are(tmp_path):
    """As printed, but for the platform that is here and into the test's own folder."""
    text = PROFILE.replace("'tpu'", f"{jax.default_backend()!r}").replace("/tmp/tpu_trace", str(tmp_path))
    found = run(IMPORTS + text)["profile_tpu_usage"](None)
    assert set(found) == {"memory_allocated", "memory_peak", "device_count", "device_utilization"}
    assert found["device_count"] == jax.device_count()
    assert found["memory_peak"] > 0
    assert found["memory_allocated"] >= 0
    assert any(tmp_path.rglob("*"))


def test_profile_method(tmp_path):
    found = run(CONFIG)["tpu_config"].profile_tpu_usage()
    assert {"memory_allocated", "memory_peak", "device_count", "device_utilization"} <= set(found)
    assert found["device_count"] == jax.local_device_count()


HOTSPOTS = """
    from typing import List, Tuple

    def detect_hotspots(self, load: jnp.ndarray) -> List[Tuple[int, int]]:
        threshold = self.scaling_config.load_threshold
        hotspots = []

        for i in range(load.shape[0]):
            for j in range(load.shape[1]):
                if load[i,j] > threshold:
                    hotspots.append((i,j))

        return hotspots
"""


def test_hotspot_method_is_the_loop_of_the_document():
    names = run(IMPORTS + CONFIG + HOTSPOTS)
    load = jax.numpy.asarray(np.random.default_rng(3).random((5, 7)), jax.numpy.float32)
    config = names["tpu_config"]
    found = config.detect_hotspots(load)
    assert found == names["detect_hotspots"](config, load)
    assert 0 < len(found) < 35


def test_optimized_sharding_follows_the_load():
    config = run(CONFIG)["tpu_config"]
    load = np.zeros((8, 8))
    load[:, 2] = 1.0  # every batch row, at one hidden position
    assert config.optimize_sharding(load) == PartitionSpec(("data", "model"), None)
    assert config.optimize_sharding(load.T) == PartitionSpec(None, ("data", "model"))
    assert tuple(config.optimize_sharding(np.zeros((8, 8)))) == ("data", "model")


def test_the_documented_error_type_can_be_caught():
    from capibara.config.tpu_config import TPUConfig, TPUError

    with pytest.raises(TPUError, match="topology"):
        TPUConfig(num_chips=16, topology="4x8")
