"""Profiles: what ran in a region of a program, for how long, on how much memory, and how far from the machine's limits.

:class:`TpuPerformanceProfiler` profiles regions by name; :func:`diff_profiles` compares two profiles.
"""

from __future__ import annotations

from capibara.observe.errors import ProfileError
from capibara.observe.profile.arguments import Argument, Recompiled
from capibara.observe.profile.diff import Change, ProfileDiff, diff_profiles
from capibara.observe.profile.planned import AgainstPlan, PlannedStep, compare_with_plan, read_planned_step
from capibara.observe.profile.profiler import TpuPerformanceProfiler, TpuProfiler
from capibara.observe.profile.result import Operation, Profile, ProgramRuns, TracedPart
from capibara.observe.profile.timeline import Timeline, Track

__all__ = [
    "AgainstPlan",
    "Argument",
    "Change",
    "Operation",
    "PlannedStep",
    "Profile",
    "ProfileDiff",
    "ProfileError",
    "ProgramRuns",
    "Recompiled",
    "Timeline",
    "TpuPerformanceProfiler",
    "TpuProfiler",
    "TracedPart",
    "Track",
    "compare_with_plan",
    "diff_profiles",
    "read_planned_step",
]
