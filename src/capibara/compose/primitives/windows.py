"""Convolutions, pooling and normalisation of signals and images: ``[batch, channels, *space]``."""

from __future__ import annotations

from typing import Any, ClassVar

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape, set_size

__all__ = [
    "BatchNormalise",
    "ChannelAdd",
    "ChannelMultiply",
    "GroupNormalise",
    "PrimitiveAvgPool1D",
    "PrimitiveAvgPool2D",
    "PrimitiveConvolution1D",
    "PrimitiveConvolution2D",
    "PrimitiveMaxPool1D",
    "PrimitiveMaxPool2D",
]


def spread(name: str, value: Any, count: int, low: int = 1) -> tuple[int, ...]:
    """One number for each dimension of space: an int stands for all."""
    row = (
        (value,) * count
        if isinstance(value, int)
        else tuple(value)
        if isinstance(value, list | tuple)
        else ()
    )
    if len(row) != count:
        raise WiringError(f"{name}={value!r} must be an integer or a row of {count}")
    for one in row:
        whole(name, one, low)
    return row


def padding_pairs(value: Any, kernel: tuple[int, ...] | None, dilation: tuple[int, ...]) -> tuple[Any, ...]:
    """``(before, after)`` for each dimension of space.

    ``value``: a number for all sides, a row with one for each dimension, a row of pairs, "valid" (none) or "same"
    (the output is as large as the input, at stride 1).
    """
    count = len(dilation)
    if value == "valid":
        return ((0, 0),) * count
    if value == "same":
        if kernel is None:
            raise WiringError("padding='same' needs the kernel's size")
        totals = [(k - 1) * d for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    if isinstance(value, str):
        raise WiringError(
            f"padding={value!r} must be 'same', 'valid', a number, or numbers for each dimension"
        )
    if isinstance(value, list | tuple) and any(isinstance(v, list | tuple) for v in value):
        if len(value) != count:
            raise WiringError(f"padding={value!r} must have a pair for each of {count} dimensions")
        return tuple(spread("padding", pair, 2, 0) for pair in value)
    if count == 1 and isinstance(value, list | tuple) and len(value) == 2:
        return (spread("padding", value, 2, 0),)
    return tuple((p, p) for p in spread("padding", value, count, 0))


def _slid(size: int, kernel: int, stride: int, pad: tuple[int, int], dilation: int) -> int:
    room = size + pad[0] + pad[1] - (kernel - 1) * dilation - 1
    if room < 0:
        raise ShapeError(
            f"a window of {(kernel - 1) * dilation + 1} does not fit a size of {size} with padding {pad}"
        )
    return room // stride + 1


class _Convolution(Primitive):
    """Cross-correlation: ``input [n, in, *s]``, ``weight [out, in / groups, *k]`` → ``output [n, out, *t]``.

    ``padding`` is a number, or numbers for each dimension of space, or pairs (before, after).
    ``t = (s + padding - (k - 1) dilation - 1) // stride + 1``.
    """

    space: ClassVar[int]

    def __init__(
        self,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        *,
        name: str | None = None,
    ) -> None:
        count = self.space
        steps, gaps = spread("stride", stride, count), spread("dilation", dilation, count)
        pads = padding_pairs(padding, None, gaps)
        whole("groups", groups)

        def rule(image: Shape, weight: Shape, output: Shape) -> bool:
            x, w, out = image.dims(), weight.dims(), output.dims()
            assert x is not None
            assert w is not None
            assert out is not None
            done = True
            if w[1].find().size is not None:
                set_size(x[1], w[1].find().size * groups)  # type: ignore[operator]
            elif x[1].find().size is not None:
                if x[1].find().size % groups:  # type: ignore[operator]
                    raise ShapeError(f"{x[1].find().size} channels cannot be split into {groups} groups")
                set_size(w[1], x[1].find().size // groups)  # type: ignore[operator]
            else:
                done = False
            if w[0].find().size is not None and w[0].find().size % groups:  # type: ignore[operator]
                raise ShapeError(f"{w[0].find().size} output channels cannot be split into {groups} groups")
            for i in range(count):
                size, kernel = x[2 + i].find().size, w[2 + i].find().size
                if size is None or kernel is None:
                    done = False
                else:
                    set_size(out[2 + i], _slid(size, kernel, steps[i], pads[i], gaps[i]))
            return done

        names = ["height", "width"][-count:]
        super().__init__(
            "convolution",
            {
                "input": (["n", "in", *names], "float"),
                "weight": (["out", "group", *(f"kernel_{s}" for s in names)], "float"),
            },
            {"output": (["n", "out", *(f"out_{s}" for s in names)], "float")},
            {"stride": steps, "padding": pads, "dilation": gaps, "groups": groups},
            constraints=[(rule, ("input", "weight", "output"))],
            accumulates=True,
            name=name,
        )


class PrimitiveConvolution1D(_Convolution):
    __doc__ = _Convolution.__doc__
    space = 1


class PrimitiveConvolution2D(_Convolution):
    __doc__ = _Convolution.__doc__
    space = 2


class _Pool(Primitive):
    """One number for each window: ``input [n, c, *s]`` → ``output [n, c, *t]``.

    ``stride=None`` is the window's own size. Padding is as for convolutions; it is at most half a window, so that
    every window holds something.
    """

    space: ClassVar[int]
    op_name: ClassVar[str]

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        *,
        name: str | None = None,
    ) -> None:
        self._build(kernel_size, stride, padding, dilation, {}, name)

    def _build(
        self,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        more: dict[str, Any],
        name: str | None,
    ) -> None:
        count = self.space
        kernel, gaps = spread("kernel_size", kernel_size, count), spread("dilation", dilation, count)
        steps = kernel if stride is None else spread("stride", stride, count)
        pads = padding_pairs(padding, kernel, gaps)
        for k, gap, pad in zip(kernel, gaps, pads, strict=True):
            if max(pad) > ((k - 1) * gap + 1) // 2:
                raise WiringError(f"padding={padding!r} is more than half of kernel_size={kernel_size!r}")

        def rule(image: Shape, output: Shape) -> bool:
            _, _, x = image.resolve() if image.dims() is None else ((), None, image.dims() or [])
            _, _, out = output.resolve() if output.dims() is None else ((), None, output.dims() or [])
            done = True
            for i in range(-count, 0):
                size = x[i].find().size
                if size is None:
                    done = False
                else:
                    set_size(out[i], _slid(size, kernel[i], steps[i], pads[i], gaps[i]))
            return done

        names = ["height", "width"][-count:]
        super().__init__(
            self.op_name,
            {"input": (["*n", "c", *names], "float")},
            {"output": (["*n", "c", *(f"out_{s}" for s in names)], "float")},
            {"kernel": kernel, "stride": steps, "padding": pads, "dilation": gaps, **more},
            constraints=[(rule, ("input", "output"))],
            name=name,
        )


class PrimitiveMaxPool1D(_Pool):
    """The largest of each window (of several equal ones the first gets the gradient): ``[*n, c, s]``."""

    space, op_name = 1, "max_pool"


class PrimitiveMaxPool2D(_Pool):
    """The largest of each window (of several equal ones the first gets the gradient): ``[*n, c, h, w]``."""

    space, op_name = 2, "max_pool"


class _AvgPool(_Pool):
    """The mean of each window: ``[*n, c, *s]``; ``count_padding`` counts padding as zeros, else it is left out."""

    op_name = "avg_pool"

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        count_padding: bool = False,
        *,
        name: str | None = None,
    ) -> None:
        self._build(kernel_size, stride, padding, dilation, {"count_padding": bool(count_padding)}, name)


class PrimitiveAvgPool1D(_AvgPool):
    __doc__ = _AvgPool.__doc__
    space = 1


class PrimitiveAvgPool2D(_AvgPool):
    __doc__ = _AvgPool.__doc__
    space = 2


class _Channel(Primitive):
    def __init__(self, op: str, name: str | None) -> None:
        super().__init__(
            op,
            {"input": ("n c *s", "float"), "values": (("c",), "float")},
            {"output": ("n c *s", "float")},
            name=name,
        )


class ChannelAdd(_Channel):
    """Add one number to each channel: ``input [n, c, *s]``, ``values [c]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("channel_add", name)


class ChannelMultiply(_Channel):
    """Multiply each channel by one number: ``input [n, c, *s]``, ``values [c]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("channel_multiply", name)


class GroupNormalise(Primitive):
    """Mean 0 and variance 1 over each group of channels (Wu and He, 2018): ``[n, c, *s]``, without scale or bias.

    ``groups=1`` is layer normalisation over all channels; as many groups as channels is instance normalisation
    (Ulyanov et al., 2016).
    """

    def __init__(self, groups: int, epsilon: float = 1e-5, *, name: str | None = None) -> None:
        whole("groups", groups)
        number("epsilon", epsilon)

        def rule(image: Shape) -> bool:
            prefix, _, _ = image.resolve()
            size = prefix[1].size
            if size is not None and size % groups:
                raise ShapeError(f"{size} channels cannot be split into {groups} groups")
            return size is not None

        super().__init__(
            "group_norm",
            {"input": ("n c *s", "float")},
            {"output": ("n c *s", "float")},
            {"groups": groups, "epsilon": float(epsilon)},
            constraints=[(rule, ("input",))],
            accumulates=True,
            name=name,
        )


class BatchNormalise(Primitive):
    """Mean 0 and variance 1 of each channel over the batch (Ioffe and Szegedy, 2015), without scale or bias.

    ``input [n, c, *s]`` and the running ``mean [c]``, ``variance [c]`` → ``output``, ``next_mean``,
    ``next_variance``. In training the batch's own statistics are used, and the running ones move towards them by
    ``momentum`` (the variance's unbiased estimate); otherwise the running ones are used and stay.
    """

    def __init__(self, momentum: float = 0.1, epsilon: float = 1e-5, *, name: str | None = None) -> None:
        number("momentum", momentum, 0.0, 1.0)
        number("epsilon", epsilon)
        row = (("c",), "float")
        super().__init__(
            "batch_norm",
            {"input": ("n c *s", "float"), "mean": row, "variance": row},
            {"output": ("n c *s", "float"), "next_mean": row, "next_variance": row},
            {"momentum": float(momentum), "epsilon": float(epsilon)},
            accumulates=True,
            uses_train=True,
            name=name,
        )
