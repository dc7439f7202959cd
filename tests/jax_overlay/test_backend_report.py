"""What the package says about itself is what is so: backend info, optimisation status, memory, diagnostics."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import jax
import pytest

import capibara.jax as cjax
from capibara import ops
from capibara.jax import _backend, diagnostics
from capibara.measure import installation

# Names that are made at run time, which no type checker can know.
flags: Any = jax.config
overlay: Any = cjax


@pytest.fixture
def on_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("written for the CPU backend")


def test_backend_info_agrees_with_jax_and_with_the_registry():
    info = cjax.get_backend_info()
    assert info["name"] == jax.default_backend()
    assert info["device_count"] == len(jax.devices())
    assert info["jax_version"] == jax.__version__
    assert set(info["implementations"]) == set(ops.list_ops())
    for name, found in info["implementations"].items():
        known = set(ops.list_ops()[name].implementations)
        assert found["chosen"] in known
        assert set(found["not_chosen"]) == known - {found["chosen"]}
        assert all(found["not_chosen"].values())
    json.dumps(info)


def test_capabilities_follow_the_implementation_that_runs(monkeypatch):
    """If only the reference is left, no capability may be claimed."""
    capabilities = cjax.get_backend_info()["capabilities"]
    assert {"flash_attention", "parallel_scan", "vq_kernels"} <= set(capabilities)

    def only_reference(op, *args, **kwargs):
        return ops.Explanation(op, "cpu", "reference", {})

    monkeypatch.setattr(ops, "explain", only_reference)
    info, status = cjax.get_backend_info(), cjax.get_optimization_status()
    assert not any(info["capabilities"].values())
    assert info["custom_kernels"] is False
    assert status["memory_optimized"] is False
    assert "stores every score" in status["reasons"]["memory_optimized"]


def test_a_hand_written_kernel_is_told_from_a_composition(monkeypatch):
    def explain_as(chosen):
        return lambda op, *args, **kwargs: ops.Explanation(op, "cpu", chosen, {})

    monkeypatch.setattr(ops, "explain", explain_as("xla"))
    assert cjax.get_backend_info()["custom_kernels"] is False
    monkeypatch.setattr(ops, "explain", explain_as("pallas_tpu"))
    assert cjax.get_backend_info()["custom_kernels"] is True
    status = cjax.get_optimization_status()
    assert status["custom_kernels_active"] is True
    assert "flash_attention (pallas_tpu)" in status["reasons"]["custom_kernels_active"]


def test_every_operation_has_a_typical_call():
    assert set(_backend.TYPICAL_CALLS) == set(ops.list_ops())
    assert set(_backend.CAPABILITIES.values()) <= set(ops.list_ops())


def test_the_explanation_follows_the_platform():
    tpu, cpu = _backend.explain_operations("tpu"), _backend.explain_operations("cpu")
    assert {each.platform for each in tpu.values()} == {"tpu"}
    assert {each.platform for each in cpu.values()} == {"cpu"}


def test_nothing_is_called_tpu_optimized_without_a_tpu(on_cpu):
    before = dict(jax.config.values)
    cjax.config.update("enable_tpu_optimizations", True)
    try:
        assert cjax.config.enable_tpu_optimizations is True
        assert dict(jax.config.values) == before
        status = cjax.get_optimization_status()
        assert status["tpu_optimized"] is False
        assert "'cpu', not a TPU" in status["reasons"]["tpu_optimized"]
        assert cjax.get_backend_info()["tpu_optimized"] is False
        assert not hasattr(cjax, "tpu_v4_optimizations")
        with pytest.raises(AttributeError, match="default backend is a TPU; here it is 'cpu'"):
            overlay.tpu_v4_optimizations
    finally:
        cjax.config.update("enable_tpu_optimizations", False)


@pytest.mark.usefixtures("no_compilation_cache")
def test_on_a_tpu_the_flags_are_set_and_put_back(monkeypatch, tmp_path):
    """The backend's name is replaced; the flags, the compilation cache and the way back are real."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = dict(jax.config.values)
    assert cjax.get_optimization_status()["tpu_optimized"] is False
    cjax.config.update("enable_tpu_optimizations", True)
    try:
        status = cjax.get_optimization_status()
        assert status["tpu_optimized"] is True
        assert "bfloat16" in status["reasons"]["tpu_optimized"]
        assert flags.jax_default_matmul_precision == "bfloat16"
        assert flags.jax_compilation_cache_dir == str(tmp_path / "capibara" / "jax")
        assert overlay.tpu_v4_optimizations is sys.modules["capibara.jax.tpu_v4"]
    finally:
        cjax.config.update("enable_tpu_optimizations", False)
    assert dict(jax.config.values) == before
    assert cjax.get_optimization_status()["tpu_optimized"] is False


def test_the_compilation_cache_is_used_after_switching_on(fresh_python, tmp_path):
    files = fresh_python(
        f"""
        import json, os, sys
        os.environ["XDG_CACHE_HOME"] = {str(tmp_path)!r}
        os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
        import capibara.jax as jax
        jax.jit(lambda x: x + 1)(1.0)
        import jax as real
        real.default_backend = lambda: "tpu"
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("enable_tpu_optimizations", True)
        real.default_backend = lambda: "cpu"
        jax.jit(lambda x: x * 3 + 1)(1.0)
        print(json.dumps(len(os.listdir(os.path.join({str(tmp_path)!r}, "capibara", "jax")))))
        """
    )
    assert files > 0


def test_memory_limit_is_the_machine_s(on_cpu):
    limit = installation.memory_limit_bytes()
    assert limit is not None
    assert 0 < limit <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert cjax.get_backend_info()["memory_limit_gb"] == pytest.approx(limit / 2**30)


def test_allocated_memory_counts_live_arrays_once(on_cpu):
    before = cjax.device_memory_allocated()
    array = jax.block_until_ready(jax.numpy.ones((256, 256)))
    same = jax.device_put(array, jax.devices()[0])
    assert cjax.device_memory_allocated() - before == 256 * 256 * 4
    assert "live JAX arrays" in before.source
    array.delete()
    del same
    assert cjax.device_memory_allocated() == before


def test_peak_memory_grows_with_an_allocation_and_stays(fresh_python):
    source, before, after = fresh_python(
        """
        import json
        import capibara.jax as jax, numpy as np
        peak = jax.device_memory_peak()
        big = np.ones(2**25)
        del big
        print(json.dumps([peak.source, peak, jax.device_memory_peak()]))
        """
    )
    assert "resident" in source
    assert after - before > 2**27


class FakeDevice:
    """A device that keeps statistics, as GPUs and TPUs do."""

    platform = "tpu"
    id = 0

    def memory_stats(self):
        return {"bytes_in_use": 5, "peak_bytes_in_use": 9, "bytes_limit": 100}


class SilentDevice:
    """A device that keeps none."""

    platform = "tpu"
    id = 0

    def memory_stats(self):
        return None


def test_a_device_s_own_statistics_come_first():
    device = FakeDevice()
    assert cjax.device_memory_allocated(device) == 5
    assert cjax.device_memory_peak(device) == 9
    assert "memory_stats" in cjax.device_memory_peak(device).source
    assert installation.memory_limit_bytes(device) == 100


def test_an_unknown_figure_is_not_made_up():
    assert installation.memory_limit_bytes(SilentDevice()) is None
    with pytest.raises(NotImplementedError, match="tpu backend reports no peak"):
        cjax.device_memory_peak(SilentDevice())


def test_diagnosis_of_a_working_installation():
    diagnosis = diagnostics.check_installation()
    assert diagnosis.jax_native_available is True
    assert diagnosis.error_message == ""
    assert diagnosis.backend == jax.default_backend()
    assert len(diagnosis.devices) == len(jax.devices())
    assert diagnosis.versions["jax"] == jax.__version__
    assert {check.name for check in diagnosis.checks} >= {"import jax", "backend", "computation", "overlay"}
    assert json.loads(json.dumps(diagnosis.to_dict()))["jax_native_available"] is True
    assert "works here" in str(diagnosis)


def test_diagnosis_of_a_backend_that_does_not_start(monkeypatch):
    monkeypatch.setattr(installation, "backend_error", lambda: "Unable to initialize backend 'tpu'")
    diagnosis = diagnostics.check_installation()
    assert diagnosis.jax_native_available is False
    assert "Unable to initialize backend 'tpu'" in diagnosis.error_message
    assert "JAX_PLATFORMS" in diagnosis.error_message
    assert diagnosis.devices == ()


def test_diagnosis_of_wrong_numbers(monkeypatch):
    monkeypatch.setattr(jax, "grad", lambda function: lambda x: 0 * x)
    diagnosis = diagnostics.check_installation()
    assert diagnosis.jax_native_available is False
    assert "came out wrong" in diagnosis.error_message


@pytest.mark.parametrize(("version", "fine"), [((0, 9, 2), False), ((0, 10, 0), True), ((0, 14, 0), True)])
def test_diagnosis_of_other_jax_versions(monkeypatch, version, fine):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    diagnosis = diagnostics.check_installation()
    assert diagnosis.jax_native_available is fine
    (check,) = [check for check in diagnosis.checks if check.name == "JAX version"]
    assert check.ok is (version == (0, 10, 0))


def test_diagnosis_of_a_second_copy(monkeypatch):
    copy = type(sys)("jax.nn")
    copy.__file__ = jax.nn.__file__
    monkeypatch.setitem(sys.modules, "capibara.jax.nn", copy)
    diagnosis = diagnostics.check_installation()
    assert diagnosis.jax_native_available is False
    assert re.search(r"second copy.*capibara\.jax\.nn", diagnosis.error_message)


def test_diagnosis_without_the_finder(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if type(f).__name__ != "AliasFinder"])
    assert "finder" in diagnostics.check_installation().error_message


def test_import_names_tell_whose_file_answers(tmp_path, monkeypatch):
    for name, text in (("mithril", "x = 1\n"), ("independent_core", "from capibara.compress import *\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)  # another test may have imported it
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {each.name: each for each in installation.import_names()}
    assert names["capibara"].by_capibara
    assert not names["mithril"].by_capibara
    assert names["mithril"].origin == str(tmp_path / "mithril" / "__init__.py")
    assert names["independent_core"].by_capibara
    (nobody,) = installation.import_names(("a_package_that_is_nowhere",))
    assert nobody.origin is None


def test_versions_of_missing_packages_are_none():
    versions = installation.package_versions(("jax", "a-package-that-is-nowhere"))
    assert versions == {"jax": jax.__version__, "a-package-that-is-nowhere": None}
