"""A small GPT: composed of blocks, trained on Python's documentation, then used to continue a text.

python examples/compose/gpt.py --steps 200 --prompt "A class "
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from capibara import compose as ml

LETTERS = 128  # ASCII


class Layer(ml.Model):
    """One transformer layer: causal self-attention, then a feed-forward layer.

    ``input [batch, sequence, size]`` → ``output`` of the same shape; ``cos`` and ``sin`` encode the positions of the
    tokens.
    """

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.add_input("input", ("batch", "sequence", size), "float")
        normed = self.add(ml.RMSNorm(), "norm", input="input")
        attention = self.add(
            ml.SelfAttention(size, heads), "attention", input=normed.output, cos="cos", sin="sin"
        )
        looked = self.add(ml.Add(), left="input", right=attention.output)
        normed = self.add(ml.RMSNorm(), "second_norm", input=looked.output)
        thought = self.add(ml.SwiGLU(4 * size, size), "feed_forward", input=normed.output)
        self.add(ml.Add(), left=looked.output, right=thought.output, output="output")


def gpt(size: int, heads: int, layers: int) -> ml.Model:
    """Scores of the token after each: ``tokens int [batch, sequence]`` → ``scores [batch, sequence, LETTERS]``."""
    model = ml.Model()
    embedding = model.add(ml.Embedding(LETTERS, size), "embedding", input="tokens")
    places = model.add(ml.Positions(), like="tokens", start=0)
    turns = model.add(ml.RotaryTable(size // heads), positions=places.output)
    stack = model.add(
        ml.Repeat(Layer(size, heads), layers), "layers", input=embedding.output, cos=turns.cos, sin=turns.sin
    )
    normed = model.add(ml.RMSNorm(), "final_norm", input=stack.output)
    # The table that reads tokens also scores them: half the parameters of two tables.
    model.add(ml.Unembed(), input=normed.output, table=embedding.weight, output="scores")
    return model


def write(compiled: ml.CompiledModel, params: Any, prompt: str, length: int, context: int, seed: int) -> str:
    """Draw ``length`` letters after the prompt, each from what the last ``context`` letters make likely."""

    @jax.jit
    def draw(window: jax.Array, last: jax.Array, key: jax.Array) -> jax.Array:
        scores = compiled.apply(params, {"tokens": window[None]})["scores"][0, last]
        return jax.random.categorical(key, scores / 0.7)

    tokens = list(prompt.encode("ascii"))
    for key in jax.random.split(jax.random.key(seed), length):
        # Always as long as the context: no token sees those after it, so what fills the rest does not matter.
        window = np.zeros(context, "int32")
        recent = tokens[-context:]
        window[: len(recent)] = recent
        tokens.append(int(draw(window, jnp.int32(len(recent) - 1), key)))
    return bytes(tokens).decode("ascii")


def texts() -> tuple[np.ndarray, np.ndarray]:
    """The documentation's letters as numbers, to learn from and, every twentieth article, to be judged by."""
    articles = list(topics.values())
    parts = ["\n".join(a for i, a in enumerate(articles) if (i % 20 == 7) == held) for held in (False, True)]
    learn, judge = (np.frombuffer(p.encode("ascii", "ignore"), "uint8").astype("int32") for p in parts)
    return learn, judge


def main(argv: list[str] | None = None) -> tuple[float, float, str]:
    """Returns the loss on text it has not seen before and after training, in nats a letter, and what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64, help="letters that it sees at once")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompt", default="A class ")
    parser.add_argument("--length", type=int, default=200)
    args = parser.parse_args(argv)

    learn, judge = texts()
    random = np.random.default_rng(args.seed)

    def batch(source: np.ndarray, rows: int) -> np.ndarray:
        starts = random.integers(0, len(source) - args.context, rows)
        return source[starts[:, None] + np.arange(args.context + 1)]

    compiled = ml.compile(gpt(args.size, args.heads, args.layers), shapes={"tokens": [None, None]})
    print(f"{compiled.num_params:,} parameters, {len(learn):,} letters to learn from")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.01))

    # apply is a pure function: what is done with it is plain JAX.
    def loss(params: Any, rows: jax.Array) -> jax.Array:
        scores = compiled.apply(params, {"tokens": rows[:, :-1]})["scores"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, rows[:, 1:]).mean()

    @jax.jit
    def step(params: Any, moments: Any, rows: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, rows)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    params = compiled.randomize_params(seed=args.seed)
    moments = optimizer.init(params)
    held = batch(judge, 64)
    judged = jax.jit(loss)
    before = float(judged(params, held))
    print(f"before training: {before:.3f} nats a letter")
    for number in range(1, args.steps + 1):
        params, moments, value = step(params, moments, batch(learn, args.batch_size))
        if number % max(1, args.steps // 5) == 0:
            print(f"step {number:4}  loss {value:.3f}  on text not seen {judged(params, held):.3f}")

    written = write(compiled, params, args.prompt, args.length, args.context, args.seed)
    print(written)
    return before, float(judged(params, held)), written


if __name__ == "__main__":
    main()
