"""Which devices of this machine each process of a group gets.

A process of JAX takes every accelerator that it sees, and no other can have it then. So several processes share the
GPUs of a machine, and cannot share its TPU, whose chips are one process's. CPUs need no sharing, and can emulate
devices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from capibara.errors import ConfigError
from capibara.startup import has_tpu

__all__ = ["device_variables"]


def device_variables(
    environment: Mapping[str, str], count: int, devices: int | None, system: str = "/"
) -> list[dict[str, str]]:
    """The environment variables that give each of ``count`` processes its devices.

    Args:
      environment: of the group. With ``JAX_PLATFORMS=cpu`` accelerators are left alone.
      devices: emulated CPU devices of each; None: real ones.
      system: the root of the file system in which device files are looked for.

    Raises:
      ConfigError: the accelerators cannot be shared by so many processes.
    """
    if devices is not None:
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        return [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}] * count
    if count == 1 or environment.get("JAX_PLATFORMS", "").strip().lower() == "cpu":
        return [{}] * count
    remedy = "Start one process (capibara train), which uses all of them; or, on the CPU, give --devices 1"
    if has_tpu(system):
        raise ConfigError(f"count={count}: the chips of a TPU host belong to one process. {remedy}")
    gpus = _gpus(environment, system)
    if len(gpus) % count:
        raise ConfigError(f"count={count}: {len(gpus)} GPUs cannot be shared equally. {remedy}")
    if not gpus:
        return [{}] * count
    each = len(gpus) // count
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[n * each : (n + 1) * each])} for n in range(count)]


def _gpus(environment: Mapping[str, str], system: str) -> list[str]:
    """NVIDIA's GPUs that programs may use, as ``CUDA_VISIBLE_DEVICES`` names them."""
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        return [name for name in names if name and name != "-1"]
    try:
        names = os.listdir(os.path.join(system, "dev"))
    except OSError:
        return []
    return sorted((found[1] for name in names if (found := re.fullmatch(r"nvidia(\d+)", name))), key=int)
