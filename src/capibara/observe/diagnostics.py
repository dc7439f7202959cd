"""Diagnostics of the devices of a program, and of the program."""

from __future__ import annotations

import time

from jax.sharding import Mesh

from capibara.observe.bottlenecks import PerformanceAnalysis, find_bottlenecks
from capibara.observe.errors import ProfileError
from capibara.observe.health import DeviceWork, HealthReport, check_health
from capibara.observe.health.checking import Progress
from capibara.observe.health.temperature import ReadTemperatures
from capibara.observe.profile import Profile, TpuPerformanceProfiler

__all__ = ["TpuDiagnostics"]


class TpuDiagnostics:
    """Health of the devices of this program (TPUs, GPUs or CPUs), and what slows it down.

    Args:
      work: what runs on devices in a health check.
      temperatures: reads the temperatures of devices; by default what the system reports.
    """

    def __init__(
        self, *, work: DeviceWork | None = None, temperatures: ReadTemperatures | None = None
    ) -> None:
        self._work, self._temperatures = work, temperatures

    def run_full_health_check(
        self,
        *,
        mesh: Mesh | None = None,
        expected_devices: int | None = None,
        memory_fraction: float | None = None,
        memory_limit_bytes: int | None = None,
        timeout: float = 60.0,
        quick: bool = False,
        progress: Progress | None = None,
    ) -> HealthReport:
        """Exercise every device and the links between them; see :func:`capibara.observe.health.check_health`.

        With several processes each calls it, with the same arguments; each gets the report of all devices.

        Args:
          mesh: whose devices and axes are checked; by default all devices.
          expected_devices: how many devices there should be, over all processes; by default what the environment says.
          memory_fraction: share of each device's free memory to test; by default a quarter, but at most 1 GiB.
          memory_limit_bytes: the most memory to test on each device.
          timeout: seconds that one piece of work on a device may take, compilation included.
          quick: test less memory, smaller and fewer products.
          progress: told what is done now, how many parts are done, and how many there are.

        Returns:
          A mapping: ``report["all_chips_online"]`` and others are True, False, or None where it cannot be known;
          ``report.reason("all_chips_online")`` says what was found.

        Raises:
          HealthError: (a ``ValueError``) an invalid argument.
        """
        return check_health(
            mesh=mesh,
            expected_devices=expected_devices,
            memory_fraction=memory_fraction,
            memory_limit_bytes=memory_limit_bytes,
            timeout=timeout,
            quick=quick,
            work=self._work,
            temperatures=self._temperatures,
            progress=progress,
        )

    def analyze_performance_bottlenecks(
        self, profile: Profile | None = None, *, seconds: float = 2.0
    ) -> PerformanceAnalysis:
        """Say what slows a program down; see :func:`capibara.observe.bottlenecks.find_bottlenecks`.

        Args:
          profile: that :class:`~capibara.observe.profile.TpuPerformanceProfiler` took. None: what the other threads of
            this process do is profiled for ``seconds``.
          seconds: for which to profile.

        Returns:
          ``has_bottlenecks``, and ``bottlenecks``, each with ``description``, ``suggestion``, ``evidence`` and
          ``predicted_gain``, by the time that they would save.

        Raises:
          ProfileError: (a ``ValueError``) an invalid argument, or another trace is being taken.
        """
        if profile is None:
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= 600:
                raise ProfileError(
                    f"seconds: got {seconds!r:.200}, expected a number above 0 and at most 600. "
                    "Pass how long to profile, such as 2.0."
                )
            profiler = TpuPerformanceProfiler()
            with profiler.profile_context("process"):
                time.sleep(seconds)
            profile = profiler.profile()
        elif not isinstance(profile, Profile):
            raise ProfileError(
                f"profile: got {profile!r:.200}, expected a Profile or None. Pass what profiler.profile() returns."
            )
        return find_bottlenecks(profile)
