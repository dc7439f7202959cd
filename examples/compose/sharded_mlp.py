"""A model on a mesh of devices: the batch and the weights are sharded, and the model does not change.

python examples/compose/sharded_mlp.py              # four devices, emulated on this machine's CPU
python examples/compose/sharded_mlp.py --mesh 4x8   # 32 of them
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
import numpy as np

from capibara import compose as ml


def model() -> ml.TrainModel:
    """``MLP`` has names for the axes of its weights (``embed``, ``mlp``); the batch is named here."""
    network = ml.Model()
    network.add_input("x", ("batch", 32), "float", axes=("batch", None))
    network |= ml.MLP(input_size=32, hidden_sizes=[256, 128], output_size=16, activation=ml.Gelu)(
        input="x", output="y"
    )
    train = ml.TrainModel(network)
    train.add_loss(ml.SquaredError(), input="y", target="target")
    return train


def train(
    backend: ml.JaxBackend, batches: list[dict[str, np.ndarray]], seed: int
) -> tuple[ml.CompiledModel, list[float], Any]:
    """Gradient descent; what is sharded, and how, is the backend's affair alone."""
    compiled = ml.compile(model(), backend, shapes={"x": [None, 32], "target": [None, 16]})
    params = compiled.randomize_params(seed)
    losses = []
    for batch in batches:
        if backend.mesh is not None:
            wanted = compiled.propose_shardings()["inputs"]
            batch = {key: jax.device_put(value, wanted[key]) for key, value in batch.items()}
        outputs, gradients = compiled.evaluate(params, batch, {"final_cost": 1.0})
        params = jax.tree.map(lambda p, g: p - 0.2 * g, params, gradients)
        losses.append(float(outputs["final_cost"]))
    return compiled, losses, params


def main(argv: list[str] | None = None) -> tuple[list[float], list[float], float]:
    """Returns the losses on one device and on the mesh, and the largest difference between the parameters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="2x2", help="parts of the batch x parts of the weights")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    mesh = tuple(int(n) for n in args.mesh.split("x"))

    # Before JAX looks for devices: as many as the mesh has. With accelerators leave this and platform="cpu" out.
    jax.config.update("jax_num_cpu_devices", math.prod(mesh))
    one = ml.JaxBackend(platform="cpu")
    many = ml.JaxBackend(platform="cpu", device_mesh=mesh, mesh_axes=("data", "model"))

    random = np.random.default_rng(args.seed)
    hidden = random.normal(size=(32, 16)) / 32**0.5  # what there is to learn
    batches = []
    for _ in range(args.steps):
        x = random.normal(size=(args.batch_size, 32)).astype("float32")
        batches.append({"x": x, "target": np.tanh(x @ hidden).astype("float32")})

    _, alone, params_alone = train(one, batches, args.seed)
    compiled, together, params = train(many, batches, args.seed)

    print(f"{many}: how the parameters lie")
    proposed = compiled.propose_shardings()["params"]
    for path, array in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        part = array.sharding.shard_shape(array.shape)
        print(f"  {name:26} {array.shape!s:11} {array.sharding.spec!s:32} {part} on each device")
    lie = jax.tree.map(
        lambda array, wanted: array.sharding.is_equivalent_to(wanted, array.ndim), params, proposed
    )
    print(f"after training all lie as proposed: {all(jax.tree.leaves(lie))}")

    for i in range(0, args.steps, max(1, args.steps // 5)):
        print(f"step {i:3}  one device {alone[i]:.6f}  {math.prod(mesh)} devices {together[i]:.6f}")
    apart = max(
        jax.tree.leaves(
            jax.tree.map(
                lambda a, b: float(np.abs(np.asarray(a) - np.asarray(b)).max()), params_alone, params
            )
        )
    )
    print(f"after {args.steps} steps the parameters differ by {apart:.1e} at most")
    return alone, together, apart


if __name__ == "__main__":
    main()
