"""Meshes for a TPU v4 slice: named presets, a validated way to create others, and related settings.

A :class:`TPUMeshConfig` describes a mesh before it is built: its shape, axis names, memory limit per device, and
purpose. The purpose (``optimization_target``) determines the rules that shard parameters over the mesh:

``training``
    Parameters are sharded over ``data`` too (fully sharded data parallel; Rajbhandari et al. 2020, "ZeRO"):
    gradients and two Adam moments have to fit as well, and gathering parameters once per step is cheap.
``inference``
    Parameters are sharded over ``model`` only. Gathering them for every generated token would cost more than
    the memory it saves.
``balanced``
    As ``inference``, but the vocabulary tables, the largest single arrays, are sharded over all devices.

The documents call 4x8 devices a "v4-32". Whether a device is a chip or a TensorCore depends on the runtime (a v4 chip
is one device); see :mod:`capibara.hardware`.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from capibara.config.axes import AxisRules
from capibara.errors import ConfigError, did_you_mean
from capibara.hardware import build_mesh

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = [
    "OptimizationContext",
    "OptimizationTarget",
    "TPUMeshConfig",
    "TPUv4MeshConfigurations",
    "create_tpu_mesh_config",
    "current_mesh",
    "tpu_optimization_settings",
    "tpu_v4_optimization_context",
]

OptimizationTarget = Literal["inference", "training", "balanced"]

# Copies of the parameters that stay in memory: training keeps gradients and Adam's two moments beside them.
_COPIES: Mapping[str, int] = {"inference": 1, "training": 4, "balanced": 1}


@dataclass(frozen=True, eq=False)
class TPUMeshConfig:
    """A mesh description. It compares, iterates and indexes like its shape: ``config == (4, 8)``.

    Attributes:
      mesh_shape: devices along each axis.
      axis_names: the name of each axis.
      optimization_target: ``"inference"``, ``"training"`` or ``"balanced"``; chooses :attr:`rules`.
      memory_limit_gb: memory that each device may use, in GiB (2**30 bytes).
      name: the preset's name, or an empty string.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...] = ("data", "model")
    optimization_target: OptimizationTarget = "balanced"
    memory_limit_gb: float = 32.0
    name: str = ""

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(self.mesh_shape)

    @property
    def memory_limit_bytes(self) -> int:
        """Memory that each device may use, in bytes."""
        return int(self.memory_limit_gb * 2**30)

    @property
    def rules(self) -> AxisRules:
        """The rules from logical axes to mesh axes for the target."""
        standard = AxisRules()
        if self.optimization_target == "training":
            return standard
        parameters = {
            axis: tuple(place for place in places if place not in ("data", "fsdp"))
            for axis, places in standard.parameters.items()
        }
        if self.optimization_target == "balanced":
            parameters["vocab"] = ("data+model", *parameters["vocab"])
        return AxisRules(parameters=parameters, activations=standard.activations)

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Create the :class:`jax.sharding.Mesh`, on ``devices`` or on all devices of this process.

        Equivalent JAX: ``jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))``.

        Raises:
          ConfigError: there are fewer devices than the mesh needs.
        """
        import jax

        available = list(jax.devices() if devices is None else devices)
        if len(available) < self.num_devices:
            raise ConfigError(
                f"the mesh {self} needs {self.num_devices} devices, but there are {len(available)} "
                f"({available[0].platform if available else 'none'}). To try it on a CPU, start Python with "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={self.num_devices}"
            )
        return build_mesh(self.mesh_shape, self.axis_names, available[: self.num_devices])

    def parameter_bytes(self, params: Any, param_axes: Any) -> int:
        """Bytes of parameters on each device if sharded by :attr:`rules`.

        Args:
          params: nested dict of arrays (or of anything with ``shape`` and ``dtype``).
          param_axes: the same nesting, with a tuple of logical axis names for each array.
        """
        sizes = dict(zip(self.axis_names, self.mesh_shape, strict=True))
        if isinstance(params, Mapping):
            return sum(self.parameter_bytes(value, param_axes[key]) for key, value in params.items())
        # Only the names and sizes of the axes are read, so no device is needed to ask.
        mesh: Any = SimpleNamespace(shape=sizes)
        count = math.prod(params.shape) * params.dtype.itemsize
        for entry in self.rules.spec(param_axes, mesh, params.shape):
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                count //= sizes[axis]
        return count

    def fits(self, params: Any, param_axes: Any) -> bool:
        """Whether ``params`` and what the target adds fit into ``memory_limit_gb`` on each device.

        Counts the parameters, and for ``training`` also gradients and Adam's two moments in the same dtype.
        Activations are not counted, so False is certain and True is only necessary.
        """
        held = _COPIES[self.optimization_target] * self.parameter_bytes(params, param_axes)
        return held <= self.memory_limit_bytes

    def __iter__(self) -> Iterator[int]:
        return iter(self.mesh_shape)

    def __len__(self) -> int:
        return len(self.mesh_shape)

    def __getitem__(self, index: int) -> int:
        return self.mesh_shape[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TPUMeshConfig):
            return self._key() == other._key()
        return self.mesh_shape == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.mesh_shape)

    def _key(self) -> tuple[Any, ...]:
        return self.mesh_shape, self.axis_names, self.optimization_target, self.memory_limit_gb, self.name

    def __str__(self) -> str:
        shape = "x".join(map(str, self.mesh_shape))
        axes = ", ".join(self.axis_names)
        label = f"{self.name}: " if self.name else ""
        limit = f"{self.memory_limit_gb:g} GiB a device"
        return f"{label}{shape} ({axes}) for {self.optimization_target}, {limit}"


class TPUv4MeshConfigurations:
    """Presets for 32 devices. The larger the first axis, the more data parallelism."""

    CULTURAL_ANALYSIS: ClassVar = TPUMeshConfig((4, 8), name="CULTURAL_ANALYSIS")
    QUANTUM_CLASSICAL: ClassVar = TPUMeshConfig((8, 4), name="QUANTUM_CLASSICAL")
    SPIKING_NEURAL: ClassVar = TPUMeshConfig((16, 2), name="SPIKING_NEURAL")

    def __iter__(self) -> Iterator[TPUMeshConfig]:
        return iter((self.CULTURAL_ANALYSIS, self.QUANTUM_CLASSICAL, self.SPIKING_NEURAL))


def create_tpu_mesh_config(
    mesh_shape: Iterable[int],
    optimization_target: OptimizationTarget = "balanced",
    memory_limit_gb: float = 32.0,
    *,
    axis_names: Sequence[str] | None = None,
) -> TPUMeshConfig:
    """Validate the values and create a :class:`TPUMeshConfig`.

    Args:
      mesh_shape: devices along each axis, such as ``(4, 8)``; a preset is accepted too.
      optimization_target: ``"inference"``, ``"training"`` or ``"balanced"``.
      memory_limit_gb: GiB that each device may use; above 0.
      axis_names: by default ``("data",)``, ``("data", "model")`` or ``("data", "fsdp", "model")``.

    Raises:
      ConfigError: a size below 1, an unknown target, a limit that is not a positive number, or names that are
        too few, too many or repeated.
    """
    shape = _checked_shape(mesh_shape)
    if optimization_target not in get_args(OptimizationTarget):
        options = get_args(OptimizationTarget)
        raise ConfigError(
            f"optimization_target={optimization_target!r} is not one of {', '.join(map(repr, options))}."
            + did_you_mean(str(optimization_target), options)
        )
    number = isinstance(memory_limit_gb, int | float) and not isinstance(memory_limit_gb, bool)
    if not number or not 0 < memory_limit_gb < 1e18:  # in bytes, too, a number that a float holds
        raise ConfigError(
            f"memory_limit_gb={memory_limit_gb!r}: expected a number of GiB above 0 and below 1e18, such as 32.0"
        )
    if axis_names is None:
        standard = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}
        if len(shape) not in standard:
            raise ConfigError(f"mesh_shape={shape} has {len(shape)} axes; name them with axis_names=(…)")
        names = standard[len(shape)]
    else:
        names = tuple(axis_names)
    if len(names) != len(shape) or len(set(names)) != len(names):
        raise ConfigError(
            f"axis_names={names!r}: expected {len(shape)} different names, one for each axis of {shape}"
        )
    return TPUMeshConfig(shape, names, optimization_target, float(memory_limit_gb))


def _checked_shape(mesh_shape: Any) -> tuple[int, ...]:
    try:
        if isinstance(mesh_shape, str):
            raise TypeError
        shape = tuple(operator.index(size) for size in mesh_shape)
    except TypeError:
        shape = ()
    if not shape or min(shape) < 1:
        raise ConfigError(
            f"mesh_shape={mesh_shape!r}: expected a sequence of integers of at least 1, such as (4, 8)"
        )
    return shape


def current_mesh() -> Mesh | None:
    """The concrete mesh of the surrounding ``jax.set_mesh(mesh)`` or (deprecated in JAX) ``with mesh:``.

    None outside both. Works while tracing too.
    """
    import jax

    # JAX has no public reader for the older context. Constraining a constant asks the same resolver that
    # user code goes through, and finds both kinds.
    try:
        with jax.ensure_compile_time_eval():
            probe = jax.lax.with_sharding_constraint(jax.numpy.zeros(()), jax.sharding.PartitionSpec())
    except RuntimeError:
        return None
    mesh = getattr(probe.sharding, "mesh", None)
    return mesh if isinstance(mesh, jax.sharding.Mesh) else None


@dataclass(frozen=True)
class OptimizationContext:
    """The settings applied by :func:`tpu_v4_optimization_context`.

    Attributes:
      platform: the backend of the decision.
      active: whether anything is set; False on other platforms.
      settings: the JAX flags in force inside the context, and only for this thread.
      reason: one sentence that explains the settings.
    """

    platform: str
    active: bool
    settings: Mapping[str, Any]
    reason: str


def tpu_optimization_settings(platform: str) -> dict[str, Any]:
    """The JAX flags that Capibara sets on a TPU, as ``{flag: value}``; empty for any other platform.

    * ``jax_default_matmul_precision = "bfloat16"``: float32 products go through the matrix unit in one
      bfloat16 pass with float32 sums. It is JAX's default on TPU; setting it overrides a program-wide "highest",
      which takes six passes.
    * ``jax_compilation_cache_dir``, unless one is set: compiled programs are cached in
      ``$XDG_CACHE_HOME/capibara/jax`` (``~/.cache/capibara/jax``), so a restarted job does not compile them again.
    """
    if platform != "tpu":
        return {}
    import jax

    settings: dict[str, Any] = {"jax_default_matmul_precision": "bfloat16"}
    if jax.config.values["jax_compilation_cache_dir"] is None:
        home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        settings["jax_compilation_cache_dir"] = str(Path(home) / "capibara" / "jax")
    return settings


@contextlib.contextmanager
def tpu_v4_optimization_context(platform: str | None = None) -> Iterator[OptimizationContext]:
    """Use the TPU settings inside the ``with`` block, for this thread, and restore the previous ones on exit.

    Only what JAX can set for one thread: the matrix-multiply precision (see
    :func:`tpu_optimization_settings`). On other platforms nothing is changed, and the object says so.

    Args:
      platform: decide for this platform instead of ``jax.default_backend()``.

    Yields:
      An :class:`OptimizationContext`.

    Equivalent JAX on a TPU: ``with jax.default_matmul_precision("bfloat16"): …``
    """
    import jax

    platform = jax.default_backend() if platform is None else platform
    precision = tpu_optimization_settings(platform).get("jax_default_matmul_precision")
    if precision is None:
        reason = f"the default backend is {platform!r}; these settings are for a TPU, so nothing was changed"
        yield OptimizationContext(platform, False, {}, reason)
        return
    with jax.default_matmul_precision(precision):
        yield OptimizationContext(
            platform,
            True,
            {"jax_default_matmul_precision": precision},
            "float32 matrix products take one bfloat16 pass with float32 sums",
        )
