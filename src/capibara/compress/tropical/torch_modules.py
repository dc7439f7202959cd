"""PyTorch modules as chains of steps, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.tropical.merging import merge_steps
from capibara.compress.tropical.network import Apply, Convolution, Dense, Flatten, Linear, Relu, Step
from capibara.compress.tropical.report import Merged

if TYPE_CHECKING:
    import torch

__all__ = ["merge"]


def merge(
    module: torch.nn.Module, keep: float | Sequence[int], inputs: Any, options: dict[str, Any]
) -> Merged:
    """:func:`~capibara.compress.tropical.merge_neurons` of a ``torch.nn.Sequential``, which itself stays as it is."""
    import torch

    if not isinstance(module, torch.nn.Sequential):
        raise CompressError(
            f"network: got {type(module).__name__}, expected a torch.nn.Sequential: the order of the layers of another "
            "module is not known. Remedy: merge the Sequential parts of it one by one."
        )
    made = copy.deepcopy(module)
    leaves = list(_leaves(made))
    held = [id(p) for _, _, leaf in leaves for p in leaf.parameters(recurse=False)]
    if len(set(held)) != len(held):
        raise CompressError("network: parameters that several layers share. Remedy: give each layer its own.")
    steps: list[Step] = []
    for number, (parent, name, leaf) in enumerate(leaves):
        if _is_norm(leaf) and steps and isinstance(last := steps[-1], Linear) and _runs(leaf):
            steps[-1] = _folded(last, leaf)
            identity = torch.nn.Identity()
            parent._modules[name] = identity
            leaves[number] = parent, name, identity
            steps.append(Apply(_call(identity), homogeneous=True))
        else:
            steps.append(_step(leaf))
    examples = None if inputs is None else _numpy(torch.as_tensor(inputs))
    found = merge_steps(steps, keep, inputs=examples, **options)
    for (parent, name, leaf), step in zip(leaves, found.network, strict=True):
        if isinstance(step, Linear):
            parent._modules[name] = _rebuilt(leaf, step)
    return replace(found, network=made)


def _leaves(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    import torch

    # named_children would leave out a layer that stands there twice.
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(child, torch.nn.Sequential):
            yield from _leaves(child)
        else:
            yield module, name, child


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    import torch

    tensor = tensor.detach().cpu()
    narrow = tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float64)
    return (tensor.float() if narrow else tensor).numpy()


def _call(module: torch.nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """The module, as it is in evaluation, as a function of arrays."""
    import torch

    def function(x: np.ndarray) -> np.ndarray:
        tensor = next(iter(module.parameters()), next(iter(module.buffers()), torch.empty(0)))
        before = module.training
        module.eval()
        try:
            with torch.no_grad():
                dtype = tensor.dtype if tensor.is_floating_point() and tensor.numel() else None
                out = module(torch.from_numpy(np.array(x)).to(tensor.device, dtype))
        finally:
            module.train(before)
        return _numpy(out)

    return function


def _is_norm(leaf: torch.nn.Module) -> bool:
    import torch

    return isinstance(leaf, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d | torch.nn.BatchNorm3d)


def _runs(leaf: torch.nn.Module) -> bool:
    return getattr(leaf, "running_mean", None) is not None


def _folded(step: Linear, norm: Any) -> Linear:
    """The layer with the batch normalisation behind it, as it is in evaluation."""
    mean, variance = _numpy(norm.running_mean).astype(np.float64), _numpy(norm.running_var).astype(np.float64)
    factor = 1 / np.sqrt(variance + norm.eps)
    shift = -mean * factor
    if norm.affine:
        gamma, beta = _numpy(norm.weight).astype(np.float64), _numpy(norm.bias).astype(np.float64)
        factor, shift = factor * gamma, shift * gamma + beta
    bias = 0.0 if step.bias is None else step.bias.astype(np.float64)
    weight = step.weight * factor.reshape(-1, *(1,) * (step.weight.ndim - 1))
    dtype = step.weight.dtype
    return replace(step, weight=weight.astype(dtype), bias=(bias * factor + shift).astype(dtype))


def _step(leaf: torch.nn.Module) -> Step:
    import torch
    from torch import nn

    if type(leaf) is nn.Linear:
        return Dense(_numpy(leaf.weight), None if leaf.bias is None else _numpy(leaf.bias))
    if type(leaf) in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        assert isinstance(leaf, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        if leaf.groups == 1 and leaf.padding_mode == "zeros":
            return Convolution(
                _numpy(leaf.weight),
                None if leaf.bias is None else _numpy(leaf.bias),
                tuple(leaf.stride),
                _padding(leaf),
                tuple(leaf.dilation),
            )
    if type(leaf) is nn.ReLU:
        return Relu()
    if type(leaf) is nn.Flatten and leaf.start_dim == 1 and leaf.end_dim == -1:
        return Flatten()
    pools = (
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
        *(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
    )
    plain = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    if type(leaf) in pools and not getattr(leaf, "return_indices", False):
        scales = getattr(leaf, "divisor_override", None) is None
        return Apply(_call(leaf), homogeneous=scales)
    if type(leaf) in plain:
        return Apply(_call(leaf), homogeneous=True)
    if not isinstance(leaf, torch.nn.Module):
        raise CompressError(f"network: {leaf!r} is not a module")
    return Apply(_call(leaf))


def _padding(leaf: Any) -> tuple[tuple[int, int], ...]:
    if isinstance(leaf.padding, str):
        if leaf.padding == "valid":
            return ((0, 0),) * len(leaf.kernel_size)
        spans = [d * (k - 1) for k, d in zip(leaf.kernel_size, leaf.dilation, strict=True)]
        return tuple((span // 2, span - span // 2) for span in spans)
    return tuple((int(p), int(p)) for p in leaf.padding)


def _rebuilt(leaf: Any, step: Linear) -> torch.nn.Module:
    """The leaf with the step's weights, of the leaf's dtype, on its device, in its mode."""
    import torch

    weight = torch.from_numpy(np.ascontiguousarray(step.weight)).to(leaf.weight.device, leaf.weight.dtype)
    leaf.weight = torch.nn.Parameter(weight, leaf.weight.requires_grad)
    if step.bias is not None:
        bias = torch.from_numpy(np.ascontiguousarray(step.bias)).to(leaf.weight.device, leaf.weight.dtype)
        leaf.bias = torch.nn.Parameter(bias, leaf.weight.requires_grad)
    if isinstance(step, Dense):
        leaf.out_features, leaf.in_features = step.weight.shape
    else:
        leaf.out_channels, leaf.in_channels = step.weight.shape[:2]
    return leaf
