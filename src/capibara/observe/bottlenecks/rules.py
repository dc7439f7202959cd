"""The rules. Each takes a profile and gives one bottleneck or none; what it says it would save follows from figures."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from capibara.errors import CapibaraError
from capibara.hardware import get_chip
from capibara.observe.bottlenecks.finding import Bottleneck
from capibara.observe.profile import Operation, Profile

__all__ = ["RULES"]

# Below these parts of the time nothing is said: measurements of short regions vary by as much.
_COMPILING = 0.05
_IDLE = 0.25
_SMALL = 0.10
_CALLBACK = 0.05
_COPIES = 0.25
_COMMUNICATION = 0.15
_WIDE = 0.20  # of types
_UNFUSED = 0.30
# A region of less is over before its figures mean anything.
_SHORTEST = 0.005
# A program that runs for less than this is as long to start as to run.
_TINY_RUN = 100e-6
# FLOPs of a product that is over before a device is busy.
_TINY_PRODUCT = 5e6
# Bytes of an operation below which its time is that of starting it.
_LITTLE_DATA = 1 << 16
# Between two operations of one program XLA takes up to this (0.08 to 0.16 µs were measured on a CPU, recorded): it is
# not the host that lets the device wait.
_BETWEEN_OPERATIONS = 0.25e-6
# Starting a program takes at least this (50 to 100 µs were measured on a CPU, for 1 to 300 runs), whoever prepares its
# input; where it is long beside the program, `dispatch` says so.
_START = 50e-6
# How XLA calls Python on CPUs and GPUs; on TPUs it exchanges arrays with the host.
_CALLS_PYTHON = re.compile(r"^xla_\w*python_(cpu|gpu)_callback$|^(send|recv)(-done)?$")
_PRIMITIVE = re.compile(r"^jit__?[a-z][a-z_0-9]*$")


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _spent(profile: Profile, operations: Iterable[Operation]) -> float:
    """Their part of the time, on one device. Operations that run beside one another are not more than all of it."""
    return min(1.0, sum(one.seconds for one in operations) / profile.devices / profile.wall_seconds)


def _compiling(profile: Profile) -> float:
    """The part of the time in which functions were traced, lowered and compiled."""
    return min(1.0, (profile.compile_seconds + profile.tracing_seconds) / profile.wall_seconds)


# What to do about a function that is compiled again, by what changed.
_AVOID = {
    "shape": "Pad this argument to a few sizes",
    "static value": "Pass it as an array and not as a static argument, if only its value changes",
    "closed-over value": "Pass the value as an argument: a jitted function has it as a constant",
    "parameter": "Put operations outside of jitted functions under jax.jit, or let them have few shapes",
    "dtype": "Give it one dtype",
    "weak type": "Pass arrays of a dtype, and not Python's numbers now and then",
    "sharding": "Put it where the program wants it, with the same jax.device_put each time",
    "structure": "Give the argument the same structure each time",
    "setting": "Set JAX's settings once, at the start",
    "": "Make jitted functions once, outside of loops, and not of a new lambda each time",
}


def recompilation(profile: Profile) -> Bottleneck | None:
    """Programs that were compiled in the region."""
    part = _compiling(profile)
    if part < _COMPILING:
        return None
    names = Counter(one.name for one in profile.programs)
    again = {name: count for name, count in names.items() if count > 1}
    changed = profile.recompilations()
    if changed:
        # JAX's operations outside of jitted functions are compiled for each shape; of functions more can be said.
        own = [one for one in changed if one.function and not one.function.startswith("jax/")]
        worst = (own or changed)[0]
        kinds = {change.what for change in worst.changes} if own else {"parameter"}
        advice = next((_AVOID[kind] for kind in _AVOID if kind in kinds), _AVOID[""])
        remedy = f"{worst}. {advice}"
    else:
        remedy = (
            "Call each function once before what counts, or compile ahead (.lower().compile()); keep programs with "
            "jax.config.update('jax_compilation_cache_dir', …); make jitted functions once, outside of loops"
        )
    return Bottleneck(
        "recompilation",
        f"{profile.compiled} programs were compiled, in {_percent(part)} of the time",
        remedy,
        {
            "compiled": profile.compiled,
            "compile_seconds": profile.compile_seconds,
            "tracing_seconds": profile.tracing_seconds,
            "same_name": again,
            "changed": [asdict(one) for one in changed[:10]],
        },
        part,
    )


def _idle(profile: Profile) -> float:
    """The part of the time in which devices waited for the host, and not for a compiler or between operations."""
    if "busy_seconds" in profile.reasons:
        return 0.0  # devices may have worked without a trace of it
    between = profile.events / profile.devices * _BETWEEN_OPERATIONS / profile.wall_seconds
    return max(0.0, (profile.idle_share or 0.0) - _compiling(profile) - between)


def _runs(profile: Profile) -> int:
    return sum(one.runs for one in profile.programs)


def _starts_tiny(profile: Profile) -> bool:
    """Whether the devices wait between many short programs."""
    runs = _runs(profile)
    return runs >= 50 * profile.devices and (profile.busy_seconds or 0.0) * profile.devices / runs < _TINY_RUN


def idle(profile: Profile) -> Bottleneck | None:
    """Devices that wait for the host: for input, for Python."""
    part = _idle(profile) - _runs(profile) / profile.devices * _START / profile.wall_seconds
    # Where operations are programs of their own, the time between them is part of what `unfused` says.
    if part < _IDLE or not profile.events or _starts_tiny(profile) or unfused(profile) is not None:
        return None
    return Bottleneck(
        "idle",
        f"devices were idle for {_percent(part)} of the time: the host did not give them work",
        "Prepare batches in another thread or process while a step runs (capibara.data, grain), read results one step "
        "later, and keep NumPy, files and printing out of the loop",
        {"idle_share": profile.idle_share, "runs": _runs(profile)},
        part,
    )


def _primitives(profile: Profile) -> list[str]:
    """Names of programs that are one operation each, as JAX makes them of code that is not jitted."""
    many: Counter[str] = Counter(one.program for one in profile.operations if one.count)
    return [
        one.name
        for one in profile.programs
        if many[one.name] <= 2 and _PRIMITIVE.match(one.name) and one.runs >= 3
    ]


def dispatch(profile: Profile) -> Bottleneck | None:
    """Many programs that are as long to start as to run."""
    part = _idle(profile)
    if part < _IDLE or not _starts_tiny(profile):
        return None
    runs = _runs(profile)
    names = [one.name for one in sorted(profile.programs, key=lambda one: -one.runs)[:5]]
    return Bottleneck(
        "dispatch",
        f"{runs:,} programs of {1e6 * (profile.busy_seconds or 0) * profile.devices / runs:.0f} µs each were started; "
        f"devices were idle for {_percent(part)} of the time between them",
        "Put the loop or the whole step under jax.jit, with jax.lax.scan for many short steps: "
        + ", ".join(names),
        {"runs": runs, "idle_share": profile.idle_share, "programs": names},
        part,
    )


def unfused(profile: Profile) -> Bottleneck | None:
    """Large arrays that go to memory and back for every operation, because each is a program of its own."""
    if dispatch(profile) is not None:
        return None  # the same remedy, and the time is that of starting them
    names = _primitives(profile)
    alone = [
        one for one in profile.operations if one.program in names and not one.flops and one.kind == "compute"
    ]
    runs = sum(one.count for one in alone)
    part = _spent(profile, alone)
    if len(names) < 3 or part < _UNFUSED or not runs or sum(one.bytes for one in alone) / runs < _LITTLE_DATA:
        return None
    # In one program the chain reads and writes once, and is started once.
    chain = len({one.program for one in alone})
    gain = (part + _idle(profile)) * (1 - 1 / chain)
    return Bottleneck(
        "unfused",
        f"{chain} operations that each read and write whole arrays took {_percent(part)} of the time: "
        + ", ".join(sorted(name.removeprefix("jit_") for name in names)[:6]),
        "Put them into one function under jax.jit: XLA makes one pass over memory of them",
        {"programs": names, "runs": runs, "part": part},
        gain,
    )


def small_products(profile: Profile) -> Bottleneck | None:
    """Matrix products too small for the device."""
    if not profile.peak_flops or not profile.peak_bandwidth:
        return None
    peak, bandwidth = profile.peak_flops, profile.peak_bandwidth
    slow = []
    saved = 0.0
    for one in profile.operations:
        if not one.flops or one.count < 20 * profile.devices or one.flops / one.count > _TINY_PRODUCT:
            continue
        # Half of the roofline is what a product of a good size reaches.
        good = 2 * max(one.flops / peak, one.bytes / bandwidth)
        if one.seconds > 3 * good:
            slow.append(one)
            saved += one.seconds - good
    device_time = profile.devices * profile.wall_seconds
    part = _spent(profile, slow)
    if saved / device_time < _SMALL:
        return None
    # What runs once for each product and moves next to nothing (a loop's counter, a copy) runs less often with them.
    loops = {(one.program, one.count) for one in slow}
    with_others = sum(
        one.seconds
        for one in profile.operations
        if not one.flops
        and one.kind in ("compute", "copy")
        and (one.program, one.count) in loops
        and one.bytes / one.count < _LITTLE_DATA
    )
    gain = (saved + with_others * saved / sum(one.seconds for one in slow)) / device_time
    worst = max(slow, key=lambda one: one.seconds)
    return Bottleneck(
        "small_products",
        f"{sum(one.count for one in slow):,} products of about {worst.flops / worst.count / 1e3:,.0f} thousand FLOPs "
        f"took {_percent(part)} of the time, at {_percent(worst.flops / worst.seconds / peak)} of what the device "
        f"reaches{_from(worst)}",
        "Make fewer and larger ones: batch with jax.vmap, larger batches, heads or experts together",
        {"operations": [one.name for one in slow][:10], "part": part},
        gain,
    )


def _from(one: Operation) -> str:
    return f" ({one.source or one.path})" if one.source or one.path else ""


def float64(profile: Profile) -> Bottleneck | None:
    """Products in float64, which devices compute at half the rate or less."""
    wide = [one for one in profile.operations if one.dtype == "f64" and one.flops]
    part = _spent(profile, wide)
    if part < _WIDE:
        return None
    return Bottleneck(
        "float64",
        f"products in float64 took {_percent(part)} of the time{_from(wide[0])}",
        "Leave jax_enable_x64 off, or cast to float32: half the bytes, and at least twice the rate",
        {"operations": [one.name for one in wide][:10], "part": part},
        part / 2,
    )


def float32(profile: Profile) -> Bottleneck | None:
    """Products in float32 on a GPU that multiplies bfloat16 faster."""
    if profile.platform != "gpu":  # TPUs multiply float32 as bfloat16 unless asked otherwise
        return None
    wide = [one for one in profile.operations if one.dtype == "f32" and one.flops]
    part = _spent(profile, wide)
    try:
        chip = get_chip(profile.chip)
        fast = chip.peak("bfloat16")
        # JAX lets recent GPUs round to TF32 by default, at half of bfloat16's rate where the catalogue has both.
        ratio = chip.peak_flops.get("tf32", fast / 2) / fast
    except CapibaraError:
        return None
    if part < _WIDE or ratio > 0.75:
        return None
    return Bottleneck(
        "float32",
        f"products in float32 took {_percent(part)} of the time{_from(wide[0])}",
        f"Compute in bfloat16 (parameters may stay float32): the chip multiplies it {1 / ratio:.0f} times as fast",
        {"operations": [one.name for one in wide][:10], "part": part, "ratio": ratio},
        part * (1 - ratio),
    )


def communication(profile: Profile) -> Bottleneck | None:
    """Collectives beside which nothing else runs."""
    if profile.communication_seconds is None:
        return None
    part = profile.communication_seconds / profile.wall_seconds
    if part < _COMMUNICATION:
        return None
    collectives = [one for one in profile.operations if one.kind == "collective"]
    longest = max(collectives, key=lambda one: one.seconds, default=None)
    most = "" if longest is None else f", most of it in {longest.opcode}{_from(longest)}"
    return Bottleneck(
        "communication",
        f"devices exchanged data and did nothing else for {_percent(part)} of the time{most}",
        "Choose a layout that exchanges less (capibara plan), larger batches per device or gradient accumulation, and "
        "let collectives run beside products (XLA's latency-hiding scheduler)",
        {"communication_seconds": profile.communication_seconds, "longest": longest and longest.name},
        part,
    )


def callback(profile: Profile) -> Bottleneck | None:
    """Python that a compiled program calls and waits for."""
    called = [one for one in profile.operations if one.kind == "kernel" and _CALLS_PYTHON.match(one.opcode)]
    part = _spent(profile, called)
    if part < _CALLBACK:
        return None
    longest = max(called, key=lambda one: one.seconds)
    return Bottleneck(
        "callback",
        f"Python that a compiled program calls took {_percent(part)} of the time{_from(longest)}",
        "Write it in jax.numpy, or call it after the step; remove jax.debug.print from what runs often",
        {"runs": sum(one.count for one in called), "part": part},
        part,
    )


def copies(profile: Profile) -> Bottleneck | None:
    """Arrays that are only copied or transposed."""
    moved = [one for one in profile.operations if one.kind == "copy" or _only_moves(one)]
    part = _spent(profile, moved)
    if part < _COPIES:
        return None
    longest = max(moved, key=lambda one: one.seconds)
    return Bottleneck(
        "copies",
        f"copies and transpositions took {_percent(part)} of the time, most of it {longest.name}{_from(longest)}",
        "Keep arrays in the order in which products take them (contract with jnp.einsum instead of transposing), and "
        "donate what is not needed again (jax.jit(donate_argnums=…))",
        {"operations": [one.name for one in moved][:10], "part": part},
        part,
    )


def _only_moves(one: Operation) -> bool:
    return (
        not one.flops
        and one.kind == "compute"
        and one.path.rpartition("/")[2] in ("transpose", "copy", "copy_p")
    )


def _long_enough(rule: Callable[[Profile], Bottleneck | None]) -> Callable[[Profile], Bottleneck | None]:
    def checked(profile: Profile) -> Bottleneck | None:
        if not math.isfinite(profile.wall_seconds) or profile.wall_seconds < _SHORTEST:
            return None
        found = rule(profile)
        return found and replace(found, predicted_gain=min(1.0, max(0.0, found.predicted_gain)))

    return checked


RULES = tuple(
    _long_enough(rule)
    for rule in (
        recompilation,
        idle,
        dispatch,
        unfused,
        small_products,
        float64,
        float32,
        communication,
        callback,
        copies,
    )
)
