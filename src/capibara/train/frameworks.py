"""Models of other kinds as models that can be trained: Flax (Linen and NNX), Equinox, plain JAX, and composed ones.

Flax and Equinox are imported only for their own objects.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp

from capibara.compose import CompiledModel, JaxBackend, compile
from capibara.compose.models import Model as LogicalModel
from capibara.errors import ConfigError
from capibara.train.functional import FunctionModel, arguments_for, of_pair, takes
from capibara.train.losses import cross_entropy, mean_loss, parts_of

__all__ = ["WithLoss", "as_model", "unwrapped"]


def as_model(
    model: Any, *, loss: Callable[[Any, Any], Any] | None = None, axes: Any = None, example: Any = None
) -> Any:
    """A :class:`capibara.train.protocols.Model` for a model of any known kind.

    Args:
      model: one of Capibara's, a composed model (compiled or not), ``(init, apply)``, a ``flax.linen.Module``, a
        ``flax.nnx.Module``, an ``equinox.Module``, or anything with the methods of the protocol.
      loss: ``(outputs, targets) ->`` one loss for each target, or their mean; by default the model's own, or else
        :func:`capibara.train.losses.cross_entropy`.
      axes: logical names of the parameters' dimensions, for models that have none.
      example: the inputs of one microbatch, or their shapes, for models whose parameters depend on them.

    Raises:
      ConfigError: it is none of these.
    """
    given = {"loss_of": loss or cross_entropy, "axes": axes, "example": example}
    if isinstance(model, FunctionModel):
        changes = {"loss_of": loss, "axes": axes, "example": example}
        return replace(model, **{name: value for name, value in changes.items() if value is not None})
    if isinstance(model, LogicalModel):
        shapes = None
        if isinstance(example, Mapping):
            shapes = {key: [None, *leaf.shape[1:]] for key, leaf in example.items()}
        elif example is not None:
            shapes = {_only_input(model.input_keys): [None, *example.shape[1:]]}
        model = compile(model, JaxBackend(), shapes=shapes)
    if isinstance(model, CompiledModel):
        return ComposedModel(model, loss)
    if isinstance(model, tuple) and len(model) == 2:
        return of_pair(*model, **given)
    model = cast("Any", model)
    # Only what is imported already can have made the object.
    linen, nnx, equinox = (sys.modules.get(name) for name in ("flax.linen", "flax.nnx", "equinox"))
    if linen is not None and isinstance(model, linen.Module):
        return _of_linen(model, linen, **given)
    if nnx is not None and isinstance(model, nnx.Module):
        return _of_nnx(model, nnx, **given)
    if equinox is not None and isinstance(model, equinox.Module):
        return _of_equinox(model, equinox, **given)
    if all(hasattr(model, name) for name in ("init", "loss", "num_params")):
        return model if loss is None else WithLoss(model, loss)
    if callable(getattr(model, "init", None)) and callable(getattr(model, "apply", None)):
        return of_pair(model.init, model.apply, **given)
    raise ConfigError(
        f"model: got {type(model).__name__}, expected a ModularCapibaraModel, a composed model, a module of Flax or "
        "Equinox, or a pair of functions (init, apply): init(key) -> params and apply(params, inputs) -> outputs"
    )


# ---- composed models ------------------------------------------------------------------------------------------


class ComposedModel:
    """A compiled composed model with a loss; a :class:`capibara.train.protocols.Model`.

    The loss is its output ``final_cost`` (of a ``TrainModel``) where there is one and no other is given; a batch is
    then its inputs. Otherwise it is that of its only output, for batches with targets.
    """

    def __init__(self, compiled: CompiledModel, loss: Callable[[Any, Any], Any] | None = None) -> None:
        self.compiled, self.loss_of = compiled, loss
        self.mesh = compiled.backend.mesh
        self.own_cost = loss is None and "final_cost" in compiled.outputs

    def on_mesh(self, mesh: Any, rules: Any = None) -> ComposedModel:
        """The same model for a mesh."""
        return ComposedModel(self.compiled.on_mesh(mesh, rules), self.loss_of)

    def init(self, seed: Any) -> tuple[Any, Any]:
        """New parameters and state."""
        key = jax.random.key(seed) if isinstance(seed, int) else seed
        return self.compiled.init(key), self.compiled.init_state(jax.random.fold_in(key, 1))

    @property
    def param_axes(self) -> Any:
        """Logical names of the parameters' dimensions."""
        return jax.tree.map(
            lambda spec: spec or (),
            self.compiled.param_axes,
            is_leaf=lambda x: x is None or isinstance(x, tuple),
        )

    @property
    def state_axes(self) -> Any:
        """Logical names of the state's dimensions."""
        return self.compiled.state_axes

    @property
    def num_params(self) -> int:
        """Number of parameters."""
        return self.compiled.num_params

    def flops_per_token(self, sequence_length: int, training: bool = True) -> float:
        """Two operations for each parameter, six in training."""
        return (6.0 if training else 2.0) * self.num_params

    def loss(
        self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True
    ) -> tuple[Any, tuple[Any, Any]]:
        """``(loss, (next state, metrics))`` of a batch."""
        if self.own_cost:
            outputs, after = self._outputs(params, dict(batch), state, key, train)
            scalars = {
                name: value
                for name, value in outputs.items()
                if jnp.ndim(value) == 0 and name not in ("final_cost", "loss")
            }
            return outputs["final_cost"], (after, scalars)
        parts = parts_of(batch)
        outputs, after = self._outputs(params, self._inputs(parts.inputs), state, key, train)
        loss_of = self.loss_of or cross_entropy
        value = mean_loss(loss_of, self._result(outputs), parts)
        return value, (after, {"cross_entropy": value} if loss_of is cross_entropy else {})

    def apply(self, params: Any, inputs: Any, *, state: Any, key: Any = None, train: bool = False) -> Any:
        """The only output; a dict of several."""
        outputs, _ = self._outputs(params, self._inputs(inputs), state, key, train)
        return self._result(outputs)

    def _outputs(self, params: Any, inputs: Any, state: Any, key: Any, train: bool) -> Any:
        return self.compiled.apply(params, inputs, state=state, key=key, train=train)

    def _inputs(self, inputs: Any) -> dict[str, Any]:
        if isinstance(inputs, Mapping):
            return dict(inputs)
        return {_only_input(self.compiled.input_keys): inputs}

    def _result(self, outputs: Any) -> Any:
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def finish(self, params: Any, state: Any) -> Any:
        """The parameters: what the compiled model is called with."""
        return params


def _only_input(keys: Any) -> str:
    keys = list(keys)
    if len(keys) != 1:
        raise ConfigError(
            f"batch: the model has the inputs {', '.join(map(repr, keys))}, and the batch has one array. Give a dict: "
            "{'inputs': {…}, 'targets': …}"
        )
    return keys[0]


class WithLoss:
    """A model of the protocol that is trained for another loss of its outputs."""

    def __init__(self, model: Any, loss: Callable[[Any, Any], Any]) -> None:
        self.inner, self.loss_of = model, loss

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def on_mesh(self, mesh: Any, rules: Any = None) -> Any:
        """The same for a mesh, if the model can be changed for one."""
        on_mesh = getattr(self.inner, "on_mesh", None)
        return self if on_mesh is None else WithLoss(on_mesh(mesh, rules), self.loss_of)

    def loss(
        self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True
    ) -> tuple[Any, tuple[Any, Any]]:
        """``(loss, (next state, {}))`` of a batch."""
        if isinstance(batch, Mapping) and "tokens" in batch and "targets" not in batch:
            # A language model: the targets are the next tokens.
            rest = {name: x[:, :-1] for name, x in batch.items() if name != "weights"}
            weights = batch["weights"][:, 1:] if "weights" in batch else None
            if (segments := batch.get("segments")) is not None:  # none is predicted from one of another text
                follows = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != 0)
                weights = jnp.where(follows, 1.0 if weights is None else weights, 0.0)
            batch = {"inputs": rest, "targets": batch["tokens"][:, 1:]}
            batch |= {} if weights is None else {"weights": weights}
        parts = parts_of(batch)
        outputs, after = self.inner.apply(params, parts.inputs, state=state, key=key, train=train)
        return mean_loss(self.loss_of, outputs, parts), (after, {})


def unwrapped(model: Any) -> Any:
    """The model itself, without a loss of one's own around it."""
    return model.inner if isinstance(model, WithLoss) else model


# ---- pytrees that are not dicts -------------------------------------------------------------------------------


class _Named:
    """A pytree as a flat dict of arrays by name, and back: what checkpoints and the step hold."""

    def __init__(self, tree: Any) -> None:
        found, self._tree = jax.tree_util.tree_flatten_with_path(tree)
        self._names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found]
        self._kinds = [_key_kind(leaf) for _, leaf in found]

    def flat(self, tree: Any) -> dict[str, Any]:
        leaves = jax.tree.leaves(tree)
        return {
            name: leaf if kind is None else jax.random.key_data(leaf)
            for name, kind, leaf in zip(self._names, self._kinds, leaves, strict=True)
        }

    def nested(self, flat: Mapping[str, Any]) -> Any:
        leaves = [
            flat[name] if kind is None else jax.random.wrap_key_data(flat[name], impl=kind)
            for name, kind in zip(self._names, self._kinds, strict=True)
        ]
        return jax.tree.unflatten(self._tree, leaves)


def _key_kind(leaf: Any) -> Any:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return None
    return jax.random.key_impl(leaf)


# ---- Flax -----------------------------------------------------------------------------------------------------


def _mode(call: Callable[..., Any], train: bool) -> dict[str, bool]:
    """What a module calls the difference between training and inference."""
    known = {"train": train, "training": train, "deterministic": not train, "use_running_average": not train}
    return {name: value for name, value in known.items() if takes(call, name)}


def _of_linen(module: Any, linen: Any, *, axes: Any, **given: Any) -> FunctionModel:
    call_of = type(module).__call__
    unbox = linen.meta.unbox

    def names(params: Any) -> Any:
        """Those of ``nn.with_partitioning`` and ``nn.with_logical_partitioning``, if the module has any."""
        boxed = lambda leaf: isinstance(leaf, linen.meta.AxisMetadata)  # noqa: E731
        if not any(boxed(leaf) for leaf in jax.tree.leaves(params, is_leaf=boxed)):
            return None
        return jax.tree.map(
            lambda leaf: (
                tuple(getattr(leaf, "names", ()) or (None,) * unbox(leaf).ndim)
                if boxed(leaf)
                else (None,) * leaf.ndim
            ),
            params,
            is_leaf=boxed,
        )

    def variables(key: Any, inputs: Any) -> Any:
        if inputs is None:
            raise ConfigError(
                "model: a Linen module makes its parameters from inputs. Call trainer.init(batch) first"
            )
        rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(("params", "dropout"))}
        args, named = arguments_for(call_of, inputs)
        return module.init(rngs, *args, **named, **_mode(call_of, False))

    def make(key: Any, inputs: Any) -> tuple[Any, Any]:
        found = dict(variables(key, inputs))
        params = found.pop("params", {})
        return unbox(params), unbox(found)

    def call(params: Any, state: Any, inputs: Any, key: Any, train: bool) -> tuple[Any, Any]:
        args, named = arguments_for(call_of, inputs)
        rngs = {"dropout": key} if train and key is not None else None
        given = {"rngs": rngs, **_mode(call_of, train), **named}
        if not (train and state):
            return module.apply({"params": params, **state}, *args, **given), state
        outputs, after = module.apply({"params": params, **state}, *args, mutable=list(state), **given)
        return outputs, {**state, **after}

    example = given["example"]
    if axes is None and example is not None:
        shapes = jax.eval_shape(lambda: dict(variables(jax.random.key(0), _zeros(example))))
        axes = names(shapes["params"])
    return FunctionModel(make=make, call=call, axes=axes, **given)


def _zeros(example: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), example)


def _of_nnx(module: Any, nnx: Any, **given: Any) -> FunctionModel:
    graphs = {}
    for train in (False, True):
        copy = nnx.clone(module)
        copy.train() if train else copy.eval()
        graphs[train], params, rest = nnx.split(copy, nnx.Param, ...)
    params_as, rest_as = _Named(params), _Named(rest)
    first = params_as.flat(params), rest_as.flat(rest)

    def call(params: Any, state: Any, inputs: Any, key: Any, train: bool) -> tuple[Any, Any]:
        whole = nnx.merge(graphs[train], params_as.nested(params), rest_as.nested(state))
        args, named = arguments_for(type(module).__call__, inputs)
        outputs = whole(*args, **named)
        after = nnx.split(whole, nnx.Param, ...)[2] if train else None
        return outputs, state if after is None else rest_as.flat(after)

    def finish(params: Any, state: Any) -> Any:
        return nnx.merge(graphs[False], params_as.nested(params), rest_as.nested(state))

    return FunctionModel(make=lambda key, inputs: first, call=call, finish=finish, given=first[0], **given)


# ---- Equinox --------------------------------------------------------------------------------------------------


def _of_equinox(module: Any, equinox: Any, **given: Any) -> FunctionModel:
    """Equinox's modules are called with one example, so the batch is mapped over it."""
    params, static = equinox.partition(module, equinox.is_inexact_array)
    named_as = _Named(params)
    first = named_as.flat(params)
    random = takes(type(module).__call__, "key")

    def call(params: Any, state: Any, inputs: Any, key: Any, train: bool) -> tuple[Any, Any]:
        whole = equinox.combine(named_as.nested(params), static)
        whole = equinox.nn.inference_mode(whole, not train)
        rows = jax.tree.leaves(inputs)[0].shape[0]

        def one(row: Any, key: Any) -> Any:
            args, named = arguments_for(type(module).__call__, row)
            return whole(*args, **named, **({"key": key} if random else {}))

        if not (random and train and key is not None):
            return jax.vmap(lambda row: one(row, None))(inputs), state
        return jax.vmap(one)(inputs, jax.random.split(key, rows)), state

    def finish(params: Any, state: Any) -> Any:
        return equinox.combine(named_as.nested(params), static)

    return FunctionModel(make=lambda key, inputs: (first, {}), call=call, finish=finish, given=first, **given)
