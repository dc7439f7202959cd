"""ReLU networks with a tenth of their neurons: what they still get right, and how much faster they are.

Five networks, 64-256-10, are trained on the handwritten digits of scikit-learn, four fifths of them, and merged by
each method. Accuracies are means over the other fifth. The peers remove as many neurons: at random groups (the sums of
random merging), and those of least importance (``‖row‖ ‖column‖``), each with and without the same least-squares fit.
A last row has the time of the forward pass of a batch, compiled by JAX, before and after.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

__all__ = ["run"]

KEEP = 0.1
SEEDS = 5
BATCH = 4096

Pairs = list[tuple[np.ndarray, np.ndarray]]


def digits(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images [q, 64] and labels, and the fifth that is kept for the test."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images, labels = (found.data / 16).astype(np.float32), found.target
    order = np.random.default_rng(seed).permutation(len(images))
    cut = len(images) * 4 // 5
    return images[order[:cut]], labels[order[:cut]], images[order[cut:]], labels[order[cut:]]


def train(images: np.ndarray, labels: np.ndarray, seed: int, epochs: int = 40) -> Pairs:
    """A 64-256-10 network after ``epochs`` of Adam."""
    import jax
    import jax.numpy as jnp
    import optax

    random = np.random.default_rng(seed)
    pairs = [
        (
            random.uniform(-1, 1, (m, n)).astype(np.float32) / np.sqrt(n),
            random.uniform(-1, 1, m).astype(np.float32) / np.sqrt(n),
        )
        for n, m in ((64, 256), (256, 10))
    ]
    tool = optax.adam(1e-3)

    def loss(pairs: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(forward(pairs, x), y).mean()

    @jax.jit
    def epoch(pairs: Any, state: Any, x: Any, y: Any) -> Any:
        def step(carry: Any, batch: Any) -> Any:
            pairs, state = carry
            updates, state = tool.update(jax.grad(loss)(pairs, *batch), state)
            return (optax.apply_updates(pairs, updates), state), None

        return jax.lax.scan(step, (pairs, state), (x, y))[0]

    state = tool.init(pairs)
    whole = len(images) // 64 * 64
    for _ in range(epochs):
        order = random.permutation(len(images))[:whole]
        x, y = jnp.asarray(images[order].reshape(-1, 64, 64)), jnp.asarray(labels[order].reshape(-1, 64))
        pairs, state = epoch(pairs, state, x, y)
    return [(np.asarray(weight), np.asarray(bias)) for weight, bias in pairs]


def forward(pairs: Any, x: Any) -> Any:
    """The outputs, of JAX's arrays or NumPy's."""
    (weight, bias), (readout, shift) = pairs
    hidden = x @ weight.T + bias
    return (hidden * (hidden > 0)) @ readout.T + shift


def accuracy(pairs: Pairs, images: np.ndarray, labels: np.ndarray) -> float:
    return float((forward(pairs, images).argmax(1) == labels).mean())


def random_merge(pairs: Pairs, seed: int) -> Pairs:
    """Neurons merged in random groups, as the others are in groups that were sought."""
    from capibara.compress.tropical import clusters

    (weight, bias), (readout, shift) = pairs
    count = int(KEEP * len(weight))
    labels = np.random.default_rng(seed).permutation(len(weight)) % count
    rows, columns = clusters.join(
        np.concatenate([weight, bias[:, None]], axis=1), readout.T, clusters.Groups(labels, count)
    )
    return [(rows[:, :-1], rows[:, -1]), (columns.T, shift)]


def prune(pairs: Pairs) -> Pairs:
    """The neurons of greatest importance."""
    (weight, bias), (readout, shift) = pairs
    length = np.hypot(np.linalg.norm(weight, axis=1), bias)
    best = np.argsort(length * np.linalg.norm(readout, axis=0))[-int(KEEP * len(weight)) :]
    return [(weight[best], bias[best]), (readout[:, best], shift)]


def fitted(pairs: Pairs, original: Pairs, images: np.ndarray) -> Pairs:
    """Any network's last layer, fitted to the outputs of the original one."""
    weight, bias = pairs[0]
    hidden = np.maximum(images @ weight.T + bias, 0)
    ones = np.concatenate([hidden, np.ones((len(hidden), 1))], axis=1)
    best = np.linalg.lstsq(ones, forward(original, images), rcond=None)[0]
    return [pairs[0], (best[:-1].T, best[-1])]


def accuracies(seeds: int = SEEDS) -> dict[str, list[float]]:
    """The test accuracy of every way, for each seed; and the last seed's networks are timed by :func:`run`."""
    from capibara.compress.tropical import merge_neurons

    found: dict[str, list[float]] = {}
    for seed in range(seeds):
        images, labels, test, answers = digits(seed)
        pairs = train(images, labels, seed)
        made = {"the network itself": pairs}
        for method in ("directions", "paths"):
            made[f"{method}, merged only"] = merge_neurons(pairs, KEEP, method=method, fit=False).network
            made[f"{method}, without data"] = merge_neurons(pairs, KEEP, method=method).network
            made[f"{method}, fitted to data"] = merge_neurons(
                pairs, KEEP, method=method, inputs=images
            ).network
        made["paths, rows moved too"] = merge_neurons(pairs, KEEP, inputs=images, refine=100).network
        made["random groups"] = random_merge(pairs, seed)
        made["random groups, fitted to data"] = fitted(made["random groups"], pairs, images)
        made["least important removed"] = prune(pairs)
        made["least important removed, fitted to data"] = fitted(
            made["least important removed"], pairs, images
        )
        for name, network in made.items():
            found.setdefault(name, []).append(accuracy(network, test, answers))
    return found


def run(rounds: int = 15) -> list[dict[str, Any]]:
    """Rows of ratios of accuracies, and of times: time of the network itself / time of the merged one."""
    import jax
    import jax.numpy as jnp

    from capibara.compress.tropical import merge_neurons
    from capibara.measure import interleaved

    found = accuracies()
    means = {name: float(np.mean(values)) for name, values in found.items()}
    for name, mean in means.items():
        print(f"{name:42s} {mean:.4f}")
    ours = [name for name in means if name.startswith(("paths", "directions"))]
    pairs_of = {True: "random groups, fitted to data", False: "random groups"}
    less = {True: "least important removed, fitted to data", False: "least important removed"}
    rows: list[dict[str, Any]] = []
    for name in ours:
        data = "fitted" in name or "moved" in name
        rows.extend(
            {
                "what": f"accuracy: {name}",
                "shape": "64-256-10 to 64-25-10",
                "peer": peer,
                "ratio": means[name] / means[peer],
                "accuracy": means[name],
            }
            for peer in ("the network itself", pairs_of[data], less[data])
        )
    images, labels, test, _ = digits(0)
    pairs = train(images, labels, 0)
    merged = merge_neurons(pairs, KEEP)
    print(merged)
    small = merged.network
    batch = jnp.asarray(np.resize(test, (BATCH, 64)))
    sides = {}
    for name, network in {"merged": small, "the network itself": pairs}.items():
        call = jax.jit(forward)
        arrays = jax.tree.map(jnp.asarray, network)
        sides[name] = lambda call=call, arrays=arrays: call(arrays, batch)
    table = interleaved(sides, rounds)
    print(table)
    rows.append(
        {
            "what": "forward pass",
            "shape": f"batch {BATCH}, 64-25-10",
            "peer": "the network itself",
            "ratio": table.ratio("the network itself", "merged"),
            "ms": table["merged"].median * 1e3,
        }
    )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    for row in run(parser.parse_args().rounds):
        print(row)
