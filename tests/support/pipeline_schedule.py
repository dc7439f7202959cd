"""The schedule of a pipeline of plain functions on emulated devices, against the same layers one after another."""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from capibara.ops.collective.pipeline import Pipeline, Sums

WIDTH, LAYERS = 6, 12
KEY = jax.random.key(3)


def enter(outer: Any, rows: Any, key: Any) -> Any:
    return outer["table"][rows["tokens"]] + outer["shift"]


def stage(blocks: Any, x: Any, rows: Any, state: Any, key: Any) -> Any:
    """Layers that read a running sum, which each microbatch of each layer adds to."""

    def layer(x: Any, own: Any) -> Any:
        w, seen = own
        x = x + jnp.tanh(x @ w + seen + rows["tokens"][..., None] * 0.01)
        return x, (jnp.mean(jnp.square(x)), seen + jax.lax.stop_gradient(jnp.mean(x)))

    x, (squares, seen) = jax.lax.scan(layer, x, (blocks["w"], state["seen"]))
    extras = jnp.sum(squares)
    return x, {"seen": seen}, {"penalty": extras, "told": 2 * extras}


def leave(outer: Any, x: Any, targets: Any) -> Any:
    return jnp.sum(
        targets["weights"]
        * jnp.square(x @ outer["head"] @ outer["table"].T - targets["value"][..., None]).mean(-1)
    )


def leave_rows(outer: Any, x: Any, targets: Any) -> Any:
    """Of each row two sums over its positions, for :func:`score`."""
    squares = jnp.square(x @ outer["head"] @ outer["table"].T - targets["value"][..., None]).mean(-1)
    return jnp.stack([jnp.sum(targets["weights"] * squares, 1), jnp.sum(jnp.tanh(squares), 1)], 1)


def score(sums: Any, rows: Any) -> Any:
    """A loss that is not a sum over positions, and that reads something of each row."""
    ratio = jnp.log(1 + sums[:, 0] * rows["level"] / (1 + sums[:, 1]))
    return jnp.sum(ratio**2), {"ratio": jnp.sum(ratio), "high": jnp.sum(ratio > 3.75, dtype=jnp.float32)}


def plain_scored(params: Any, state: Any, rows: Any, targets: Any, scale: Any, share: Any) -> Any:
    """As :func:`plain`, of the other loss; also the sums."""
    outer, blocks = params
    total = penalty = 0.0
    scores = {"ratio": 0.0, "high": 0.0}
    sums = []
    for n in range(share.shape[0]):
        row, target = (jax.tree.map(lambda a: a[n], tree) for tree in (rows, targets))  # noqa: B023
        x, state, extras = stage(blocks, enter(outer, row, None), row, state, None)
        sums.append(leave_rows(outer, x, target))
        loss, found = score(sums[-1], row)
        total += scale * loss
        penalty += share[n] * extras["penalty"]
        scores = {name: scores[name] + value for name, value in found.items()}
    return total + penalty, (total, scores, state, jnp.stack(sums))


def plain(params: Any, state: Any, rows: Any, targets: Any, scale: Any, share: Any) -> Any:
    outer, blocks = params
    total = penalty = told = 0.0
    for n in range(share.shape[0]):
        row, target = (jax.tree.map(lambda a: a[n], tree) for tree in (rows, targets))  # noqa: B023
        x, state, extras = stage(blocks, enter(outer, row, None), row, state, None)
        total += scale * leave(outer, x, target)
        penalty += share[n] * extras["penalty"]
        told += share[n] * extras["told"]
    return total + penalty, (total, penalty, told, state)


def problem(count: int, positions: int) -> Any:
    random = np.random.default_rng(count)

    def draw(*shape: int) -> Any:
        return random.normal(size=shape).astype("float32")

    outer = {"table": draw(5, WIDTH), "shift": draw(WIDTH), "head": draw(WIDTH, WIDTH)}
    blocks = {"w": draw(LAYERS, WIDTH, WIDTH) / 3}
    rows = {
        "tokens": random.integers(0, 5, (count, 2, positions)).astype("int32"),
        "level": np.abs(draw(count, 2)),
    }
    targets = {"value": draw(count, 2, positions), "weights": np.abs(draw(count, 2, positions))}
    share = np.abs(draw(count))
    return outer, blocks, {"seen": draw(LAYERS)}, rows, targets, np.float32(0.3), share


def mapped(stages: int, function: str, specs: Any, *, scored: bool = False) -> Any:
    pipeline = Pipeline("pipeline", enter, stage, leave, counted="penalty")
    if scored:
        pipeline = Pipeline("pipeline", enter, stage, leave_rows, counted="penalty", score=score)
    mesh = Mesh(np.array(jax.devices()[:stages]), ("pipeline",))
    own, whole = PartitionSpec("pipeline"), PartitionSpec()
    run = getattr(pipeline, function)
    return jax.jit(
        jax.shard_map(
            lambda *arrays: run(*arrays, KEY),
            mesh=mesh,
            in_specs=(whole, own, own, *(whole for _ in range(2 if function == "sums" else 4))),
            out_specs=specs(Sums(whole, whole, own, whole), whole, own),
            check_vma=False,
        )
    )


def gap(a: Any, b: Any) -> float:
    pairs = zip(jax.device_get(jax.tree.leaves(a)), jax.device_get(jax.tree.leaves(b)), strict=True)
    return max(float(np.max(np.abs(x - y)) / (1 + np.max(np.abs(y)))) for x, y in pairs)


def compared(problems: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for stages, count, positions in problems:
        outer, blocks, state, *rest = problem(count, positions)
        (_, aux), wanted = jax.jit(jax.value_and_grad(plain, has_aux=True))((outer, blocks), state, *rest)
        sums, *gradients = mapped(stages, "gradients", lambda *s: s)(outer, blocks, state, *rest)
        only = mapped(stages, "losses", lambda *s: s[0])(outer, blocks, state, *rest)
        seen = [(s.total, s.extras["penalty"], s.extras["told"], s.state) for s in (sums, only)]
        found = [gap(tuple(gradients), wanted), *(gap(each, aux) for each in seen)]
        out[f"{stages} stages, {count} microbatches of {positions}"] = max(found)
        (_, (*aux, each)), wanted = jax.jit(jax.value_and_grad(plain_scored, has_aux=True))(
            (outer, blocks), state, *rest
        )
        sums, *gradients = mapped(stages, "gradients", lambda *s: s, scored=True)(outer, blocks, state, *rest)
        only = mapped(stages, "losses", lambda *s: s[0], scored=True)(outer, blocks, state, *rest)
        rows, targets, *_ = rest
        rows = {"tokens": rows["tokens"]}  # without what the score alone reads
        alone = mapped(stages, "sums", lambda *s: s[1], scored=True)(outer, blocks, state, rows, targets)
        assert aux[1]["high"] > 0
        seen = [(s.total, s.scores, s.state) for s in (sums, only)]
        found = [gap(tuple(gradients), wanted), *(gap(one, tuple(aux)) for one in seen), gap(alone, each)]
        out[f"{stages} stages, {count} microbatches of {positions}, of rows"] = max(found)
    return out


def memory() -> dict[str, Any]:
    """Temporary bytes of few and of many microbatches."""
    found = []
    for count in (8, 64):
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), problem(count, 512))
        compiled = mapped(4, "gradients", lambda *s: s).lower(*shapes).compile()
        found.append(compiled.memory_analysis().temp_size_in_bytes)
        permutes = compiled.as_text().count("collective-permute")
    return {"bytes": found, "input": 2 * 512 * WIDTH * 4, "permutes": permutes}


if __name__ == "__main__":
    print("RESULT", json.dumps({"gaps": compared(json.loads(sys.argv[1])), "memory": memory()}))
