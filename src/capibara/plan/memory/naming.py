"""Name the sources of buffers that no operation of the model created.

The compiler creates its own arrays: the stack of a loop's gradients, copies of parameters in the compute dtype before
the loop, values of every repetition saved for the backward pass. They are identified by their shapes, which match
those of their sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["named"]


def named(buffers: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The buffers, with a ``place`` for temporaries that have the shape of a parameter or are a loop's stacks."""
    listed = [dict(each) for each in buffers]
    owners: dict[str, tuple[str, str]] = {}
    for each in listed:
        dtype, dimensions = _parts(each["shape"])
        if each["kind"] == "parameters" and dimensions and each.get("place"):
            owners.setdefault(_sorted(dimensions), (dtype, each["place"]))
    for each in listed:
        if each["kind"] != "temporary":
            continue
        dtype, dimensions = _parts(each["shape"])
        owner = owners.get(_sorted(dimensions))
        if re.search(r"jvp\(\)/while$", each["op_name"]) and "transpose" not in each["op_name"]:
            each["place"] = ", ".join(filter(None, (each.get("place"), "kept for the backward pass")))
        elif each.get("place"):
            continue
        elif owner is not None and not each["op_name"]:
            what = "a gradient, or a copy," if dtype == owner[0] else f"a copy in {_long(dtype)}"
            each["place"] = f"{what} of the shape of {owner[1]}"
    return tuple(listed)


def _parts(shape: str) -> tuple[str, str]:
    match = re.fullmatch(r"([a-z]+\d*)\[([\d,]*)\]", shape)
    return (match[1], match[2]) if match else ("", "")


def _sorted(dimensions: str) -> str:
    """The same for every order of the dimensions: the compiler turns arrays as it likes."""
    return ",".join(sorted(dimensions.split(",")))


def _long(dtype: str) -> str:
    return {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}.get(dtype, dtype)
