"""Prefill and decoding of a configuration, lowered for devices that need not be present.

Both are the model's own cached form (:meth:`capibara.core.ModularCapibaraModel.decode`) followed by greedy sampling,
and the cache is donated: the memory is that of a server with one cache for all of its requests. Parameters are
replicated along the ``data`` axis, because gathering them for every token would cost more than the token; the cache's
rows are sharded over ``data`` and its heads over ``model``.

The cached form counts positions once for all rows, so the rows of a batch start together. Prompts are read a few rows
at a time (a *group*), into a small cache whose rows are then copied into the large one: the activation memory of a
long prompt does not grow with the batch.

One array holds the caches of all layers, and each layer writes its rows of a token in place
(:mod:`capibara.compose.backends.jax_stacked`): the compiled step has the cache once and makes no large copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from capibara.compose.physical.specs import nest
from capibara.plan.errors import PlanError
from capibara.plan.workloads.workload import Workload

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from capibara.config import AxisRules, ModularModelConfig
    from capibara.core import ModularCapibaraModel

__all__ = [
    "lower_decode",
    "lower_prefill",
    "serving_config",
    "serving_rules",
]


def serving_config(config: ModularModelConfig, dtype: str) -> ModularModelConfig:
    """The configuration with weights, arithmetic and cache in ``dtype``, and without its own devices."""
    precision = config.precision.replace(param_dtype=dtype, compute_dtype=dtype)
    return config.replace(precision=precision, tpu=config.tpu.replace(enabled=False))


def serving_rules() -> AxisRules:
    """The usual rules, with parameters replicated along ``data``."""
    from capibara.sharding import Layout

    return Layout(mesh=(("data", 1),), parameters="replicated").rules


def lower_decode(
    mesh: Mesh,
    *,
    config: Mapping[str, Any],
    dtype: str,
    rows: int,
    cache_length: int,
) -> Workload:
    """Lower one decoding step: one token for every row.

    Args:
      mesh: devices, real or abstract.
      config: as ``ModularModelConfig.to_dict()``.
      dtype: of weights, arithmetic and cache.
      rows: of the batch, on all devices together; a multiple of the ``data`` axis.
      cache_length: length of the cache: tokens of prompt and answer.

    Raises:
      PlanError: the rows cannot be divided.
    """
    import jax
    import jax.numpy as jnp

    served = _Served(mesh, config, dtype)
    served.check(rows, "rows")
    model = served.model

    def step(params: Any, state: Any, cache: Any, tokens: Any) -> Any:
        logits, after = model.decode(params, tokens, cache, state=state)
        chosen = jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32)
        return chosen, after

    cache, tokens = served.cache(rows, cache_length), served.tokens(rows, 1)
    out = (tokens.sharding, jax.tree.map(lambda leaf: leaf.sharding, cache))
    jitted = jax.jit(step, donate_argnums=(2, 3), out_shardings=out)
    lowered = jitted.lower(served.params, served.state, cache, tokens)
    return Workload(lowered, served.kinds(cache=cache, batch=tokens))


def lower_prefill(
    mesh: Mesh,
    *,
    config: Mapping[str, Any],
    dtype: str,
    rows: int,
    group: int,
    prompt_length: int,
    cache_length: int,
) -> Workload:
    """Lower the reading of ``group`` prompts into their places in a cache of ``rows`` rows.

    Args:
      mesh, config, dtype, rows, cache_length: as :func:`lower_decode`.
      group: prompts read at once, on all devices together; a multiple of the ``data`` axis.
      prompt_length: tokens of each.

    Raises:
      PlanError: rows or group cannot be divided, or the group is larger than the batch.
    """
    import jax
    import jax.numpy as jnp

    served = _Served(mesh, config, dtype)
    served.check(rows, "rows")
    served.check(group, "group")
    if group > rows:
        raise PlanError(f"group={group} prompts are more than the rows={rows} of the cache")
    model = served.model
    large, small = served.cache(rows, cache_length), served.cache(group, cache_length)
    axes = served.batch_axes()
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, large)

    def insert(large: Any, small: Any, place: Any) -> Any:
        """Each device copies its rows of the small cache into its rows of the large one."""

        def one(axis: int, here: Any, new: Any) -> Any:
            if axis < 0:  # the position: the same for all rows
                return new
            return jax.lax.dynamic_update_slice_in_dim(here, new, place * new.shape[axis], axis)

        return jax.tree.map(one, axes, large, small)

    whole = jax.sharding.PartitionSpec()
    placed = jax.shard_map(insert, mesh=mesh, in_specs=(specs, specs, whole), out_specs=specs)

    def step(params: Any, state: Any, cache: Any, tokens: Any, place: Any) -> Any:
        fresh = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), small)
        logits, filled = model.decode(params, tokens, fresh, state=state)
        first = jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32)
        return first, placed(cache, filled, place)

    tokens = served.tokens(group, prompt_length)
    place = jax.ShapeDtypeStruct((), "int32", sharding=served.whole)
    out = (served.tokens(group, 1).sharding, jax.tree.map(lambda leaf: leaf.sharding, large))
    jitted = jax.jit(step, donate_argnums=2, out_shardings=out)
    lowered = jitted.lower(served.params, served.state, large, tokens, place)
    return Workload(lowered, served.kinds(cache=large, batch=[tokens, place]))


class _Served:
    """A model on a mesh, and descriptions of what its steps take."""

    def __init__(self, mesh: Mesh, config: Mapping[str, Any], dtype: str) -> None:
        from jax.sharding import NamedSharding, PartitionSpec

        from capibara.config import ModularModelConfig
        from capibara.core import ModularCapibaraModel

        settings = serving_config(ModularModelConfig.from_dict(config), dtype)
        self.mesh, self.rules = mesh, serving_rules()
        self.model: ModularCapibaraModel = ModularCapibaraModel(settings, mesh=mesh, rules=self.rules)
        self.whole = NamedSharding(mesh, PartitionSpec())
        compiled = self.model.compiled
        self.params = nest({path: self._described(s, "parameters") for path, s in compiled.params.items()})
        self.state = nest({path: self._described(s, "parameters") for path, s in compiled.states.items()})

    def _described(self, spec: Any, kind: Any, free: Mapping[str, int] | None = None) -> Any:
        import jax
        from jax.sharding import NamedSharding

        shape = spec.sizes(free or {}, "an array of the model")
        where = self.rules.spec(spec.axes or (None,) * len(shape), self.mesh, shape, kind=kind)
        return jax.ShapeDtypeStruct(shape, spec.dtype, sharding=NamedSharding(self.mesh, where))

    def check(self, count: int, name: str) -> None:
        data = dict(self.mesh.shape).get("data", 1)
        if count < 1 or count % data:
            raise PlanError(f"{name}={count} must be a multiple of the {data} devices along 'data'")

    def _cache_specs(self) -> dict[tuple[str, ...], Any]:
        mine = self.model.compiled.states
        return {path: spec for path, spec in self.model.decoder.states.items() if path not in mine}

    def cache(self, rows: int, length: int) -> Any:
        """The cache, rows over ``data`` and heads over ``model``."""
        free = {"batch": rows, "cache": length}
        specs = self._cache_specs().items()
        return nest({path: self._described(spec, "activations", free) for path, spec in specs})

    def batch_axes(self) -> Any:
        """The number of the dimension of rows in each array of the cache, -1 where there is none."""

        def axis(spec: Any) -> int:
            shape: tuple[Any, ...] = spec.shape or ()
            return shape.index("batch") if "batch" in shape else -1

        return nest({path: axis(spec) for path, spec in self._cache_specs().items()})

    def tokens(self, rows: int, length: int) -> Any:
        """Tokens, rows over ``data``."""
        import jax
        from jax.sharding import NamedSharding

        where = self.rules.spec(("batch", None), self.mesh, (rows, length), kind="activations")
        return jax.ShapeDtypeStruct((rows, length), "int32", sharding=NamedSharding(self.mesh, where))

    def kinds(self, **more: Any) -> dict[str, Any]:
        kinds = {"parameters": self.params, "model state": self.state, **more}
        return {kind: tree for kind, tree in kinds.items() if tree}
