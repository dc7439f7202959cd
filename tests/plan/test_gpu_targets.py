"""Hosts of GPUs as targets: their names, memory, links and layouts; and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.hardware import TopologyError, get_chip
from capibara.jax_versions import MEMORY_FRACTIONS
from capibara.plan import (
    CompilerMissingError,
    DoesNotFitError,
    GpuHost,
    PlanError,
    Slice,
    parse_slice,
    parse_target,
    plan,
    plan_serving,
    plan_slices,
    step_work,
)
from capibara.plan.compiler import CompiledProgram, Job, compiler_for
from capibara.plan.compiler.limits import within
from capibara.plan.gpus import COUNTS, FRACTION, GPUS
from capibara.plan.memory import estimate_memory
from capibara.plan.memory.remedies import changes
from capibara.plan.planned import read_planned
from capibara.plan.search.space import layouts
from capibara.plan.targets import Target, target_from_json
from capibara.sharding import Layout, options_for

TINY = (
    *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.vocab_size=512", "train.batch_size=8", "train.sequence_length=128"),
)


@pytest.fixture(autouse=True)
def _default_fraction(monkeypatch):
    for name in MEMORY_FRACTIONS:
        monkeypatch.delenv(name, raising=False)


def tiny(*settings: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml("demo", [*TINY, *settings])


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("count", COUNTS)
def test_names_are_read_back(name, count):
    host = parse_target(f"{name}:{count}")
    assert isinstance(host, GpuHost)
    assert isinstance(host, Target)
    assert host == parse_target(f" {name.upper()}:{count} ") == parse_target(host)
    assert parse_target(host.text) == host
    assert target_from_json(json.loads(json.dumps(host.to_json()))) == host
    assert host.num_devices == host.num_chips == count
    assert host.chip == get_chip(name)
    assert host.chip_name == f"nvidia-{name}" + ("-sxm" if name == "h100" else "")
    assert "TPU" not in f"{host} {host.notes()}"
    assert "slice" not in f"{host} {host.notes()}"


def test_slices_are_targets_too():
    pod = parse_target("v4-32")
    assert isinstance(pod, Slice)
    assert isinstance(pod, Target)
    assert pod == parse_slice("v4-32") == parse_target(pod)
    assert target_from_json(json.loads(json.dumps(pod.to_json()))) == pod
    assert parse_target("v4:2x2x4", "core") == parse_slice("v4:2x2x4", "core")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h100:3", "expected 1, 2, 4 or 8"),
        ("h100:16", "Several hosts are not planned"),
        ("h100:0", "expected 1, 2, 4 or 8"),
        ("h100:-1", "expected 1, 2, 4 or 8"),
        ("h100:08", "expected 1, 2, 4 or 8"),
        ("h100:2x4", "expected 1, 2, 4 or 8"),
        ("h100:" + "9" * 5000, "expected 1, 2, 4 or 8"),
        ("h100", "how many GPUs"),
        ("h100:", "how many GPUs"),
        ("h100-8", "Did you mean 'h100'"),
        ("a100-80gb:8", "made for h100, h200, b200"),
        ("a100:8", "made for h100, h200, b200. Did you mean 'h100'"),
        ("gb200:4", "Did you mean 'b200'"),
        ("l40s:1", "Write h100:8"),
    ],
)
def test_names_that_are_not_planned(text, words):
    with pytest.raises(PlanError) as refusal:
        parse_target(text)
    assert words in str(refusal.value)
    assert len(str(refusal.value)) < 400


def test_what_is_neither_is_read_as_a_slice():
    with pytest.raises(TopologyError):
        parse_target("x100:8")
    with pytest.raises(PlanError, match="expected a slice of TPUs such as"):
        parse_target(8)  # type: ignore[arg-type]
    for host in ("h100:8", GpuHost("h100", 8)):
        with pytest.raises(PlanError, match="a GPU is one device"):
            parse_target(host, "core")


def test_memory_is_what_jax_takes(monkeypatch):
    # What the drivers of these GPUs report, and the three quarters that JAX takes if nothing else is said.
    whole = {"h100": 84942979072, "h200": 151397597184, "b200": 191514411008}
    for name, size in whole.items():
        host = parse_target(f"{name}:1")
        assert host.memory_bytes == size  # type: ignore[attr-defined]
        assert host.usable_hbm_bytes == size * 3 // 4
    monkeypatch.setenv(FRACTION, "0.92")
    assert parse_target("h100:8").usable_hbm_bytes == int(84942979072 * 0.92)
    assert "92%" in parse_target("h100:8").notes()[1]
    for wrong in ("0", "1.5", "-0.5", "nan", "x"):
        monkeypatch.setenv(FRACTION, wrong)
        with pytest.raises(PlanError, match=f"{FRACTION}.*above 0 and at most 1"):
            parse_target("h100:8")


def test_the_memory_fraction_is_read_as_jax_does(monkeypatch):
    # jaxlib.xla_client.generate_pjrt_gpu_plugin_options is what JAX asks when it starts a GPU.
    client = pytest.importorskip("jaxlib.xla_client")

    def taken() -> float:
        return client.generate_pjrt_gpu_plugin_options().get("memory_fraction", 0.75)

    assert taken() == parse_target("h100:8").fraction  # type: ignore[attr-defined]
    for name, value in zip(MEMORY_FRACTIONS, ("0.9", "0.6"), strict=True):
        monkeypatch.setenv(name, value)
        assert taken() == parse_target("h100:8").fraction == float(value)  # type: ignore[attr-defined]
        monkeypatch.delenv(name)
    for name in MEMORY_FRACTIONS:
        monkeypatch.setenv(name, "0.9")
    with pytest.raises(ValueError, match="together"):
        taken()
    with pytest.raises(PlanError, match=f"Unset {MEMORY_FRACTIONS[1]}"):
        parse_target("h100:8")


# GiB of arguments, new outputs and temporaries, compiled by jax-cuda13-plugin 0.10.2: capibara plan --config
# production/tpu_v4 --topology h100:8 --max-compiles 3 model.num_layers=4 train.batch_size=64
COMPILED = {"none": 10.669, "dots": 6.828, "full": 2.650}


@pytest.mark.parametrize("remat", COMPILED)
def test_the_memory_of_a_step_is_that_of_the_gpu_compiler(remat):
    config = ModularModelConfig.from_toml("production/tpu_v4", ["model.num_layers=4", "train.batch_size=64"])
    layout = Layout(mesh=(("data", 8), ("model", 1)), remat=remat)
    found = estimate_memory(config, layout, parse_target("h100:8")).total / 2**30
    assert found == pytest.approx(COMPILED[remat], rel=0.06)


def test_the_compiler_is_told_the_memory():
    host = parse_target("h200:4")
    options = host.topology_options
    assert options["topology"] == "1x1x4"
    # It plans with four fifths of what it is told.
    told = int(options["target_config"].split("device_memory_size: ")[1].split()[0])
    assert told * 0.8 == pytest.approx(host.usable_hbm_bytes, rel=1e-9)
    assert 'device_description_str: "NVIDIA H200"' in options["target_config"]
    layout = Layout(mesh=(("data", 4), ("model", 1)))
    assert within(layout, 1 << 30, host) == layout
    job = Job(builder="a:b", params={}, slice=host, mesh=layout.mesh)
    assert job.options == {}
    assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def test_links_are_those_of_the_switch():
    links = parse_target("h100:8").links({"data": 4, "model": 2})
    assert links.switched
    assert links.bandwidth == 450e9
    # Whichever axis is used has all of it.
    assert links.gather(8e9, ("data",)) == pytest.approx(6e9 / 450e9, rel=1e-3)
    assert links.gather(8e9, ("model",)) == pytest.approx(4e9 / 450e9, rel=1e-3)


def test_flags_are_those_of_the_gpu_compiler():
    every = list(layouts(tiny(), parse_target("h100:4")))
    flags = {name for layout in every for name, _ in layout.flags}
    assert flags == {"xla_gpu_enable_latency_hiding_scheduler", "xla_gpu_enable_while_loop_double_buffering"}
    assert {layout.mesh for layout in every} == {
        layout.mesh for layout in layouts(tiny(), parse_target("v4:2x2x1"))
    }
    alone = {layout.flags for layout in layouts(tiny(), parse_target("b200:1"))}
    assert alone == {(("xla_gpu_enable_latency_hiding_scheduler", "true"),)}


def test_each_compiler_has_its_own_flags():
    flags = {
        "xla_gpu_enable_latency_hiding_scheduler": "true",
        "xla_gpu_all_gather_combine_threshold_bytes": "1024",
        "xla_enable_async_all_gather": "true",
    }
    assert options_for("tpu", flags) == {"xla_enable_async_all_gather": "true"}
    # XLA refuses "true" there.
    own = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": "1024",
    }
    assert options_for("gpu", flags) == options_for("cuda", flags) == own
    assert options_for("cpu", flags) == {}


def test_an_estimate_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CAPIBARA_CUDA_PLUGIN", str(tmp_path))
    found = plan(tiny(), "h100:8", compile=False)
    assert found.best.layout.num_devices == 8
    assert found.best.memory.get("padding", 0) == 0
    assert found.limit_bytes == 84942979072 * 3 // 4
    shown = f"{found}{json.dumps(found.to_json(), allow_nan=False)}"
    for words in ("TPU", "slice of", "libtpu"):
        assert words not in shown.replace("tpu.", "")
    assert found.best.usd_per_hour == 8 * 2.95
    assert "not calibrated" in shown
    with pytest.raises(CompilerMissingError, match="CAPIBARA_CUDA_PLUGIN"):
        plan(tiny(), "h100:8", compile=True)
    # Without being asked to, it estimates, and says why.
    assert "names no folder with jax_cuda13_plugin" in str(plan(tiny(), "h100:8"))


def test_a_missing_compiler_names_its_packages(monkeypatch):
    monkeypatch.delenv("CAPIBARA_CUDA_PLUGIN", raising=False)
    monkeypatch.setattr("sys.prefix", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        CompilerMissingError, match=r"pip install --no-deps jax-cuda13-plugin\S* jax-cuda13-pjrt"
    ):
        compiler_for(parse_target("h100:8"))
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    with pytest.raises(CompilerMissingError, match="exists for Linux only"):
        compiler_for(parse_target("h100:8"))


def test_the_plugin_of_another_jax_is_said(monkeypatch, tmp_path):
    (tmp_path / "jax_cuda13_plugin").mkdir()
    (tmp_path / "jax_cuda13_plugin-0.9.1.dist-info").mkdir()
    monkeypatch.setenv("CAPIBARA_CUDA_PLUGIN", str(tmp_path))
    found = compiler_for(parse_target("h100:8"))
    assert (found.name, found.version, found.path) == ("jax-cuda13-plugin", "0.9.1", str(tmp_path))
    assert "jax-cuda13-plugin 0.9.1 is installed beside JAX" in found.notes()[0]
    environment = found.environment()
    assert environment["PYTHONPATH"].split(":")[0] == str(tmp_path)
    assert environment["JAX_PLATFORMS"] == "cpu"


def test_prices_of_your_own(tmp_path):
    prices = tmp_path / "prices.toml"
    prices.write_text(
        '[[price]]\nchip = "h100"\nregion = "here"\nterm = "on-demand"\nusd_per_chip_hour = 3.0\n'
        'as_of = 2026-11-01\nsource = "an offer"\n'
    )
    found = plan(tiny(), "h100:4", compile=False, prices=prices)
    assert found.best.usd_per_hour == 12.0
    unknown = plan(tiny(), "b200:1", compile=False, term="spot")
    assert unknown.best.usd_per_hour is None
    assert "no price: the spot price of nvidia-b200 is not known" in str(unknown)


def test_what_gpus_have_not_is_refused():
    with pytest.raises(PlanError, match="XLA's GPU compiler does not make programs smaller"):
        plan(tiny(), "h100:8", compile=True, least_memory=True)
    with pytest.raises(DoesNotFitError) as refusal:
        plan(tiny(), "h100:8", compile=False, memory_limit_gb=1e-6)
    assert "More than the 8 GPUs of a host" in str(refusal.value)
    with pytest.raises(DoesNotFitError) as refusal:
        plan(tiny(), "h100:1", compile=False, memory_limit_gb=0.003)
    assert "A host such as h100:" in str(refusal.value)


def test_nothing_is_offloaded(monkeypatch):
    offloaded = "tpu.topology=8x1 tpu.offload=optimizer"
    found = plan(tiny(), "h100:8", compile=False, layout=offloaded)
    assert found.own is not None
    assert "keeps all arrays on the GPUs" in found.own.reason
    assert all(candidate.layout.offload == "none" for candidate in found.candidates)
    with pytest.raises(PlanError, match=r"tpu\.offload: .* keeps all arrays on the GPUs"):
        plan(tiny("tpu.offload=optimizer"), "h100:8", compile=False, keep=["tpu.offload"])
    kept = plan(tiny("tpu.offload=none"), "h100:8", compile=False, keep=["tpu.offload"])
    assert kept.best.layout.offload == "none"
    # A slice has its hosts' memory.
    on_slice = plan(tiny(), "v5e:2x4", compile=False, layout=offloaded)
    assert on_slice.own is not None
    assert not on_slice.own.reason


def test_a_lockfile_has_the_memory_that_it_was_planned_for(monkeypatch, tmp_path):
    from capibara.plan import lock

    monkeypatch.setenv(FRACTION, "0.92")
    target = parse_target("h100:8")
    estimate = plan(tiny(), target, compile=False)
    monkeypatch.delenv(FRACTION)
    monkeypatch.setattr(lock, "compiler_for", lambda target: SimpleNamespace(notes=list))
    best = replace(estimate.best, memory_source="compiler", versions={})
    file = tmp_path / "plan.lock"
    lock.write_lock(replace(estimate, candidates=(best,)), file)
    asked = []

    def candidate_of(work, target, layout, **options):
        asked.append(target)
        return CompiledProgram(status="ok"), best

    monkeypatch.setattr(lock, "candidate_of", candidate_of)
    assert lock.check_lock(file, cache=tmp_path).passed
    assert asked == [target]
    data = json.loads(file.read_text())
    for wrong in (0, 1.5, "0.9", None):
        file.write_text(json.dumps(data | {"memory_fraction": wrong}))
        with pytest.raises(PlanError, match="not a valid plan lockfile"):
            lock.check_lock(file, cache=tmp_path)
    # Those of earlier versions say nothing of it.
    del data["memory_fraction"]
    file.write_text(json.dumps(data))
    assert lock.check_lock(file, cache=tmp_path).passed
    assert asked[-1] == parse_target("h100:8")


def test_what_is_for_slices_says_so():
    with pytest.raises(PlanError, match=r"GPUs are planned for one host\. Leave it out"):
        plan(tiny(), "h100:8", compile=False, dcn_gbps=50)
    with pytest.raises(PlanError, match=r"GPUs are planned for one host\. Write h100:8"):
        plan(tiny(), "2xh100:8", compile=False)
    with pytest.raises(PlanError, match=r"only slices of TPUs are compared\. Plan it alone"):
        plan_slices(tiny(), ["h100:8", "v5e:2x4"], compile=False)
    with pytest.raises(PlanError, match="is not exported"):
        plan(tiny(), "h100:8", compile=False).export("jax")


def test_a_step_is_exported_for_its_platform(tmp_path):
    import jax
    import jax.numpy as jnp

    def step(w, x):
        return w - x.T @ (x @ w)

    args = (jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32))
    work = step_work(step, args, platform="cuda", folder=tmp_path)
    assert plan(work, "h100:2", compile=False).best.layout.num_devices == 2
    with pytest.raises(PlanError, match=r"exported for NVIDIA GPUs.*platform='tpu'"):
        plan(work, "v5e:2x2", compile=False)
    with pytest.raises(PlanError, match=r"exported for TPUs.*platform='cuda'"):
        plan(step_work(step, args, folder=tmp_path), "h100:2", compile=False)
    with pytest.raises(PlanError, match="platform='gpu' must be 'tpu' or 'cuda'"):
        step_work(step, args, platform="gpu")


def test_serving_is_estimated():
    found = plan_serving(tiny(), "h100:2", prompt_length=16, output_length=16, compile=False)
    assert found.best.target == parse_target("h100:2")
    assert "TPU" not in str(found)


def test_remedies_have_more_gpus():
    config = tiny()
    layout = Layout(mesh=(("data", 1), ("model", 1)), remat="none")
    host = parse_target("h100:1")
    limit = estimate_memory(config, layout, host).total // 2
    words = {change.words for change in changes(config, layout, host, limit)}
    assert any(word.startswith("8 GPUs (h100:8)") for word in words)
    assert not any("chips" in word or "16" in word.split(" (")[0] for word in words)


def test_a_plan_file_is_read_back(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan(tiny(), "h200:8", compile=False).to_json()))
    planned = read_planned(file)
    assert planned.topology == "h200:8"
    assert planned.layout.num_devices == 8


def test_the_command_plans_gpus(capsys):
    arguments = ["plan", "--config", "demo", *TINY, "--topology", "h100:8", "--no-compile"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "on h100:8 (8 × NVIDIA H100 SXM); a device has 59.33 GiB" in out
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["topology"] == "h100:8"
    assert data["slice"] == "8 × NVIDIA H100 SXM"
    assert data["candidates"][0]["devices"] == 8
    assert main(["plan", "--topology", "h100:3", "--no-compile"]) == 2
    assert "expected 1, 2, 4 or 8" in capsys.readouterr().err
