"""How a compressed model runs: which weights stay quantized, which are decoded, and the memory they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from capibara.compress.errors import CompressError

__all__ = ["Running", "check_decode", "refuse"]


@dataclass(frozen=True)
class Running:
    """The memory of a compressed model.

    Attributes:
      quantized: names of weights that are multiplied in their stored form.
      decoded: names of the others, and the reasons.
      on_the_way: quantized weights that a traced program decodes while it runs, and for which operation; known once
        the model has run.
      nbytes: of codes and decoded values in memory.
      archive_bytes: of the file.
    """

    quantized: tuple[str, ...]
    decoded: Mapping[str, str]
    on_the_way: Mapping[str, str]
    nbytes: int
    archive_bytes: int

    def __str__(self) -> str:
        lines = [
            f"{self.nbytes:,} bytes in memory, {self.archive_bytes:,} in the file; "
            f"{len(self.quantized)} quantized weights, {len(self.decoded)} decoded"
        ]
        for name in self.quantized:
            wanted = self.on_the_way.get(name)
            lines.append(
                f"  {name}: quantized" + (f", decoded while it runs, for {wanted}" if wanted else "")
            )
        lines += [f"  {name}: decoded: {why}" for name, why in self.decoded.items()]
        return "\n".join(lines)


def check_decode(decode: object) -> None:
    """``True``, ``False`` or ``"auto"``.

    Raises:
      CompressError: anything else.
    """
    if decode is not True and decode is not False and decode != "auto":
        raise CompressError(f"decode: got {decode!r}, expected True, False or 'auto'")


def refuse(path: object, why: Mapping[str, str]) -> None:
    """Raise the error that no weight can run quantized.

    Raises:
      CompressError: always.
    """
    first = next(iter(why.items()), ("", "no tensor"))
    raise CompressError(
        f"decode: got False, but no weight of {path} can run quantized: {first[0]} is {first[1]}, and "
        f"{max(len(why) - 1, 0)} others. Remedy: strategy='int8' (or 'int4', 'nf4') when it is compressed, or "
        "decode='auto'."
    )
