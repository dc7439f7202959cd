"""A layout as MaxText's settings and as a Python file: against MaxText's rules, and the shardings of training."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from emulation import emulated

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.plan import PlanError, parse_slice, plan
from capibara.plan.export import export_layout, maxtext_settings
from capibara.sharding import Layout

TINY = (
    *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.vocab_size=512", "train.batch_size=16", "train.sequence_length=128"),
)
# Settings of MaxText's base.yml.
KNOWN = {
    line
    for line in Path(__file__).with_name("maxtext_settings.txt").read_text("utf-8").splitlines()
    if not line.startswith("#")
}


def tiny(*settings: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml("demo", [*TINY, *settings])


def exported(layout: Layout, *settings: str, topology: str = "v5e:2x4", slices: int = 1) -> dict[str, str]:
    found = maxtext_settings(tiny(*settings), layout, parse_slice(topology), slices=slices)
    assert found.settings.keys() <= KNOWN
    assert found.compile_for.keys() <= KNOWN
    return dict(found.settings)


LAYOUTS = [
    Layout(mesh=(("data", 4), ("model", 2)), microbatches=2, remat="full"),
    Layout(mesh=(("data", 8), ("model", 1)), parameters="replicated", remat="dots"),
    Layout(mesh=(("data", 8),), parameters="replicated", optimizer="sharded"),
    Layout(mesh=(("data", 2), ("fsdp", 2), ("model", 2))),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_maxtext_cuts_each_matrix_into_the_same_parts(layout: Layout):
    """By MaxText's own rules (logical_axis_rules of base.yml at that commit), for a matrix with names as there."""
    found = exported(layout)
    axes = ("data", "fsdp", "tensor", "expert", "pipeline", "context")
    sizes = {axis: int(found.get(f"ici_{axis}_parallelism", "1")) for axis in axes}
    devices = 1
    for size in sizes.values():
        devices *= size
    assert devices == layout.num_devices
    # Rows go over data, fsdp and expert; parameters' width over fsdp, heads, hidden units and vocabulary over tensor.
    theirs = {"batch": sizes["data"] * sizes["fsdp"], "embed": sizes["fsdp"], "mlp": sizes["tensor"]}

    class Sizes:
        shape = layout.axis_sizes

    def parts(names: tuple[str, ...], kind: Any) -> list[int]:
        spec = layout.rules.spec(names, Sizes(), (64,) * len(names), kind=kind)
        out = []
        for entry in spec:
            cut = 1
            for axis in [entry] if isinstance(entry, str) else entry or ():
                cut *= layout.axis_sizes[axis]
            out.append(cut)
        return out

    assert parts(("embed", "mlp"), "parameters") == [theirs["embed"], theirs["mlp"]]
    assert parts(("batch",), "activations") == [theirs["batch"]]
    assert ("shard_optimizer_over_data" in found) == (layout.optimizer == "sharded")


@pytest.mark.parametrize(
    ("rows", "microbatches", "mesh", "topology"),
    [
        (16, 2, (("data", 4), ("model", 2)), "v5e:2x4"),
        (4, 1, (("data", 4), ("model", 4)), "v5e:4x4"),
        (3 * 7 * 64, 7, (("data", 64),), "v5e:8x8"),
        (1, 1, (("data", 1), ("model", 64)), "v5e:8x8"),
    ],
)
def test_maxtext_takes_as_many_rows(rows, microbatches, mesh, topology):
    layout = Layout(mesh=mesh, microbatches=microbatches)
    heads = ("model.num_heads=64", "model.num_kv_heads=64", "model.embed_dim=128")
    found = exported(layout, f"train.batch_size={rows}", *heads, topology=topology)
    each, steps = float(found["per_device_batch_size"]), int(found["gradient_accumulation_steps"])
    # calculate_global_batch_sizes of its types.py
    assert int(int(layout.num_devices * each) * steps) == rows


def test_a_share_that_is_no_sum_of_halves_is_whole_again():
    from capibara.plan.export.maxtext import _share

    for devices in range(1, 200):
        for rows in range(1, 40):
            assert int(devices * float(repr(_share(rows, devices)))) == rows


def test_the_settings_of_a_published_model():
    """Of Llama 3.1 8B, against MaxText's own file for it (src/maxtext/configs/models/llama3.1-8b.yml)."""
    config = tiny(
        *("model.embed_dim=4096", "model.num_layers=32", "model.num_heads=32", "model.num_kv_heads=8"),
        *("model.head_dim=128", "model.mlp_dim=14336", "model.vocab_size=128256", "model.rope_theta=500000"),
        *("model.tie_embeddings=false", "model.rope.scaling=llama3", "model.rope.factor=8"),
        *(
            "model.rope.original_length=8192",
            "precision.compute_dtype=bfloat16",
            "model.max_sequence_length=8192",
        ),
    )
    found = maxtext_settings(config, LAYOUTS[0], parse_slice("v5e:2x4")).settings
    theirs = {
        "base_emb_dim": "4096",
        "base_num_query_heads": "32",
        "base_num_kv_heads": "8",
        "base_num_decoder_layers": "32",
        "base_mlp_dim": "14336",
        "head_dim": "128",
        "mlp_activations": "[silu,linear]",
        "vocab_size": "128256",
        "enable_dropout": "false",
        "logits_via_embedding": "false",
        "normalization_layer_epsilon": "1e-05",
        "rope_max_timescale": "500000",
        "decoder_block": "llama2",
    }
    assert {key: found[key] for key in theirs} == theirs
    assert found["rope_type"] == "llama3.1"
    assert found["dtype"] == "bfloat16"


def test_experts_and_slices():
    layout = Layout(mesh=(("data", 2), ("fsdp", 2), ("expert", 2), ("model", 2)))
    found = exported(
        layout,
        *("model.experts.count=8", "model.experts.dim=128", "train.batch_size=32"),
        topology="v5e:2x4",
        slices=2,
    )
    assert found["decoder_block"] == "mixtral"
    assert (found["num_experts"], found["base_moe_mlp_dim"]) == ("8", "128")
    assert (found["dcn_data_parallelism"], found["ici_data_parallelism"]) == ("2", "1")
    assert (found["ici_fsdp_parallelism"], found["ici_expert_parallelism"]) == ("2", "2")
    assert found["per_device_batch_size"] == "2"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (['model.pattern=["ssm"]'], "ssm blocks (model.pattern)"),
        (['model.pattern=["attention","local"]', "model.window=8"], "local blocks (model.pattern)"),
        (["model.norm=layer"], "model.norm='layer' (only 'rms')"),
        (["model.activation=gelu"], "model.activation='gelu' (only silu, gelu_tanh, relu)"),
        (["model.positions=learned"], "model.positions='learned'"),
        (["model.qk_norm=all"], "model.qk_norm='all'"),
        (["model.rope.fraction=0.5"], "model.rope.fraction=0.5"),
        (
            ["model.rope.scaling=llama3", "model.rope.factor=32", "model.rope.original_length=8192"],
            "model.rope.factor=32.0 with scaling='llama3' (only 8)",
        ),
        (["optimizer.name=lion", "optimizer.beta2=0.95"], "optimizer.name='lion'"),
        (["optimizer.schedule=linear"], "optimizer.schedule='linear'"),
        (["train.ema=0.99"], "train.ema=0.99"),
        (["model.experts.count=4", "model.experts.router=sigmoid"], "model.experts.router='sigmoid'"),
    ],
)
def test_what_maxtext_lacks_is_refused_by_name(settings, named):
    with pytest.raises(PlanError) as error:
        exported(LAYOUTS[0], *settings)
    assert named in str(error.value)
    assert "format 'jax'" in str(error.value)


def test_everything_refused_is_named_at_once():
    with pytest.raises(PlanError, match=r"norm='layer'.*lion"):
        exported(LAYOUTS[0], "model.norm=layer", "optimizer.name=lion")


def test_what_runs_otherwise_is_said():
    found = maxtext_settings(tiny(), Layout(mesh=(("data", 8),), remat="none"), parse_slice("v5e:2x4"))
    assert found.settings["remat_policy"] == "minimal_with_context"
    assert "always recomputes" in found.notes[0]
    assert f"# Note: {found.notes[0]}" in found.script()


def test_the_script_passes_flags_and_settings(tmp_path):
    """A shell reads the script as meant: the program that it starts gets each setting as one argument."""
    layout = Layout(
        mesh=(("data", 8),), flags=(("xla_enable_async_all_gather", "true"),), offload="optimizer"
    )
    script = export_layout(tiny(), layout, parse_slice("v5e:2x4"), "maxtext")
    fake = tmp_path / "python3"
    fake.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "print(json.dumps([sys.argv[1:], os.environ['LIBTPU_INIT_ARGS'].split()]))\n"
    )
    fake.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "LIBTPU_INIT_ARGS": "--mine=1",
    }
    done = subprocess.run(
        ["sh", "-c", script, "sh", "run_name=a b"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    arguments, flags = json.loads(done.stdout)
    assert arguments[:2] == ["-m", "maxtext.trainers.pre_train.train"]
    assert arguments[-1] == "run_name=a b"
    assert "mlp_activations=[silu,linear]" in arguments
    assert "optimizer_memory_host_offload=true" in arguments
    assert flags == ["--xla_enable_async_all_gather=true", "--mine=1"]
    assert "compile_topology=v5e-8 compile_topology_num_slices=1" in script


_COMPARED = """
import json, sys
import jax
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.plan import parse_slice
from capibara.plan.export import export_layout
from capibara.plan.workloads.training import batch_arrays
from capibara.sharding import Layout
from capibara.train.placement import Placement
from capibara.train.run import Run

compared = 0
for case in json.loads(sys.argv[1]):
    config = ModularModelConfig.from_toml("demo", case["settings"])
    layout = Layout.from_json(case["layout"])
    code = export_layout(config, layout, parse_slice(case["slice"]), "jax", slices=case["slices"])
    names = {"__name__": "exported"}
    exec(compile(code, "exported.py", "exec"), names)
    placement = Placement.planned(layout)  # as training has it
    run = Run(config, placement, ModularCapibaraModel(config, mesh=placement.mesh, rules=placement.rules))
    mesh = names["make_mesh"]()
    assert mesh.axis_names == placement.mesh.axis_names
    assert (mesh.devices == placement.mesh.devices).all()
    assert (names["MICROBATCHES"], names["REMAT"]) == (layout.microbatches, layout.remat)
    assert names["COMPILER_OPTIONS"] == layout.compiler_options
    batch = batch_arrays(config, placement, layout.microbatches, packed=False)
    for tree, table in ((run.state, names["STATE"]), (batch, names["BATCH"])):
        found = names["shardings_like"](tree, mesh, table)
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        assert len(leaves) == len(table)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(found), strict=True):
            assert sharding.is_equivalent_to(leaf.sharding, leaf.ndim), (path, sharding, leaf.sharding)
            array = table[jax.tree_util.keystr(path, simple=True, separator=".")]
            assert (array.shape, array.dtype) == (leaf.shape, str(leaf.dtype)), path
            compared += 1
    alone = names["shardings_like"](run.state.params, mesh, names["STATE"], "params")
    assert jax.tree.leaves(alone)[0].is_equivalent_to(jax.tree.leaves(run.state.params)[0].sharding, 3)
    if not case.get("arrays"):
        continue
    state = run.placement.make_state(run.model, run.optimizer, seed=0)
    moved = jax.device_put(state, names["shardings_like"](state, mesh, names["STATE"]))
    equal = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), moved, state)
    assert all(jax.tree.leaves(equal))
print(json.dumps(compared))
"""


def test_the_file_has_the_shardings_of_training():
    """Executed on eight emulated devices, for layouts of several kinds."""
    flags = (("xla_enable_async_all_gather", "true"),)
    cases: list[dict[str, Any]] = [
        {
            "layout": layout.to_json(),
            "slice": "v5e:2x4",
            "slices": 1,
            "settings": [*TINY, f"model.remat={layout.remat}"],
        }
        for layout in [*LAYOUTS, Layout(mesh=(("data", 4), ("model", 2)), flags=flags, microbatches=4)]
    ]
    cases[0]["arrays"] = True
    cases.append({**cases[3], "slice": "v5e:2x2", "slices": 2})
    ssm = ['model.pattern=["ssm","attention"]', "optimizer.name=muon"]
    cases.append({**cases[0], "settings": [*TINY, *ssm, "model.remat=full"]})
    done = subprocess.run(
        [sys.executable, "-P", "-c", _COMPARED, json.dumps(cases)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": emulated(8, quick=True)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 200


def test_the_file_imports_jax_and_numpy_only():
    code = export_layout(
        tiny(), LAYOUTS[0], parse_slice("v5e:2x4"), "jax", coordinates=((0, 0, 0), (1, 0, 0))
    )
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {str(name).partition(".")[0] for name in imported} == {
        "__future__",
        "math",
        "typing",
        "jax",
        "numpy",
    }
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(code, "exported.py", "exec"), names)

    class Device:
        platform = "tpu"

        def __init__(self, *coords: int) -> None:
            self.coords = coords

    names["COORDINATES"] = ((0, 1, 0), (0, 0, 0), (1, 1, 0), (1, 0, 0))
    devices = [Device(x, y, 0) for x in range(2) for y in range(2)]
    found = names["_arranged"]([2, 2], devices)
    assert [device.coords for device in found.flat] == list(names["COORDINATES"])
    with pytest.raises(ValueError, match="needs 8 devices, got 4"):
        names["make_mesh"](devices)
    with pytest.raises(KeyError, match="other is not among the planned arrays"):
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
        names["shardings_like"]({"other": jax.ShapeDtypeStruct((1,), "int32")}, mesh, {})


def test_an_unknown_format_and_a_wrong_mesh():
    with pytest.raises(PlanError, match=r"format='maxtxt'.*Did you mean 'maxtext'"):
        export_layout(tiny(), LAYOUTS[0], parse_slice("v5e:2x4"), "maxtxt")
    with pytest.raises(PlanError, match="has 8 devices, expected 16"):
        export_layout(tiny(), LAYOUTS[0], parse_slice("v5e:4x4"), "jax")


def test_the_command_prints_or_writes_it(capsys, tmp_path):
    arguments = ["plan", "--no-compile", "--topology", "v5e:2x2", *TINY]
    assert main([*arguments, "--export", "maxtext"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/sh\n")
    found = plan(tiny(), "v5e:2x2", compile=False)
    assert found.export("maxtext") == script
    assert main([*arguments, "--export", "jax", "--output", str(tmp_path / "shardings.py")]) == 0
    assert "on v5e:2x2" in capsys.readouterr().out  # the table
    assert (tmp_path / "shardings.py").read_text("utf-8") == found.export("jax")
    for wrong, said in (
        (["--output", "x"], "--output is for --export"),
        (["--export", "jax", "--json"], "add --output FILE"),
        (["--export", "jax", "--output", str(tmp_path / "none" / "x.py")], "a folder that exists"),
    ):
        assert main([*arguments, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert main([*arguments, "model.norm=layer", "--export", "maxtext"]) == 2
    assert "MaxText has no setting for model.norm='layer'" in capsys.readouterr().err
