"""Training steps of 22 and 32 billion parameters on TPU slices, as the planner lays them out and predicts them.

The peer is MaxText's program of the same sizes, rebuilt (``_maxtext/decoder.py``) with the mesh and the flags that it
published, compiled by the same TPU compiler and timed by the same reader of compiled programs: no TPU is needed. Ours
has rotary positions and skips the masked half of the scores, as ``capibara train`` does.
"""

from __future__ import annotations

from typing import Any

LONG = "about twelve compilations of half a minute each, unless cached"

__all__ = ["CASES", "run"]

_SHARED = (
    "model.mlp=plain",
    "model.activation=relu",
    "model.vocab_size=32768",
    "model.tie_embeddings=true",
    "model.head_dim=256",
)
# MaxText's name of the row, and its sizes as settings.
CASES: dict[str, tuple[str, ...]] = {
    "22B v4-128": (
        "model.embed_dim=6144",
        "model.num_layers=48",
        "model.num_heads=24",
        "model.num_kv_heads=24",
        "model.mlp_dim=24576",
        "model.max_sequence_length=1024",
        "train.sequence_length=1024",
        "train.batch_size=1024",
    ),
    "32B v5p-128": (
        "model.embed_dim=10240",
        "model.num_layers=32",
        "model.num_heads=32",
        "model.num_kv_heads=32",
        "model.mlp_dim=32768",
        "model.max_sequence_length=2048",
        "train.sequence_length=2048",
        "train.batch_size=512",
    ),
}


def run() -> list[dict[str, Any]]:
    """Rows of ratios: the peer's predicted step time / that of the plan."""
    from benchmarks._maxtext.programs import compile_rows
    from benchmarks._maxtext.rows import load_rows
    from benchmarks.plan_calibration import predict
    from capibara.config import ModularModelConfig
    from capibara.plan import plan

    peers = {row.name: row for row in load_rows()}
    rows: list[dict[str, Any]] = []
    for name, settings in CASES.items():
        config = ModularModelConfig.from_toml("production/tpu_v4", [*_SHARED, *settings])
        found = plan(config, peers[name].topology)
        ((_, program),) = compile_rows([peers[name]])
        peer = predict(peers[name], program)
        print(f"{name}: {found.best.layout}, {found.step_seconds:.4g} s, peer {peer.seconds:.4g} s")
        rows.append(
            {
                "what": f"predicted training step: {name.partition(' ')[0]}",
                "shape": f"{found.target}, {found.work}",
                "peer": "MaxText's program, rebuilt",
                "ratio": peer.seconds / found.step_seconds,
                "seconds": found.step_seconds,
                "peer_seconds": peer.seconds,
                "mfu": found.best.mfu,
                "layout": str(found.best.layout),
            }
        )
    return rows


if __name__ == "__main__":
    for each in run():
        print(each)
