"""Compress models to a ratio by merging neurons: the strategy ``"tropical"``.

The result is an ordinary network with fewer neurons (:mod:`capibara.compress.tropical`), stored losslessly: it needs
no decoder and is faster. The number of neurons is found by search, with the real size of the file.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from capibara.compress.container import Archive
from capibara.compress.errors import CompressError
from capibara.compress.models.adapters import put_tensor
from capibara.compress.models.numbers import from_bits, is_array, is_torch, to_bits
from capibara.compress.tropical import Merged, merge_neurons

__all__ = ["MERGED", "Merger", "is_pairs", "relu_chain", "resized", "training_inputs", "worst_error"]

MERGED = "capibara.merged"  # the key of an archive's metadata that says that neurons were merged


def is_pairs(model: object) -> bool:
    """Whether it is a list of (weight [out, in], bias or ``None``) with ReLU between them."""
    if not isinstance(model, list | tuple) or not model:
        return False
    return all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and is_array(pair[0])
        and len(pair[0].shape) == 2
        and (pair[1] is None or is_array(pair[1]))
        for pair in model
    )


def relu_chain(pairs: Any, x: Any) -> Any:
    """Evaluate a list of (weight, bias), with arrays of any kind."""
    for i, (weight, bias) in enumerate(pairs):
        x = x @ weight.T if i == 0 else x.clip(min=0) @ weight.T
        x = x if bias is None else x + bias
    return x


def training_inputs(batches: Iterable[Any]) -> np.ndarray:
    """The inputs of batches as one array [q, …], for fitting.

    Raises:
      CompressError: named inputs, or inputs of different shapes.
    """
    parts = []
    for batch in batches:
        if not is_array(batch):
            raise CompressError(
                f"validation_data: inputs are {type(batch).__name__}, expected arrays [q, …] for strategy='tropical'"
            )
        parts.append(batch.detach().cpu().float().numpy() if is_torch(batch) else np.asarray(batch))
    if len({p.shape[1:] for p in parts}) != 1:
        raise CompressError("validation_data: inputs of several shapes, expected the same but for the batch")
    return np.concatenate(parts)


class Merger:
    """Merges as many neurons of a model as needed for a file of the required size.

    Args:
      model: a ``torch.nn.Sequential``, or pairs.
      inputs: data to fit to; ``None``: fit over all directions.
      size: function that returns the file size of a network in bytes.
      original: bytes of the model.

    Raises:
      CompressError: an unsupported network, or one without ReLU layers that can be merged.
    """

    def __init__(
        self, model: Any, inputs: np.ndarray | None, size: Callable[[Any], int], original: int
    ) -> None:
        self._model, self._inputs, self._size, self._original = model, inputs, size, original
        if is_pairs(model):
            self._given: Any = [(_host(w), None if b is None else _host(b)) for w, b in model]
        elif any(
            k.__module__.startswith("torch.") and k.__name__ == "Sequential" for k in type(model).__mro__
        ):
            self._given = model
        else:
            raise CompressError(
                f"model: got {type(model).__name__}, and the strategy 'tropical' merges neurons of ReLU networks: a "
                "torch.nn.Sequential, or a list of (weight, bias). Remedy: its Sequential parts one by one, or another "
                "strategy."
            )
        # A network's size is quadratic in the share of neurons that stay.
        probes = [merge_neurons(self._given, share, fit=False) for share in (1e-9, 0.5, 1.0)]
        self._finest = 1 / max(layer.neurons for layer in probes[0].layers)
        self._least, middle, whole = (size(probe.network) for probe in probes)
        self._square = 2 * (self._least - 2 * middle + whole)
        self._slope = whole - self._least - self._square

    def merged(self, share: float) -> Merged:
        """Merge to a share of each layer's neurons, and fit."""
        made = merge_neurons(self._given, min(max(share, 1e-9), 1.0), inputs=self._inputs)
        return made if self._given is self._model else _with_kinds(made, self._model)

    def _share(self, size: float) -> float:
        """With which a file has about that size."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            fits = self._least + self._slope * middle + self._square * middle**2 <= size
            low, high = (middle, high) if fits else (low, middle)
        return low

    def to_ratio(self, ratio: float) -> Merged:
        """Merge to about as many neurons as fit the ratio.

        Raises:
          CompressError: the file cannot be made that small.
        """
        target = self._original / ratio
        if self._least > target * 1.02:
            raise CompressError(
                f"ratio: {ratio} cannot be met by merging neurons: with one neuron in each hidden layer {self._least} "
                f"of {self._original} bytes are left. Remedy: one up to {self._original / self._least * 0.99:.2f}, or "
                "another strategy."
            )
        aim, best = target, None
        for _ in range(8):
            found = self.merged(self._share(aim))
            size = self._size(found.network)
            fits = size <= target * 1.02
            if fits and (best is None or size > best[0]):
                best = size, found
            if fits and size >= target * 0.98:
                break
            # Fitted numbers take a little more than those that were estimated from.
            change = target - size
            step = self._size_of_a_neuron()
            if best is not None and abs(change) < step:
                break
            aim += change if fits else min(change, -step)
        return self.merged(1e-9) if best is None else best[1]

    def _size_of_a_neuron(self) -> float:
        return (abs(self._slope) + abs(self._square)) * self._finest


def _host(array: Any) -> np.ndarray:
    return array.detach().cpu().numpy() if is_torch(array) else np.asarray(array)


def _with_kinds(made: Merged, model: Any) -> Merged:
    """Arrays of the kinds that were given."""

    def like(new: Any, old: Any) -> Any:
        if new is None:
            return None
        bits, form, shape = to_bits(np.ascontiguousarray(new))
        return from_bits(bits, form, shape, old)

    pairs = [
        (like(w, old_w), like(b, old_w if old_b is None else old_b))
        for (w, b), (old_w, old_b) in zip(made.network, model, strict=True)
    ]
    return replace(made, network=pairs)


def worst_error(made: Merged) -> float:
    """The largest relative error of a merged layer over all directions of its inputs."""
    return max(
        (layer.sphere_error for layer in made.layers if math.isfinite(layer.sphere_error)), default=0.0
    )


def resized(model: Any, archive: Archive) -> Any:
    """A model like the original, with the merged shapes of the archive.

    Raises:
      CompressError: another kind of model.
    """
    if is_pairs(model):
        return [
            tuple(
                None if f"{i}.{j}" not in archive.entries else _array(archive, f"{i}.{j}", pair[0])
                for j in range(2)
            )
            for i, pair in enumerate(model)
        ]
    if not (hasattr(model, "_modules") and hasattr(model, "get_submodule")):
        raise CompressError(
            f"model: got {type(model).__name__}, and in {archive.path} is a merged ReLU network"
        )
    import torch

    made = copy.deepcopy(model)
    known: dict[str, list[str]] = {}
    for entry in archive:
        path, _, leaf = entry.name.rpartition(".")
        known.setdefault(path, []).append(leaf)
    for path, layer in list(made.named_modules()):
        own = [*layer._parameters, *layer._buffers]
        if not own or not path:
            continue
        if path not in known:  # a batch normalisation that was folded into the layer before it
            parent, _, leaf = path.rpartition(".")
            made.get_submodule(parent)._modules[leaf] = torch.nn.Identity()
            continue
        for leaf in known[path]:
            entry = archive[f"{path}.{leaf}"]
            old = layer._parameters.get(leaf)
            if leaf not in own or (old is not None and tuple(old.shape) == entry.shape):
                continue
            weight: Any = layer._parameters["weight"]
            if old is None:
                layer._parameters[leaf] = torch.nn.Parameter(weight.new_zeros(entry.shape))
            else:
                put_tensor(made, entry.name, old.detach().new_zeros(entry.shape))
        shape = tuple(getattr(layer, "weight", torch.empty(0)).shape)
        for names in (("out_features", "in_features"), ("out_channels", "in_channels")):
            if all(hasattr(layer, name) for name in names) and len(shape) >= 2:
                for name, count in zip(names, shape, strict=False):
                    setattr(layer, name, count)
    return made


def _array(archive: Archive, name: str, like: Any) -> Any:
    entry = archive[name]
    return from_bits(archive.read(name).reshape(-1), entry.format, entry.shape, like)
