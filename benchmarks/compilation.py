"""What functions with programs of their own cost per call, and what a packed program saves before the first step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Rows with the ratio of times, ``jax.jit`` / Capibara: above 1 is faster than ``jax.jit``."""
    return [_calls(100 * rounds), _first_step(rounds)]


def _calls(rounds: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from capibara.compilation import create_tpu_optimized_jit
    from capibara.measure import interleaved

    def step(state: Any, x: Any) -> Any:
        return jax.tree.map(lambda w: w + x.sum(), state)

    state, x = {f"w{number}": jnp.ones((4, 4)) for number in range(100)}, jnp.ones((8, 32))
    plain, ours = jax.jit(step), create_tpu_optimized_jit(step)
    functions = {
        "jax.jit": lambda: jax.block_until_ready(plain(state, x)),
        "create_tpu_optimized_jit": lambda: jax.block_until_ready(ours(state, x)),
    }
    table = interleaved(functions, rounds, 1)
    print(table)
    return _row(table, "call with 101 arrays of 16 to 256 elements", "jax.jit", "create_tpu_optimized_jit")


def _first_step(rounds: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from capibara.compilation import create_tpu_optimized_jit, load_program, pack_program
    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel
    from capibara.measure import interleaved

    model = ModularCapibaraModel(ModularModelConfig.from_toml("demo"))
    params, state = model.init(0)
    batch = {"tokens": jnp.ones((2, 65), jnp.int32)}

    def new() -> Any:
        jax.clear_caches()

        def step(params: Any, batch: Any) -> Any:
            return jax.value_and_grad(lambda p: model.loss(p, batch, state=state, train=False)[0])(params)

        return create_tpu_optimized_jit(step)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.caprog"
        pack_program(path, new(), (params, batch))

        def load() -> Any:
            step = new()
            load_program(path, step, (params, batch))
            return jax.block_until_ready(step(params, batch))

        table = interleaved(
            {"compile": lambda: jax.block_until_ready(new()(params, batch)), "load_program": load}, rounds, 1
        )
    print(table)
    return _row(
        table,
        "first step of the demo's model, forward and backward, traced and loaded",
        "compile",
        "load_program",
    )


def _row(table: Any, what: str, peer: str, ours: str) -> dict[str, Any]:
    return {"what": what, "peer": peer, "ratio": table.ratio(peer, ours), "seconds": table[ours].median}


if __name__ == "__main__":
    for row in run():
        print(row)
