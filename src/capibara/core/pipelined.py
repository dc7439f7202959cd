"""The loss of a language model whose blocks are divided among the devices of the mesh axis ``pipeline``.

The model is cut into what comes before its blocks, a stage of them, and what comes after; the schedule is
:mod:`capibara.ops.collective.pipeline`. It computes loss and gradients at once, so that a loss which is differentiated
has its gradients already.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from capibara.compose import CompiledModel, compile
from capibara.compose.backends.meshes import free_axes
from capibara.compose.physical.explicit import automatic_mesh
from capibara.compose.physical.sharding import constrain
from capibara.config import ModularModelConfig
from capibara.core.decoder import build_entry, build_exit, build_stage, groups_of
from capibara.core.loss import parts_of, total_loss
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
    if config.finetune.objective == "dpo":
        raise ConfigError(
            f"{said}and finetune.objective=dpo compares pairs of answers, for which there is no pipeline. Use the axes "
            "data, fsdp or model"
        )
    if config.finetune.method != "full":
        raise ConfigError(
            f"{said}and finetune.method={config.finetune.method} trains adapters alone, for which there is no "
            "pipeline. Use the axes data, fsdp or model"
        )
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
        check_stages(config, self.stages)
        self._part = cache(self._compiled)

    def _compiled(self, part: str, flag: bool) -> CompiledModel:
        model = self.config.model
        built = {
            "entry": lambda: build_entry(model, ragged=flag),
            "stage": lambda: build_stage(model, self.stages, ragged=flag),
            "exit": lambda: build_exit(model, head=flag),
        }[part]()
        return compile(built, self.backend)

    def __call__(
        self, params: Mapping[str, Any], batch: Mapping[str, Any], *, state: Any, key: Any, train: bool
    ) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]:
        """As :meth:`~capibara.core.ModularCapibaraModel.loss`, for arrays ``[microbatches, batch, sequence + 1]``.

        The loss is the mean over microbatches, each of which counts as much as its tokens do.
        """
        import jax

        check_targets(batch["tokens"].shape[1:])
        with self.backend.scope():
            given = jax.vmap(_prepared)(dict(batch))
            loss = jax.custom_vjp(partial(self._run, train, False))
            loss.defvjp(partial(self._run, train, True), _pull)
            value, after, metrics = loss(dict(params), given, state, key)
        return value, (after, metrics)

    def cut(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """``[batch, …]`` as ``[microbatches, …]``: at most twice as many as stages, as the data axes allow."""
        import jax
        import numpy as np

        rows = np.shape(batch["tokens"])[0]
        sizes = self.mesh.shape
        data = math.prod(sizes.get(axis, 1) for axis in ("data", "fsdp", "expert"))
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

    def _run(self, train: bool, back: bool, params: Any, given: Any, state: Any, key: Any) -> Any:
        import jax
        import jax.numpy as jnp
        from jax.sharding import PartitionSpec

        rows, targets = given
        ragged = "segments" in rows
        weights = targets.get("weights")
        count = targets["tokens"].shape[0]
        if weights is None:
            share = jnp.full((count,), 1 / count, jnp.float32)
            scale = jnp.float32(1 / targets["tokens"].size)
        else:
            sums = jnp.sum(weights, axis=(1, 2), dtype=jnp.float32)
            total = jnp.sum(sums)
            scale = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
            share = sums * scale
        blocks = {"blocks": params["blocks"]}
        outer = {name: value for name, value in params.items() if name != "blocks"}
        pipeline = self._pipeline(ragged, train)
        whole, own = PartitionSpec(), PartitionSpec(AXIS)
        sums_of = type_of_sums(whole, own)
        names = {axis for axis, size in self.mesh.shape.items() if axis == AXIS or size == 1}
        mapped = jax.shard_map(
            pipeline.gradients if back else pipeline.losses,
            mesh=self.mesh if jax.sharding.get_abstract_mesh().empty else None,
            in_specs=(whole, own, own, whole, whole, whole, whole, whole),
            out_specs=(sums_of, whole, own) if back else sums_of,
            axis_names=names,
            check_vma=False,  # nothing is differentiated through it
        )
        found = jax.jit(mapped, inline=True)(outer, blocks, state, rows, targets, scale, share, key)
        sums, *gradients = found if back else (found,)
        metrics = {"cross_entropy": sums.total.astype(self.config.precision.accumulate_dtype)}
        value = metrics["cross_entropy"]
        if "auxiliary_loss" in sums.extras:
            value = value + sums.extras["auxiliary_loss"].astype(value.dtype)
            kinds = self.config.model.block_kinds.count("vq")
            metrics["auxiliary_loss"] = sums.extras["auxiliary_loss"]
            metrics["codebook_perplexity"] = sums.extras["perplexity"] / kinds
            metrics["codebook_usage"] = sums.extras["usage"] / kinds
        out = value, sums.state, metrics
        if not back:
            return out
        of_outer, of_blocks = gradients
        of_params = jax.tree.map(lambda g, p: g.astype(p.dtype), {**of_outer, **of_blocks}, dict(params))
        return out, of_params

    def _pipeline(self, ragged: bool, train: bool) -> Any:
        import jax
        import jax.numpy as jnp

        from capibara.ops.collective.pipeline import Pipeline

        entry, stage = self._part("entry", ragged), self._part("stage", ragged)
        own = {path[0] for path in entry.params}

        def enter(outer: Any, rows: Any, key: Any) -> Any:
            params = {name: value for name, value in outer.items() if name in own}
            inputs = {name: rows[name] for name in entry.input_keys}
            return entry.apply(params, inputs, key=key, train=train)["output"]

        def run(blocks: Any, x: Any, rows: Any, state: Any, key: Any) -> Any:
            inputs, states = _with_stream(stage, x, state)
            inputs |= {name: rows[name] for name in stage.input_keys if name != "stream"}
            out, after = stage.apply(blocks, inputs, state=states, key=key, train=train)
            after = {name: value for name, value in after.items() if name != "stream"}
            extras = {name: jnp.float32(out[name]) for name in _EXTRAS if name in out}
            return out["output"], after, extras

        def place(what: str, tree: Any) -> Any:
            if what == "x":
                names = (None,) * (tree.ndim - 3) + ("batch", "sequence", "embed")
                return constrain(tree, names, self.mesh, self.backend.rules)
            axes = self._axes
            axes = {name: axes[name] for name in tree}
            return jax.tree.map(self._place_one, tree, axes)

        counted = "auxiliary_loss" if "vq" in self.config.model.block_kinds else None
        return Pipeline(AXIS, enter, run, self._leave, counted, place)

    @property
    def _axes(self) -> dict[str, Any]:
        axes: dict[str, Any] = {}
        for part, flag in (("entry", False), ("exit", True), ("stage", False)):
            axes |= self._part(part, flag).param_axes
        return axes

    def _place_one(self, array: Any, names: Any) -> Any:
        import jax

        free = free_axes(self.mesh)
        if free is None or not names:
            return array
        spec = self.backend.rules.spec(names, free, array.shape)
        return jax.lax.with_sharding_constraint(array, spec)

    def _leave(self, outer: Any, x: Any, targets: Any) -> Any:
        """The sum of the losses of the tokens of ``x``, weighted."""
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
        if parts is not None:
            return total_loss(self.config, outer, out["hidden"], tokens, parts, weights=weights)
        logits = out["logits"]
        # Without a gather, which XLA cannot split over a part of a mesh with three axes.
        own_entry = jnp.arange(logits.shape[-1]) == tokens[..., None]
        chosen = jnp.sum(jnp.where(own_entry, logits, 0), axis=-1)
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        if weights is None:
            return jnp.sum(losses)
        # Not 0 times the loss: it may be infinite where nothing is to be predicted.
        return jnp.sum(jnp.where(weights == 0, 0, losses * weights.astype(losses.dtype)))


def _with_stream(
    part: CompiledModel, x: Any, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inputs and the states of a part that is given the residual stream."""
    if "stream" in part.input_keys:
        return {"stream": x}, dict(state)
    return {}, {**state, "stream": x}


def type_of_sums(whole: Any, own: Any) -> Any:
    """The shardings of what a pipeline gives: the state is divided as the stages are."""
    from capibara.ops.collective.pipeline import Sums

    return Sums(whole, whole, own)


def _prepared(batch: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of one microbatch the inputs of the model, and the targets with their weights."""
    texts = texts_of(batch)
    weights = texts.target_weights()
    targets = {"tokens": texts.tokens[:, 1:]} | ({} if weights is None else {"weights": weights})
    return texts.without_last().inputs(), targets


def _pull(gradients: Any, cotangents: Any) -> Any:
    import jax

    of_loss = cotangents[0]
    return jax.tree.map(lambda g: (g * of_loss).astype(g.dtype), gradients), None, None, None
