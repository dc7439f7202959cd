"""Run as a process of its own with four emulated devices: answers of the planner's serving programs.

Prints, as JSON, the tokens that the lowered prefill and decoding programs give, run on the devices they were lowered
for, and those of the plain model without a cache, read again from the start for every token.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main(pattern: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel
    from capibara.plan.workloads.decoding import lower_decode, lower_prefill, serving_config

    config = ModularModelConfig.from_toml(
        "demo",
        ["model.num_layers=2", "model.embed_dim=32", "model.num_heads=4", "model.num_kv_heads=2",
         "model.vocab_size=64", "model.scan_layers=scan", f"model.pattern={pattern}", "model.mlp_dim=64"],
    )  # fmt: skip
    rows, group, prompt, answer = 4, 2, 5, 4
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    given: Any = {
        "config": config.to_dict(),
        "dtype": "float32",
        "cache_length": prompt + answer,
    }
    prefill = lower_prefill(mesh, rows=rows, group=group, prompt_length=prompt, **given)
    decode = lower_decode(mesh, rows=rows, **given)
    model = ModularCapibaraModel(serving_config(config, "float32"))
    params, state = model.init(0)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.3 * rng.standard_normal(x.shape).astype(x.dtype), params)
    prompts = rng.integers(0, 64, (rows, prompt)).astype(np.int32)

    # Each device along "data" holds two rows, and a group is one row of each.
    fill, step = prefill.lowered.compile(), decode.lowered.compile()
    where = fill.input_shardings[0]
    put = jax.device_put
    empty = model.init_cache(rows, prompt + answer)
    cache = put(empty, where[2])
    first = np.zeros((rows, 1), np.int32)
    for place in range(2):
        mine = np.array([place, 2 + place])
        found, cache = fill(
            put(params, where[0]),
            put(state, where[1]),
            cache,
            put(prompts[mine], where[3]),
            put(np.int32(place), where[4]),
        )
        first[mine] = found
    where = step.input_shardings[0]
    tokens, answers = put(jnp.asarray(first), where[3]), [first]
    for _ in range(answer - 1):
        tokens, cache = step(put(params, where[0]), put(state, where[1]), cache, tokens)
        answers.append(np.array(tokens))

    # Causal: what stands behind a position does not matter to it.
    plain = jax.jit(lambda text: model.apply(params, text, state=state)[0])
    text = np.pad(prompts, ((0, 0), (0, answer)))
    for at in range(prompt, prompt + answer):
        text[:, at] = np.asarray(plain(text))[:, at - 1].argmax(-1)
    print(json.dumps({"served": np.concatenate(answers, 1).tolist(), "plain": text[:, prompt:].tolist()}))


if __name__ == "__main__":
    main(sys.argv[1])
