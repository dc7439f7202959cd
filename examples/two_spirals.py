"""Compose a classifier of points on two spirals, and train it with plain JAX.

python examples/two_spirals.py
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp

from capibara import compose as ml


def spirals(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Points ``[count, 2]`` on two interleaved spirals, and which one each is on, ``int32 [count]``."""
    along, noise, which = jax.random.split(key, 3)
    label = jax.random.randint(which, (count,), 0, 2)
    turn = 0.25 + 0.75 * jax.random.uniform(along, (count,))
    angle = 3 * jnp.pi * turn + jnp.pi * label
    points = jnp.stack([turn * jnp.cos(angle), turn * jnp.sin(angle)], axis=1)
    return points + 0.01 * jax.random.normal(noise, points.shape), label


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps

    model = ml.Model()
    model |= ml.MLP(input_size=2, hidden_sizes=[64, 64], output_size=2, activation=ml.Tanh)(input="points")
    compiled = ml.compile(model, shapes={"points": [None, 2]})
    print(compiled)

    @jax.jit
    def step(params, points, label):
        def loss(params):
            logits = compiled.apply(params, {"points": points})["output"]
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(label.size), label])

        value, gradients = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)

    params = compiled.randomize_params(seed=0)
    points, label = spirals(jax.random.key(1), 512)
    for number in range(1, steps + 1):
        value, params = step(params, points, label)
        if number == 1 or number % max(1, steps // 5) == 0:
            print(f"step {number:5}  loss {value:.4f}")

    points, label = spirals(jax.random.key(2), 512)
    guess = compiled.evaluate(params, {"points": points})["output"].argmax(axis=1)
    print(f"right on {jnp.mean(guess == label):.1%} of new points")


if __name__ == "__main__":
    main()
