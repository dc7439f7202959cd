"""A language model of alternating attention and state-space blocks, trained and sampled from Python.

python examples/hybrid_language_model.py --steps 200
"""

from __future__ import annotations

import argparse

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.serve import Generator, Sampling, find_checkpoint, load_model
from capibara.train import load_corpus, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--directory", default="runs/hybrid")
    parser.add_argument("--prompt", default="The ")
    args = parser.parse_args()

    config = ModularModelConfig.from_toml(
        "demo",
        {
            "model.pattern": ["ssm", "attention"],
            "model.num_layers": 2,
            "model.embed_dim": 64,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "train.sequence_length": 64,
            "train.batch_size": 8,
            "train.steps": args.steps,
            "train.eval_every": args.steps,
            "train.eval_batches": 4,
            "optimizer.warmup_steps": min(20, args.steps // 2),
            "checkpoint.directory": args.directory,
        },
    )
    model = ModularCapibaraModel(config)
    print(model)
    print(train(config, model, load_corpus()))

    trained = load_model(find_checkpoint(args.directory))
    generator = Generator(
        trained.model, trained.params, state=trained.state, sampling=Sampling(0.8, top_k=40)
    )
    print(args.prompt + "".join(generator.text(args.prompt, max_tokens=100)))


if __name__ == "__main__":
    main()
