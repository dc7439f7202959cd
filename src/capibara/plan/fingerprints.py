"""Fingerprints of compiled programs, kept in a file, so that a change is seen: what changed, and by how much.

A fingerprint is a digest of the program before compilation, and figures of the compiled one: operations, bytes,
memory, collectives by kind and how much of them runs beside products. The first says that the code or JAX asks for
something else, the second what became of it. The same program is another one with other versions of the compiler, so
a file holds one fingerprint for each combination of versions, and only those of the same are compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.files import read_bounded, replace_file
from capibara.plan.compiler import CompiledProgram, Memory
from capibara.plan.errors import CompilationError, PlanError
from capibara.plan.program import overlap_by_kind, overlaps, read_program
from capibara.plan.program.digest import program_digest

__all__ = ["Fingerprint", "FingerprintCheck", "check_fingerprints", "fingerprint", "record_fingerprints"]

FORMAT = 1
_MOST_BYTES = 16 << 20
_MOST_NUMBER = 10**30


@dataclass(frozen=True)
class Fingerprint:
    """One compiled program.

    Attributes:
      digest: SHA-256 of the program before compilation; :func:`capibara.plan.program.digest.program_digest`.
      versions: of what compiled it, by name.
      figures: of one execution on one device, by name: ``FLOPs``, ``bytes moved``, ``bytes of temporaries``,
        ``all-gather``, ``all-gather, asynchronous`` …
    """

    digest: str
    versions: Mapping[str, str]
    figures: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, program: CompiledProgram) -> Fingerprint:
        """Of a program that the planner compiled.

        Raises:
          PlanError: it did not compile, or its text is no longer in the cache.
        """
        kinds = {} if program.memory is None else dict(program.memory.kinds)
        figures = _figures(program.text, program.memory, kinds)
        return cls(program.program_hash, dict(program.versions), figures)

    def changes(self, now: Fingerprint) -> tuple[str, ...]:
        """One line for each thing that is different in another fingerprint of the same program."""
        found = [
            f"{name} was {self.versions.get(name, 'none')}, is {now.versions.get(name, 'none')}"
            for name in sorted({*self.versions, *now.versions})
            if self.versions.get(name) != now.versions.get(name)
        ]
        if self.digest != now.digest:
            found.append("the program before compilation is another one: its code, its shapes or JAX changed")
        for name in [*self.figures, *(name for name in now.figures if name not in self.figures)]:
            before, after = self.figures.get(name, 0), now.figures.get(name, 0)
            if before != after:
                part = f" ({after / before - 1:+.1%})" if before and after else ""
                found.append(f"{name}: was {before:,}, is {after:,}{part}")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"versions": dict(self.versions), "digest": self.digest, "figures": dict(self.figures)}

    @classmethod
    def from_json(cls, data: Any) -> Fingerprint:
        """Read the output of :meth:`to_json`.

        Raises:
          ValueError: it is something else.
        """
        try:
            digest, versions, figures = data["digest"], data["versions"], data["figures"]
            texts = (digest, *versions, *versions.values(), *figures)
            numbers = tuple(figures.values())
        except (AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"expected digest, versions and figures, got {data!r:.100} ({error!r})"
            ) from None
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"expected names and versions as texts, got {data!r:.200}")
        for number in numbers:
            if type(number) is not int or abs(number) >= _MOST_NUMBER:
                raise ValueError(f"expected figures as integers, got {number!r:.100}")
        return cls(digest, dict(versions), dict(figures))


def fingerprint(lowered: Any, compiled: Any = None) -> Fingerprint:
    """The fingerprint of a function of your own, on any platform.

    Args:
      lowered: ``jax.jit(f).lower(…)``.
      compiled: ``lowered.compile(…)`` if you have it, such as with compiler options; it is compiled here otherwise.

    Raises:
      CompilationError: it does not compile. PlanError: an argument is something else, or the platform's compiler does
        not show its programs.
    """
    import jax

    if not isinstance(lowered, jax.stages.Lowered):
        raise PlanError(f"lowered: got {type(lowered).__name__}, expected jax.jit(f).lower(…)")
    if compiled is None:
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise CompilationError(f"the compiler refuses it: {str(error).splitlines()[0]}") from error
    if not isinstance(compiled, jax.stages.Compiled):
        raise PlanError(f"compiled: got {type(compiled).__name__}, expected lowered.compile(…)")
    text, analysis = compiled.as_text(), compiled.memory_analysis()
    if text is None or analysis is None:
        raise PlanError("the compiler of this platform does not show its programs: there is nothing to keep")
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
    )
    return Fingerprint(program_digest(lowered), _versions(compiled), _figures(text, memory, {}))


def _versions(compiled: Any) -> dict[str, str]:
    """Of JAX, and of the compiler of the devices that the program is for."""
    from importlib import metadata

    import jax

    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = [device for each in shardings for device in each.device_set] or jax.local_devices()[:1]
    version = " ".join(str(devices[0].client.platform_version).split())
    return {"jax": jax.__version__, "jaxlib": metadata.version("jaxlib"), devices[0].platform: version}


def _figures(text: str, memory: Memory | None, kinds: Mapping[str, int]) -> dict[str, int]:
    facts = read_program(text)
    found: dict[str, int] = {
        "devices": facts.num_devices,
        "FLOPs": facts.flops,
        "bytes moved": facts.hbm_bytes,
        "estimated cycles": facts.cycles,
        "kernel calls": sum(kernel.trips for kernel in facts.kernels),
    }
    if memory is not None:
        for name in ("arguments", "outputs", "aliased", "temporaries"):
            found[f"bytes of {name}"] = getattr(memory, name)
    found |= {f"bytes of {kind}": size for kind, size in kinds.items()}
    for kind, sums in overlap_by_kind(overlaps(facts)).items():
        found[kind] = sums.collectives
        found[f"{kind}, asynchronous"] = sums.asynchronous
        found[f"{kind}, bytes"] = sums.bytes
        found[f"{kind}, bytes beside products"] = sums.hidden_bytes
    return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class FingerprintCheck:
    """Programs, compared with a file.

    Attributes:
      changes: lines of what is different, by the name of the program; only those that changed.
      missing: by name, why there is nothing to compare with.
      same: names of those that are as they were.
    """

    changes: Mapping[str, tuple[str, ...]]
    missing: Mapping[str, str]
    same: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing changed; what could not be compared is in ``missing``."""
        return not self.changes

    def __str__(self) -> str:
        lines = [f"{name}: as it was" for name in self.same]
        lines += [f"{name}: not compared, {why}" for name, why in self.missing.items()]
        lines += [f"{name}: CHANGED\n  " + "\n  ".join(told) for name, told in self.changes.items()]
        return "\n".join(lines)


def record_fingerprints(path: str | os.PathLike[str], found: Mapping[str, Fingerprint]) -> None:
    """Write fingerprints into a file: in place of those of the same program and versions, beside all others.

    Args:
      path: a JSON file; made if it is not there.
      found: by the names of the programs.

    Raises:
      PlanError: the file is something else, or ``found`` is. OSError: it cannot be written.
    """
    _check(found)
    known = _read(path) if Path(path).exists() else {}
    for name, new in found.items():
        others = [old for old in known.get(name, ()) if dict(old.versions) != dict(new.versions)]
        known[name] = [*others, new]
    programs = {
        name: [each.to_json() for each in sorted(several, key=_by_versions)]
        for name, several in sorted(known.items())
    }
    replace_file(path, json.dumps({"format": FORMAT, "programs": programs}, indent=1) + "\n")


def _by_versions(each: Fingerprint) -> list[tuple[str, str]]:
    return sorted(each.versions.items())


def check_fingerprints(path: str | os.PathLike[str], found: Mapping[str, Fingerprint]) -> FingerprintCheck:
    """Compare programs with a file of :func:`record_fingerprints`.

    Args:
      found: by the names of the programs, as they are now.

    Raises:
      PlanError: it is not such a file, or cannot be read; or ``found`` is something else.
    """
    _check(found)
    known = _read(path)
    changes: dict[str, tuple[str, ...]] = {}
    missing: dict[str, str] = {}
    same: list[str] = []
    for name, now in found.items():
        several = known.get(name, [])
        before = next((each for each in several if dict(each.versions) == dict(now.versions)), None)
        if before is not None:
            told = before.changes(now)
            if told:
                changes[name] = told
            else:
                same.append(name)
        elif several:
            missing[name] = f"compiled by {_text(now)}, known of {'; '.join(map(_text, several))}"
        else:
            missing[name] = f"no program of this name is in {os.fspath(path)}"
    return FingerprintCheck(changes, missing, tuple(same))


def _check(found: Any) -> None:
    if not isinstance(found, Mapping):
        raise PlanError(f"found: got {type(found).__name__}, expected a dict of names and fingerprint(…)")
    for name, each in found.items():
        if not isinstance(name, str) or not isinstance(each, Fingerprint):
            raise PlanError(
                f"found: got {name!r:.80}: {type(each).__name__}, expected a name and its fingerprint(…)"
            )


def _text(each: Fingerprint) -> str:
    return ", ".join(f"{name} {version:.80}" for name, version in each.versions.items())


def _read(path: str | os.PathLike[str]) -> dict[str, list[Fingerprint]]:
    where = os.fspath(path)
    try:
        data = json.loads(read_bounded(path, _MOST_BYTES))
    except OSError as error:
        raise PlanError(f"{where}: the file of fingerprints cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where} is not a file of fingerprints: {error}") from None
    try:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(
                f"format is {data.get('format') if isinstance(data, dict) else data!r:.40}, expected {FORMAT}"
            )
        programs = data.get("programs")
        if not isinstance(programs, dict) or not all(isinstance(each, list) for each in programs.values()):
            raise ValueError("expected programs, a table of lists")
        return {name: [Fingerprint.from_json(each) for each in several] for name, several in programs.items()}
    except ValueError as error:
        raise PlanError(f"{where} is not a file of fingerprints: {error}") from None
