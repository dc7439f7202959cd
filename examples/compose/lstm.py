"""A character-level LSTM that learns to write like Python's own documentation.

python examples/compose/lstm.py --steps 300 --prompt "The "
"""

from __future__ import annotations

import argparse
import math
from pydoc_data.topics import topics
from typing import Any

import jax
import numpy as np
import optax

from capibara import compose as ml


def network(letters: int, hidden: int) -> ml.Model:
    """Scores of the next letter at each position: ``text int [batch, time]`` → ``scores [batch, time, letters]``.

    The LSTM's state is passed as ``hidden`` and ``cell`` and returned as ``next_hidden`` and ``next_cell``, so that
    one call can continue where another ended.
    """
    model = ml.Model()
    model |= ml.Embedding(letters, 32)(input="text", output="embedded")
    model |= ml.LSTM(hidden, initial_state=True)(
        input="embedded",
        initial_hidden="hidden",
        initial_cell="cell",
        output="seen",
        last_hidden="next_hidden",
        last_cell="next_cell",
    )
    model |= ml.Linear(letters)(input="seen", output="scores")
    model.expose("scores", "next_hidden", "next_cell")
    return model


def nothing(rows: int, hidden: int) -> dict[str, np.ndarray]:
    """What is remembered before the first letter."""
    zeros = np.zeros((rows, hidden), "float32")
    return {"hidden": zeros, "cell": zeros}


def write(
    compiled: ml.CompiledModel, params: Any, prompt: np.ndarray, length: int, hidden: int, seed: int
) -> list[int]:
    """Draw ``length`` letters after the prompt, each fed back in for the next."""
    random = np.random.default_rng(seed)
    outputs = compiled.evaluate(params, {"text": prompt[None]} | nothing(1, hidden))
    letters: list[int] = []
    for _ in range(length):
        scores = np.asarray(outputs["scores"][0, -1], "float64") / 0.7  # below 1: bolder than it has learned
        chance = np.exp(scores - scores.max())
        letters.append(int(random.choice(len(chance), p=chance / chance.sum())))
        text = np.array([letters[-1:]], "int32")
        outputs = compiled.evaluate(
            params, {"text": text, "hidden": outputs["next_hidden"], "cell": outputs["next_cell"]}
        )
    return letters


def texts() -> tuple[np.ndarray, np.ndarray]:
    """The documentation's letters as numbers, to learn from and, every twentieth article, to be judged by."""
    articles = list(topics.values())
    parts = ["\n".join(a for i, a in enumerate(articles) if (i % 20 == 7) == held) for held in (False, True)]
    learn, judge = (np.frombuffer(p.encode("ascii", "ignore"), "uint8").astype("int32") for p in parts)
    return learn, judge


def main(argv: list[str] | None = None) -> tuple[float, float, str]:
    """Returns the first and the last loss on text it has not seen, in nats a letter, and what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--time", type=int, default=64, help="letters that a training step looks back over")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="The ")
    parser.add_argument("--length", type=int, default=200)
    args = parser.parse_args(argv)

    learn, judge = texts()
    print(f"{len(learn):,} letters to learn from")

    train = ml.TrainModel(network(128, args.hidden))
    train.add_loss(ml.CrossEntropy(axis=-1), input="scores", target="next")
    compiled = ml.compile(train, shapes={"text": [None, None]})
    params = compiled.randomize_params(seed=args.seed)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    moments = optimizer.init(params)

    @jax.jit
    def improved(params: Any, moments: Any, gradients: Any) -> tuple[Any, Any]:
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    random = np.random.default_rng(args.seed)

    def batch(source: np.ndarray) -> dict[str, np.ndarray]:
        starts = random.integers(0, len(source) - args.time, args.batch_size)
        rows = source[starts[:, None] + np.arange(args.time + 1)]
        return {"text": rows[:, :-1], "next": rows[:, 1:]} | nothing(args.batch_size, args.hidden)

    held = batch(judge)

    def judged() -> float:
        return float(compiled.evaluate(params, held)["loss"])

    before = judged()
    print(f"before training: {before:.3f} nats a letter (a blind guess: {math.log(128):.3f})")
    for step in range(1, args.steps + 1):
        outputs, gradients = compiled.evaluate(params, batch(learn), {"final_cost": 1.0})
        params, moments = improved(params, moments, gradients)
        if step % max(1, args.steps // 5) == 0:
            print(f"step {step:4}  loss {outputs['loss']:.3f}  on text not seen {judged():.3f}")

    # The parameters of what a TrainModel trains stand under "model".
    writer = ml.compile(network(128, args.hidden), shapes={"text": [None, None]}, inference=True)
    prompt = np.frombuffer(args.prompt.encode("ascii"), "uint8").astype("int32")
    letters = write(writer, params["model"], prompt, args.length, args.hidden, args.seed)
    written = bytes(letters).decode("ascii")
    print(args.prompt + written)
    return before, judged(), written


if __name__ == "__main__":
    main()
