"""One training step of a 6-layer decoder against the same model in PyTorch and in Flax NNX, on the same cores.

Forward, backward, gradient clipping and AdamW; float32; the same sizes and batch. The PyTorch side is
:class:`benchmarks.torch_decoder.TorchDecoder`, eager and (with ``--compile``, slow to start) ``torch.compile``; the
NNX side is :class:`benchmarks.nnx_decoder.NnxDecoder` with optax. The last peers are matrix products by XLA: those that
the step's linear layers consist of, one after another and nothing between them (no attention either), and one large
product, scaled to as many operations as the step has.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

__all__ = ["run"]

_SIDE = 2048  # of the matrix product: 17 GFLOP
OVERRIDES = [
    "model.embed_dim=256",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.mlp_dim=704",
    "train.batch_size=16",
]


def run(rounds: int = 8, *, with_compile: bool = False) -> list[dict[str, Any]]:
    """Rows of ratios: time of PyTorch / time of Capibara, so that above 1 Capibara is the faster."""
    from capibara.train.memory import keep_freed_memory

    # As `capibara train` does; before any thread starts, and so for both sides.
    keep_freed_memory()
    import jax
    import torch  # pyright: ignore[reportMissingImports]
    import torch.nn.functional as F  # pyright: ignore[reportMissingImports]

    from benchmarks.torch_decoder import TorchDecoder
    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel
    from capibara.measure import interleaved
    from capibara.train.optimizer import build_optimizer
    from capibara.train.state import TrainState
    from capibara.train.step import make_train_step

    config = ModularModelConfig.from_toml("demo", overrides=OVERRIDES)
    m, t = config.model, config.train
    tokens = np.random.default_rng(0).integers(0, 256, (t.batch_size, t.sequence_length + 1)).astype(np.int32)
    flops = 0.0

    def ours(mode: str) -> Any:
        nonlocal flops
        model = ModularCapibaraModel(config.with_overrides([f"model.scan_layers={mode}"]))
        flops = model.flops_per_token(t.sequence_length) * tokens[:, 1:].size
        params, state = model.init(0)
        optimizer = build_optimizer(config, param_axes=model.param_axes)
        box = [TrainState.create(params, state, optimizer.init(params), seed=0)]
        step = make_train_step(model, optimizer)
        batch = {"tokens": jax.numpy.asarray(tokens[None])}

        def one() -> Any:
            box[0], metrics = step(box[0], batch)
            return metrics

        return one

    def theirs(compiled: bool) -> Any:
        torch.manual_seed(0)
        model = TorchDecoder(m)
        assert sum(p.numel() for p in model.parameters()) == ModularCapibaraModel(config).num_params
        run = torch.compile(model) if compiled else model
        o = config.optimizer
        optimizer = torch.optim.AdamW(
            model.parameters(), o.learning_rate, (o.beta1, o.beta2), weight_decay=o.weight_decay
        )
        x, y = (torch.from_numpy(a.astype(np.int64)) for a in (tokens[:, :-1], tokens[:, 1:]))

        def one() -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(run(x).flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), o.grad_clip_norm)
            optimizer.step()
            return loss.item()

        return one

    def matrix_product() -> Any:
        square = jax.numpy.asarray(np.random.default_rng(0).normal(size=(_SIDE, _SIDE)).astype(np.float32))
        product = jax.jit(jax.numpy.matmul)
        return lambda: product(square, square)

    def own_products() -> Any:
        rng = np.random.default_rng(0)
        wide, inner = m.embed_dim, m.resolved_mlp_dim
        heads, kv_heads = m.num_heads * m.resolved_head_dim, m.num_kv_heads * m.resolved_head_dim
        layer = [(wide, heads), *[(wide, kv_heads)] * 2, (heads, wide), *[(wide, inner)] * 2, (inner, wide)]
        every = [*layer * m.num_layers, (wide, m.vocab_size)]

        def array(*shape: int) -> jax.Array:
            return jax.numpy.asarray(rng.normal(size=shape).astype(np.float32))

        rows = tokens[:, 1:].size
        of = {(i, o): (array(rows, i), array(i, o), array(rows, o)) for i, o in set(every)}
        three = jax.jit(lambda x, w, d: (x @ w, d @ w.T, x.T @ d))
        return lambda: [three(*of[shape]) for shape in every]

    def nnx() -> Any:
        from benchmarks.nnx_decoder import nnx_step

        one = nnx_step(m, config.optimizer, jax.numpy.asarray(tokens))
        assert one.parameters == ModularCapibaraModel(config).num_params
        return one

    functions = {
        "capibara": ours("auto"),
        "capibara, scanned": ours("scan"),
        "torch eager": theirs(False),
        "flax nnx": nnx(),
        "its products alone": own_products(),
        "matrix product": matrix_product(),
    }
    if with_compile:
        functions["torch.compile"] = theirs(True)
    table = interleaved(functions, rounds, 2)
    print(table)
    operations = {"matrix product": 2.0 * _SIDE**3}
    rate = {name: operations.get(name, flops) / table[name].median / 1e9 for name in functions}
    shape = f"{m.num_layers} layers, d {m.embed_dim}, {t.batch_size} × {t.sequence_length}"
    return [
        {
            "what": f"training step ({name})",
            "shape": shape,
            "peer": peer,
            "ratio": table.ratio(peer, name) * flops / operations.get(peer, flops),
            "ours_gflops": rate[name],
            "peer_gflops": rate[peer],
        }
        for name in ("capibara", "capibara, scanned")
        for peer in functions
        if not peer.startswith("capibara")
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", action="store_true", help="torch.compile as well")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    for row in run(arguments.rounds, with_compile=arguments.compile):
        print(row)
