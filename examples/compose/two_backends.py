"""One model on two backends: trained in JAX and in PyTorch from the same parameters, with equal results step by step.

python examples/compose/two_backends.py      # needs PyTorch and scikit-learn
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
from sklearn.datasets import load_digits

from capibara import compose as ml


def model() -> ml.TrainModel:
    """A digit's 64 pixels → scores of the ten digits, and their loss with a little weight decay."""
    network = ml.Model()
    network |= ml.MLP(activations=[ml.Tanh, ml.Gelu, None], dimensions=[64, 32, 10])(
        input="pixels", output="scores"
    )
    train = ml.TrainModel(network)
    train.add_loss(ml.CrossEntropy(), input="scores", target="digit")
    train.add_regularization(ml.L2(), 1e-4, input="mlp.layer_0.weight")
    return train


def train(
    backend: Any, start: Any, batches: list[dict[str, np.ndarray]], rate: float
) -> tuple[list[float], Any]:
    """Gradient descent on any backend: the loss before each step, and the parameters at the end."""
    compiled = ml.compile(model(), backend, shapes={"pixels": [None, 64]})
    # Parameters are nested dicts of arrays, whatever library the arrays are of.
    params = jax.tree.map(backend.array, start)
    losses = []
    with backend.scope():  # JAX computes in float64 only where it is told to, as here
        for batch in batches:
            outputs, gradients = compiled.evaluate(params, batch, {"final_cost": 1.0})
            params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
            losses.append(float(outputs["final_cost"]))
    return losses, jax.tree.map(backend.to_numpy, params)


def plot(path: str, losses: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for (name, values), style in zip(losses.items(), ("-", "--"), strict=True):
        axes.plot(values, style, label=name, linewidth=2)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> tuple[list[float], list[float], float]:
    """Returns the losses on JAX and on PyTorch, and the largest difference between the parameters at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.2)
    parser.add_argument("--dtype", default="float64", choices=["float32", "float64"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", help="draw both losses (matplotlib)")
    args = parser.parse_args(argv)

    pixels, labels = load_digits(return_X_y=True)
    pixels, labels = (pixels / 16).astype(args.dtype), labels.astype("int32")
    random = np.random.default_rng(args.seed)
    rows = [random.integers(0, len(labels), args.batch_size) for _ in range(args.steps)]
    batches = [{"pixels": pixels[r], "digit": labels[r]} for r in rows]

    # The start is drawn once, in NumPy, and given to both.
    drawn = ml.compile(model(), ml.NumpyBackend(args.dtype), shapes={"pixels": [None, 64]})
    start = drawn.randomize_params(seed=args.seed)

    on_jax, left = train(ml.JaxBackend(args.dtype), start, batches, args.rate)
    on_torch, right = train(ml.TorchBackend(args.dtype), start, batches, args.rate)
    for i in range(0, args.steps, max(1, args.steps // 5)):
        apart = abs(on_jax[i] - on_torch[i])
        print(f"step {i:4}  JAX {on_jax[i]:.10f}  PyTorch {on_torch[i]:.10f}  apart by {apart:.1e}")

    apart = max(jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), left, right)))
    print(f"the losses differ by {np.abs(np.subtract(on_jax, on_torch)).max():.1e} at most, in {args.dtype};")
    print(f"the parameters after {args.steps} steps by {apart:.1e} at most")
    if args.plot:
        plot(args.plot, {"JAX": on_jax, "PyTorch": on_torch})
    return on_jax, on_torch, apart


if __name__ == "__main__":
    main()
