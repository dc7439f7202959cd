"""Profiles: what ran in a region of a program, for how long, on how much memory, and how far from the machine's limits.

:class:`TpuPerformanceProfiler` profiles regions by name; :func:`diff_profiles` compares two profiles.
"""

from __future__ import annotations

from capibara.observe.errors import ProfileError
from capibara.observe.profile.diff import Change, ProfileDiff, diff_profiles
from capibara.observe.profile.profiler import TpuPerformanceProfiler, TpuProfiler
from capibara.observe.profile.result import Operation, Profile, ProgramRuns

__all__ = [
    "Change",
    "Operation",
    "Profile",
    "ProfileDiff",
    "ProfileError",
    "ProgramRuns",
    "TpuPerformanceProfiler",
    "TpuProfiler",
    "diff_profiles",
]
