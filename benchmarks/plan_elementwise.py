"""The compiler's cycles for element-wise work, which predicted times consist of, against a closed form.

Sixteen programs, each one layer's element-wise work at the sizes of a 7-billion-parameter model: norms, SwiGLU, RoPE,
softmax, residuals, AdamW, transposes, casts, reductions, a loop over stacked layers. Three figures of each, on four
chips:

* the closed form: the bytes of its arguments and results, read and written once, at the chip's memory bandwidth. It
  comes from shapes alone; no step can be faster.
* the compiler's cycles at the chip's clock, as they stand in its program's text, summed here without the planner's
  reader (a loop's body times its turns).
* the planner's prediction (``StepTime.memory``), which has to be that sum, and the bytes that its reader counts.

``tests/plan/elementwise.json`` holds what the compiler said. By itself this compares the recorded figures;
``--record`` compiles them anew (no TPU is needed; a minute or two a chip). Run in the repository's
root.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.files import replace_file
from capibara.plan import parse_slice

__all__ = [
    "CHIPS",
    "PROGRAMS",
    "RECORD",
    "Elementwise",
    "compare",
    "count_cycles",
    "least_bytes",
    "measure",
    "run",
    "summary",
]

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "plan" / "elementwise.json"
CHIPS = ("v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1")
TOKENS, WIDTH, HIDDEN, HEADS, HEAD, WORDS, LAYERS = 16384, 4096, 14336, 32, 128, 32768, 8
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_SIZES = {"bfloat16": 2, "float32": 4, "int32": 4}


@dataclass(frozen=True)
class Elementwise:
    """One program.

    Attributes:
      function: of its arguments.
      arguments: shapes and dtypes. results: those of what it returns.
      turns: of the loop in it.
    """

    function: Callable[..., Any]
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    results: tuple[tuple[tuple[int, ...], str], ...]
    turns: int = 1


def _rms(x: Any, scale: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    wide = x.astype("float32")
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def _layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    wide = x.astype("float32")
    middle = wide - jnp.mean(wide, -1, keepdims=True)
    return (middle * lax.rsqrt(jnp.mean(middle * middle, -1, keepdims=True) + 1e-5) * scale + bias).astype(
        x.dtype
    )


def _gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """The derivatives by all arguments but the last, which is that of the result."""

    def backward(*arguments: Any) -> Any:
        import jax

        return jax.vjp(function, *arguments[:-1])[1](arguments[-1])

    return backward


def _swiglu(gate: Any, up: Any) -> Any:
    import jax

    return jax.nn.silu(gate) * up


def _gelu(x: Any) -> Any:
    import jax

    return jax.nn.gelu(x)


def _rope(x: Any, cosine: Any, sine: Any) -> Any:
    import jax.numpy as jnp

    left, right = jnp.split(x.astype("float32"), 2, -1)
    c, s = cosine[:, None, :], sine[:, None, :]
    return jnp.concatenate([left * c - right * s, right * c + left * s], -1).astype(x.dtype)


def _softmax(scores: Any) -> Any:
    import jax

    return jax.nn.softmax(scores, -1).astype("bfloat16")


def _residual(x: Any, y: Any) -> Any:
    return x + y


def _adamw(weight: Any, gradient: Any, first: Any, second: Any) -> Any:
    import jax.numpy as jnp

    first = 0.9 * first + 0.1 * gradient
    second = 0.95 * second + 0.05 * gradient * gradient
    change = first / (jnp.sqrt(second) + 1e-8) + 0.1 * weight
    return weight - 3e-4 * change, first, second


def _transpose(x: Any) -> Any:
    return x.T


def _cast(x: Any) -> Any:
    return x.astype("bfloat16")


def _square_sum(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.sum(x * x)


def _column_sum(x: Any) -> Any:
    import jax.numpy as jnp

    return jnp.sum(x.astype("float32"), 0)


def _logsumexp(logits: Any) -> Any:
    import jax

    return jax.nn.logsumexp(logits.astype("float32"), -1)


def _layers(x: Any, scales: Any, more: Any) -> Any:
    from jax import lax

    return lax.scan(lambda h, layer: (h * layer[0] + layer[1], None), x, (scales, more))[0]


_STREAM, _INNER = ((TOKENS, WIDTH), "bfloat16"), ((TOKENS, HIDDEN), "bfloat16")
_SCALE, _MATRIX = ((WIDTH,), "float32"), ((WIDTH, HIDDEN), "float32")
_QUERIES, _ANGLES = ((TOKENS, HEADS, HEAD), "bfloat16"), ((TOKENS, HEAD // 2), "float32")
_SCORES = (HEADS, 2048, 2048)

PROGRAMS: Mapping[str, Elementwise] = {
    "residual": Elementwise(_residual, (_STREAM, _STREAM), (_STREAM,)),
    "RMSNorm": Elementwise(_rms, (_STREAM, _SCALE), (_STREAM,)),
    "RMSNorm, backward": Elementwise(_gradient(_rms), (_STREAM, _SCALE, _STREAM), (_STREAM, _SCALE)),
    "LayerNorm": Elementwise(_layer_norm, (_STREAM, _SCALE, _SCALE), (_STREAM,)),
    "SwiGLU": Elementwise(_swiglu, (_INNER, _INNER), (_INNER,)),
    "SwiGLU, backward": Elementwise(_gradient(_swiglu), (_INNER, _INNER, _INNER), (_INNER, _INNER)),
    "GELU": Elementwise(_gelu, (_INNER,), (_INNER,)),
    "RoPE": Elementwise(_rope, (_QUERIES, _ANGLES, _ANGLES), (_QUERIES,)),
    "softmax": Elementwise(_softmax, ((_SCORES, "float32"),), ((_SCORES, "bfloat16"),)),
    "AdamW": Elementwise(_adamw, (_MATRIX,) * 4, (_MATRIX,) * 3),
    "transpose": Elementwise(_transpose, (_INNER,), (((HIDDEN, TOKENS), "bfloat16"),)),
    "cast": Elementwise(_cast, (_MATRIX,), (((WIDTH, HIDDEN), "bfloat16"),)),
    "sum of squares": Elementwise(_square_sum, (_MATRIX,), (((), "float32"),)),
    "sum over rows": Elementwise(_column_sum, (_INNER,), (((HIDDEN,), "float32"),)),
    "logsumexp": Elementwise(
        _logsumexp, (((TOKENS // 2, WORDS), "bfloat16"),), (((TOKENS // 2,), "float32"),)
    ),
    "loop over layers": Elementwise(
        _layers,
        (_STREAM, ((LAYERS, WIDTH), "bfloat16"), ((LAYERS, TOKENS, WIDTH), "bfloat16")),
        # The residual stream is read and written in every turn.
        (_STREAM,) * (2 * LAYERS - 1),
        turns=LAYERS,
    ),
}


def least_bytes(program: Elementwise) -> int:
    """Bytes of the arguments and results, each once."""
    arrays = (*program.arguments, *program.results)
    return sum(math.prod(shape) * _SIZES[dtype] for shape, dtype in arrays)


def measure(chip: str, names: Sequence[str] = tuple(PROGRAMS)) -> list[dict[str, Any]]:
    """Compile programs for a chip in a process of their own; the compiler's cycles, and what the planner reads.

    Returns:
      ``{"name", "chip", "cycles", "hbm_bytes", "seconds"}`` each: the sum of the text's cycles with turns; bytes by the
      planner's reader; its predicted time.

    Raises:
      CompilerMissingError: the TPU compiler is not installed. subprocess.CalledProcessError: it refuses one.
    """
    from capibara.plan.compiler import find_compiler

    told = [sys.executable, "-m", "benchmarks.plan_elementwise", "--chip", chip, *names]
    environment = find_compiler().environment()
    paths = [str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run(told, env=environment, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=1800)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b'{"name"')]


def _compile(chip: str, names: Sequence[str]) -> None:
    """Compile here, and print a line a program."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from capibara.plan.compiler.devices import describe_mesh
    from capibara.plan.program import read_program
    from capibara.plan.time import predict_step

    target, axes = parse_slice(chip), (("data", 1),)
    mesh, places = describe_mesh(target, axes)
    here = NamedSharding(mesh, PartitionSpec())
    for name in names:
        program = PROGRAMS[name]
        arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in program.arguments]
        text = jax.jit(program.function).lower(*arrays).compile().as_text()
        assert text is not None
        facts = read_program(text)
        time = predict_step(facts, target, axes, places=places)
        row = {"name": name, "chip": chip, "cycles": count_cycles(text, program.turns)}
        print(json.dumps({**row, "hbm_bytes": facts.hbm_bytes, "seconds": time.seconds}), flush=True)


def count_cycles(text: str, turns: int) -> int:
    """All estimates in a program's text; those in a loop's body as often as it turns."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    total = 0
    for part in re.split(r"\n(?=%|ENTRY )", text):
        head = part.removeprefix("ENTRY").strip().lstrip("%").split(" ", 1)[0]
        cycles = sum(map(int, _CYCLES.findall(part)))
        if part.startswith("ENTRY"):
            total += cycles
        elif head in bodies:
            total += turns * cycles
    return total


def compare() -> list[dict[str, Any]]:
    """A row a program and chip: the compiler's cycles over the closed form."""
    rows = []
    for row in json.loads(RECORD.read_bytes())["programs"]:
        target = parse_slice(row["chip"])
        bandwidth = target.chip.hbm_bandwidth
        assert bandwidth is not None
        least = least_bytes(PROGRAMS[row["name"]])
        seconds = row["cycles"] / target.clock_hz
        rows.append(
            {
                "what": row["name"],
                "shape": row["chip"],
                "peer": "bytes at the memory bandwidth",
                "ratio": seconds / (least / bandwidth),
                "read": row["hbm_bytes"] / least,
                "predicted": row["seconds"] / seconds,
            }
        )
    return rows


def run() -> list[dict[str, Any]]:
    """Rows whose ratio is the time of the compiler's cycles over that of the closed form."""
    return compare()


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a chip."""
    lines = []
    for chip in dict.fromkeys(row["shape"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["shape"] == chip]
        lines.append(
            f"{chip}: {len(ratios)} programs, cycles over closed form {min(ratios):.2f} to {max(ratios):.2f}, "
            f"median {statistics.median(ratios):.2f}"
        )
    return "\n".join(lines)


def record() -> None:
    """Compile all programs, and write the file, chip by chip."""
    from capibara.plan.compiler import find_compiler

    versions = {"jax": importlib.metadata.version("jax"), "libtpu": find_compiler().version}
    rows: list[dict[str, Any]] = []
    for chip in CHIPS:
        rows += measure(chip)
        lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
        replace_file(RECORD, f'{{\n "versions": {json.dumps(versions)},\n "programs": [\n{lines}\n ]\n}}\n')


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="compile all programs and write the file")
    parser.add_argument("--chip", help="compile in this process for a chip, and print what is recorded")
    parser.add_argument("names", nargs="*", help="programs, with --chip; all if left out")
    options = parser.parse_args(arguments)
    if options.chip:
        _compile(options.chip, options.names or tuple(PROGRAMS))
        return 0
    if options.record:
        record()
    rows = compare()
    for row in rows:
        print(
            f"{row['what']:20s} {row['shape']:10s} cycles/closed form {row['ratio']:6.2f}  bytes read by the planner "
            f"{row['read']:6.2f}  prediction/cycles {row['predicted']:6.3f}"
        )
    print(summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
