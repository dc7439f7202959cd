"""The whole compression system in one object: devices, programs, strategies and a monitor.

A coordinator starts the components that its configuration requests. With JAX these are nine; without JAX it warns
once and provides the same methods with compiled host code and PyTorch or NumPy, writing the same bytes. Each
component can also be used directly.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from capibara.compress.container.index import check_name
from capibara.compress.errors import CompressError
from capibara.compress.profile import EXACT, FIXED, CompressionProfile
from capibara.compress.system.configuration import SystemConfiguration
from capibara.compress.system.engines import engine_problem, fallback_engine, warn_fallback
from capibara.compress.system.host_tropical import HostTropicalEngine
from capibara.compress.system.monitor import MetricType, PipelineType, UnifiedPerformanceMonitor
from capibara.compress.system.result import CompressedTensor
from capibara.compress.system.strategies import StrategySelector
from capibara.compress.system.tensors import KINDS, make_tensor, read_tensor
from capibara.errors import did_you_mean
from capibara.hardware.telemetry import host_memory

__all__ = ["JAX_COMPONENTS", "SystemIntegrationCoordinator"]

JAX_COMPONENTS = (
    "jax_config_adapter",
    "jax_device_manager",
    "jax_memory_pool",
    "jax_memory_optimizer",
    "jax_compilation_optimizer",
    "jax_tropical_engine",
    "jax_tropical_bridge",
    "jax_strategy",
    "jax_performance_monitor",
)
"""The components that are there when JAX is."""


class _OwnWidth(CompressionProfile):
    """A single codec without a ratio, as for a single tensor: it compresses as it is, or says what it misses."""

    @property
    def own_width(self) -> bool:
        return True


def _profile(config: SystemConfiguration) -> CompressionProfile:
    """What a configuration asks of a model: as :meth:`SystemIntegrationCoordinator.compress` reads it for a tensor."""
    ratio = None if config.strategy in EXACT else config.target_compression_ratio
    if ratio is not None or config.strategy in FIXED:
        return CompressionProfile(strategy=config.strategy, target_compression_ratio=ratio)
    kind = CompressionProfile if config.strategy in ("auto", "jax", *EXACT) else _OwnWidth
    return kind(strategy=config.strategy, mode="lossless")


class SystemIntegrationCoordinator:
    """Compresses tensors and models with one configuration; use it as a context manager, or call :meth:`shutdown`.

    Args:
      config: the settings; the defaults if omitted.
      monitor: receives the measurements; a new one if omitted.

    Attributes:
      config: the settings.
      monitor: the measurements.
      components: by name: ``strategy_selector``, ``performance_monitor``, ``tropical_engine``, and, with JAX, the
        nine of :data:`JAX_COMPONENTS`.

    Raises:
      CompressError: ``config`` or ``monitor`` is something else.
    """

    def __init__(
        self, config: SystemConfiguration | None = None, *, monitor: UnifiedPerformanceMonitor | None = None
    ) -> None:
        config = SystemConfiguration() if config is None else config
        if not isinstance(config, SystemConfiguration):
            raise CompressError(f"config: got {type(config).__name__}, expected a SystemConfiguration")
        if monitor is not None and not isinstance(monitor, UnifiedPerformanceMonitor):
            raise CompressError(
                f"monitor: got {type(monitor).__name__}, expected a UnifiedPerformanceMonitor"
            )
        self.config = config
        self.monitor = UnifiedPerformanceMonitor() if monitor is None else monitor
        self._components: dict[str, Any] = {}
        self._running = True
        self._began = time.monotonic()
        self._counts = {"compressed": 0, "decompressed": 0, "original_bytes": 0, "compressed_bytes": 0}
        problem = engine_problem("jax") if config.enable_jax else "enable_jax is False"
        self.jax_problem = problem
        if problem is None:
            self._initialize_jax_components()
            engine: Any = self._components[
                "jax_tropical_bridge"
            ]  # takes tensors of PyTorch's, as the host's does
        else:
            engine = HostTropicalEngine(fallback_engine())
            if config.enable_jax:
                warn_fallback(
                    "jax",
                    f"JAX does not run here ({problem}): compression uses the host's code and "
                    f"{'PyTorch' if engine.name == 'torch' else 'NumPy'}, with the same results.",
                )
        manager = self._components.get("jax_device_manager")
        selector = StrategySelector(config, accelerated=manager is not None and manager.is_accelerated)
        self._components |= {
            "strategy_selector": selector,
            "performance_monitor": self.monitor,
            "tropical_engine": engine,
        }
        if problem is None:
            self._components["jax_strategy"] = selector.strategies["jax"]

    def _initialize_jax_components(self) -> None:
        from capibara.compress.system.jax_compilation import JaxCompilationOptimizer
        from capibara.compress.system.jax_devices import JaxConfigAdapter, JaxDeviceManager
        from capibara.compress.system.jax_events import JaxPerformanceMonitor
        from capibara.compress.system.jax_memory import JaxMemoryOptimizer, JaxMemoryPool
        from capibara.compress.system.jax_tropical import JaxTropicalBridge, JaxTropicalEngine

        adapter = JaxConfigAdapter(self.config)
        adapter.apply()  # before a device starts
        devices = JaxDeviceManager(self.config)
        compiler = JaxCompilationOptimizer(
            self.config.jax_compilation_cache_size, enable_x64=self.config.jax_enable_x64
        )
        pool = JaxMemoryPool(devices.devices[0], fraction=self.config.jax_memory_fraction)
        memory = JaxMemoryOptimizer(pool, compiler)
        engine = JaxTropicalEngine(devices, compiler, memory)
        performance = JaxPerformanceMonitor(self.monitor, pool, compiler)
        compiler.on_lookup = performance.looked_up
        performance.start()
        self._components |= {
            "jax_config_adapter": adapter,
            "jax_device_manager": devices,
            "jax_memory_pool": pool,
            "jax_memory_optimizer": memory,
            "jax_compilation_optimizer": compiler,
            "jax_tropical_engine": engine,
            "jax_tropical_bridge": JaxTropicalBridge(engine),
            "jax_performance_monitor": performance,
        }

    @property
    def components(self) -> Mapping[str, Any]:
        return MappingProxyType(self._components)

    def get_component(self, name: str) -> Any:
        """The component of that name.

        Raises:
          CompressError: there is no such component; for those of JAX the message says why.
        """
        if (found := self._components.get(name)) is not None:
            return found
        why = (
            f" It needs JAX: {self.jax_problem}."
            if name in JAX_COMPONENTS
            else did_you_mean(str(name), self._components)
        )
        raise CompressError(
            f"component: got {name!r:.200}, expected one of {', '.join(self._components)}.{why}"
        )

    def compress(
        self,
        tensor: Any,
        *,
        ratio: float | None = None,
        strategy: str | None = None,
        name: str = "tensor",
        verify: bool = True,
    ) -> CompressedTensor:
        """Compress one tensor of NumPy, PyTorch or JAX.

        Args:
          tensor: of any shape and any type of :data:`capibara.compress.formats.FORMATS`.
          ratio: original bytes over compressed bytes, above 1, met within 2 % (codecs of fixed width may give smaller
            sizes); by default the configuration's ``target_compression_ratio``. Lossless without one, except for
            codecs of fixed width (``int8``, ``int4``, ``nf4``).
          strategy: instead of the configuration's.
          name: stored with the tensor.
          verify: decode and compare, to measure the error.

        Raises:
          CompressError: not a tensor, an unknown strategy, an invalid name, a ratio that cannot be met, or the system
            is shut down.
        """
        self._check_running()
        wanted = self.config.target_compression_ratio if ratio is None else ratio
        if (wrong := check_name(name)) is not None:
            raise CompressError(f"name: got {name!r:.200}: {wrong}")
        if (exact := self.config.strategy if strategy is None else strategy) in EXACT:
            if ratio is not None:
                raise CompressError(
                    f"ratio: got {ratio}, but {exact!r} compression has no target ratio. "
                    "Remedy: choose another strategy."
                )
            wanted = None
        bits = read_tensor(tensor)
        if wanted is not None and ratio is None and not bits.form.is_float:
            wanted = None  # integers are exact; only a ratio for this very tensor is an error
        choice = self._components["strategy_selector"].select(bits, strategy=strategy)
        made = choice.strategy.compress(bits, ratio=wanted, name=name, reason=choice.reason, verify=verify)
        size = made.compressed_bytes
        pipeline = PipelineType(made.engine)
        assert made.seconds is not None
        self.monitor.record(MetricType.COMPRESSION_TIME, made.seconds * 1e3, pipeline)
        self.monitor.record(MetricType.THROUGHPUT, made.original_bytes / made.seconds / 1e6, pipeline)
        self.monitor.record(MetricType.COMPRESSION_RATIO, made.original_bytes / size, pipeline)
        if made.relative_error is not None:
            self.monitor.record(MetricType.RELATIVE_ERROR, made.relative_error, pipeline)
        self._sample()
        self._counts["compressed"] += 1  # last: a call that failed did not compress
        self._counts["original_bytes"] += made.original_bytes
        self._counts["compressed_bytes"] += size
        return made

    def decompress(self, compressed: CompressedTensor, *, kind: str | None = None) -> Any:
        """Decode a tensor, with its original type and on its original device, if available.

        Args:
          compressed: of :meth:`compress`, or loaded from a file.
          kind: ``"numpy"``, ``"torch"`` or ``"jax"``; by default the original framework, or NumPy if that is not
            installed.

        Raises:
          CompressError: not a compressed tensor, or the system is shut down.
          DamagedError: its payload is not what was written.
          MissingEngineError: ``kind`` names a package that is not installed.
        """
        self._check_running()
        if not isinstance(compressed, CompressedTensor):
            raise CompressError(
                f"compressed: got {type(compressed).__name__}, expected what compress() gives"
            )
        if kind is not None and kind not in KINDS:
            raise CompressError(f"kind: got {kind!r}, expected one of {', '.join(map(repr, KINDS))}")
        if kind is None:
            kind = compressed.kind
            if kind != "numpy" and engine_problem(kind) is not None:
                kind = "numpy"
        pool = self._components.get("jax_memory_pool") if kind == "jax" else None
        key = None
        if pool is not None:
            key = (hashlib.blake2b(compressed.to_bytes()).digest(), compressed.device)
            if (array := pool.get(key)) is not None:
                self._counts["decompressed"] += 1
                return array
        selector: StrategySelector = self._components["strategy_selector"]
        engine = compressed.engine if compressed.engine in selector.strategies else "auto"
        with self.monitor.track(MetricType.DECOMPRESSION_TIME, PipelineType.SYSTEM):
            values = selector.strategies[engine].decompress(compressed)
            device = compressed.device if kind == compressed.kind else None
            tensor = make_tensor(values, compressed.entry.format, compressed.shape, kind, device)
        if pool is not None:
            pool.put(key, tensor)
        self._sample()
        self._counts["decompressed"] += 1
        return tensor

    def compress_model(self, model: Any, profile: Any = None, *, validation_data: Any = None) -> Any:
        """Compress a whole model, with :class:`capibara.compress.model_api.ModelCompressionAPI`.

        Args:
          model: a ``torch.nn.Module``, a tree of arrays, a composed model …
          profile: a ``CompressionProfile``; by default one with the configuration's strategy and ratio. Lossless
            without a ratio, except with a codec of fixed width (``int8``, ``int4``, ``nf4``).
          validation_data: to measure errors on.

        Raises:
          CompressError: as for :class:`ModelCompressionAPI`; the configured codec needs a ratio and there is none; or
            the system is shut down.
        """
        from capibara.compress.model_api import ModelCompressionAPI

        self._check_running()
        if profile is None:
            profile = _profile(self.config)
        with self.monitor.track(MetricType.COMPRESSION_TIME, PipelineType.SYSTEM):
            made = ModelCompressionAPI(profile).compress(model, validation_data=validation_data)
        self._sample()
        return made

    def get_system_status(self) -> dict[str, Any]:
        """The system's settings, components and counts, as plain values for JSON."""
        self._sample()
        described = {}
        for name, component in self._components.items():
            describe = getattr(component, "describe", None)
            described[name] = {"type": type(component).__qualname__, **(describe() if describe else {})}
        return {
            "state": "running" if self._running else "shut down",
            "seconds": time.monotonic() - self._began,
            "engine": "jax" if self.jax_problem is None else fallback_engine(),
            "jax": {
                "enabled": self.config.enable_jax,
                "available": engine_problem("jax") is None,
                "in_use": self.jax_problem is None,
                "problem": self.jax_problem,
            },
            "configuration": self.config.to_dict(),
            "components": described,
            "counts": dict(self._counts),
            "performance": self.monitor.report(),
        }

    def shutdown(self) -> None:
        """Release programs and arrays and stop listening; a second call has no effect. Results stay valid."""
        if not self._running:
            return
        self._running = False
        if self.jax_problem is None:
            self._components["jax_performance_monitor"].stop()
            self._components["jax_memory_pool"].clear()
            self._components["jax_compilation_optimizer"].clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _sample(self) -> None:
        if (used := host_memory().in_use) is not None:
            self.monitor.record(MetricType.HOST_MEMORY, used / (1 << 20))
        if self._running and (performance := self._components.get("jax_performance_monitor")) is not None:
            performance.sample()

    def _check_running(self) -> None:
        if not self._running:
            raise CompressError("the system is shut down. Remedy: a new SystemIntegrationCoordinator.")
