"""What a run costs over its bare step: batches, losses, metrics, watching; and a checkpoint, while steps go on or not.

Each side of a ratio takes the same steps from the same state. A checkpoint is begun in their middle and complete before
the clock stops, so that what it takes from the steps beside it counts, and what is left of it at the end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["run"]

SIZES = {
    "demo": [],
    "6 layers, d 256": [
        "model.embed_dim=256",
        "model.num_heads=8",
        "model.num_kv_heads=8",
        "model.mlp_dim=704",
        "train.batch_size=8",
    ],
}


def run(
    rounds: int = 5, steps: int = 20, size: str = "demo", *, processor: bool = False, checkpoints: bool = True
) -> list[dict[str, Any]]:
    """Rows of ratios: time without over time with; above 0.97 a checkpoint costs less than 3 % of the steps.

    Args:
      processor: compare the processor time of all threads, which other programs on the machine change less.
      checkpoints: also with them.
    """
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved

    with tempfile.TemporaryDirectory() as folder:
        made, train_step, initial, loop = _parts(Path(folder), steps, SIZES[size])
        batches = [made.put_batch(step) for step in range(steps)]

        def bare() -> Any:
            state = jax.tree.map(jnp.copy, initial)
            for batch in batches:
                state, _ = train_step(state, batch)
            return state.step

        functions: dict[str, Callable[[], Any]] = {
            "the bare step": bare,
            "the run's loop": lambda: loop(None),
        }
        if checkpoints:
            functions["an asynchronous checkpoint"] = lambda: loop(True)
            functions["a synchronous checkpoint"] = lambda: loop(False)
        table = interleaved(functions, rounds, 1, clock=time.process_time if processor else time.perf_counter)
        print(table)
        params = sum(leaf.size for leaf in jax.tree.leaves(initial.params))
        bytes_ = sum(leaf.nbytes for leaf in jax.tree.leaves((initial.params, initial.opt_state)))
    t = made.config.train
    shape = f"{params / 1e6:.1f} M parameters, {t.batch_size} × {t.sequence_length}, {steps} steps"
    pairs = (
        ("the loop of capibara train", "the bare jitted step", "the bare step", "the run's loop"),
        (
            "with an asynchronous checkpoint",
            "the loop without",
            "the run's loop",
            "an asynchronous checkpoint",
        ),
        ("with a synchronous checkpoint", "the loop without", "the run's loop", "a synchronous checkpoint"),
    )
    return [
        {
            "what": what,
            "shape": shape,
            "peer": peer,
            "ratio": table.ratio(theirs, ours),
            "seconds a step": table[theirs].median / steps,
            "checkpoint_mb": bytes_ / 1e6,
            "extra_ms": 1e3
            * statistics.median(
                b - a for a, b in zip(table[theirs].seconds, table[ours].seconds, strict=True)
            ),
        }
        for what, peer, theirs, ours in pairs
        if ours in functions
    ]


def _parts(
    folder: Path, steps: int, overrides: list[str]
) -> tuple[Any, Any, Any, Callable[[bool | None], Any]]:
    """A run, its compiled step, its first state, and a function that takes the steps, with a checkpoint or without."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel
    from capibara.train import CheckpointStore, Run, split_corpus
    from capibara.train.loop import Loop
    from capibara.train.metrics import MetricsLog
    from capibara.train.progress import SilentReporter
    from capibara.train.recovery.guard import Guard
    from capibara.train.recovery.skips import Skips
    from capibara.train.recovery.watchdog import Watchdog
    from capibara.train.saved import items_of
    from capibara.train.saves import Saves
    from capibara.train.signals import StopFlag

    config = ModularModelConfig.from_toml(
        "demo",
        overrides=[
            *overrides,
            f"train.steps={steps}",
            "train.max_seconds=null",
            "optimizer.warmup_steps=2",
            "train.eval_every=1000000",
            f"checkpoint.every_steps={steps // 2}",
            f"checkpoint.directory={folder}",
        ],
    )
    text = np.random.default_rng(0).integers(32, 127, 400_000).astype(np.uint8).tobytes()
    corpus = split_corpus(text, name="random", validation_fraction=0.0)
    made = Run.build(config, ModularCapibaraModel(config), corpus, jax.local_devices()[:1], None)
    initial = made.initial_state()
    train_step = made.train_step.lower(initial, made.put_batch(0)).compile()
    store = CheckpointStore(folder / "checkpoints", keep=2)
    writers = {flag: Saves(store, asynchronous=flag) for flag in (True, False)}

    def loop(asynchronous: bool | None) -> Any:
        saves = writers[bool(asynchronous)]

        def save(state: Any, step: int, *_: Any) -> None:
            if asynchronous is not None and step == steps // 2:
                saves.save(step, items_of(state), meta={"seconds": 0.0}, config_toml=config.to_toml())

        watchdog = Watchdog(10.0)
        with MetricsLog(folder / "metrics.jsonl", resume_step=0) as log, watchdog:
            state, _ = Loop(
                run=made,
                train_step=train_step,
                eval_step=None,  # pyright: ignore[reportArgumentType]  # there is nothing to validate
                log=log,
                save=save,
                saves=saves,
                after_evaluation=lambda step, bits: None,
                reporter=SilentReporter(),
                stop=StopFlag(),
                guard=Guard(learning_rate=1.0),
                skips=Skips(),
                watchdog=watchdog,
                sound=lambda step: None,
            ).run_steps(jax.tree.map(jnp.copy, initial), 0)
        return state.step

    return made, train_step, initial, loop


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processor-time", action="store_true", help="of all threads, not on the clock")
    parser.add_argument("--no-checkpoints", action="store_true", help="the loop and the bare step alone")
    parser.add_argument("--size", choices=sorted(SIZES), default="demo")
    arguments = parser.parse_args()
    for row in run(
        arguments.rounds,
        arguments.steps,
        arguments.size,
        processor=arguments.processor_time,
        checkpoints=not arguments.no_checkpoints,
    ):
        print(row)
