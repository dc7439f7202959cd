"""Blocks that put arrays together or take them apart, whose number of ports Mithril leaves to what is connected."""

from __future__ import annotations

from typing import Any

from capibara import compose
from capibara.compose import TBD
from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from mithril.connecting import Connectable
from mithril.model import Model

__all__ = [
    "Arange",
    "BroadcastTo",
    "Cast",
    "Concat",
    "Eye",
    "EyeComplement",
    "Indexer",
    "PositionalEncoding",
    "Reshape",
    "ScaledDotProduct",
    "Slice",
    "Split",
    "TensorToList",
    "ToList",
    "ToTuple",
]


class Reshape(Connectable, p.Reshape):
    __doc__ = p.Reshape.__doc__

    signature = "shape input"
    places = "input shape output"
    sized = ("shape",)


class BroadcastTo(Connectable, p.BroadcastTo):
    __doc__ = p.BroadcastTo.__doc__

    signature = "shape input"
    places = "input shape output"
    sized = ("shape",)


class Arange(Connectable, p.Arange):
    """``start, start + step, …`` up to but without ``stop``, integers or connections that follow from shapes."""

    signature = "start=0 stop step=1"
    places = "start stop step dtype output"
    sized = ("start", "stop")


class Eye(Connectable, p.Eye):
    __doc__ = p.Eye.__doc__

    signature = "N/rows M/columns=None"
    places = "N M dtype output"


class EyeComplement(Connectable, p.EyeComplement):
    __doc__ = p.EyeComplement.__doc__

    signature = "N/rows M/columns=None"
    places = "N M dtype output"


class Cast(Connectable, p.Cast):
    """Change the dtype; integers of all widths are compose's one integer, int32."""

    signature = "dtype"
    places = "input dtype output"

    def _make(self, options: dict[str, Any], name: str | None) -> None:
        if options.get("dtype", TBD) is TBD:
            self.__dict__["_open"] = ["dtype"]
            compose.Primitive.__init__(self, "cast", {}, {}, name=name)
            return
        dtype = compose.dtypes.dtype_name(options["dtype"])
        super()._make({**options, "dtype": "int32" if "int" in dtype else dtype}, name)


class Indexer(Connectable, p.Indexer):
    __doc__ = p.Indexer.__doc__

    signature = "index input"
    places = "input index output"


class Slice(Connectable, p.Slice):
    __doc__ = p.Slice.__doc__

    signature = "start=None stop=None step=None"
    places = "start stop step output"


class PositionalEncoding(Connectable, p.PositionalEncoding):
    """Sines and cosines of the position added to ``input [*b, sequence, d]``; the sizes follow from the input."""

    signature = "hidden_dim max_len=5000 input"
    places = "input hidden_dim max_len output"

    def _make(self, options: dict[str, Any], name: str | None) -> None:
        options.pop("hidden_dim", None)
        options.pop("max_len", None)
        super()._make(options, name)


class ScaledDotProduct(Connectable, p.ScaledDotProduct):
    """``softmax(query keyᵀ scale + attn_mask) value``; causal unless it is told otherwise."""

    signature = "is_causal/causal=True scale=None dropout_p=0.0 use_attn_mask=False query key value attn_mask"
    places = "query key value dropout_p is_causal scale output attn_mask"

    def _make(self, options: dict[str, Any], name: str | None) -> None:
        if options.pop("dropout_p", 0.0) not in (0, 0.0):
            raise WiringError(
                "dropout_p: got a rate, expected 0. Use capibara.compose.Dropout after the product"
            )
        mask = options.pop("use_attn_mask", False)
        if mask:
            options["mask"] = "float"
        super()._make({k: v for k, v in options.items() if k != "attn_mask"}, name)
        if options.get("attn_mask", TBD) is not TBD:
            self._values["attn_mask"] = options["attn_mask"]

    def _joined(self, ports: dict[str, Any]) -> dict[str, Any]:
        ports.pop("dropout_p", None)
        if "attn_mask" in ports:
            ports["mask"] = ports.pop("attn_mask")
        return super()._joined(ports)


class _Several(Model):
    """A block whose number of inputs is that of what it is connected to."""

    def _gather(self, parts: Any) -> dict[str, Any]:
        if not isinstance(parts, list | tuple):
            raise WiringError(f"{type(self).__name__}: got {parts!r}, expected a list of connections")
        return {f"input{i}": part for i, part in enumerate(parts, 1)}

    def _count(self, count: int) -> None:
        keys = [f"input{i}" for i in range(1, count + 1)]
        joined = {f"input_{i}": key for i, key in enumerate(keys)}
        self.add(self._block(count), "inner", **joined, output="output")
        self.expose("output")

    def _block(self, count: int) -> Any:
        raise NotImplementedError


class Concat(_Several):
    """Arrays one after the other along ``axis``: ``Concat(axis=1).connect(input=[a, b], output="c")``."""

    places = "input axis output"

    def __init__(self, input: Any = TBD, axis: Any = 0, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.axis = axis
        self.parts = input

    def _joined(self, ports: dict[str, Any]) -> dict[str, Any]:
        if "axis" in ports:
            self.axis = self._setting("axis", ports.pop("axis"))
        parts = ports.pop("input", self.parts)
        if not self.children and parts is not TBD:
            self._count(len(parts))
        return super()._joined({**({} if parts is TBD else self._gather(parts)), **ports})

    def _block(self, count: int) -> Any:
        return p.Concat(count, self.axis)


class ToList(_Several):
    """Arrays of one shape side by side, ``[n, …]``: what ``[a, b]`` is where an array is expected."""

    def __init__(self, n: int, *, name: str | None = None, **values: Any) -> None:
        super().__init__(name=name, **values)
        self._count(n)

    def _block(self, count: int) -> Any:
        return p.Stack(count)


class ToTuple(ToList):
    __doc__ = ToList.__doc__


class Split(Model):
    """``split_size`` equal parts along ``axis``: ``output[i]`` is one of them; parts are stacked, ``[n, …]``."""

    places = "input output"

    def __init__(self, split_size: int, axis: int, input: Any = TBD, *, name: str | None = None) -> None:
        super().__init__(name=name, input=input)
        part = self.add(p.Split(split_size, axis), "parts", input="input")
        joined = {f"input_{i}": part.port(f"output_{i}") for i in range(split_size)}
        self.add(p.Stack(split_size), "stacked", **joined, output="output")
        self.expose("output")


class TensorToList(Connectable, p.Buffer):
    """An array as the list of what is along its first dimension: the array itself, ``output[i]``."""

    signature = "input"
