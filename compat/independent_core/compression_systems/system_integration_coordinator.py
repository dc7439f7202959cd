"""The configuration and the coordinator of :mod:`capibara.compress.system`."""

from capibara.compress.system.configuration import OptimizationStrategy as OptimizationStrategy
from capibara.compress.system.configuration import SystemConfiguration as SystemConfiguration
from capibara.compress.system.coordinator import JAX_COMPONENTS as JAX_COMPONENTS
from capibara.compress.system.coordinator import SystemIntegrationCoordinator as SystemIntegrationCoordinator
from capibara.compress.system.engines import JAX_AVAILABLE as JAX_AVAILABLE
from capibara.compress.system.result import CompressedTensor as CompressedTensor
