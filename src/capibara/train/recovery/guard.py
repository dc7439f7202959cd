"""Whether a step's loss and gradients are sound: finite, and no spike above the recent losses.

A spike is measured in standard deviations of the recent losses, estimated from their median and the median absolute
deviation from it, which a few earlier spikes do not move (Rousseeuw and Croux, "Alternatives to the median absolute
deviation", 1993).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from capibara.train.errors import DivergedError

__all__ = ["Guard"]

# Of normally distributed numbers, the standard deviation over the median absolute deviation.
_DEVIATIONS = 1.4826
# Losses that differ less from one another than by this part are not told apart from rounding.
_LEAST = 1e-3


class Guard:
    """Looks at the metrics of every step.

    Args:
      learning_rate: the highest, for the message.
      sigmas: see ``recovery.spike_sigmas``. window: see ``recovery.spike_window``.
    """

    def __init__(self, *, learning_rate: float, sigmas: float = 0.0, window: int = 64) -> None:
        self.learning_rate, self.sigmas = learning_rate, sigmas
        self._recent: deque[float] = deque(maxlen=window)

    def know(self, losses: Iterable[float]) -> None:
        """Take over losses of earlier steps, in their order."""
        self._recent.extend(losses)

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Look at one step's ``loss`` and ``grad_norm``.

        Raises:
          DivergedError: one is not finite, or the loss is a spike.
        """
        loss, norm = values["loss"], values.get("grad_norm", 0.0)
        if not math.isfinite(loss):
            self._diverged(step, f"the loss became {loss} at step {step}")
        if not math.isfinite(norm):
            self._diverged(step, f"the norm of the gradients became {norm} at step {step}")
        if self.sigmas and len(self._recent) == self._recent.maxlen:
            middle = statistics.median(self._recent)
            spread = statistics.median(abs(value - middle) for value in self._recent) * _DEVIATIONS
            limit = middle + self.sigmas * max(spread, _LEAST * abs(middle))
            if loss > limit:
                self._diverged(
                    step,
                    f"the loss rose to {loss:.4f} at step {step}, more than recovery.spike_sigmas={self.sigmas:g} "
                    f"standard deviations above the median {middle:.4f} of the last {len(self._recent)}",
                )
        self._recent.append(loss)

    def _diverged(self, step: int, what: str) -> None:
        raise DivergedError(
            f"{what}. Nothing of that is saved: the newest checkpoint is from before. Lower optimizer.learning_rate "
            f"(now {self.learning_rate:g}), or set optimizer.grad_clip_norm, and run again.",
            step=step,
        )
