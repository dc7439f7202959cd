"""The loss of a language model whose blocks are divided among the devices of the mesh axis ``pipeline``.

The model is cut into what comes before its blocks, a stage of them, and what comes after; the schedule is
:mod:`capibara.ops.collective.pipeline`. It computes loss and gradients at once, so that a loss which is differentiated
has its gradients already: of the parameters that it is differentiated by, and of no others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from capibara.compose import CompiledModel, compile
from capibara.compose.backends.meshes import free_axes
from capibara.compose.errors import InputError
from capibara.compose.physical.explicit import automatic_mesh
from capibara.compose.physical.sharding import constrain
from capibara.config import ModularModelConfig
from capibara.core.adapters import joined
from capibara.core.decoder import build_entry, build_exit, build_stage, groups_of
from capibara.core.loss import losses_of, parts_of, total_loss
from capibara.core.preferences import answer_sums, check_pairs, mean_scores, pair_scores, without_reference
from capibara.core.texts import check_targets, texts_of
from capibara.errors import ConfigError

if TYPE_CHECKING:
    import jax

__all__ = ["AXIS", "PipelinedLoss", "check_stages", "stages_of"]

AXIS = "pipeline"
_EXTRAS = ("auxiliary_loss", "perplexity", "usage")


def stages_of(mesh: Any) -> int:
    """The number of stages that a mesh divides a model into."""
    return 1 if mesh is None else mesh.shape.get(AXIS, 1)


def check_stages(config: ModularModelConfig, stages: int) -> None:
    """Refuse a model that cannot be divided into so many equal stages.

    Raises:
        ConfigError: it says why, and what to do.
    """
    model = config.model
    said = f"the mesh axis 'pipeline' has {stages} devices, "
    if model.experts.first_dense and model.experts.count:
        raise ConfigError(
            f"{said}and model.experts.first_dense={model.experts.first_dense} makes the first blocks others than the "
            "rest, while stages have to be alike. Use model.experts.first_dense=0, or the axes data, expert or model"
        )
    period = min(len(model.pattern), model.num_layers)
    group = groups_of(model)[0]
    if len(groups_of(model)) > 1 or group.turns % stages:
        step = period * stages
        below = model.num_layers // step * step
        choices = " or ".join(str(n) for n in (below, below + step) if n)
        one = "blocks" if period == 1 else f"turns of the {period} blocks of model.pattern"
        raise ConfigError(
            f"{said}which divide model.num_layers={model.num_layers} blocks into equal stages of whole {one}: expected "
            f"a multiple of {step}. Use model.num_layers={choices}, or another number of devices"
        )


class PipelinedLoss:
    """The loss of several microbatches, which go through the stages of a pipeline.

    Args:
        config: the model's.
        backend: with a mesh that has the axis ``pipeline``.

    Raises:
        ConfigError: as :func:`check_stages`.
    """

    def __init__(self, config: ModularModelConfig, backend: Any) -> None:
        self.config, self.backend = config, backend
        self.mesh: Any = automatic_mesh(backend.mesh)
        self.stages = stages_of(self.mesh)
        self.pairs = config.finetune.objective == "dpo"
        check_stages(config, self.stages)
        self._part = cache(self._compiled)

    def _compiled(self, part: str, flag: bool) -> CompiledModel:
        model, finetune = self.config.model, self.config.finetune
        built = {
            "entry": lambda: build_entry(model, ragged=flag),
            "stage": lambda: build_stage(model, self.stages, finetune=finetune, ragged=flag),
            "exit": lambda: build_exit(model, head=flag),
        }[part]()
        return compile(built, self.backend)

    def __call__(
        self, params: Mapping[str, Any], batch: Mapping[str, Any], *, state: Any, key: Any, train: bool
    ) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]:
        """As :meth:`~capibara.core.ModularCapibaraModel.loss`, for arrays ``[microbatches, batch, sequence + 1]``.

        The loss is the mean over microbatches, each of which counts as much as its tokens do; of pairs
        (``finetune.objective=dpo``), which each count alike, the batch also has ``reference [microbatches, batch, 2]``.
        """
        import jax

        check_targets(batch["tokens"].shape[1:])
        if self.pairs:
            check_pairs(batch, reference=True)
        with self.backend.scope():
            given = jax.vmap(self._prepared)(dict(batch))
            loss = jax.custom_vjp(partial(self._run, train, None))
            loss.defvjp(partial(self._differentiated, train), _pull, symbolic_zeros=True)
            value, after, metrics = loss(dict(params), given, state, key)
        return value, (after, metrics)

    def pair_log_probs(
        self, params: Mapping[str, Any], batch: Mapping[str, Any], *, state: Any, key: Any, train: bool
    ) -> jax.Array:
        """As :func:`capibara.core.preferences.pair_log_probs`.

        Raises:
            InputError: it is differentiated.
        """
        import jax

        check_targets(batch["tokens"].shape)

        def log_probs(params: Any, given: Any, state: Any, key: Any) -> Any:
            rows, targets = given
            run = self._mapped("sums", "segments" in rows, train, 3, lambda whole, own: whole)
            return -self._uncut(run(None, None, *_divided(params), state, rows, targets, key))

        def refuse(*_: Any) -> Any:
            raise InputError(
                "pair_log_probs: got a derivative over the mesh axis 'pipeline', expected the values alone. "
                "Differentiate model.loss, or use other axes"
            )

        with self.backend.scope():
            function = jax.custom_vjp(log_probs)
            function.defvjp(refuse, refuse)
            return function(dict(params), jax.vmap(self._prepared)(self.cut(batch)), state, key)

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``[batch, …]`` as ``[microbatches, …]``: at most twice as many as stages, as the data axes allow."""
        import jax
        import numpy as np

        rows, data = np.shape(batch["tokens"])[0], self._data
        each = rows // data if rows % data == 0 else 1
        count = max(n for n in range(1, 2 * self.stages + 1) if each % n == 0)
        # Each microbatch has rows of all devices along the data axes: none is moved.
        return jax.tree.map(
            lambda a: (
                a.reshape(data, count, -1, *a.shape[1:]).swapaxes(0, 1).reshape(count, -1, *a.shape[1:])
                if count > 1
                else a[None]
            ),
            dict(batch),
        )

    def _uncut(self, found: Any) -> Any:
        """``[microbatches, …]`` as ``[batch, …]``, in the order of the rows that :meth:`cut` was given."""
        count, each = found.shape[:2]
        if count == 1:
            return found[0]
        apart = found.reshape(count, self._data, each // self._data, *found.shape[2:])
        return apart.swapaxes(0, 1).reshape(count * each, *found.shape[2:])

    @property
    def _data(self) -> int:
        """Devices that have rows of their own."""
        return math.prod(self.mesh.shape.get(axis, 1) for axis in ("data", "fsdp", "expert"))

    def _prepared(self, batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of one microbatch the inputs of the model, and the targets with their weights."""
        texts = texts_of(without_reference(batch) if self.pairs else batch)
        weights = texts.target_weights()
        targets = {"tokens": texts.tokens[:, 1:]} | ({} if weights is None else {"weights": weights})
        rows = texts.without_last().inputs()
        if self.pairs:
            targets["segments"] = texts.segments[:, 1:]
            rows |= {name: batch[name] for name in ("reference",) if name in batch}
        return rows, targets

    def _mapped(self, method: str, ragged: bool, train: bool, more: int, specs: Any) -> Any:
        """A method of the pipeline, over the devices of the stages.

        The function has the arguments ``(outer, blocks, *others, state, …)``: parameters that are differentiated, and
        the others, both as :func:`_divided` gives them, with ``None`` for those that are not among them.

        Args:
            more: how many arguments come after the state; all devices get them whole.
            specs: ``(whole, own) ->`` the specifications of what the method gives.
        """
        import jax
        from jax.sharding import PartitionSpec

        def run(outer: Any, blocks: Any, others: Any, other_blocks: Any, *rest: Any) -> Any:
            return getattr(self._pipeline(ragged, train, others, other_blocks), method)(outer, blocks, *rest)

        whole, own = PartitionSpec(), PartitionSpec(AXIS)
        mapped = jax.shard_map(
            run,
            mesh=self.mesh if jax.sharding.get_abstract_mesh().empty else None,
            in_specs=(whole, own, whole, own, own, *(whole for _ in range(more))),
            out_specs=specs(whole, own),
            axis_names={axis for axis, size in self.mesh.shape.items() if axis == AXIS or size == 1},
            check_vma=False,  # nothing is differentiated through it
        )
        return jax.jit(mapped, inline=True)

    def _differentiated(self, train: bool, *given: Any) -> Any:
        """:meth:`_run` of what ``jax.custom_vjp`` gives with ``symbolic_zeros``."""
        import jax

        wanted = jax.tree.map(lambda leaf: leaf.perturbed, given[0])
        return self._run(train, wanted, *jax.tree.map(lambda leaf: leaf.value, given))

    def _run(self, train: bool, wanted: Any, params: Any, given: Any, state: Any, key: Any) -> Any:
        """``(loss, state, metrics)``; with ``wanted`` also gradients.

        Args:
            wanted: nested like the parameters, whether there is to be a gradient of each; None: of none.
        """
        import jax
        import jax.numpy as jnp

        from capibara.ops.collective.pipeline import Sums

        rows, targets = given
        ragged = "segments" in rows
        weights = targets.get("weights")
        count = targets["tokens"].shape[0]
        if self.pairs or weights is None:
            share = jnp.full((count,), 1 / count, jnp.float32)
            each = targets["tokens"].shape[:2] if self.pairs else targets["tokens"].shape
            scale = jnp.float32(1 / math.prod(each))
        else:
            sums = jnp.sum(weights, axis=(1, 2), dtype=jnp.float32)
            total = jnp.sum(sums)
            scale = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
            share = sums * scale
        part, rest = None, params
        if wanted is not None:
            part = jax.tree.map(lambda leaf, of: leaf if of else None, params, wanted)
            rest = jax.tree.map(lambda leaf, of: None if of else leaf, params, wanted)

        def specs(whole: Any, own: Any) -> Any:
            sums = Sums(whole, whole, own, whole)
            return sums if part is None else (sums, whole, own)

        run = self._mapped("losses" if part is None else "gradients", ragged, train, 5, specs)
        found = run(*_divided(part), *_divided(rest), state, rows, targets, scale, share, key)
        sums, *gradients = (found,) if part is None else found
        wide = self.config.precision.accumulate_dtype
        value, after = sums.total.astype(wide), sums.state
        if self.pairs:
            # As without stages, their loss is that of answers alone, and leaves the state as it was.
            metrics = mean_scores(sums.scores, weights, targets["segments"])
            metrics = {name: each.astype(wide) for name, each in metrics.items()}
            after = state
        else:
            metrics = {"cross_entropy": value}
        if not self.pairs and "auxiliary_loss" in sums.extras:
            value = value + sums.extras["auxiliary_loss"].astype(value.dtype)
            kinds = self.config.model.block_kinds.count("vq")
            metrics["auxiliary_loss"] = sums.extras["auxiliary_loss"]
            metrics["codebook_perplexity"] = sums.extras["perplexity"] / kinds
            metrics["codebook_usage"] = sums.extras["usage"] / kinds
        out = value, after, metrics
        if part is None:
            return out
        of_outer, of_blocks = gradients
        of_params = jax.tree.map(lambda g, p: g.astype(p.dtype), {**of_outer, **of_blocks}, part)
        return out, of_params

    def _pipeline(self, ragged: bool, train: bool, others: Any, other_blocks: Any) -> Any:
        """The pipeline of a part of the parameters; ``others`` and ``other_blocks`` are not differentiated."""
        import jax
        import jax.numpy as jnp

        from capibara.ops.collective.pipeline import Pipeline

        entry, stage = self._part("entry", ragged), self._part("stage", ragged)
        own = {path[0] for path in entry.params}

        def enter(outer: Any, rows: Any, key: Any) -> Any:
            params = {name: value for name, value in joined(outer, others).items() if name in own}
            inputs = {name: rows[name] for name in entry.input_keys}
            return entry.apply(params, inputs, key=key, train=train)["output"]

        def run(blocks: Any, x: Any, rows: Any, state: Any, key: Any) -> Any:
            inputs, states = _with_stream(stage, x, state)
            inputs |= {name: rows[name] for name in stage.input_keys if name != "stream"}
            params = joined(blocks, other_blocks)
            out, after = stage.apply(params, inputs, state=states, key=key, train=train)
            after = {name: value for name, value in after.items() if name != "stream"}
            if self.pairs:
                after = state  # it stays what it was, for the next microbatch too
            extras = {name: jnp.float32(out[name]) for name in _EXTRAS if name in out}
            return out["output"], after, extras

        def place(what: str, tree: Any) -> Any:
            if what == "x":
                names = (None,) * (tree.ndim - 3) + ("batch", "sequence", "embed")
                return constrain(tree, names, self.mesh, self.backend.rules)
            axes = self._axes
            axes = {name: axes[name] for name in tree}
            return jax.tree.map(self._place_one, tree, axes, is_leaf=lambda leaf: leaf is None)

        def leave(outer: Any, x: Any, targets: Any) -> Any:
            return self._leave(joined(outer, others), x, targets)

        def score(sums: Any, rows: Any) -> Any:
            return pair_scores(-sums, rows["reference"], self.config.finetune.beta)

        counted = "auxiliary_loss" if "vq" in self.config.model.block_kinds and not self.pairs else None
        return Pipeline(AXIS, enter, run, leave, counted, place, score if self.pairs else None)

    @property
    def _axes(self) -> dict[str, Any]:
        axes: dict[str, Any] = {}
        for part, flag in (("entry", False), ("exit", True), ("stage", False)):
            axes |= self._part(part, flag).param_axes
        return axes

    def _place_one(self, array: Any, names: Any) -> Any:
        import jax

        free = free_axes(self.mesh)
        if array is None or free is None or not names:
            return array
        spec = self.backend.rules.spec(names, free, array.shape)
        return jax.lax.with_sharding_constraint(array, spec)

    def _leave(self, outer: Any, x: Any, targets: Any) -> Any:
        """The sum of the losses of the tokens of ``x``, weighted; of pairs those of both answers of each."""
        import jax
        import jax.numpy as jnp

        tokens, weights = targets["tokens"], targets.get("weights")
        parts = parts_of(self.config, tokens, self.backend.mesh, self.backend.rules)
        exit = self._part("exit", parts is None)
        own = {path[0] for path in exit.params}
        inputs, states = _with_stream(exit, x, {})
        if "table" in exit.input_keys:
            inputs["table"] = outer["embedding"]["weight"]
        params = {name: value for name, value in outer.items() if name in own}
        out, _ = exit.apply(params, inputs, state=states)
        if parts is None:
            logits = out["logits"]
            # Without a gather, which XLA cannot split over a part of a mesh with three axes.
            own_entry = jnp.arange(logits.shape[-1]) == tokens[..., None]
            chosen = jnp.sum(jnp.where(own_entry, logits, 0), axis=-1)
            losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        elif self.pairs:
            losses = losses_of(self.config, outer, out["hidden"], tokens, parts)
        else:
            return total_loss(self.config, outer, out["hidden"], tokens, parts, weights=weights)
        if self.pairs:
            return answer_sums(losses, weights, targets["segments"])
        if weights is None:
            return jnp.sum(losses)
        # Not 0 times the loss: it may be infinite where nothing is to be predicted.
        return jnp.sum(jnp.where(weights == 0, 0, losses * weights.astype(losses.dtype)))


def _divided(params: Any) -> tuple[Any, Any]:
    """The parameters outside of the blocks, and those of the blocks; of None, None."""
    if params is None:
        return None, None
    outer = {name: value for name, value in params.items() if name != "blocks"}
    return outer, {"blocks": params["blocks"]}


def _with_stream(
    part: CompiledModel, x: Any, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs and the states of a part that is given the residual stream."""
    if "stream" in part.input_keys:
        return {"stream": x}, dict(state)
    return {}, {**state, "stream": x}


def _pull(gradients: Any, cotangents: Any) -> Any:
    import jax
    from jax.custom_derivatives import SymbolicZero

    of_loss = cotangents[0]
    if isinstance(of_loss, SymbolicZero):
        return None, None, None, None
    return jax.tree.map(lambda g: (g * of_loss).astype(g.dtype), gradients), None, None, None
