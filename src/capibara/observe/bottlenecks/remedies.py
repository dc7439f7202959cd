"""Try the remedies of bottlenecks on a script, and measure what they save."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError
from capibara.files import read_bounded
from capibara.observe.bottlenecks.analysis import find_bottlenecks
from capibara.observe.bottlenecks.finding import KINDS, Bottleneck
from capibara.observe.profile import Operation, Profile
from capibara.observe.profile.changes import Change, jitted_functions, rolled_loops
from capibara.observe.profile.results import compare_results, compare_texts
from capibara.observe.profile.run import FOUND, NOTES, RESULTS, RUN, USES
from capibara.observe.profile.turns import UNROLLED

__all__ = ["Remedy", "Tried", "choose_remedies", "try_remedies", "why_untried"]

_MOST_PROFILE = 512 * 2**20
_MOST_NOTES = 1 << 20
# Seconds that a run with a remedy may take, beside ten times the profiled region: it may wait for itself, where items
# that another thread prepares need a lock that the loop holds.
_LEAST_LIMIT = 300.0
# The share by which numbers of two runs may differ: sums have another order, and bfloat16 has eight bits.
_SAME, _SAME_ROUNDED = 1e-3, 3e-2
# By platform, the variable and the flags of a scheduler that hides collectives.
_SCHEDULERS = {
    "gpu": ("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=true"),
    "tpu": (
        "LIBTPU_INIT_ARGS",
        "--xla_tpu_enable_latency_hiding_scheduler=true --xla_enable_async_all_gather=true",
    ),
}


@dataclass(frozen=True)
class Remedy:
    """What can be done about a bottleneck without changing the script.

    Attributes:
      description: what is done.
      change: put into the process that runs the script, if any.
      environment: variables for it.
      before: whether it must run once before it is measured.
      unused: said if it changed nothing in that run; empty if that is not known.
      predicted_gain: the part of the time that it should save, if it is not the bottleneck's.
      tolerance: the share by which results may differ.
    """

    description: str
    change: Change | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    before: bool = False
    unused: str = ""
    predicted_gain: float | None = None
    tolerance: float = _SAME


@dataclass(frozen=True)
class Tried:
    """A remedy, and what it saved.

    Attributes:
      kind: the bottleneck's.
      description: what was done.
      before: seconds of the profiled region, median. after: likewise. Without those of tracing and compiling, unless
        these are what the remedy is for.
      predicted_gain: the part of that time that was predicted to be saved.
      same_output: whether the script printed the same; numbers may differ by a thousandth (three hundredths for
        bfloat16).
      notes: what became of it.
      same_results: whether the arrays and numbers that the script's names held at its end were the same, likewise;
        None if there were none.
    """

    kind: str
    description: str
    before: float | None
    after: float | None
    predicted_gain: float
    same_output: bool | None
    notes: tuple[str, ...] = ()
    same_results: bool | None = None

    @property
    def gain(self) -> float | None:
        """The part of the time that was saved; negative if it took longer."""
        return None if self.before is None or self.after is None else 1 - self.after / self.before

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "gain": self.gain}

    def __str__(self) -> str:
        if self.gain is None:
            lines = [f"  {self.kind}: {self.description}"]
        else:
            before, after = (f"{1e3 * (seconds or 0):,.1f} ms" for seconds in (self.before, self.after))
            saved = f"{abs(100 * self.gain):.0f} % {'saved' if self.gain >= 0 else 'lost'}"
            output = "the output was the same" if self.same_output else "the output was another"
            if self.same_results is not None:
                output += (
                    ", the results, too"
                    if self.same_results is self.same_output
                    else (", the results were the same" if self.same_results else ", the results were others")
                )
            lines = [
                f"  {self.kind}: {self.description}: {before} → {after}, {saved} "
                f"({100 * self.predicted_gain:.0f} % predicted); {output}"
            ]
        return "\n".join([*lines, *(f"    {note}" for note in self.notes)])


def choose_remedies(
    profile: Profile, bottleneck: Bottleneck, script: Path | None, cache: Path
) -> list[Remedy]:
    """What can be tried about a bottleneck; nothing where only the script's author can do it.

    Args:
      profile: in which it was found.
      script: the file that was run, or None (``-m``).
      cache: a folder for programs that are kept.
    """
    kind = bottleneck.kind
    if kind == "recompilation":
        keep = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        found = [Remedy("programs are kept (JAX_COMPILATION_CACHE_DIR)", environment=keep, before=True)]
        if bottleneck.evidence.get("same_name"):
            found.append(Remedy("each function is jitted once", Change("jit_once")))
        return found
    if kind == "float64":
        return [Remedy("jax_enable_x64 is off", Change("x64_off"))]
    if kind == "idle":
        return _while_devices_work(bottleneck, script)
    if kind == "small_products" or "kernels" in bottleneck.evidence:
        return _several_turns(bottleneck)
    if kind == "float32":
        return [
            Remedy(
                "products in bfloat16 (JAX_DEFAULT_MATMUL_PRECISION=bfloat16)",
                environment={"JAX_DEFAULT_MATMUL_PRECISION": "bfloat16"},
                tolerance=_SAME_ROUNDED,
            )
        ]
    if kind == "callback":
        return [Remedy("jax.debug.print and jax.debug.callback do nothing", Change("no_debug_callbacks"))]
    if kind == "copies":
        return [Remedy("results take the place of arguments (donate_argnums)", Change("donate"))]
    if kind == "communication" and profile.platform in _SCHEDULERS:
        variable, flags = _SCHEDULERS[profile.platform]
        given = " ".join(filter(None, [os.environ.get(variable), flags]))
        return [Remedy(f"collectives run beside products ({flags})", environment={variable: given})]
    if kind in ("dispatch", "unfused") and script is not None:
        found = []
        lines = _eager_lines(profile, set(bottleneck.evidence.get("programs", ())), script)
        if lines:
            where = ", ".join(map(str, lines))
            found.append(
                Remedy(
                    f"the functions around lines {where} are under jax.jit", Change("jit", lines), before=True
                )
            )
        if kind == "dispatch":
            found.append(
                Remedy(
                    "loops of the script that only compute are one program each",
                    Change("roll"),
                    before=True,
                    unused="no loop that only assigns names, over a range or an array, took 20 turns",
                )
            )
        return found
    return []


def _while_devices_work(bottleneck: Bottleneck, script: Path | None) -> list[Remedy]:
    """Let the host work while the devices do: the shorter of both is saved."""
    predicted = bottleneck.evidence.get("beside_the_devices")
    found = [
        Remedy(
            "block_until_ready does not wait",
            Change("no_wait"),
            before=True,
            unused="the script never calls block_until_ready",
            predicted_gain=predicted,
        )
    ]
    if script is not None:
        found.append(
            Remedy(
                "what loops go over is prepared by another thread, two items ahead",
                Change("ahead"),
                before=True,
                unused="no loop of the script goes over an iterator that runs Python: what it prepares in its body "
                "cannot be prepared before",
                predicted_gain=predicted,
            )
        )
    return found


def _several_turns(bottleneck: Bottleneck) -> list[Remedy]:
    """Compute several turns of compiled loops at once."""
    return [
        Remedy(
            "turns of compiled loops that do not depend on one another are computed together (jax.vmap)",
            Change("batch"),
            before=True,
            unused="no lax.map was compiled, and no lax.scan whose turns do not depend on one another",
        ),
        Remedy(
            f"{UNROLLED} turns of compiled loops are one (unroll={UNROLLED})",
            Change("unroll"),
            before=True,
            unused="no lax.scan, lax.map or lax.fori_loop of a known number of turns was compiled",
            predicted_gain=bottleneck.evidence["beside"] * (1 - 1 / UNROLLED)
            if "beside" in bottleneck.evidence
            else None,
        ),
    ]


def why_untried(profile: Profile, bottleneck: Bottleneck, script: Path | None) -> str:
    """Why there is nothing that can be tried from outside."""
    if bottleneck.kind == "padded":
        return (
            "XLA pads what a TPU multiplies to its tiles itself: with operands padded in the program it estimates as "
            "many cycles, or up to 41 % more. Other sides make another model, whose results cannot be compared with "
            "these"
        )
    if bottleneck.kind == "communication":
        return (
            "devices that a CPU emulates share its cores, and XLA has no scheduler there that lets collectives run "
            "beside products"
            if profile.platform == "cpu"
            else f"XLA's flags for collectives beside products on {profile.platform} are not known"
        )
    if script is None:
        return "a module (-m) is not rewritten: give the file"
    if bottleneck.kind == "unfused":
        places = {one.source.rpartition(":")[0] for one in profile.operations if one.source}
        names = ", ".join(sorted(places)[:3]) or "unknown lines"
        return f"no line of {script.name} starts these operations ({names}): functions of other files are not rewritten"
    return "what it takes has to be written into the program"


def _eager_lines(profile: Profile, programs: set[str], script: Path, most: int = 8) -> tuple[int, ...]:
    """Lines of the script that started most operations of some programs."""
    counts: dict[int, int] = {}
    for one in profile.operations:
        if one.program in programs and (line := _line(one, script)):
            counts[line] = counts.get(line, 0) + one.count
    whole = sum(counts.values())
    often = sorted((line for line in counts if counts[line] >= 0.05 * whole), key=lambda line: -counts[line])
    return tuple(sorted(often[:most]))


def _line(one: Operation, script: Path) -> int:
    file, _, line = one.source.rpartition(":")
    return int(line) if file and line.isdigit() and Path(file).resolve() == script.resolve() else 0


def try_remedies(
    command: Sequence[str],
    script: Path | None,
    profile: Profile,
    *,
    repeats: int = 3,
    only: Collection[str] = KINDS,
    progress: Callable[[str], None] = lambda _: None,
    stdin: Callable[[], int | None] = lambda: None,
) -> list[Tried]:
    """Run a script with and without each remedy, by turns, and compare the times of their profiled regions.

    Args:
      command: Python, and its arguments (``[python, "script.py", …]``).
      script: the file that is run, or None (``-m``).
      profile: of it.
      repeats: runs on each side.
      only: kinds of bottlenecks of which remedies are tried.
      progress: is told what is being done.
      stdin: gives the standard input of the next run (:meth:`RepeatedInput.next`).
    """
    found: list[Tried] = []
    for bottleneck in find_bottlenecks(profile).bottlenecks:
        if bottleneck.kind not in only:
            continue
        with tempfile.TemporaryDirectory(prefix="capibara-remedies-") as temporary:
            cache = Path(temporary) / "cache"
            remedies = choose_remedies(profile, bottleneck, script, cache)
            if not remedies:
                found.append(_by_hand(bottleneck, why_untried(profile, bottleneck, script)))
            for remedy in remedies:
                predicted = _of_what_is_compared(bottleneck, remedy, profile)
                progress(f"{bottleneck.kind}: {remedy.description}")
                run = functools.partial(
                    _run,
                    command,
                    stdin,
                    Path(temporary),
                    compiling=bottleneck.kind == "recompilation",
                    limit=_LEAST_LIMIT + 10 * profile.wall_seconds,
                )
                found.append(_measured(run, bottleneck, remedy, predicted, repeats))
    return found


def _by_hand(bottleneck: Bottleneck, why: str) -> Tried:
    return Tried(
        bottleneck.kind,
        f"not tried: {why}",
        None,
        None,
        bottleneck.predicted_gain,
        None,
    )


@dataclass(frozen=True)
class _Ran:
    seconds: float
    output: bytes
    notes: tuple[str, ...]
    uses: tuple[str, ...]
    found: tuple[str, ...]
    results: Path


def _of_what_is_compared(bottleneck: Bottleneck, remedy: Remedy, profile: Profile) -> float:
    """The predicted gain, as a part of the time without compiling where that is what is compared."""
    predicted = bottleneck.predicted_gain if remedy.predicted_gain is None else remedy.predicted_gain
    if bottleneck.kind == "recompilation":
        return predicted
    rest = profile.wall_seconds - profile.compile_seconds - profile.tracing_seconds
    return min(1.0, predicted * profile.wall_seconds / rest) if rest > 0 else 1.0


def _measured(
    run: Callable[[Remedy | None], _Ran],
    bottleneck: Bottleneck,
    remedy: Remedy,
    predicted: float,
    repeats: int,
) -> Tried:
    def untried(*notes: str) -> Tried:
        return Tried(bottleneck.kind, f"tried: {remedy.description}", None, None, predicted, None, notes)

    sides: tuple[list[_Ran], list[_Ran]] = ([], [])
    notes: tuple[str, ...] = ()
    try:
        if remedy.before:
            first = run(remedy)
            notes = (*first.uses, *first.notes)
            if remedy.unused and not first.uses:
                return untried(remedy.unused, *notes)
            # What works is known now: the runs that are measured make no calls to find out.
            change = remedy.change
            if change is not None and change.kind == "jit":
                known = jitted_functions(first.found)
                if not known:
                    return untried(*notes)
                remedy = replace(remedy, change=replace(change, jitted=known))
            elif change is not None and change.kind == "roll":
                loops = rolled_loops(first.found)
                if not loops:
                    return untried(*notes)
                remedy = replace(remedy, change=replace(change, loops=loops))
        for _ in range(repeats):
            sides[0].append(run(None))
            sides[1].append(run(remedy))
    except CapibaraError as error:
        return untried(str(error))
    before, after = (statistics.median(one.seconds for one in side) for side in sides)
    if not remedy.before:
        notes = sides[1][-1].notes
    # What happens now and then, such as items that another thread takes too early, need not in the last run.
    differs, values, other = _differences(zip(*sides, strict=True), remedy.tolerance)
    if differs:
        notes = (*notes, f"the output differs first in {differs}")
    if other:
        notes = (*notes, f"of what the script's names held, {other} differs")
    if differs or other:
        again, _, others = _differences(itertools.pairwise(sides[0]), remedy.tolerance)
        if (again and differs) or (others and other):
            notes = (
                *notes,
                "two runs of the script as it is differ as well: what differs need not be the remedy's",
            )
    return Tried(
        bottleneck.kind,
        remedy.description,
        before,
        after,
        predicted,
        not differs,
        tuple(dict.fromkeys(notes)),
        not other if values or other else None,
    )


def _differences(pairs: Iterable[tuple[_Ran, _Ran]], tolerance: float) -> tuple[str, int, str]:
    """Where outputs of two runs differ, if any do, how many values were compared, and the first that differs."""
    differs, values, other = "", 0, ""
    for one, two in pairs:
        differs = differs or compare_texts(one.output, two.output, tolerance)
        count, name = compare_results(one.results, two.results, tolerance)
        values, other = max(values, count), other or name
    return differs, values, other


def _run(
    command: Sequence[str],
    stdin: Callable[[], int | None],
    folder: Path,
    remedy: Remedy | None,
    *,
    compiling: bool,
    limit: float,
) -> _Ran:
    python, *arguments = command
    results = Path(tempfile.mkdtemp(dir=folder)) / RESULTS
    with tempfile.TemporaryDirectory(dir=folder) as place:
        change = [] if remedy is None or remedy.change is None else [f"--change={remedy.change.to_json()}"]
        try:
            done = subprocess.run(
                [python, "-c", RUN, place, "--results", *change, *arguments],
                env={**os.environ, **({} if remedy is None else remedy.environment)},
                stdin=stdin(),
                capture_output=True,
                check=False,
                timeout=None if remedy is None else limit,
            )
        except subprocess.TimeoutExpired:
            raise CapibaraError(
                f"the program did not end within {limit:,.0f} s (300 s, and ten times the profiled region)"
            ) from None
        written = Path(place) / "profile.json"
        if done.returncode or not written.is_file():
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise CapibaraError(f"the program failed (exit code {done.returncode}): {last[:300]}")
        profile = Profile.from_json(read_bounded(written, _MOST_PROFILE).decode())
        notes, uses, known = (_lines(Path(place) / name) for name in (NOTES, USES, FOUND))
        if (Path(place) / RESULTS).is_file():
            shutil.move(Path(place) / RESULTS, results)
    seconds = profile.wall_seconds
    if not compiling:
        # Programs that threads compile side by side take more time together than there is.
        rest = max(
            seconds - profile.compile_seconds - profile.tracing_seconds,
            min(profile.busy_seconds or 0.0, seconds),
        )
        seconds = rest if rest > 0 else seconds
    return _Ran(
        seconds, done.stdout, tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(uses)), tuple(known), results
    )


def _lines(path: Path) -> list[str]:
    return read_bounded(path, _MOST_NOTES).decode(errors="replace").splitlines() if path.is_file() else []
