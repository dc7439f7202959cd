"""The accelerator slice that a program is designed for: sharding, precision, hotspots.

:class:`TPUConfig` sets the number of chips, the mesh and the dtypes. Its ``topology`` is the shape of the mesh of
devices: ``"4x8"`` with 32 chips is what Capibara's documents call a "v4-32" (Google's own v4-32 is 16 chips; see
:mod:`capibara.hardware.topology`).

JAX is imported only by the methods that need it.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capibara.errors import CapibaraError, ConfigError, did_you_mean
from capibara.hardware.topology import TopologyError, parse_topology
from capibara.jax_versions import stop_profile

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

__all__ = ["ScalingConfig", "TPUConfig", "TPUConfigError", "TPUError"]

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_DEFAULT_AXES = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}


class TPUError(CapibaraError, RuntimeError):
    """An accelerator operation failed or is not possible."""


class TPUConfigError(TPUError, ConfigError):
    """A setting of :class:`TPUConfig` is invalid (also a ``ConfigError`` and a ``ValueError``)."""


def _number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    ok = (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and low <= value <= high
    )
    if not ok:
        what = "an integer" if whole else "a number"
        raise TPUConfigError(f"{name}: got {value!r}, expected {what} from {low:g} to {high:g}")


@dataclass(frozen=True)
class ScalingConfig:
    """The threshold of overload: positions with a load greater than ``load_threshold``."""

    load_threshold: float = 0.8

    def __post_init__(self) -> None:
        _number("load_threshold", self.load_threshold, -1e30, 1e30)


@dataclass(frozen=True)
class TPUConfig:
    """An accelerator slice.

    Attributes:
      num_chips: devices in the mesh; the product of ``topology``.
      topology: shape of the mesh, such as ``"4x8"``.
      memory_per_chip: bytes of device memory.
      flops_per_chip: FLOP/s of dense matrix products in ``compute_dtype``, as the vendor states it.
      compute_dtype, param_dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``.
      mesh_axes: a name for each axis of ``topology``; by default ``("data", "model")`` for two axes,
        ``("data",)`` for one, ``("data", "fsdp", "model")`` for three.
      scaling_config: the threshold of :meth:`detect_hotspots`.

    Raises:
      TPUConfigError: (a ``TPUError``, ``ConfigError`` and ``ValueError``) a setting is invalid; the message names it,
        its value and what is expected.
    """

    num_chips: int = 32
    topology: str = "4x8"
    memory_per_chip: int = 32 * 1024**3
    flops_per_chip: float = 275e12
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    mesh_axes: tuple[str, ...] | None = None
    scaling_config: ScalingConfig = field(default_factory=ScalingConfig)

    def __post_init__(self) -> None:
        _number("num_chips", self.num_chips, 1, 1_048_576, whole=True)
        _number("memory_per_chip", self.memory_per_chip, 1, 2**50, whole=True)
        _number("flops_per_chip", self.flops_per_chip, 1.0, 1e21)
        for name in ("compute_dtype", "param_dtype"):
            value = getattr(self, name)
            if value not in _BYTES:
                hint = did_you_mean(value, _BYTES) if isinstance(value, str) else ""
                raise TPUConfigError(f"{name}: got {value!r}, expected one of {', '.join(_BYTES)}.{hint}")
        try:
            topology = parse_topology(self.topology)
        except TopologyError as error:
            raise TPUConfigError(str(error)) from error
        if topology.size != self.num_chips:
            raise TPUConfigError(
                f"topology: got {self.topology!r}, which is {topology.size} chips, expected num_chips = "
                f"{self.num_chips}. Change one of them"
            )
        rank = len(topology.shape)
        axes = _DEFAULT_AXES.get(rank) if self.mesh_axes is None else tuple(self.mesh_axes)
        if axes is None:
            raise TPUConfigError(
                f"mesh_axes: topology {self.topology!r} has {rank} axes; give a name for each"
            )
        if len(axes) != rank or len(set(axes)) != rank or not all(isinstance(a, str) and a for a in axes):
            raise TPUConfigError(
                f"mesh_axes: got {axes!r}, expected {rank} different names for {self.topology!r}"
            )
        object.__setattr__(self, "mesh_axes", axes)
        if not isinstance(self.scaling_config, ScalingConfig):
            raise TPUConfigError(f"scaling_config: got {self.scaling_config!r}, expected a ScalingConfig")

    @classmethod
    def from_chip(cls, chip: str, topology: str = "4x8", **settings: Any) -> TPUConfig:
        """A slice of a catalogue chip (``"v4"``): with its memory and its bfloat16 peak.

        Raises:
          capibara.hardware.ChipError: an unknown chip, or its figures are not known.
        """
        from capibara.hardware import ChipError, get_chip

        found = get_chip(chip)
        if found.hbm_bytes is None:
            raise ChipError(f"{found.title}: the memory size is not known; give TPUConfig(memory_per_chip=…)")
        figures = {"memory_per_chip": found.hbm_bytes, "flops_per_chip": found.peak("bfloat16")}
        return cls(num_chips=parse_topology(topology).size, topology=topology, **{**figures, **settings})

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """``topology`` as integers."""
        return parse_topology(self.topology).shape

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axis name to its number of devices."""
        return dict(zip(self.mesh_axes or (), self.mesh_shape, strict=True))

    @property
    def use_mixed_precision(self) -> bool:
        """Whether the compute dtype is narrower than that of the parameters."""
        return _BYTES[self.compute_dtype] < _BYTES[self.param_dtype]

    @property
    def total_memory(self) -> int:
        """Bytes of device memory of all chips."""
        return self.num_chips * self.memory_per_chip

    @property
    def total_flops(self) -> float:
        """Peak FLOP/s of all chips."""
        return self.num_chips * self.flops_per_chip

    def get_memory_config(self) -> dict[str, Any]:
        """The settings that determine memory use, as a plain dictionary."""
        return {
            "use_mixed_precision": self.use_mixed_precision,
            "compute_dtype": self.compute_dtype,
            "param_dtype": self.param_dtype,
            "compute_bytes": _BYTES[self.compute_dtype],
            "param_bytes": _BYTES[self.param_dtype],
            "num_chips": self.num_chips,
            "memory_per_chip": self.memory_per_chip,
            "total_memory": self.total_memory,
        }

    def get_sharding_spec(self, tensor_shape: Sequence[int]) -> PartitionSpec:
        """The sharding of a tensor: first dimension over ``data``, last over ``model``, the others replicated.

        A dimension that its mesh axis does not divide, or whose axis the mesh lacks, is replicated (None), so that
        the result is always valid for ``jax.NamedSharding``. A vector counts as a last dimension (a bias or scale is
        sharded along the hidden axis); a scalar gives ``PartitionSpec()``.

        Equivalent plain JAX, for a divisible tensor of rank 2 or more:
        ``PartitionSpec("data", *[None] * (len(tensor_shape) - 2), "model")``.

        Raises:
          TPUError: the shape is not a sequence of integers of at least 0.
        """
        from jax.sharding import PartitionSpec

        shape = _checked_shape(tensor_shape)
        entries: list[str | None] = [None] * len(shape)
        if len(shape) > 1:
            entries[0] = self._axis_if_divides("data", shape[0])
        if shape:
            entries[-1] = self._axis_if_divides("model", shape[-1])
        return PartitionSpec(*entries)

    def _axis_if_divides(self, axis: str, size: int) -> str | None:
        devices = self.axis_sizes.get(axis)
        return axis if devices is not None and size % devices == 0 else None

    def detect_hotspots(self, load: Any) -> list[tuple[int, int]]:
        """Positions ``(i, j)`` whose load is greater than ``scaling_config.load_threshold``, row by row.

        Args:
          load: numbers [rows, columns]; a NumPy or JAX array or nested lists. NaN is never a hotspot.

        Raises:
          TPUError: not two-dimensional, or not real numbers.
        """
        import numpy as np

        values = np.asarray(load)
        if values.ndim != 2:
            raise TPUError(f"load: got shape {values.shape}, expected two dimensions, [batch, hidden]")
        if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
            raise TPUError(f"load: got dtype {values.dtype}, expected real numbers")
        rows, columns = np.nonzero(values > self.scaling_config.load_threshold)
        return list(zip(rows.tolist(), columns.tolist(), strict=True))

    def optimize_sharding(self, load: Any, tensor_shape: Sequence[int] | None = None) -> PartitionSpec:
        """Choose the dimension to shard over *all* devices, from the position of the overload.

        ``load[i, j]`` is the load at batch position ``i`` and hidden position ``j``. Hotspots occupy a number of
        distinct batch positions and a number of distinct hidden positions. Sharding the dimension in which they
        occupy more positions puts them on more devices: for example, if all batch rows are hot at one hidden
        position, sharding the hidden dimension would leave all of them on one device, while sharding the batch
        distributes them.

        * more batch positions than hidden ones: ``PartitionSpec(("data", "model"), None)``;
        * otherwise: ``PartitionSpec(None, ("data", "model"))``;
        * no hotspots: ``PartitionSpec("data", "model")``.

        Args:
          load: [batch, hidden]; need not have the tensor's size.
          tensor_shape: if given (rank at least 2, batch first, hidden last), the result has that rank, and is that of
            :meth:`get_sharding_spec` if the chosen dimension is not a multiple of ``num_chips``.

        Raises:
          TPUError: see :meth:`detect_hotspots`; or ``tensor_shape`` is not a shape of rank 2 or more.
        """
        from jax.sharding import PartitionSpec

        shape = None if tensor_shape is None else _checked_shape(tensor_shape)
        if shape is not None and len(shape) < 2:
            raise TPUError(
                f"tensor_shape: got {tuple(shape)}, expected at least two dimensions, [batch, …, hidden]"
            )
        hotspots = self.detect_hotspots(load)
        axes = self.mesh_axes or ()
        middle = [None] * (0 if shape is None else len(shape) - 2)
        batch_hotspots = {i for i, _ in hotspots}
        hidden_hotspots = {j for _, j in hotspots}
        if not hotspots:
            known = [axis if axis in axes else None for axis in ("data", "model")]
            return PartitionSpec(*known) if shape is None else self.get_sharding_spec(shape)
        over_batch = len(batch_hotspots) > len(hidden_hotspots)
        if shape is not None and shape[0 if over_batch else -1] % self.num_chips:
            return self.get_sharding_spec(shape)
        return PartitionSpec(axes, *middle, None) if over_batch else PartitionSpec(None, *middle, axes)

    def profile_tpu_usage(
        self, trace_dir: str | os.PathLike[str] | None = None, workload: Callable[[], Any] | None = None
    ) -> dict[str, Any]:
        """Measure the use of the local devices while ``workload`` runs (or over a tenth of a second).

        Args:
          trace_dir: if given, a ``jax.profiler`` trace is written there.
          workload: a function without arguments; its result is waited for.

        Returns:
          A dictionary. ``memory_allocated`` and ``memory_peak``: bytes, over all local devices. On a CPU, whose
          runtime does not report these, the bytes of live arrays and the peak resident memory of the process.
          ``device_count``; ``platform``; ``seconds``. ``device_utilization``: share of the time in which the devices
          worked, 0 to 1, the mean over them and over readings ten times a second: NVML's on NVIDIA's GPUs, libtpu's
          duty cycle on TPUs, that of all the machine's CPUs on a CPU; None where these do not report it. The
          drivers average over up to a second or more: let the workload run for several seconds. ``notes``: for each
          figure its definition and source, or why it is None.

        Raises:
          TPUError: an invalid argument, no device, or the trace cannot be written.
        """
        if workload is not None and not callable(workload):
            raise TPUError(
                f"workload: got {workload!r:.200}, expected a function without arguments or None. "
                "Pass one that does the work, such as lambda: step(state)."
            )
        folder = None if trace_dir is None else _checked_folder(trace_dir)
        import jax

        from capibara.hardware import cpu_times, device_memory, host_memory, live_array_bytes
        from capibara.hardware.utilization import UtilizationSampler

        try:
            devices = jax.local_devices()
        except RuntimeError as error:
            raise TPUError(f"JAX finds no device: {error}") from error
        platform = devices[0].platform

        def run() -> float:
            start = time.perf_counter()
            if workload is None:
                time.sleep(0.1)
            else:
                jax.block_until_ready(workload())
            return time.perf_counter() - start

        sampler = None if platform == "cpu" else UtilizationSampler(devices)
        before = cpu_times()
        with contextlib.ExitStack() as stack:
            if folder is not None:
                stack.enter_context(self._tracing(folder))
            if sampler is not None:
                stack.enter_context(sampler)
            seconds = run()
        after = cpu_times()

        reported = device_memory(devices)
        in_use = [m.in_use for m in reported if m.in_use is not None]
        peaks = [m.peak for m in reported if m.peak is not None]
        utilization: float | None = None
        notes = {"memory_allocated": "bytes in use", "memory_peak": "most bytes in use since start"}
        if sampler is not None:
            mean = sampler.mean
            utilization, notes["device_utilization"] = mean.value, mean.note
        else:
            notes["memory_allocated"] = "bytes of live JAX arrays; the CPU runtime has no allocator figures"
            notes["memory_peak"] = "peak resident memory of this process"
            notes["device_utilization"] = "share of all CPUs' time spent working, by any process"
            if before is not None and after is not None:
                utilization = after.utilization_since(before)
            if utilization is None:
                notes["device_utilization"] = (
                    "this system does not report CPU times, or too little time passed"
                )
        on_cpu = platform == "cpu"
        return {
            "memory_allocated": sum(in_use) if in_use else live_array_bytes() if on_cpu else None,
            "memory_peak": sum(peaks) if peaks else host_memory().peak if on_cpu else None,
            "device_count": len(devices),
            "device_utilization": utilization,
            "platform": platform,
            "seconds": seconds,
            "trace_dir": folder,
            "notes": notes,
        }

    @staticmethod
    @contextlib.contextmanager
    def _tracing(folder: str) -> Iterator[None]:
        import jax

        message = f"trace_dir: cannot write a trace to {folder!r}"
        try:
            os.makedirs(folder, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            jax.profiler.start_trace(folder)
        except (OSError, RuntimeError) as error:
            raise TPUError(f"{message}: {error}") from error
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                stop_profile()
            raise
        try:
            stop_profile()
        except RuntimeError as error:
            raise TPUError(f"{message}: {error}") from error

    def describe(self) -> str:
        """The slice in a few lines."""
        axes = ", ".join(f"{name}={size}" for name, size in self.axis_sizes.items())
        gib = 1024**3
        return (
            f"{self.num_chips} chips as a mesh of {axes}\n"
            f"memory    {self.memory_per_chip / gib:g} GiB a chip, {self.total_memory / gib:g} GiB in all\n"
            f"compute   {self.flops_per_chip / 1e12:g} TFLOP/s a chip, {self.total_flops / 1e15:g} PFLOP/s\n"
            f"precision parameters {self.param_dtype}, compute {self.compute_dtype}"
        )


def _checked_folder(trace_dir: object) -> str:
    """The path of a folder, as text."""
    folder = os.fspath(trace_dir) if isinstance(trace_dir, str | os.PathLike) else None
    if not isinstance(folder, str) or not folder or "\0" in folder:
        raise TPUError(
            f"trace_dir: got {trace_dir!r:.200}, expected the path of a folder (str or os.PathLike), without NUL "
            "characters, or None. Pass a folder that a trace can be written to."
        )
    return folder


def _checked_shape(shape: Sequence[int]) -> list[int]:
    try:
        sizes = [size.__index__() for size in shape]
    except (TypeError, AttributeError):
        sizes = [-1]
    if any(size < 0 for size in sizes):
        raise TPUError(
            f"tensor_shape: got {shape!r}, expected integers of at least 0, such as (32, 512, 768)"
        )
    return sizes
