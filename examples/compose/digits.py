"""Handwritten digits: a small convolutional network, trained with Optax and evaluated on held-out digits.

python examples/compose/digits.py            # needs scikit-learn, which brings 1797 digits of 8 x 8 pixels
python examples/compose/digits.py --plot digits.png
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

from capibara import compose as ml


def network() -> ml.Model:
    """Scores of the ten digits: ``image [n, 1, 8, 8]`` → ``scores [n, 10]``."""
    model = ml.Model()
    model |= ml.Convolution2D(3, 16, padding=1)(input="image", output="edges")
    model += ml.Relu()
    model += ml.MaxPool2D(2)  # 8 x 8 → 4 x 4
    model += ml.Convolution2D(3, 32, padding=1)
    model += ml.Relu()
    model += ml.Flatten(1)
    model += ml.Linear(10)(output="scores")
    return model


def trained_for(model: ml.Model) -> ml.TrainModel:
    """The same with a loss to minimise, ``final_cost``, and the share of right answers, ``accuracy``."""
    train = ml.TrainModel(model)
    train.add_loss(ml.CrossEntropy(), input="scores", target="digit")
    train.add_metric(ml.Accuracy(is_label_one_hot=False), pred="scores", label="digit", key_name="accuracy")
    return train


def data(seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Three quarters of the digits to learn from, and the rest to be judged by; in a random order."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    images = pixels[order].reshape(-1, 1, 8, 8).astype("float32") / 16
    labels = labels[order].astype("int32")
    cut = len(order) * 3 // 4
    return (
        {"image": images[:cut], "digit": labels[:cut]},
        {"image": images[cut:], "digit": labels[cut:]},
    )


def plot(path: str, seen: dict[str, np.ndarray], guesses: np.ndarray) -> None:
    """The first 40 digits of the test set with what they were taken for; wrong ones in red."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5))
    for i, axes in enumerate(figure.subplots(4, 10).flat):
        axes.imshow(seen["image"][i, 0], cmap="gray_r")
        axes.set_title(str(guesses[i]), color="black" if guesses[i] == seen["digit"][i] else "red")
        axes.axis("off")
    figure.savefig(path)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> float:
    """Returns the accuracy on the test set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--plot", metavar="FILE", help="draw some of the test set with the answers (matplotlib)"
    )
    args = parser.parse_args(argv)

    train, test = data(args.seed)
    compiled = ml.compile(
        trained_for(network()),
        ml.JaxBackend(),
        shapes={"image": [None, 1, 8, 8]},  # None: batches of any size
    )
    print(f"{compiled.num_params} parameters, {len(train['digit'])} digits to learn from")

    params = compiled.randomize_params(seed=args.seed)
    optimizer = optax.adam(2e-3)
    moments = optimizer.init(params)

    @jax.jit
    def improved(params: Any, moments: Any, gradients: Any) -> tuple[Any, Any]:
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    random = np.random.default_rng(args.seed)
    for step in range(1, args.steps + 1):
        rows = random.integers(0, len(train["digit"]), args.batch_size)
        batch = {key: values[rows] for key, values in train.items()}
        # The gradient of final_cost: its own is 1, the other outputs are left out.
        outputs, gradients = compiled.evaluate(params, batch, {"final_cost": 1.0})
        params, moments = improved(params, moments, gradients)
        if step == 1 or step % max(1, args.steps // 6) == 0:
            print(
                f"step {step:4}  loss {outputs['final_cost']:.4f}  right in the batch {outputs['accuracy']:.1%}"
            )

    outputs = compiled.evaluate(params, test)
    accuracy = float(outputs["accuracy"])
    print(f"right on {accuracy:.2%} of {len(test['digit'])} new digits")
    if args.plot:
        plot(args.plot, test, np.asarray(outputs["scores"]).argmax(axis=1))
    return accuracy


if __name__ == "__main__":
    main()
