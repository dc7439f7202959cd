"""Kinds of models that can be compressed, and the names of their tensors: one adapter per kind.

An adapter splits a model into named tensors and rebuilds a model of the same kind with other values. It can also run
the model, if possible, so that errors can be measured on its outputs. The kinds:

===============  ==================================================================================================
a module         ``torch.nn.Module``: names as in its ``state_dict``; tied tensors stay tied
applied          anything with ``params`` and a pure ``apply(params, inputs)``, or such a pair ``(model, params)``:
                 composed models, :class:`capibara.core.ModularCapibaraModel`, Flax modules
a tree           nested dicts, lists and tuples of arrays (a state dict is one), with JAX also Equinox modules and
                 whatever else JAX knows as a tree: names are the paths, joined with dots
===============  ==================================================================================================
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.models.numbers import (
    format_of,
    from_bits,
    is_array,
    is_torch,
    to_bits,
    torch_from_bits,
)
from capibara.compress.models.source import Tensors

__all__ = ["Adapter", "AppliedAdapter", "TorchAdapter", "TreeAdapter", "adapt", "put_tensor"]

Reader = Callable[[str], np.ndarray]
STRUCTURE = "capibara.structure"  # the key of an archive's metadata that says how tensors were nested


class Adapter:
    """A model as named tensors.

    Attributes:
      kind: ``"torch"``, ``"applied"`` or ``"tree"``.
      model: the model itself, which is not changed.
      arrays: name → array.
      tensors: the arrays as formats, shapes and bits.
      tied: second names of tensors, and the names that they refer to.
      metadata: text stored in the archive, so that the model can be rebuilt without the original.
    """

    kind = ""

    def __init__(self, model: Any, arrays: dict[str, Any], metadata: dict[str, str]) -> None:
        self.model, self.arrays, self.metadata = model, arrays, metadata
        if not arrays:
            raise CompressError(f"model: got a {type(model).__name__} without any tensor")
        first: dict[Any, str] = {}
        self.tied: dict[str, str] = {}
        for name, array in arrays.items():
            if (known := first.setdefault(_identity(array), name)) != name:
                self.tied[name] = known
        self.tensors = Tensors(
            {name: (format_of(a, name, meta=True), tuple(a.shape)) for name, a in arrays.items()},
            lambda name: to_bits(self.arrays[name], name)[0],
        )

    def rebuild(self, read: Reader) -> Any:
        """A model of the same kind, with the values that ``read`` returns."""
        raise NotImplementedError

    def with_arrays(self, arrays: Mapping[str, Any]) -> Any:
        """A model nested like this one, with other arrays or their stand-ins."""
        raise NotImplementedError

    def skeleton(self) -> Adapter:
        """An adapter with the model's nesting and how to run it, but without its arrays."""
        raise NotImplementedError

    def variant(self, changed: Mapping[str, np.ndarray]) -> Any:
        """The model with the bits of some tensors changed; valid until the next call."""

        def read(name: str) -> np.ndarray:
            return changed[name] if name in changed else self.tensors.read(name)

        return self.rebuild(read)

    def owner(self, model: Any = None) -> Any:
        """The object whose attributes a compressed model has too; ``None`` where there is none.

        Args:
          model: of :meth:`rebuild` or :meth:`with_arrays`: an object like the original, with these numbers. Without
            it the original.
        """
        return None

    @property
    def runs(self) -> bool:
        """Whether :meth:`run` can work."""
        return False

    def run(self, model: Any, inputs: Any) -> Any:
        """The outputs of a model returned by :meth:`rebuild`, or of the original.

        Raises:
          CompressError: it is not known how to run these tensors.
        """
        raise CompressError(
            f"model: a {type(self.model).__name__} of tensors does not say how it runs. Remedy: pass apply="
            "(a function of the tensors and the inputs), or the model itself."
        )


def _identity(array: Any) -> Any:
    """Equal for two names of one memory."""
    if is_torch(array):
        if array.numel() == 0 or array.device.type == "meta":
            return id(array)
        return (array.data_ptr(), array.dtype, tuple(array.shape), tuple(array.stride()), str(array.device))
    if isinstance(array, np.ndarray) and array.size:
        return (array.__array_interface__["data"][0], array.dtype, array.shape, array.strides)
    return id(array)


class TorchAdapter(Adapter):
    """A ``torch.nn.Module``."""

    kind = "torch"

    def __init__(self, model: Any) -> None:
        arrays = {k: v for k, v in model.state_dict(keep_vars=True).items() if is_torch(v)}
        super().__init__(model, arrays, {})
        self._work: Any = None
        self._changed: set[str] = set()

    def rebuild(self, read: Reader) -> Any:
        new = copy.deepcopy(self.model)
        self._fill(new, [n for n in self.arrays if n not in self.tied], read)
        return new

    def _fill(self, module: Any, names: Iterable[str], read: Reader) -> None:
        import torch

        tensors = module.state_dict(keep_vars=True)
        for name in names:
            value, tensor = torch_from_bits(read(name), *self.tensors.forms[name]), tensors[name]
            if tensor.is_meta:
                put_tensor(module, name, value)
                for other in (n for n, first in self.tied.items() if first == name):
                    put_tensor(module, other, value, module.get_parameter(name))
                continue
            with torch.no_grad():
                tensor.copy_(value)

    def variant(self, changed: Mapping[str, np.ndarray]) -> Any:
        # One copy for all calls: a model is large, and a variant differs in few tensors.
        if self._work is None:
            self._work = copy.deepcopy(self.model)
        self._fill(self._work, self._changed - set(changed), self.tensors.read)
        self._fill(self._work, changed, changed.__getitem__)
        self._changed = set(changed)
        return self._work

    @property
    def runs(self) -> bool:
        return True

    def run(self, model: Any, inputs: Any) -> Any:
        import torch

        training = [m for m in model.modules() if m.training]
        model.eval()
        try:
            with torch.no_grad():
                return _call(model, inputs)
        finally:
            for module in training:
                module.training = True

    def call(self, model: Any, inputs: Any) -> Any:
        """As :meth:`run`, in the module's current mode, with gradients if they are enabled."""
        return _call(model, inputs)


def put_tensor(module: Any, name: str, value: Any, parameter: Any = None) -> None:
    """Replace a parameter or buffer of a module by a tensor.

    Args:
      parameter: used instead of a new one, if it is a parameter.
    """
    import torch

    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if (old := owner._parameters.get(leaf)) is not None:
        owner._parameters[leaf] = (
            parameter if parameter is not None else torch.nn.Parameter(value, old.requires_grad)
        )
    else:
        owner._buffers[leaf] = value


def _call(function: Callable[..., Any], inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return function(**inputs)
    return function(*inputs) if isinstance(inputs, tuple | list) else function(inputs)


class TreeAdapter(Adapter):
    """Nested containers of arrays; run by ``apply``, or by themselves."""

    kind = "tree"

    def __init__(self, model: Any, apply: Callable[[Any, Any], Any] | None = None) -> None:
        self.apply = apply
        arrays: dict[str, Any] = {}
        structure = _describe(model, (), arrays)
        if structure is not None:
            self._flatten = None
        else:
            jax = sys.modules.get("jax")
            if jax is None:
                raise CompressError(
                    f"model: got {type(model).__name__}, expected a torch.nn.Module, or dicts, lists and tuples of "
                    "arrays. Remedy: import jax first, if JAX knows it as a tree."
                )
            arrays.clear()
            flat, self._treedef = jax.tree_util.tree_flatten_with_path(model)
            self._flatten = [leaf for _, leaf in flat]
            self._names = [
                jax.tree_util.keystr(path, simple=True, separator=".") or "value" for path, _ in flat
            ]
            for name, leaf in zip(self._names, self._flatten, strict=True):
                if is_array(leaf):
                    _enter(arrays, name, leaf)
        text = None if structure is None else json.dumps(structure, separators=(",", ":"))
        super().__init__(model, arrays, {} if text is None else {STRUCTURE: text})

    def rebuild(self, read: Reader) -> Any:
        made: dict[str, Any] = {}

        def make(name: str) -> Any:
            name = self.tied.get(name, name)
            if name not in made:
                form, shape = self.tensors.forms[name]
                made[name] = from_bits(read(name), form, shape, self.arrays[name])
            return made[name]

        return self.with_arrays({name: make(name) for name in self.arrays})

    def skeleton(self) -> TreeAdapter:
        return TreeAdapter(self.with_arrays({name: np.empty(0) for name in self.arrays}), self.apply)

    def with_arrays(self, arrays: Mapping[str, Any]) -> Any:
        """The same tree with other arrays."""
        if self._flatten is None:
            return assemble(json.loads(self.metadata[STRUCTURE]), arrays.__getitem__, self.model)
        leaves = [
            arrays[name] if is_array(leaf) else leaf
            for name, leaf in zip(self._names, self._flatten, strict=True)
        ]
        return sys.modules["jax"].tree_util.tree_unflatten(self._treedef, leaves)

    def owner(self, model: Any = None) -> Any:
        if self._flatten is None:
            return None  # dicts, lists and tuples have nothing of their own
        return self.model if model is None else model

    def read_arrays(self, tree: Any) -> dict[str, Any]:
        """The arrays of a tree with the model's nesting."""
        return TreeAdapter(tree).arrays

    @property
    def runs(self) -> bool:
        return self.apply is not None or callable(self.model)

    def run(self, model: Any, inputs: Any) -> Any:
        if self.apply is not None:
            return self.apply(model, inputs)
        return _call(model, inputs) if callable(model) else super().run(model, inputs)


class AppliedAdapter(Adapter):
    """Parameters and their pure function."""

    kind = "applied"

    def __init__(self, model: Any, owner: Any, params: Any) -> None:
        self._owner, self.tree = owner, TreeAdapter(params)
        self._holds = model is owner
        super().__init__(model, self.tree.arrays, self.tree.metadata)

    def rebuild(self, read: Reader) -> Any:
        """The parameters, nested as they were."""
        return self.tree.rebuild(read)

    def with_arrays(self, arrays: Mapping[str, Any]) -> Any:
        return self.tree.with_arrays(arrays)

    def owner(self, model: Any = None) -> Any:
        if model is None or not self._holds:
            return self._owner  # or it is given its parameters with each call
        made = copy.copy(self._owner)
        for name in list(getattr(made, "__dict__", ())):
            if isinstance(inspect.getattr_static(type(made), name, None), functools.cached_property):
                del made.__dict__[name]  # of the original's parameters
        object.__setattr__(made, "params", model)  # also of a frozen dataclass
        return made

    def skeleton(self) -> AppliedAdapter:
        empty = self.tree.skeleton().model
        made = AppliedAdapter((self._owner, empty), self._owner, empty)
        made._holds = self._holds
        return made

    @property
    def runs(self) -> bool:
        return True

    def run(self, model: Any, inputs: Any) -> Any:
        params = self.tree.model if model is self.model else model
        return self._owner.apply(params, inputs)


def adapt(model: Any, apply: Callable[[Any, Any], Any] | None = None) -> Adapter:
    """The adapter of a model.

    Args:
      model: a ``torch.nn.Module``; nested dicts, lists and tuples of arrays (a state dict, a JAX tree); an object with
        ``params`` and ``apply(params, inputs)``; or a pair of an object with ``apply`` and its parameters.
      apply: runs a tree of arrays: ``apply(tree, inputs)``.

    Raises:
      CompressError: none of these kinds, or a model without tensors.
    """
    torch = sys.modules.get("torch")
    if apply is not None and not callable(apply):
        raise CompressError(f"apply: got {apply!r}, expected a function of the tensors and the inputs")
    if torch is not None and isinstance(model, torch.nn.Module):
        if apply is not None:
            raise CompressError("apply: a torch.nn.Module runs by itself. Remedy: leave it out.")
        return TorchAdapter(model)
    pair = isinstance(model, tuple) and len(model) == 2 and callable(getattr(model[0], "apply", None))
    if pair and apply is None and not is_array(model[0]):
        return AppliedAdapter(model, model[0], model[1])
    params = getattr(model, "params", None)
    if params is not None and callable(getattr(model, "apply", None)) and apply is None:
        if isinstance(params, Mapping) and any(isinstance(k, tuple) for k in params):
            raise CompressError(
                f"model: a {type(model).__name__} does not hold its parameters. Remedy: compress((model, params))."
            )
        return AppliedAdapter(model, model, params)
    if is_array(model):
        return TreeAdapter({"value": model}, apply)
    return TreeAdapter(model, apply)


def _enter(arrays: dict[str, Any], name: str, value: Any) -> None:
    if name in arrays:
        raise CompressError(
            f"model: two tensors are called {name!r}. Remedy: rename a key that has a dot in it."
        )
    arrays[name] = value


def _describe(value: Any, path: tuple[str, ...], arrays: dict[str, Any]) -> Any:
    """How arrays are nested, as JSON: a name for an array; ``None`` if it is not a dict, list, tuple or plain value."""
    if is_array(value):
        name = ".".join(path) or "value"
        _enter(arrays, name, value)
        return name
    if type(value) is tuple or type(value) is list:
        parts = [_describe(v, (*path, str(i)), arrays) for i, v in enumerate(value)]
        return None if None in parts else {"tuple" if type(value) is tuple else "list": parts}
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            return None
        parts = {k: _describe(v, (*path, k), arrays) for k, v in value.items()}
        return None if None in parts.values() else {"dict": parts}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    return None


def assemble(structure: Any, make: Callable[[str], Any], like: Any = None, depth: int = 0) -> Any:
    """Arrays nested according to a structure; containers of the same type as those of ``like``, if given.

    Raises:
      CompressError: the structure is invalid.
    """
    if isinstance(structure, str):
        return make(structure)
    if depth < 200 and isinstance(structure, dict) and len(structure) == 1:
        ((kind, parts),) = structure.items()
        if kind == "value":
            return parts
        if kind == "dict" and isinstance(parts, dict):
            known = like if isinstance(like, Mapping) else {}
            made = {k: assemble(v, make, known.get(k), depth + 1) for k, v in parts.items()}
            return made if type(known) is dict else _same_mapping(known, made)
        if kind in ("list", "tuple") and isinstance(parts, list):
            known = like if isinstance(like, list | tuple) else [None] * len(parts)
            made = [assemble(v, make, known[i], depth + 1) for i, v in enumerate(parts)]
            return tuple(made) if kind == "tuple" else made
    raise CompressError(
        "the archive's structure of tensors is invalid: the file is damaged, or of a newer version"
    )


def _same_mapping(like: Any, made: dict[str, Any]) -> Any:
    new = copy.copy(like)
    try:
        new.update(made)
    except AttributeError:  # one that cannot be changed, such as a frozen dict
        return type(like)(made)
    return new
