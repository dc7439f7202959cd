"""The documented profilers: regions of a program, and what each of them did."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capibara.errors import did_you_mean
from capibara.observe.errors import ProfileError
from capibara.observe.profile.capture import Capture, Captured, capture
from capibara.observe.profile.result import Profile

__all__ = ["TpuPerformanceProfiler", "TpuProfiler"]


class TpuPerformanceProfiler:
    """Profile regions of a program on TPUs, GPUs and CPUs.

    FLOPs and bytes are those of the compiled programs that ran, with the trip counts of their loops, as often as the
    trace shows that they ran; times are the trace's; the memory peak is the device's, or, on a CPU, the process's.
    A figure that the platform cannot give is None, and :attr:`Profile.reasons` says why. The plain JAX is::

        with jax.profiler.trace(folder):
            jax.block_until_ready(f(x))

    Args:
      capture_memory: the most memory in use.
      capture_flops: FLOPs and bytes of the programs that ran.
      capture_communication: time of collectives beside which nothing else ran.
      capture_kernel_details: each operation.
      trace_dir: a folder in which to keep each region's trace (XProf, TensorBoard and Perfetto open it), the text of
        its programs and ``profile.json``, in a folder named after the region. Nothing is kept if None.

    Raises:
      ProfileError: a setting of another type.

    With the last three False no trace is taken: then only time and memory are measured, and nothing is slower.
    """

    def __init__(
        self,
        capture_memory: bool = True,
        capture_flops: bool = True,
        capture_communication: bool = True,
        capture_kernel_details: bool = True,
        *,
        trace_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        settings = {
            "capture_memory": capture_memory,
            "capture_flops": capture_flops,
            "capture_communication": capture_communication,
            "capture_kernel_details": capture_kernel_details,
        }
        for name, value in settings.items():
            if not isinstance(value, bool):
                raise ProfileError(f"{name}: got {value!r}, expected True or False")
        self._what = Capture(capture_memory, capture_flops, capture_communication, capture_kernel_details)
        self._folder = None if trace_dir is None else Path(trace_dir)
        self.profiles: dict[str, Profile] = {}

    @contextlib.contextmanager
    def profile_context(self, name: str) -> Iterator[Captured]:
        """Profile the body of a ``with`` block.

        It begins when all earlier work of this process has ended, and ends when its own has. Call what is profiled
        once before: otherwise its compilation is part of the region (and reported as such).

        Args:
          name: of the region; the profile of an earlier one of this name is replaced.

        Raises:
          ProfileError: a name that is empty or not text; another trace is being taken; operations are missing in the
            trace.
        """
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise ProfileError(f"name: got {name!r:.100}, expected a text such as 'forward_pass'")
        folder = None
        if self._folder is not None:
            folder = self._folder / _folder_name(name)
        with capture(name, self._what, folder) as captured:
            yield captured
        if captured.profile is not None:
            self.profiles.pop(name, None)
            self.profiles[name] = captured.profile

    def profile(self, name: str | None = None) -> Profile:
        """The profile of a region; of the last one by default.

        Raises:
          ProfileError: nothing was profiled yet, or nothing of that name.
        """
        if not self.profiles:
            raise ProfileError(
                "nothing was profiled yet: put the code into 'with profiler.profile_context(\"name\"):' first"
            )
        if name is None:
            return next(reversed(self.profiles.values()))
        if name not in self.profiles:
            raise ProfileError(f"name: got {name!r}; {did_you_mean(name, self.profiles)}")
        return self.profiles[name]

    def get_detailed_metrics(self, name: str | None = None) -> dict[str, Any]:
        """Figures of a region (of the last one by default), ready for JSON.

        Returns:
          ``tflops`` (10¹² FLOP/s of all devices), ``total_flops``, ``peak_memory_gb`` (10⁹ bytes),
          ``memory_efficiency`` and ``compute_efficiency`` (shares, 0 to 1, of the memory's bandwidth and of the FLOP/s
          that the devices can reach), ``comm_overhead_ms`` (collectives beside which nothing else ran),
          ``wall_time_ms``, ``busy_time_ms``, ``idle_share``, ``compiled_programs``, ``compile_time_ms``,
          ``perturbation`` (share of the time that recording took), ``kernels``, ``programs`` and ``reasons`` (why a
          figure is None).

        Raises:
          ProfileError: nothing was profiled yet, or nothing of that name.
        """
        return self.profile(name).metrics()

    def get_metrics(self, name: str | None = None) -> dict[str, Any]:
        """The main figures of a region, efficiencies in percent.

        Returns:
          ``tflops``, ``peak_memory_gb``, ``memory_efficiency`` and ``compute_efficiency`` (0 to 100),
          ``comm_overhead_ms``, ``wall_time_ms``.

        Raises:
          ProfileError: nothing was profiled yet, or nothing of that name.
        """
        found = self.get_detailed_metrics(name)
        for efficiency in ("memory_efficiency", "compute_efficiency"):
            share = found[efficiency]
            found[efficiency] = None if share is None else 100 * share
        kept = (
            "tflops",
            "peak_memory_gb",
            "memory_efficiency",
            "compute_efficiency",
            "comm_overhead_ms",
            "wall_time_ms",
        )
        return {name: found[name] for name in kept}


def _folder_name(name: str) -> str:
    """A name of a folder for a region's: another one for every other name."""
    safe = "".join(one if one.isalnum() or one in "._-" else "_" for one in name).strip(".")[:100]
    return safe if safe == name else f"{safe}-{zlib.crc32(name.encode(errors='replace')):08x}"


class TpuProfiler:
    """A profiler of one region, itself the context: ``with TpuProfiler() as profiler: …``.

    Args: see :class:`TpuPerformanceProfiler`.
    """

    def __init__(
        self,
        capture_memory: bool = True,
        capture_flops: bool = True,
        capture_communication: bool = True,
        capture_kernel_details: bool = True,
        *,
        trace_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._profiler = TpuPerformanceProfiler(
            capture_memory,
            capture_flops,
            capture_communication,
            capture_kernel_details,
            trace_dir=trace_dir,
        )
        self._context: contextlib.AbstractContextManager[Captured] | None = None

    def __enter__(self) -> TpuProfiler:
        if self._context is not None:
            raise ProfileError("the profiler is in use already: make another one, or end its block first")
        self._context = self._profiler.profile_context("profile")
        try:
            self._context.__enter__()
        except BaseException:
            self._context = None
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(*error)

    @property
    def profile(self) -> Profile:
        """The profile of the last region.

        Raises:
          ProfileError: nothing was profiled yet.
        """
        return self._profiler.profile()

    def generate_report(self) -> dict[str, Any]:
        """What :meth:`TpuPerformanceProfiler.get_detailed_metrics` returns, for this region.

        Raises:
          ProfileError: nothing was profiled yet.
        """
        return self._profiler.get_detailed_metrics()
