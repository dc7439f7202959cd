"""Dtypes of parameters, arithmetic and sums."""

from __future__ import annotations

from dataclasses import dataclass

from capibara.compose.errors import CompileError
from capibara.errors import did_you_mean

__all__ = ["FLOAT_DTYPES", "Precision"]

FLOAT_DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Precision:
    """The precision policy of a compiled model.

    Args:
        param: dtype in which parameters are stored and updated.
        compute: dtype of activations and of the operands of matrix products.
        accumulate: dtype in which products are summed, and in which normalisation and softmax are computed.
        exchange: which of these dtypes the devices' parts of the gradient of a linear layer's weight have while a mesh
            sums them: ``"accumulate"``, or ``"compute"``, which halves what is exchanged where that has 16 bits. Each
            part is rounded to it before the sum rather than the sum after it. So is the gradient of what such layers
            read, where a mesh divides their outputs. Other parameters, such as embeddings, norms and experts, are not
            concerned.
    """

    param: str = "float32"
    compute: str = "float32"
    accumulate: str = "float32"
    exchange: str = "accumulate"

    def __post_init__(self) -> None:
        for key in ("param", "compute", "accumulate"):
            value = getattr(self, key)
            if value not in FLOAT_DTYPES:
                raise CompileError(
                    f"{key}={value!r} is not a floating dtype: choose one of {', '.join(FLOAT_DTYPES)}."
                    f"{did_you_mean(str(value), FLOAT_DTYPES)}"
                )
        width = FLOAT_DTYPES.index
        if width(self.accumulate) < max(
            width(self.compute), 2 if self.compute in ("bfloat16", "float16") else 0
        ):
            raise CompileError(
                f"accumulate={self.accumulate!r} is narrower than compute={self.compute!r} allows: use 'float32' "
                "or 'float64'"
            )
        if self.exchange not in ("accumulate", "compute"):
            raise CompileError(
                f"exchange={self.exchange!r} is not one of 'accumulate' and 'compute'."
                f"{did_you_mean(str(self.exchange), ('accumulate', 'compute'))}"
            )
