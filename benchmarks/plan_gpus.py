"""Step times that the planner predicts on hosts of GPUs, against those that others published for the same models.

The runs are PyTorch's (FSDP); ``_gpus/decoder.py`` has the same products in plain JAX, compiled for the GPUs by XLA
without one (half a minute of one core each the first time, kept in the user's cache). Nothing is fitted. Attention's
kernel is not in the program: its time is added, at the 329 TFLOP/s that FlashAttention 2 reaches on an H200
(Azure/AI-benchmarking-guide, ``ND_H200_v5_results.md``), with half of the scores, as the mask leaves them, and two
and a half times the forward pass backward.

``ratio`` is predicted over published step time: 1 is right. Run in the repository's root.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LONG = "8 compilations of half a minute each, unless cached"

__all__ = ["ROWS", "PublishedRun", "attention_seconds", "run"]

_FLASH = 329e12


@dataclass(frozen=True)
class PublishedRun:
    """A run of somebody else's.

    Attributes:
      name: the model and its length.
      target: the GPUs.
      tokens_per_second: published, of all GPUs.
      step: arguments of :func:`benchmarks._gpus.decoder.lower_step`.
      source: where it was published.
    """

    name: str
    target: str
    tokens_per_second: float
    step: dict[str, Any]
    source: str

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.step["rows"] * self.step["length"] / self.tokens_per_second


_MPT = "mosaicml/llm-foundry, scripts/train/benchmarking/README.md at 061f2c7ce64e, H100 80GB BF16"
_KEMPNER = "KempnerInstitute/KempnerForge, benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md at 9f3f03a07066"


def _mpt(
    name: str, width: int, layers: int, length: int, rows: int, micro: int, again: bool, rate: int
) -> PublishedRun:
    heads = width // 128
    step: dict[str, Any] = {
        "width": width,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads,
        "inner": 4 * width,
        "gated": False,
        "tied": True,
    }
    step |= {
        "vocab": 50368,
        "length": length,
        "rows": rows,
        "microbatches": micro,
        "recompute": again,
        "stored": "float32",
    }
    return PublishedRun(f"MPT {name}, {length}", "h100:8", rate, step, _MPT)


def _llama(gpus: int, micro: int, rate: int) -> PublishedRun:
    # Its 80.7 GB on one GPU have no room for a copy of parameters and moments in float32.
    step: dict[str, Any] = {
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "inner": 14336,
        "gated": True,
        "tied": False,
    }
    step |= {
        "vocab": 128256,
        "length": 4096,
        "rows": 8 * gpus,
        "microbatches": micro,
        "recompute": True,
        "stored": "bfloat16",
    }
    step["stored"] = "bfloat16"
    return PublishedRun("Llama 3 8B, 4096", f"h200:{gpus}", rate, step, _KEMPNER)


ROWS = (
    _mpt("1B", 2048, 24, 2048, 112, 1, False, 363645),
    _mpt("1B", 2048, 24, 8192, 96, 4, False, 233256),
    _mpt("7B", 4096, 32, 2048, 48, 1, False, 85144),
    _mpt("7B", 4096, 32, 4096, 256, 2, True, 68893),
    _mpt("13B", 5120, 40, 2048, 16, 1, False, 38336),
    _llama(1, 4, 10471),
    _llama(2, 4, 18728),
    _llama(4, 2, 38983),
)


def attention_seconds(step: dict[str, Any], gpus: int) -> float:
    """Of attention's kernels in a step on one GPU."""
    forward = 2 * step["layers"] * step["rows"] / gpus * step["length"] ** 2 * step["width"]
    return forward * (3.5 + step["recompute"]) / _FLASH


def run() -> list[dict[str, Any]]:
    """Compile and time every row."""
    from capibara.plan import parse_target
    from capibara.plan.compiler import Job, compile_program
    from capibara.plan.program import read_program
    from capibara.plan.time import predict_step

    # The processes that compile import the decoder from here.
    here = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    rows = []
    for row in ROWS:
        target = parse_target(row.target)
        mesh = (("data", target.num_devices),)
        job = Job(
            builder="benchmarks._gpus.decoder:lower_step",
            params=row.step,
            slice=target,
            mesh=mesh,
            compiler_options=dict(target.flag_choices(mesh)[0]),
        )
        program = compile_program(job)
        if program.memory is None:
            raise RuntimeError(f"{row.name} did not compile: {program.message}")
        time = predict_step(read_program(program.text), target, mesh)
        added = attention_seconds(row.step, target.num_devices)
        seconds = time.seconds + added
        print(f"{row.name} on {row.target}: {seconds:.3f} s, published {row.seconds:.3f}", file=sys.stderr)
        rows.append(
            {
                "what": f"{row.name}, on {row.target}: seconds of a step",
                "peer": row.source,
                "ratio": seconds / row.seconds,
                "predicted_seconds": seconds,
                "published_seconds": row.seconds,
                "low_seconds": time.low + added,
                "high_seconds": time.high + added,
                "attention_seconds": added,
                "gib": program.memory.total / 2**30,
            }
        )
    return rows


if __name__ == "__main__":
    for each in run():
        print(each)
