"""Runs over the mesh axis ``pipeline``: what is refused, what a layout says; losses, evaluation and restarts."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart
from tiny_run import tiny_config

from capibara.core.pipelined import check_stages
from capibara.errors import ConfigError
from capibara.plan import estimate_memory, parse_slice
from capibara.sharding import Layout
from capibara.train.frameworks import WithLoss
from capibara.train.pipelines import check_pipeline, pipeline_notes


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.num_layers=6"], "multiple of 4. Use model.num_layers=4 or 8"),
        (["model.num_layers=2"], "multiple of 4. Use model.num_layers=4,"),
        (["model.num_layers=4", "model.pattern=['ssm','attention']"], "turns of the 2 blocks"),
        (["model.num_layers=9", "model.pattern=['ssm','attention']"], "Use model.num_layers=8 or 16"),
        (
            [
                "model.num_layers=4",
                "model.experts.count=4",
                "model.experts.first_dense=1",
                "model.experts.dim=8",
            ],
            "first_dense=0",
        ),
    ],
)
def test_models_that_cannot_be_divided_are_refused(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match="'pipeline' has 4 devices") as caught:
        check_stages(tiny_config("unused", *settings), 4)
    assert said in str(caught.value)


def test_stages_need_not_be_scanned_nor_one_kind_of_block() -> None:
    for more in ("model.scan_layers=unroll", "model.pattern=['ssm','attention']"):
        check_stages(tiny_config("unused", "model.num_layers=8", more), 4)


def test_other_models_and_losses_are_refused() -> None:
    stages = jax.sharding.AbstractMesh((2, 4), ("data", "pipeline"))
    none = jax.sharding.AbstractMesh((8, 1), ("data", "pipeline"))
    for model, said in ((object(), "ModularCapibaraModel"), (WithLoss(object(), lambda o, t: o), "loss=")):
        with pytest.raises(ConfigError, match=said):
            check_pipeline(model, stages)
        check_pipeline(model, none)


def test_a_layout_says_what_a_pipeline_idles() -> None:
    layout = Layout(mesh=(("data", 2), ("pipeline", 4)), microbatches=2)
    assert layout.stages == 4
    assert layout.bubble == pytest.approx(3 / 5)
    assert str(layout).endswith("2 microbatches, bubble 60%")
    assert Layout(mesh=(("data", 8),)).bubble == 0.0
    (few,) = pipeline_notes(layout)
    assert few.startswith("4 stages, 2 microbatches: a stage waits 60% of each step; use more microbatches")
    (many,) = pipeline_notes(Layout(mesh=(("pipeline", 4),), microbatches=29))
    assert many == "4 stages, 29 microbatches: a stage waits 9% of each step"
    assert pipeline_notes(Layout(mesh=(("data", 8),))) == pipeline_notes(None) == []
    assert Layout.from_json(layout.to_json()) == layout


def test_plans_estimate_a_stage_of_a_pipeline() -> None:
    config = tiny_config("unused", "model.num_layers=4", "train.batch_size=16")
    staged, whole = (
        estimate_memory(config, Layout(mesh=mesh, parameters="replicated"), parse_slice("v4:2x2x4"))
        for mesh in ((("pipeline", 4), ("data", 4)), (("data", 16),))
    )
    assert 0 < staged.parameters < whole.parameters


RUNS = """
import json, sys
from pathlib import Path
import jax, numpy as np
from tiny_run import tiny_config, tiny_corpus
from capibara.core import ModularCapibaraModel
from capibara.sharding import Layout
from capibara.train import read_losses, train
from capibara.train.progress import SilentReporter
from capibara.train.signals import StopFlag

class Reporter(SilentReporter):
    def __init__(self, last):
        self.flag, self.last = StopFlag(), last
    def step(self, step, *rest, **more):
        if step == self.last:
            self.flag.requested, self.flag.signal = True, 15

base = Path(sys.argv[1])
settings = ("model.num_layers=4", "train.batch_size=16", "train.eval_every=6", "train.log_every=1",
            "precision.compute_dtype=float32", "model.vocab_size=256")

def run(name, last, *layout, devices=None):
    config = tiny_config(base / name, *settings, "train.steps=8", *layout)
    reporter = Reporter(last)
    report = train(config, ModularCapibaraModel(config), tiny_corpus(), devices=devices,
                   measure_utilisation=False, reporter=reporter, stop=reporter.flag)
    losses = read_losses(base / name / "metrics.jsonl")
    return list(losses.values()), report.validation_bits_per_byte

two = Layout(mesh=(("data", 2), ("pipeline", 2)), microbatches=4).overrides()
four = Layout(mesh=(("pipeline", 4),), microbatches=2).overrides()
one = run("one", 8, devices=jax.devices()[:1])
run("stages", 4, *two)
again = run("stages", 8, *four)
print("RESULT", json.dumps({"one": one, "stages": again}))
"""


@pytest.mark.slow  # three runs, each with its programs
def test_runs_are_those_of_one_device_and_go_on_with_other_stages(tmp_path: Path) -> None:
    seen = run_apart(RUNS, str(tmp_path), XLA_FLAGS=emulated(4, quick=True))
    (wanted, bits), (losses, own) = seen["one"], seen["stages"]
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert own == pytest.approx(bits, rel=1e-5)


PAIRS = """
import json, sys
from pathlib import Path
import jax, numpy as np
from tiny_run import tiny_config
from capibara.core import ModularCapibaraModel
from capibara.sharding import Layout
from capibara.train import checkpoint_store, read_metrics, restore_model, train
from capibara.train.examples import load_data
from capibara.train.progress import SilentReporter

base = Path(sys.argv[1])
settings = ("model.num_layers=4", "train.batch_size=8", "train.eval_every=4", "train.log_every=1", "train.steps=4",
            "precision.compute_dtype=float32", "model.vocab_size=256", "finetune.objective=dpo", "finetune.beta=0.3",
            "data.validation_fraction=0.2", "optimizer.learning_rate=1e-2",
            f"data.paths=[{json.dumps(str(base / 'pairs.jsonl'))}]")

def run(name, *more, devices=None):
    config = tiny_config(base / name, *settings, *more)
    train(config, ModularCapibaraModel(config), load_data(config.data, objective="dpo"), devices=devices,
          measure_utilisation=False, reporter=SilentReporter())
    entries = list(read_metrics(base / name / "metrics.jsonl"))
    steps = [[e[key] for key in ("loss", "grad_norm", "accuracy", "margin")] for e in entries if e["kind"] == "train"]
    validations = [e["bits_per_byte"] for e in entries if e["kind"] == "validation"]
    params, _ = restore_model(checkpoint_store(base / name).newest(), ModularCapibaraModel(config))
    return steps, validations, np.load(base / name / "reference.npy"), jax.device_get(params)

low = ("finetune.method=lora", "finetune.rank=2")
stages = Layout(mesh=(("data", 2), ("pipeline", 2)), microbatches=2).overrides()
out = {}
for name, more in (("full", ()), ("adapters", low)):
    one, many = run(f"{name} one", *more, devices=jax.devices()[:1]), run(f"{name} stages", *more, *stages)
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one[3], many[3])
    out[name] = {"one": one[:2], "stages": many[:2], "params": max(jax.tree.leaves(moved)),
                 "reference": [one[2].tolist(), many[2].tolist()]}
print("RESULT", json.dumps(out))
"""


@pytest.mark.slow  # four runs, each with its programs
def test_preferences_over_stages_are_those_of_one_device(tmp_path: Path) -> None:
    pytest.importorskip("grain")
    pairs = [{"prompt": f"{n}? ", "chosen": "yes" if n % 2 else "no", "rejected": "?"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    seen = run_apart(PAIRS, str(tmp_path), XLA_FLAGS=emulated(4, quick=True))
    for name in ("full", "adapters"):
        found = seen[name]
        # All pairs in their order, those held out among them.
        wanted, own = found["reference"]
        assert np.shape(own) == (40, 2)
        assert np.std(wanted) > 0.5
        np.testing.assert_allclose(own, wanted, rtol=1e-5)
        (steps, bits), (own_steps, own_bits) = found["one"], found["stages"]
        # In the first step both answers have the same score: which of them has the higher one is rounding.
        own_steps[0][2] = steps[0][2]
        np.testing.assert_allclose(own_steps, steps, rtol=2e-4, atol=2e-5)
        assert len(bits) == 1
        np.testing.assert_allclose(own_bits, bits, rtol=1e-5)
        assert steps[-1][0] < np.log(2) - 0.01 < steps[0][0]
        assert found["params"] < 3e-4


LOSSES = """
import json
import jax, jax.numpy as jnp, numpy as np
from tiny_run import tiny_config
from capibara.compose.errors import InputError
from capibara.core import ModularCapibaraModel
from capibara.hardware import build_mesh

mesh = build_mesh((2,), ("pipeline",), jax.devices()[:2])
tokens = np.random.default_rng(0).integers(0, 64, (4, 9)).astype("int32")
small = ("model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=2", "model.vocab_size=64")

def both(*settings, **options):
    config = tiny_config("unused", *small, *settings)
    alone = ModularCapibaraModel(config)
    params, state = alone.init(0)
    found = []
    for model in (alone, alone.on_mesh(mesh)):
        def loss(params):
            return model.loss(params, {"tokens": tokens}, state=state, **options)[0]
        found.append((jax.jit(jax.value_and_grad(loss)), params, state, model))
    return found

def wide():
    (one, params, *_), (two, *_) = both(
        "model.residual=accumulate", "precision.compute_dtype=bfloat16", train=False
    )
    a, b = one(params), two(params)
    norm = lambda tree: jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))
    return [float(a[0]), float(b[0]), float(norm(jax.tree.map(jnp.subtract, a[1], b[1])) / norm(a[1]))]

def dropped():
    # The slope along the gradient, of the same masks.
    _, (two, params, *_) = both(
        "model.dropout_rate=0.3", "precision.compute_dtype=float32", key=jax.random.key(3), train=True
    )
    value, gradient = two(params)
    size = jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(gradient)))
    ends = [
        two(jax.tree.map(lambda p, g: p + step * g / size, params, gradient))[0] for step in (-1e-2, 1e-2)
    ]
    again = two(params)[0]
    return [float(size), float((ends[1] - ends[0]) / 2e-2), float(value), float(again)]

def partly():
    # The gradient of some parameters alone, as adapters are trained.
    (one, params, *_), (two, *_, state, model) = both("precision.compute_dtype=float32", train=False)
    def loss(part):
        return model.loss({**params, **part}, {"tokens": tokens}, state=state, train=False)[0]
    gaps, wanted = [], one(params)[1]
    for name in ("blocks", "final_norm"):
        found = jax.jit(jax.grad(loss))({name: params[name]})
        pairs = zip(jax.tree.leaves(found[name]), jax.tree.leaves(wanted[name]), strict=True)
        gaps += [float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs]
    return [max(gaps), len(gaps)]

def differentiated():
    _, (_, params, state, model) = both("finetune.objective=dpo")
    from capibara.core.preferences import pair_log_probs
    batch = {"tokens": tokens, "segments": np.ones_like(tokens), "weights": np.ones(tokens.shape, "float32")}
    try:
        jax.grad(lambda p: jnp.sum(pair_log_probs(model, p, batch, state=state)))(params)
    except InputError as error:
        return str(error)

def codebooks():
    # Their averages stay as they were, for the pairs of all microbatches.
    (_, params, state, alone), (*_, staged) = both("finetune.objective=dpo", "model.pattern=['vq']")
    batch = {"tokens": tokens, "segments": np.repeat([[1] * 5 + [2] * 4], 4, axis=0).astype("int32"),
             "weights": np.ones(tokens.shape, "float32"), "reference": np.zeros((4, 2), "float32")}
    def of(model):
        return jax.jit(lambda p: model.loss(p, batch, state=state, key=jax.random.key(0), train=True)[0])(params)
    return [float(of(model)) for model in (alone, staged)]

def refused():
    _, (_, params, state, model) = both()
    said = []
    for shape in ((4, 1), (0, 5), (4,)):
        try:
            model.loss(params, {"tokens": np.zeros(shape, "int32")}, state=state)
        except InputError as error:
            said.append(str(error))
    parts = {"tokens": np.zeros((2, 4, 1), "int32")}
    try:
        model.loss_of_microbatches(params, parts, state=state, key=None, train=True)
    except InputError as error:
        said.append(str(error))
    return said

print("RESULT", json.dumps({"wide": wide(), "dropped": dropped(), "refused": refused(), "partly": partly(),
                            "differentiated": differentiated(), "codebooks": codebooks()}))
"""


@pytest.mark.slow  # four programs in stages
def test_a_wide_stream_dropout_and_tokens_without_targets() -> None:
    seen = run_apart(LOSSES, XLA_FLAGS=emulated(2, quick=True))
    alone, stages, gap = seen["wide"]
    assert stages == pytest.approx(alone, rel=1e-4)
    assert gap < 0.02
    # The backward pass computes a stage again with the masks of the forward pass.
    norm, slope, value, again = seen["dropped"]
    assert slope == pytest.approx(norm, rel=0.01)
    assert value == again
    gap, compared = seen["partly"]
    assert gap < 1e-4
    assert compared > 5
    assert "'pipeline'" in seen["differentiated"]
    alone, stages = seen["codebooks"]
    assert stages == pytest.approx(alone, rel=1e-4)
    assert len(seen["refused"]) == 4
    assert all("tokens has shape" in said for said in seen["refused"])
