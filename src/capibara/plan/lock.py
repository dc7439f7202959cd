"""Plan lockfiles, with which a project's CI notices when a new jax or libtpu changes a plan's figures.

The file is JSON: the configuration, the slice, the layout with its compiler flags, the versions, the hash of the
program, and the figures. :func:`check_lock` compiles the same layout with the currently installed versions and
compares. Memory and time may grow by a tolerance; of all else, such as operations and collectives
(:mod:`capibara.plan.fingerprints`), it says what changed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.flags import flag_problem
from capibara.errors import ConfigError
from capibara.files import replace_file
from capibara.plan.compiler import CompiledProgram, ProgramCache, compiler_for
from capibara.plan.errors import PlanError
from capibara.plan.fingerprints import Fingerprint
from capibara.plan.gpus import GpuHost
from capibara.plan.planning import candidate_of
from capibara.plan.result import Plan
from capibara.plan.sizes import size_text, unit_of
from capibara.plan.targets import parse_target
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

__all__ = ["Drift", "LockCheck", "check_lock", "write_lock"]

FORMAT = 1
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class Drift:
    """One figure, then and now. Smaller is better: only growth counts."""

    figure: str
    locked: float
    now: float
    tolerance: float

    @property
    def change(self) -> float:
        """(now − locked) / locked."""
        return (self.now - self.locked) / self.locked if self.locked else math.inf if self.now else 0.0

    @property
    def passed(self) -> bool:
        """Whether the growth is within the tolerance."""
        return self.change <= self.tolerance

    def __str__(self) -> str:
        scale, unit = unit_of(self.locked) if self.figure == "HBM" else (1, "s")
        word = "ok" if self.passed else "DRIFT"
        return (
            f"{word:<5}  {self.figure}: locked {self.locked / scale:.4g} {unit}, now {self.now / scale:.4g} {unit} "
            f"({self.change:+.1%}, at most {self.tolerance:+.1%})"
        )


@dataclass(frozen=True)
class LockCheck:
    """The result of a check.

    Attributes:
      drifts: the figures.
      changed: other differences, which are not failures: versions, the program's digest, figures of what it does; and
        that the compiler is not the one that JAX pins.
      failure: why it no longer compiles or fits; empty if it does.
    """

    drifts: tuple[Drift, ...]
    changed: tuple[str, ...] = ()
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether the plan still holds."""
        return not self.failure and all(drift.passed for drift in self.drifts)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        figures = {d.figure: {"locked": d.locked, "now": d.now, "change": d.change} for d in self.drifts}
        return {
            "passed": self.passed,
            "figures": figures,
            "changed": list(self.changed),
            "failure": self.failure,
        }

    def __str__(self) -> str:
        lines = [str(drift) for drift in self.drifts]
        if self.failure:
            lines.append(f"FAILED {self.failure}")
        return "\n".join([*lines, *(f"note   {each}" for each in self.changed)])


def check_lockable(config: ModularModelConfig, slices: int) -> None:
    """Refuse to lock the plan of several slices.

    Raises:
      PlanError: there are several.
    """
    if slices > 1:
        raise PlanError(
            "only the plan of one slice can be locked: its program is what is compared. Lock the plan of one slice "
            f"with train.batch_size={config.train.batch_size // slices}"
        )


def write_lock(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the best candidate of a compiled plan of a configuration, atomically.

    Raises:
      PlanError: the plan was not compiled, or is not the plan of a configuration.
      OSError: the file cannot be written.
    """
    best = plan.best
    if best.memory_source != "compiler":
        raise PlanError("only a compiled plan can be locked: this one is an estimate")
    if plan.config is None:
        raise PlanError("only the plan of a configuration can be locked: a function cannot be kept in a file")
    check_lockable(plan.config, plan.slices)
    data = {
        "format": FORMAT,
        "work": plan.work,
        "config": plan.config.to_dict(),
        "topology": plan.target.text,
        "view": plan.target.view,
        # What JAX takes of a GPU's memory decides how the program is scheduled, and whether it fits.
        **({"memory_fraction": plan.target.fraction} if isinstance(plan.target, GpuHost) else {}),
        "limit_bytes": plan.limit_bytes,
        "layout": best.layout.to_json(),
        "versions": dict(best.versions or {}),
        "program_hash": best.program_hash,
        "hbm_bytes": best.hbm_bytes,
        "step_seconds": best.step_seconds,
        # That the compiler is not the one that JAX pins.
        "notes": compiler_for(plan.target).notes(),
    }
    if best.program is not None:
        data["figures"] = dict(Fingerprint.of(best.program).figures)
    replace_file(path, json.dumps(data, indent=1) + "\n")


def check_lock(
    path: str | os.PathLike[str],
    *,
    hbm_tolerance: float = 0.05,
    time_tolerance: float = 0.05,
    cache: str | os.PathLike[str] | None = None,
    progress: Callable[[str, Layout, CompiledProgram | None], None] | None = None,
) -> LockCheck:
    """Compile a locked layout again, and compare memory and predicted time.

    Args:
      hbm_tolerance, time_tolerance: the relative growth allowed for each.

    Raises:
      PlanError: not a lockfile, or a damaged one.
      CompilerMissingError, CompilationError: as :func:`capibara.plan.plan`.
    """
    for name, value in (("hbm_tolerance", hbm_tolerance), ("time_tolerance", time_tolerance)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 10:
            raise PlanError(f"{name}={value!r} must be a part such as 0.05")
    locked = _read(Path(path))
    work, target, layout = TrainWork(locked["config"]), locked["slice"], locked["layout"]
    program, candidate = candidate_of(work, target, layout, cache=ProgramCache(cache), progress=progress)
    versions = {name: program.versions.get(name, "none") for name in locked["versions"]}
    before = Fingerprint(locked["program_hash"], locked["versions"], locked["figures"])
    figures = Fingerprint.of(program).figures if locked["figures"] and program.fits else locked["figures"]
    now = Fingerprint(program.program_hash or before.digest, versions, figures)
    changed = (*before.changes(now), *compiler_for(target).notes())
    if candidate is None:
        return LockCheck((), changed, f"{program.status}: {program.message[:500]}")
    if candidate.hbm_bytes > locked["limit_bytes"]:
        return LockCheck((), changed, f"it takes {size_text(candidate.hbm_bytes)} and does not fit any more")
    drifts = (
        Drift("HBM", locked["hbm_bytes"], candidate.hbm_bytes, hbm_tolerance),
        Drift("step", locked["step_seconds"], candidate.step_seconds, time_tolerance),
    )
    return LockCheck(drifts, changed)


def _read(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise PlanError(f"{path}: the lockfile cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise PlanError(f"{path} is not a valid plan lockfile: it is larger than {_MOST_BYTES:,} bytes")
    try:
        found = json.loads(data)
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(
                f"format is {found.get('format') if isinstance(found, dict) else found!r}, expected {FORMAT}"
            )
        layout = Layout.from_json(_mapping(found["layout"]))
        for name, value in layout.flags:
            if (problem := flag_problem(f"{name}={value}")) is not None:
                raise ValueError(f"compiler flags: {problem}")
        target = parse_target(found["topology"], found["view"], rented=False)
        if isinstance(target, GpuHost) and "memory_fraction" in found:
            fraction = _number(found["memory_fraction"])
            if not 0 < fraction <= 1:
                raise ValueError(f"memory_fraction is {fraction!r}, expected a part above 0 and at most 1")
            target = replace(target, fraction=fraction)
        return {
            "config": ModularModelConfig.from_dict(_mapping(found["config"])),
            "slice": target,
            "layout": layout,
            "versions": {str(k): str(v) for k, v in _mapping(found["versions"]).items()},
            "program_hash": str(found["program_hash"]),
            "limit_bytes": min(_number(found["limit_bytes"]), target.usable_hbm_bytes),
            "hbm_bytes": _number(found["hbm_bytes"]),
            "step_seconds": _number(found["step_seconds"]),
            # Lockfiles of earlier versions have none.
            "figures": {str(k): _figure(v) for k, v in _mapping(found.get("figures", {})).items()},
        }
    except KeyError as error:
        raise PlanError(f"{path} is not a valid plan lockfile: missing {error}") from None
    except (ValueError, TypeError, RecursionError, ConfigError) as error:
        raise PlanError(f"{path} is not a valid plan lockfile: {error}") from None


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, got {value!r:.100}")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise ValueError(f"expected a number above 0, got {value!r:.100}")
    return value


def _figure(value: Any) -> int:
    if type(value) is not int or not abs(value) < 1e30:
        raise ValueError(f"expected figures as integers, got {value!r:.100}")
    return value
