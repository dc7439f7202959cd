"""The result of a run, for people and for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["TrainReport"]


@dataclass(frozen=True)
class TrainReport:
    """The result of a run.

    Attributes:
      reason: "finished" (all steps), "time" (``train.max_seconds``), "interrupted" (a signal) or "already
      trained".
      step: optimizer steps taken in the whole run.
      start_step: steps that were already taken when this process began.
      loss: training loss of the last step in nats per token, None if no step was run.
      validation_bits_per_byte: on the held-out text at the end; None if not measured.
      tokens_per_second: mean over the steps of this process, since its last move or rollback, without compilation,
        validation and checkpoints.
      utilisation: that rate times the model's FLOP per token, over ``matmul_flops``.
      matmul_flops: FLOP/s of a matrix multiply, measured at the start.
      seconds: training time of the whole run; compile_seconds: what this process compiled before.
      num_params: parameters of the model; devices: number of devices used.
      unit: what the loss is of: "byte" or "token", or "pair" of answers.
    """

    reason: str
    directory: str
    step: int
    start_step: int
    loss: float | None
    validation_bits_per_byte: float | None
    tokens_per_second: float | None
    utilisation: float | None
    matmul_flops: float | None
    seconds: float
    compile_seconds: float
    num_params: int
    devices: int
    signal: int | None = None
    unit: str = "byte"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        words = {"time": "reached train.max_seconds", "already trained": "already trained"}
        reason = words.get(self.reason, self.reason)
        lines = [f"{reason}: {self.step:,} steps in {self.seconds:,.1f} s of training"]
        if self.loss is not None:
            lines.append(f"training loss      {self.loss:.4f} nats per {self.unit} (last step)")
        if self.validation_bits_per_byte is not None:
            lines.append(f"validation         {self.validation_bits_per_byte:.4f} bits per byte")
        if self.tokens_per_second is not None:
            where = f"{self.devices} device{'' if self.devices == 1 else 's'}"
            lines.append(f"speed              {self.tokens_per_second:,.0f} tokens/s on {where}")
        if self.utilisation is not None and self.matmul_flops is not None:
            rate = f"{self.matmul_flops / 1e9:,.0f} GFLOP/s"
            lines.append(f"utilisation        {self.utilisation:.1%} of a matrix multiply's {rate}")
        lines.append(f"written to         {self.directory} (checkpoints, metrics.jsonl, loss.png)")
        return "\n".join(lines)
