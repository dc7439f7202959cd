"""What depth costs before the first step: building, tracing and compiling a repeated block.

Scanned, a block of 64 repetitions must compile in the time of 4; the ratio says how nearly.
"""

from __future__ import annotations

from typing import Any

__all__ = ["run"]


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Rows with the ratio of compile times, 4 blocks / 64 blocks: 0.77 is 30 % more for 64."""
    import jax
    import jax.numpy as jnp

    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel
    from capibara.measure import interleaved

    def compiled(kind: str, count: int) -> Any:
        config = ModularModelConfig.from_toml(
            "demo",
            overrides=[f"model.pattern=[{kind!r}]", f"model.num_layers={count}", "model.scan_layers=scan"],
        )

        def build() -> Any:
            jax.clear_caches()
            model = ModularCapibaraModel(config)
            params, state = jax.eval_shape(lambda: model.init(0))
            batch = {"tokens": jax.ShapeDtypeStruct((2, 65), jnp.int32)}
            key = jax.eval_shape(lambda: jax.random.key(0))
            step = jax.jit(jax.grad(lambda p, s, b, k: model.loss(p, b, state=s, key=k)[0]))
            step.lower(params, state, batch, key).compile()

        return build

    rows = []
    for kind in ("attention", "ssm", "vq"):
        functions = {f"{count} {kind} blocks": compiled(kind, count) for count in (4, 64)}
        table = interleaved(functions, rounds, 1)
        print(table)
        few, many = functions
        rows.append(
            {
                "what": f"trace and compile, forward and backward, scanned {kind}",
                "shape": "64 blocks",
                "peer": "4 blocks",
                "ratio": table.ratio(few, many),
                "seconds": table[many].median,
            }
        )
    return rows


if __name__ == "__main__":
    for row in run():
        print(row)
