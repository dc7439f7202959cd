"""Training over meshes: the losses of one device, arrays that lie where the settings say, restarts on other meshes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from emulation import emulated
from other_process import run_apart
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara.errors import ConfigError
from capibara.sharding import Layout
from capibara.train import train
from capibara.train.optimizer import build_optimizer
from capibara.train.placement import Placement

SETTINGS = ("batch_size=16", "steps=6", "log_every=1", "eval_every=6", "eval_batches=2", "model.num_heads=4")

MESHES = """
import json, shutil, sys
from pathlib import Path
import jax, numpy as np
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus
from capibara.core import ModularCapibaraModel
from capibara.sharding import Layout
from capibara.train import CheckpointStore, read_losses, train
from capibara.train.progress import SilentReporter
from capibara.train.signals import StopFlag

base, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
assert len(jax.devices()) == 8
shards = {}

class Reporter(SilentReporter):
    def __init__(self, stop_after=None):
        self.notes, self.stop, self.stop_after = [], StopFlag(), stop_after
    def note(self, text):
        self.notes.append(text)
    def step(self, step, loss):
        if step == self.stop_after:
            self.stop.requested, self.stop.signal = True, 15

save = CheckpointStore.save
def watched(self, step, items, **rest):
    # The state that a run holds after its steps.
    state = {"params": items["model"]["params"], "opt": items["training"]["opt_state"][1]}
    shards[self.folder.parent.name] = {
        jax.tree_util.keystr(path, simple=True, separator="."): [
            list(leaf.shape), list(leaf.addressable_shards[0].data.shape), leaf.sharding.memory_kind,
            len(leaf.sharding.device_set),
        ]
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    return save(self, step, items, **rest)
CheckpointStore.save = watched

def run(name, layout=None, *more, kind=TinyModel, devices=None, stop_after=None):
    layout = [] if layout is None else Layout.from_json(layout).overrides()
    config = tiny_config(base / name, *settings, *layout, *more)
    reporter = Reporter(stop_after)
    report = train(config, kind(config), tiny_corpus(), devices=devices, measure_utilisation=False,
                   reporter=reporter, stop=reporter.stop)
    losses = read_losses(base / name / "metrics.jsonl")
    return {"losses": list(losses.values()), "bits": report.validation_bits_per_byte, "notes": reporter.notes,
            "devices": report.devices, "from": report.start_step}

out = {"one": run("one", devices=jax.devices()[:1])}
layouts = json.loads(sys.argv[3])
for name, layout in layouts.items():
    out[name] = run(name, layout)
# Stopped on one mesh, continued on another with the moments elsewhere, and on one device; and the other way round.
run("stopped", layouts["fsdp"], stop_after=2)
for name, layout in (("to moments", layouts["moments"]), ("to host", layouts["host"]), ("to one", None)):
    shutil.copytree(base / "stopped", base / name)
    out[name] = run(name, layout, devices=None if layout else jax.devices()[:1])
run("one stopped", devices=jax.devices()[:1], stop_after=2)
shutil.copytree(base / "one stopped", base / "from one")
out["from one"] = run("from one", layouts["tensor"])
# The real model: its kernels run on each device's part of the mesh.
real = dict(kind=ModularCapibaraModel)
out["real one"] = run("real one", None, "train.steps=3", devices=jax.devices()[:1], **real)
out["real"] = run("real", {"mesh": [["data", 2], ["model", 4]], "remat": "full"}, "train.steps=3", **real)
out["real dp"] = run("real dp", None, "train.steps=3", **real)
# Read by a model that has the mesh, and by one that has none.
from capibara.train import checkpoint_store, restore_model
checkpoint = checkpoint_store(base / "real").newest()
config = tiny_config(base / "real").from_toml(checkpoint.config_path)
there, _ = restore_model(checkpoint, ModularCapibaraModel(config))
here, _ = restore_model(checkpoint, ModularCapibaraModel(config.with_overrides(["tpu.enabled=false"])))
leaves = list(zip(jax.tree.leaves(there), jax.tree.leaves(here), strict=True))
restored = {
    "equal": all(np.array_equal(a, b) for a, b in leaves),
    "parts": sum(a.addressable_shards[0].data.size for a, _ in leaves) / sum(b.size for _, b in leaves),
    "devices": [len(leaves[0][0].sharding.device_set), len(leaves[0][1].sharding.device_set)],
}
print("RESULT", json.dumps({"runs": out, "shards": shards, "restored": restored}))
"""

LAYOUTS: dict[str, Layout] = {
    "fsdp": Layout(mesh=(("data", 8),)),
    "tensor": Layout(mesh=(("data", 2), ("model", 4)), microbatches=2),
    "moments": Layout(
        mesh=(("data", 8), ("model", 1)),
        parameters="replicated",
        optimizer="sharded",
        flags=(("xla_tpu_enable_latency_hiding_scheduler", "true"),),
    ),
    "host": Layout(mesh=(("data", 4), ("model", 2)), offload="optimizer"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    layouts = json.dumps({name: layout.to_json() for name, layout in LAYOUTS.items()})
    base = tmp_path_factory.mktemp("meshes")
    return run_apart(
        MESHES,
        str(base),
        json.dumps(SETTINGS),
        layouts,
        # Restarts run programs that were compiled before.
        JAX_COMPILATION_CACHE_DIR=str(base / "compiled"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        XLA_FLAGS=emulated(8, quick=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAYOUTS, "to moments", "to host", "to one", "from one", "real", "real dp"])
def test_the_losses_are_those_of_one_device(found: Any, name: str) -> None:
    run = found["runs"][name]
    one = found["runs"]["real one" if name.startswith("real") else "one"]
    assert len(run["losses"]) == len(one["losses"]) > 2
    assert one["devices"] == 1
    assert run["devices"] == (1 if name == "to one" else 8)
    np.testing.assert_allclose(run["losses"], one["losses"], rtol=2e-5)
    np.testing.assert_allclose(run["bits"], one["bits"], rtol=2e-5)
    # It does learn, so that equal losses say something of the optimizer too.
    assert run["losses"][-1] < run["losses"][0] - 0.01


@pytest.mark.slow
def test_every_device_holds_the_part_that_it_should(found: Any) -> None:
    # Of the matrices "embed" [vocab, embed] and "block.q" [embed, hidden]; "scale" is [embed].
    parts = {
        "fsdp": ((1, 8), (8, 1), (8,)),
        "tensor": ((4, 2), (2, 4), (2,)),
        "moments": ((1, 1), (1, 1), (1,)),
        "host": ((2, 4), (4, 2), (4,)),
    }
    moments = {**parts, "moments": ((1, 8), (8, 1), (8,))}
    names = ("embed", "block.q", "scale")
    for layout in parts:
        shards = found["shards"][layout]
        for prefix, table in (("params.", parts), ("opt.mu.", moments), ("opt.nu.", moments)):
            for name, cut in zip(names, table[layout], strict=True):
                shape, part, memory, devices = shards[prefix + name]
                assert part == [n // by for n, by in zip(shape, cut, strict=True)], (layout, prefix, name)
                assert devices == 8
                on_host = layout == "host" and prefix != "params."
                assert memory == ("pinned_host" if on_host else "device")
    # All of them, not only these: every device has its fraction of all parameters.
    sizes = [
        (math.prod(s), math.prod(p))
        for key, (s, p, _, _) in found["shards"]["fsdp"].items()
        if "params" in key
    ]
    assert sum(whole for whole, _ in sizes) == 8 * sum(part for _, part in sizes)


@pytest.mark.slow
def test_a_changed_layout_is_said(found: Any) -> None:
    for name in ("to moments", "to host", "to one", "from one"):
        run = found["runs"][name]
        assert 2 <= run["from"] < 6
        (note,) = [note for note in run["notes"] if "layout changed since step" in note]
        assert ("replicated on every device" in note) == ("one" in name)
    assert any("left out on cpu" in note for note in found["runs"]["moments"]["notes"])
    assert not any("left out on cpu" in note for note in found["runs"]["fsdp"]["notes"])
    assert not any(
        "layout changed" in note for run in ("fsdp", "one") for note in found["runs"][run]["notes"]
    )


def test_a_checkpoint_is_read_with_and_without_a_mesh(found: Any) -> None:
    restored = found["restored"]
    assert restored["equal"]
    assert restored["devices"] == [8, 1]
    assert restored["parts"] < 0.3  # a quarter or an eighth of all but the scales


SAME = """
import json, math, sys
import jax
from tiny_run import tiny_config, tiny_corpus
from capibara.core import ModularCapibaraModel
from capibara.sharding import Layout
from capibara.plan.workloads.training import lower_train_step
from capibara.train import Run

from capibara.plan.work import TrainWork
from capibara.plan import parse_slice
from capibara.plan.memory.arguments import step_arguments
from capibara.train.examples import load_data

out = []
for layout, settings in json.loads(sys.argv[1]):
    layout = Layout.from_json(layout)
    config = tiny_config("unused", "batch_size=16", "model.num_heads=4", *settings, *layout.overrides())
    corpus = load_data(config.data) if config.data.paths else tiny_corpus()
    run = Run.build(config, ModularCapibaraModel(config), corpus)
    batch = run.put_batch(0)
    text = run.train_step.lower(run.state, batch).as_text()
    params = TrainWork(config).job(layout, parse_slice("v5e:2x4")).params
    planned = lower_train_step(run.placement.mesh, **params)
    # The planner's arguments: bytes of one device's part of each array, by kind.
    mine = [sum(b.bytes for b in step_arguments(config, layout) if b.kind == kind and not b.on_host)
            for kind in ("parameters", "optimizer", "inputs")]
    here = [
        sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
            if x.sharding.memory_kind != "pinned_host")
        for tree in (run.state.params, (run.state.opt_state, run.state.ema), [batch, run.state.step])
    ]
    here[2] += 8  # the key, two numbers of 32 bits
    out.append([text == planned.lowered.as_text(), text.count("sharding") > 10, mine == here])
print("RESULT", json.dumps(out))
"""


def check_steps(steps: list[tuple[Any, list[str]]]) -> None:
    found = run_apart(SAME, json.dumps(steps), XLA_FLAGS=emulated(8))
    assert found == [[True, True, True]] * len(steps)


def test_the_step_is_the_one_that_was_planned() -> None:
    experts = Layout(mesh=(("data", 2), ("expert", 2), ("model", 2)), remat="full", microbatches=2)
    mixture = ["model.experts.count=4", "model.experts.dim=8"]
    low = ["finetune.method=lora", "finetune.base=nf4"]
    check_steps(
        [
            (LAYOUTS["tensor"].to_json(), ["train.ema=0.99"]),
            ({**LAYOUTS["host"].to_json(), "remat": "dots"}, []),
            (experts.to_json(), mixture),
            ({**LAYOUTS["fsdp"].to_json(), "remat": "dots"}, low),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adafactor", "muon", "sgd"])
def test_the_step_of_another_optimizer_is_the_one_that_was_planned(name: str) -> None:
    wide = ["model.embed_dim=128", f"optimizer.name={name}"]
    check_steps([(LAYOUTS["tensor"].to_json(), wide), (LAYOUTS["fsdp"].to_json(), wide)])


@pytest.mark.slow
def test_a_step_with_packed_rows_is_the_one_that_was_planned(tmp_path: Path) -> None:
    pytest.importorskip("grain", reason="packing needs grain")
    lines = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}."} for n in range(120)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    check_steps([(LAYOUTS["tensor"].to_json(), [f"data.paths=[{json.dumps(str(tmp_path / 'sums.jsonl'))}]"])])


def test_too_few_devices(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, *Layout(mesh=(("data", 4096),)).overrides(), "batch_size=4096")
    with pytest.raises(ConfigError, match=r"tpu\.num_chips=4096"):
        train(config, TinyModel(config), tiny_corpus())
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError) as error:
        Placement.of(config, jax.devices()[:1])
    for word in ("tpu.num_chips=4096", "1 cpu device.", "tpu.enabled=false", "device_count=4096"):
        assert word in str(error.value)


def test_rows_that_do_not_divide(tmp_path: Path) -> None:
    layout = Layout(mesh=(("data", 1), ("fsdp", 1)), microbatches=4)
    config = tiny_config(tmp_path, "batch_size=16", *layout.overrides())
    mesh = Placement.of(config, jax.devices()[:1]).mesh
    assert mesh is not None
    assert mesh.axis_names == ("data", "fsdp")
    wider = Layout(mesh=(("data", 2), ("fsdp", 4)), microbatches=4)
    with pytest.raises(
        ConfigError, match=r"batch_size=16 must be a multiple of 4 microbatches × 8 devices .* = 32"
    ):
        Placement.over(mesh, wider).check_rows(16)


class NoHostMemory:
    platform = "cpu"
    process_index = 0

    def addressable_memories(self) -> list[Any]:
        class Memory:
            kind = "device"

        return [Memory()]


def test_what_devices_cannot_do_is_said() -> None:
    layout = Layout(mesh=(("data", 1),), offload="optimizer")
    with pytest.raises(ConfigError, match=r"tpu.offload='optimizer': cpu devices .*tpu.offload=none"):
        Placement.planned(layout, [NoHostMemory()])


def test_a_model_that_does_not_name_its_dimensions(tmp_path: Path) -> None:
    class Nameless(TinyModel):
        param_axes = None  # pyright: ignore

    config = tiny_config(tmp_path, *Layout(mesh=(("data", 1),)).overrides())
    placement = Placement.of(config, jax.devices()[:1])
    model = Nameless(config)
    with pytest.raises(ConfigError, match="param_axes"):
        placement.describe_state(model, optax.adam(0.1))
    assert placement.mesh is not None
    whole = Placement.over(placement.mesh, Layout(mesh=(("data", 1),), parameters="replicated"))
    state = whole.describe_state(model, build_optimizer(config))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state))
    assert jax.tree.structure(state.params) == jax.tree.structure(model.params)


def test_the_compiler_gets_its_options_on_a_tpu() -> None:
    class Tpu:
        platform = "tpu"

    flags = (("xla_enable_async_all_gather", "true"),)
    layout = Layout(mesh=(("data", 1),), flags=flags)
    assert Placement((Tpu(),), None, layout).compiler_options == dict(flags)
    assert Placement(tuple(jax.devices()[:1]), None, layout).compiler_options == {}
    assert Placement((Tpu(),), None).compiler_options == {}


def test_validation_is_worked_off_as_training_is() -> None:
    layout = Layout(mesh=(("data", 2),), microbatches=4)
    batches = [np.arange(16 * 3).reshape(16, 3), np.arange(15).reshape(5, 3)]
    pieces = Placement((), None, layout).cut(batches, 16)
    assert [len(piece) for piece in pieces] == [
        4,
        4,
        4,
        4,
        4,
    ]  # the fifth row of the short one fills no piece
    assert np.array_equal(np.concatenate(pieces[:4]), batches[0])
    assert np.array_equal(pieces[4], batches[1][:4])
    assert [len(piece) for piece in Placement((), None).cut(batches, 16)] == [16, 5]


def test_validation_takes_no_more_rows_than_training() -> None:
    placement = Placement((), None, Layout(mesh=(("data", 4), ("model", 2)), microbatches=2))

    def rows(*lengths: int) -> list[int]:
        return [len(piece) for piece in placement.cut([np.zeros((n, 17), np.int32) for n in lengths], 16)]

    assert rows(16, 16) == [8, 8, 8, 8]
    assert rows(12) == [8]
    assert rows(6) == [4]
    assert rows(3) == [3]  # fewer than devices along the data axis: whole on each


def test_an_axis_that_nothing_is_cut_along() -> None:
    with pytest.raises(ConfigError, match=r"'dta'.*data"):
        Placement.planned(Layout(mesh=(("dta", 2), ("model", 2))), [object()] * 4)
