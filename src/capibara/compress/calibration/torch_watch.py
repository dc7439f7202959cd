"""Observe the inputs of a torch model's linear layers, where they are multiplied by a parameter.

This does not depend on module types: a dispatch mode observes every operation that torch runs, so that weights used
by ``F.linear``, by ``x @ w``, inside ``nn.MultiheadAttention`` or under several names are found like those of
``nn.Linear``. An operand belongs to a parameter if it is a view of its storage; the view's strides show along which
of the parameter's axes it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import Sums, Unseen, Watched
from capibara.errors import MissingExtraError

__all__ = ["watch_function", "watch_module"]

try:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:
    raise MissingExtraError("torch", "torch", "watching a torch model") from None


class _Watch(TorchDispatchMode):
    """Adds up the inputs of parameters, given by name."""

    def __init__(self, named: Mapping[str, list[torch.Tensor]] | dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.sums, self.unseen = Sums(), Unseen()
        self.names: list[str] = []
        self._by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
        for name, tensor in named.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2 and tensor.is_floating_point():
                self.names.append(name)
                self._by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (rule := _RULES.get(func.overloadpacket)) is not None:
            rule(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def owners(self, view: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The parameters that a tensor is a view of."""
        out = []
        for name, whole in self._by_storage.get(view.untyped_storage().data_ptr(), ()):
            first = whole.storage_offset()
            if first <= view.storage_offset() < first + whole.numel() and view.dtype == whole.dtype:
                out.append((name, whole))
        return out

    def product(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """left [..., n, k] times right [..., k, m]."""
        for inputs, weight, axis in ((left, right, -2), (right.mT, left, -1)):
            for name, whole in self.owners(weight):
                if (found := _axis(whole, weight.shape[axis], weight.stride(axis))) is not None:
                    for entry, some in _entries(whole, weight, inputs, found):
                        self.sums.add(name, _numpy(some), (found,), entry=entry)
                else:
                    self.unseen.lose(name, "it is multiplied along a part of an axis, or several at once")

    def found(self, batches: int) -> Watched:
        return Watched(batches, self.sums, self.unseen, self.names)


def _axis(whole: torch.Tensor, size: int, stride: int) -> int | None:
    for axis in range(whole.dim()):
        if whole.shape[axis] == size and (size == 1 or whole.stride(axis) == stride):
            return axis
    return None


def _entries(
    whole: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor, axis: int
) -> list[tuple[tuple[int, int] | None, torch.Tensor]]:
    """Inputs by the entry of a stack [entries, …] that they are multiplied by; ``None`` where that is not one."""
    count = len(whole)
    if axis == 0 or whole.dim() != 3 or count < 2 or not whole.is_contiguous():
        return [(None, inputs)]
    first, at = divmod(int(weight.storage_offset() - whole.storage_offset()), int(whole.stride(0)))
    if weight.dim() == 2 and at + weight.shape[0] * weight.shape[1] <= whole.stride(0):
        return [((first, count), inputs)]
    if weight.dim() == 3 == inputs.dim() and weight.stride(0) == whole.stride(0):
        return [((first + i, count), x) for i, x in enumerate(inputs)]
    return [(None, inputs)]


def _numpy(x: torch.Tensor) -> np.ndarray:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.detach().to("cpu", wide).numpy()


def _linear(watch: _Watch, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> None:
    watch.product(x, weight.mT)


def _mm(watch: _Watch, left: torch.Tensor, right: torch.Tensor, **_: Any) -> None:
    watch.product(left, right)


def _addmm(watch: _Watch, bias: Any, left: torch.Tensor, right: torch.Tensor, **_: Any) -> None:
    watch.product(left, right)


def _convolution(
    watch: _Watch,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> None:
    """Patches of one and two dimensions; grouped and transposed convolutions are not one matrix product."""
    spatial = weight.dim() - 2
    if transposed or groups != 1 or spatial not in (1, 2):
        for name, _ in watch.owners(weight):
            watch.unseen.lose(
                name,
                "grouped and transposed convolutions, and those of three dimensions, are not one matrix product",
            )
        return
    for name, whole in watch.owners(weight):
        if whole.shape != weight.shape:
            continue
        x = x if x.dim() == weight.dim() else x[None]
        flat = spatial == 1  # as one of two dimensions, the first of size 1
        patches = torch.nn.functional.unfold(
            x.unsqueeze(2) if flat else x,
            (1, weight.shape[2]) if flat else tuple(weight.shape[2:]),
            _pair(dilation, 1, flat),
            _pair(padding, 0, flat),
            _pair(stride, 1, flat),
        )
        watch.sums.add(name, _numpy(patches.mT), tuple(range(1, weight.dim())))


def _pair(given: Any, fill: int, flat: bool) -> tuple[int, ...]:
    """One number for each of two dimensions."""
    return (fill, int(given[0])) if flat else (int(given[0]), int(given[-1]))


_RULES: dict[Any, Callable[..., None]] = {
    torch.ops.aten.linear: _linear,
    torch.ops.aten.mm: _mm,
    torch.ops.aten.bmm: _mm,
    torch.ops.aten.addmm: _addmm,
    torch.ops.aten.baddbmm: _addmm,
    torch.ops.aten.convolution: _convolution,
}


def _call(module: Callable[..., Any], batch: Any) -> None:
    def tensor(x: Any) -> Any:
        return torch.from_numpy(x) if isinstance(x, np.ndarray) else x

    if isinstance(batch, Mapping):
        module(**{key: tensor(x) for key, x in batch.items()})
    elif isinstance(batch, tuple | list):
        module(*map(tensor, batch))
    else:
        module(tensor(batch))


def watch_module(module: torch.nn.Module, batches: Iterator[Any]) -> Watched:
    """The observations of a module, by ``state_dict`` name."""
    watch = _Watch(dict(module.named_parameters(remove_duplicate=False)))
    modes = {m: m.training for m in module.modules()}
    # The fused encoder layer is one operation, in which nothing can be seen.
    fused, count = torch.backends.mha.get_fastpath_enabled(), 0
    torch.backends.mha.set_fastpath_enabled(False)
    module.eval()
    try:
        with torch.no_grad(), watch:
            for batch in batches:
                _call(module, batch)
                count += 1
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for part, training in modes.items():
            part.training = training
    return watch.found(count)


def watch_function(
    function: Callable[..., Any], params: Any, batches: Iterator[Any], names: Callable[[tuple[Any, ...]], str]
) -> Watched:
    """The same for ``function(params, batch)`` with nested dictionaries of tensors."""
    named: dict[str, torch.Tensor] = {}

    def walk(path: tuple[Any, ...], tree: Any) -> None:
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            if isinstance(value, Mapping | list | tuple):
                walk((*path, key), value)
            elif isinstance(value, torch.Tensor):
                named[names((*path, key))] = value

    walk((), params)
    watch, count = _Watch(named), 0
    with torch.no_grad(), watch:
        for batch in batches:
            function(params, batch)
            count += 1
    return watch.found(count)
