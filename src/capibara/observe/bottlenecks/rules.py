"""The rules. Each takes a profile and gives one bottleneck or none; what it says it would save follows from figures."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

from capibara.errors import CapibaraError
from capibara.hardware import get_chip
from capibara.observe.bottlenecks.finding import Bottleneck
from capibara.observe.profile import Operation, Profile
from capibara.observe.profile.capture import GPU_EVENT_SECONDS

__all__ = ["RULES"]

# Below these parts of the time nothing is said: measurements of short regions vary by as much.
_COMPILING = 0.05
_IDLE = 0.25
# Seconds in all below which devices that wait for a small part say nothing: the system hands out memory meanwhile, or
# gives a processor to another process.
_SHORTLY = 0.01
_SMALL = 0.10
_CALLBACK = 0.05
_COPIES = 0.25
_COMMUNICATION = 0.15
_WIDE = 0.20  # of types
_UNFUSED = 0.30
_PADDED = 0.10
# A region of less is over before its figures mean anything.
_SHORTEST = 0.005
# A program that runs for less than this is as long to start as to run.
_TINY_RUN = 100e-6
# FLOPs of a product that is over before a device is busy.
_TINY_PRODUCT = 5e6
# Operations that ran less often are not worth to be put together.
_OFTEN = 20
# Of the roofline, what a product of a good size reaches.
_GOOD = 0.6
# Bytes of an operation below which its time is that of starting it; one that takes longer than this computes something.
_LITTLE_DATA = 1 << 16
_LITTLE_TIME = 10e-6
# Between two operations of one program XLA takes up to this (0.08 to 0.16 µs were measured on a CPU, recorded): it is
# not the host that lets the device wait.
_BETWEEN_OPERATIONS = 0.25e-6
# Starting a program takes at least this (50 to 100 µs were measured on a CPU, for 1 to 300 runs), whoever prepares its
# input; where it is long beside the program, `dispatch` says so.
_START = 50e-6
# The same of a GPU (15 to 20 µs were measured on an H200, for each turn of a loop of a few small operations), which
# remains where a loop in Python becomes one in a program.
_TURN_ON_GPU = 16e-6
# Beside a callback's own time: a kernel of a program that waits for the host each time is started this late.
_START_ON_GPU = 3e-6
# How XLA calls Python on CPUs and GPUs; on TPUs it exchanges arrays with the host.
_CALLS_PYTHON = re.compile(r"^xla_\w*python_(cpu|gpu)_callback$|^(send|recv)(-done)?$")
# What XLA calls a kernel of this one operation; of the path it has that of the operand.
_MOVES = re.compile(r"^wrapped_(transpose|copy)\b")
_PRIMITIVE = re.compile(r"^jit_(?!_lambda$)_?[a-z][a-z_0-9]*$")


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _spent(profile: Profile, operations: Iterable[Operation]) -> float:
    """Their part of the time, on one device; of operations that run beside one another, a share of that time."""
    seconds = _alone(profile) * sum(one.seconds for one in operations)
    return min(1.0, seconds / profile.at_once / profile.wall_seconds)


def _alone(profile: Profile) -> float:
    """The time in which devices were at work, as a part of the operations' times: 1 if none ran beside another."""
    every = sum(one.seconds for one in profile.operations)
    return min(1.0, (profile.busy_seconds or 0.0) * profile.at_once / every) if every else 1.0


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
    if profile.within_seconds is not None:
        between = profile.within_seconds / profile.wall_seconds
    else:
        between = profile.events / profile.devices * _BETWEEN_OPERATIONS / profile.wall_seconds
    return max(0.0, (profile.idle_share or 0.0) - _compiling(profile) - between)


def _runs(profile: Profile) -> int:
    return sum(one.runs for one in profile.programs)


def _starts_tiny(profile: Profile) -> bool:
    """Whether the devices wait between many short programs."""
    runs = _runs(profile)
    return runs >= 50 * profile.devices and (profile.busy_seconds or 0.0) * profile.at_once / runs < _TINY_RUN


def idle(profile: Profile) -> Bottleneck | None:
    """Devices that wait for the host: for input, for Python."""
    part = _idle(profile) - _runs(profile) / profile.devices * _START / profile.wall_seconds
    if profile.platform == "gpu":
        # Recording kernels is the host's work, too, and long beside that of starting them.
        part -= profile.perturbation or 0.0
    if part < _IDLE or not profile.events or _starts_tiny(profile):
        return None
    if part < 2 * _IDLE and part * profile.wall_seconds < _SHORTLY:
        return None
    # Where operations are programs of their own, the time between them is part of what `unfused` says; and where large
    # arrays are copied, their memory is handed out and taken back meanwhile.
    if unfused(profile) is not None or _copied(profile)[1] > part:
        return None
    return Bottleneck(
        "idle",
        f"devices were idle for {_percent(part)} of the time: the host did not give them work",
        "Prepare batches in another thread or process while a step runs (capibara.data, grain), read results one step "
        "later, and keep NumPy, files and printing out of the loop",
        {
            "idle_share": profile.idle_share,
            "runs": _runs(profile),
            # What is saved where the host works as long as the devices do, and not less.
            "beside_the_devices": min(part, (profile.busy_seconds or 0.0) / profile.wall_seconds),
        },
        part,
    )


def _primitives(profile: Profile) -> list[str]:
    """Names of programs that are one operation each, as JAX makes them of code that is not jitted."""
    many: Counter[str] = Counter(one.program for one in profile.operations if one.count)
    alike: Counter[str] = Counter(one.name for one in profile.programs)
    return [
        one.name
        for one in profile.programs
        if many[one.name] <= 2 * alike[one.name] and _PRIMITIVE.match(one.name) and one.runs >= 3
    ]


def dispatch(profile: Profile) -> Bottleneck | None:
    """Many programs that are as long to start as to run."""
    part = _idle(profile)
    if part < _IDLE or not _starts_tiny(profile):
        return _kernels_one_by_one(profile)
    runs = _runs(profile)
    names = [one.name for one in sorted(profile.programs, key=lambda one: -one.runs)[:5]]
    left = 0.0
    if profile.platform == "gpu":
        # It becomes a loop in a program, of which each turn runs each of these.
        turns = runs / profile.devices / len({one.name for one in profile.programs})
        left = _TURN_ON_GPU * turns / profile.wall_seconds
    return Bottleneck(
        "dispatch",
        f"{runs:,} programs of {1e6 * (profile.busy_seconds or 0) * profile.at_once / runs:.0f} µs each were started; "
        f"devices were idle for {_percent(part)} of the time between them",
        "Put the loop or the whole step under jax.jit, with jax.lax.scan for many short steps: "
        + ", ".join(names),
        {"runs": runs, "idle_share": profile.idle_share, "programs": names},
        part - min(left, part / 2),
    )


def _kernels_one_by_one(profile: Profile) -> Bottleneck | None:
    """Operations of one program, on a GPU, that are as long to start as to run."""
    recorded = GPU_EVENT_SECONDS * profile.events / profile.devices
    part = ((profile.within_seconds or 0.0) - recorded) / profile.wall_seconds
    # Of these the remedy is another.
    if part < _IDLE or _callbacks(profile) or small_products(profile) is not None:
        return None
    longest = max(profile.programs, key=lambda one: one.seconds, default=None)
    each = 1e6 * (profile.busy_seconds or 0.0) * profile.at_once / max(1, profile.events)
    return Bottleneck(
        "dispatch",
        f"{profile.events:,} kernels of {each:.0f} µs each were started one by one; devices were idle for "
        f"{_percent(part)} of the time between those of one program",
        "Give each operation more work (larger batches, several sequences or heads at once), or let jax.lax.scan and "
        "fori_loop unroll a few turns (unroll=8): XLA starts what lies between two loops as one CUDA graph",
        {"kernels": profile.events, "part": part, "programs": [longest.name] if longest else []},
        part / 2,
    )


def unfused(profile: Profile) -> Bottleneck | None:
    """Large arrays that go to memory and back for every operation, because each is a program of its own."""
    if _starts_tiny(profile) and _idle(profile) >= _IDLE:
        return None  # `dispatch` has the same remedy, and the time is that of starting them
    names = _primitives(profile)
    alone = [
        one for one in profile.operations if one.program in names and not one.flops and one.kind == "compute"
    ]
    runs = sum(one.count for one in alone)
    part = _spent(profile, alone)
    if len(names) < 3 or part < _UNFUSED or not runs or sum(one.bytes for one in alone) / runs < _LITTLE_DATA:
        return None
    # In one program the chain reads and writes once, is started once, and what lies between needs no memory. A
    # reduction has to end before what takes its result begins: the array is read once more for each.
    chain = len({one.program for one in alone})
    per_call = sum(one.bytes / one.count for one in alone)
    array = max(one.bytes / one.count for one in alone) / 2
    reductions = sum("reduce" in one.path.rpartition("/")[2] for one in alone)
    if profile.platform == "gpu":
        # Memory sets the time of all of them there; one operation may run several times in a turn.
        large = [one for one in alone if one.bytes / one.count >= _LITTLE_DATA]
        turns = min((one.count for one in large), default=runs)
        left = min(1.0, (2 + reductions) * array / (sum(one.bytes for one in alone) / turns))
    else:
        left = min(1.0, max(1 / chain, (2 + reductions) * array / per_call))
    gain = (part + _idle(profile)) * (1 - left)
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
    groups: dict[tuple[str, int], list[Operation]] = {}
    for one in profile.operations:
        if (
            one.products >= _OFTEN * profile.devices
            and one.flops / one.products <= _TINY_PRODUCT
            and one.flops  # known
        ):
            groups.setdefault((one.program, one.count), []).append(one)
    slow: list[Operation] = []
    saved = beside = 0.0
    waiting = {(one.program, one.count) for one in _callbacks(profile)}
    runs: Counter[str] = Counter()
    for one in profile.programs:
        runs[one.name] += one.runs
    for (program, count), products in groups.items():
        if (program, count) in waiting:
            continue  # it is Python that they wait for
        # What runs once for each product and moves little (a loop's counter, slices, copies) runs less often with them.
        # Outside of loops it may be other work of the program.
        alike = products
        if count > runs[program]:
            alike = [one for one in profile.operations if (one.program, one.count) == (program, count)]
        kinds = ("compute", "copy", "kernel") if profile.platform == "gpu" else ("compute", "copy")
        others = sum(
            one.seconds
            for one in alike
            if not one.flops
            and one.kind in kinds
            and one.bytes / count < _LITTLE_DATA
            and one.seconds / count < _LITTLE_TIME
        )
        # As one product they would read once what they now read each time, and have a good product's rate.
        good = sum(max(one.flops / peak, (one.bytes - one.reread) / bandwidth) for one in products) / _GOOD
        spent = sum(one.seconds for one in products) + others
        # On a GPU the time until the next operation begins is part of what each costs.
        started = sum(one.count for one in alike)
        spent += (profile.within_seconds or 0.0) * profile.devices * started / max(1, profile.events)
        if spent > 3 * good:
            slow += products
            saved += spent - good
            beside += others
    device_time = profile.devices * profile.wall_seconds
    saved *= _alone(profile)
    part = _spent(profile, slow)
    if saved / device_time < _SMALL:
        return None
    worst = max(slow, key=lambda one: one.seconds)
    many, size = sum(one.products for one in slow), worst.flops / worst.products / 1e3
    return Bottleneck(
        "small_products",
        f"{many:,} products of about {size:,.0f} thousand FLOPs "
        f"took {_percent(part)} of the time, at {_percent(worst.flops / worst.seconds / peak)} of what the device "
        f"reaches{_from(worst)}",
        "Make fewer and larger ones: batch with jax.vmap, larger batches, heads or experts together",
        {
            "operations": [one.name for one in slow][:10],
            "part": part,
            # Of what runs once for each, such as a loop's counter and slices.
            "beside": beside * _alone(profile) / device_time,
        },
        saved / device_time,
    )


def padded(profile: Profile) -> Bottleneck | None:
    """Matrix products with sides that fill a TPU's tiles badly."""
    if profile.platform != "tpu":  # the others' units are small beside their products
        return None
    products = [one for one in profile.operations if one.flops and one.tiled_flops > one.flops]
    bandwidth = profile.peak_bandwidth or math.inf

    def lost(one: Operation) -> float:
        # Where memory sets the time, padding costs none of it.
        return max(
            0.0, min(one.seconds * (1 - one.flops / one.tiled_flops), one.seconds - one.bytes / bandwidth)
        )

    gain = sum(map(lost, products)) / profile.devices / profile.wall_seconds
    if gain < _PADDED:
        return None
    worst = max(products, key=lost)
    return Bottleneck(
        "padded",
        f"{_percent(gain)} of the time went into padding of matrices: {worst.name} has work for "
        f"{_percent(worst.flops / worst.tiled_flops)} of the tiles that it takes{_from(worst)}",
        "Choose sides that are multiples of 128 (widths, heads × head size, vocabulary, experts' capacity) and batches "
        "that are multiples of 8",
        {"operations": [one.name for one in products][:10], "part": _spent(profile, products)},
        gain,
    )


def _from(one: Operation) -> str:
    return f" ({one.source or one.path})" if one.source or one.path else ""


def float64(profile: Profile) -> Bottleneck | None:
    """Work in float64, at half the rate or less, on arrays of twice the bytes."""
    wide = [one for one in profile.operations if one.dtype == "f64" and (one.flops or one.kind != "kernel")]
    part = _spent(profile, wide)
    if part < _WIDE:
        return None
    products = [one for one in wide if one.flops]
    longest = max(products or wide, key=lambda one: one.seconds)
    return Bottleneck(
        "float64",
        f"{'products and other ' if products else ''}operations in float64 took {_percent(part)} of the time"
        f"{_from(longest)}",
        "Leave jax_enable_x64 off, or cast to float32: half the bytes, and at least twice the rate",
        {"operations": [one.name for one in wide][:10], "part": part},
        part / 2 + _spent(profile, products) * (0.5 - _rate_of_float64(profile)),
    )


def _rate_of_float64(profile: Profile) -> float:
    """Of products, beside float32 as JAX multiplies it; at most a half."""
    try:
        peaks = get_chip(profile.chip).peak_flops
        return min(0.5, peaks["float64"] / peaks.get("tf32", peaks["float32"]))
    except (CapibaraError, KeyError):
        return 0.5


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
    called = _callbacks(profile)
    part = _spent(profile, called)
    if called and profile.within_seconds is not None:
        # A GPU does nothing meanwhile: what it has of the call is a copy of the arguments.
        waiting = profile.within_seconds - profile.events / profile.devices * _START_ON_GPU
        part = min(1.0, part + max(0.0, waiting) / profile.wall_seconds)
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


def _callbacks(profile: Profile) -> list[Operation]:
    return [one for one in profile.operations if one.kind == "kernel" and _CALLS_PYTHON.match(one.opcode)]


def copies(profile: Profile) -> Bottleneck | None:
    """Arrays that are only copied or transposed."""
    moved, part = _copied(profile)
    if part < _COPIES:
        return None
    longest = max(moved, key=lambda one: one.seconds)
    return Bottleneck(
        "copies",
        f"copies and transpositions took {_percent(part)} of the time, most of it {longest.name}{_from(longest)}",
        "Keep arrays in the order in which products take them (contract with jnp.einsum instead of transposing), and "
        "donate what is not needed again (jax.jit(donate_argnums=…))",
        {"operations": [one.name for one in moved][:10], "part": part},
        part + (_idle(profile) if part > _idle(profile) and profile.platform != "gpu" else 0.0),
    )


def _copied(profile: Profile) -> tuple[list[Operation], float]:
    """Operations that only move arrays, and their part of the time.

    Copies that XLA puts into a program of other work (for a loop's carry, or a layout that a product takes) are left
    out: nobody can take them out. Programs that mostly copy hold what need not be.
    """
    every: defaultdict[str, float] = defaultdict(float)
    copied: defaultdict[str, float] = defaultdict(float)
    for one in profile.operations:
        every[one.program] += one.seconds
        copied[one.program] += one.seconds if one.kind == "copy" or _only_moves(one) else 0.0
    moved = [
        one
        for one in profile.operations
        if _only_moves(one) or (one.kind == "copy" and 2 * copied[one.program] >= every[one.program])
    ]
    part = _spent(profile, moved)
    if profile.platform == "gpu":  # beside other work a copy costs nothing
        beside = sum(one.seconds for one in profile.operations) / profile.devices - (
            profile.busy_seconds or 0.0
        )
        part = max(0.0, part - max(0.0, beside) / profile.wall_seconds)
    return moved, part


def _only_moves(one: Operation) -> bool:
    return (
        not one.flops
        and one.kind == "compute"
        and (one.path.rpartition("/")[2] in ("transpose", "copy", "copy_p") or bool(_MOVES.match(one.name)))
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
        padded,
        float64,
        float32,
        communication,
        callback,
        copies,
    )
)
