"""The chip catalogue, its views, and detecting the chip here."""

from __future__ import annotations

import pickle
from importlib import resources
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.hardware import (
    Chip,
    ChipError,
    chip_for_device_kind,
    cpu_name,
    detect_chip,
    get_chip,
    list_chips,
)
from capibara.hardware.detect import _cpu_chip

ALL = [chip.name for chip in list_chips()]
GIB = 1024**3


def test_the_catalogue_holds_every_promised_chip():
    wanted = {f"tpu-{v}" for v in ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x")}
    wanted |= {"nvidia-a100-40gb", "nvidia-a100-80gb", "nvidia-h100-sxm", "nvidia-h100-pcie", "nvidia-h200"}
    wanted |= {"nvidia-b200"}
    wanted |= {"arm-axion", "cpu-amd", "cpu-intel"}
    assert wanted <= set(ALL)
    assert {c.kind for c in list_chips()} == {"tpu", "gpu", "cpu"}
    assert all(c.kind == "tpu" for c in list_chips("tpu"))
    assert len(list_chips("tpu")) == 7


def test_the_data_ships_inside_the_package():
    files = {entry.name for entry in resources.files("capibara.hardware").iterdir()}
    assert {"chips.toml", "prices.toml"} <= files


@pytest.mark.parametrize("name", ALL)
def test_every_figure_has_a_source(name):
    chip = get_chip(name)
    for dtype in chip.peak_flops:
        assert chip.source(f"peak_flops.{dtype}") is not None
    for figure in (
        "hbm_bytes",
        "hbm_bandwidth",
        "link_bandwidth",
        "interconnect_bandwidth",
        "links_per_chip",
        "gke_accelerator",
        "chips_per_host",
        "most_chips_on_one_host",
    ):
        if getattr(chip, figure) is not None:
            source = chip.source(figure)
            assert source is not None, figure
            assert source.title
            assert source.url is None or source.url.startswith("https://")
    if chip.usable_hbm_bytes is not None or chip.usable_hbm_bytes_core is not None:
        assert chip.source("usable_hbm_bytes") is not None


@pytest.mark.parametrize("name", ALL)
def test_figures_are_of_the_right_size(name):
    chip = get_chip(name)
    for rate in chip.peak_flops.values():
        assert 1e12 < rate < 1e16
    if chip.hbm_bytes is not None:
        assert 8 * GIB < chip.hbm_bytes < 512 * GIB
        assert 0.9 * chip.hbm_bytes < (chip.usable_hbm_bytes or chip.hbm_bytes) <= chip.hbm_bytes
    if chip.hbm_bandwidth is not None:
        assert 0.5e12 < chip.hbm_bandwidth < 1e13
    if chip.link_bandwidth is not None and chip.interconnect_bandwidth is not None:
        # The vendor's total, both ways, is nominal: data get nine tenths of it, by the other source.
        links = chip.links_per_chip or 6  # of TPU7x, whose grid has three axes
        assert 0.9 * chip.interconnect_bandwidth == pytest.approx(2 * links * chip.link_bandwidth)
    if chip.topology_dims is not None:
        assert chip.links_per_chip == 2 * chip.topology_dims
    assert chip.name in chip.describe()
    assert chip.title in str(chip)


def test_links_carry_what_the_table_says():
    """ "How to Scale Your Model", part 2: bytes a second over a link, one way."""
    table = {"v3": 1e11, "v4": 4.5e10, "v5p": 9e10, "v5e": 4.5e10, "v6e": 9e10, "v7x": 9e10}
    assert {name: get_chip(name).link_bandwidth for name in table} == table


def test_v4_figures():
    chip = get_chip("v4")
    assert chip.peak("bfloat16") == 275e12
    assert chip.hbm_bytes == 32 * GIB
    assert chip.hbm_bandwidth == 1200e9
    assert chip.usable_hbm_bytes == 30.75 * GIB
    assert (chip.link_bandwidth, chip.links_per_chip, chip.topology_dims) == (45e9, 6, 3)
    assert chip.devices_per_chip == 1  # megacore
    assert chip.ridge() == pytest.approx(275e12 / 1200e9)


@pytest.mark.parametrize("version", ["v2", "v3", "v4", "v5e", "v5p", "v6e", "7x"])
def test_tpu_figures_agree_with_jaxs_own_table(version):
    info_module = pytest.importorskip("jax._src.pallas.mosaic.tpu_info")
    if not hasattr(info_module, "_get_tpu_info_impl"):
        pytest.skip("this JAX keeps no such table")
    kind = info_module.ChipVersion(version)
    info = info_module._get_tpu_info_impl(kind, 1)
    chip = get_chip(f"tpu-v{version}" if version == "7x" else f"tpu-{version}")
    cores = kind.num_physical_tensor_cores_per_chip
    assert chip.cores_per_chip == cores
    assert chip.megacore == kind.supports_megacore
    # The vendor's pages and JAX's table round differently (v3: 123 against 140 TFLOP/s).
    assert chip.peak("bfloat16") == pytest.approx(info.bf16_ops_per_second * cores, rel=0.13)
    assert chip.hbm_bandwidth == pytest.approx(info.mem_bw_bytes_per_second * cores, rel=0.13)
    assert chip.hbm_bytes == pytest.approx(info.hbm_capacity_bytes * cores, rel=0.08)


# --- names ---


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v4", "tpu-v4"),
        ("TPU v4", "tpu-v4"),
        ("TPU V4", "tpu-v4"),
        ("tpu_v4", "tpu-v4"),
        (" tpu-v4 ", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("Trillium", "tpu-v6e"),
        ("TPU7x", "tpu-v7x"),
        ("H100", "nvidia-h100-sxm"),
        ("h100-pcie", "nvidia-h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-40gb"),
        ("a100", "nvidia-a100-80gb"),
        ("axion", "arm-axion"),
        ("tpu-v4-core", "tpu-v4-core"),
        ("v5e-core", "tpu-v5e"),
    ],
)
def test_names_and_aliases(name, expected):
    assert get_chip(name).name == expected


def test_get_chip_passes_a_chip_through():
    chip = get_chip("v4")
    assert get_chip(chip) is chip


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h10", "Did you mean 'h100'?"),
        ("tpu-v44", "Did you mean 'tpu-v4'?"),
        ("", "Known: "),
        ("x" * 1000, "Known: "),
    ],
)
def test_unknown_chips(name, expected):
    with pytest.raises(ChipError) as caught:
        get_chip(name)
    assert expected in str(caught.value)
    assert "nvidia-h200" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_not_even_a_name():
    with pytest.raises(ChipError, match="name"):
        get_chip(4)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ChipError, match="kind"):
        list_chips("npu")


# --- views and figures ---


def test_core_view_halves_everything_but_the_links():
    chip, core = get_chip("v4"), get_chip("tpu-v4-core")
    assert core.view == "core"
    assert core.peak("bf16") == chip.peak("bf16") / 2
    assert core.hbm_bytes == 16 * GIB
    assert core.hbm_bandwidth == 600e9
    assert core.usable_hbm_bytes == 15.25 * GIB
    assert core.link_bandwidth == chip.link_bandwidth
    assert core.ridge() == chip.ridge()
    assert core.core_view() is core
    assert "one TensorCore of 2" in core.title


@pytest.mark.parametrize(
    ("name", "devices"), [("v2", 2), ("v3", 2), ("v4", 1), ("v5p", 1), ("v5e", 1), ("v7x", 2)]
)
def test_devices_a_chip(name, devices):
    assert get_chip(name).devices_per_chip == devices


def test_only_tpus_have_cores():
    with pytest.raises(ChipError, match="core view"):
        get_chip("h100").core_view()


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_peak_takes_any_spelling(dtype):
    assert get_chip("v4").peak(dtype) == 275e12


def test_peak_of_other_types():
    assert get_chip("h100").peak(np.float32) == 67e12
    assert get_chip("h100").peak("fp8") == get_chip("h100").peak(jnp.float8_e4m3fn) == 1979e12
    with pytest.raises(ChipError, match=r"'float32' is not known.*bfloat16, int8"):
        get_chip("v4").peak("float32")


def test_a_cpu_has_no_published_peak():
    with pytest.raises(ChipError, match="measured_chip"):
        get_chip("cpu-amd").peak("float32")
    with pytest.raises(ChipError, match="bandwidth"):
        get_chip("cpu-amd").ridge()
    assert "not published" in get_chip("axion").describe()


def test_chips_are_frozen_hashable_and_picklable():
    chip = get_chip("v4")
    with pytest.raises(AttributeError):
        chip.name = "x"  # pyright: ignore[reportAttributeAccessIssue]
    assert pickle.loads(pickle.dumps(chip)) == chip
    assert len({get_chip(name) for name in ALL}) == len(ALL)
    chip.peak_flops["bfloat16"] = 0.0  # a copy: the chip is untouched
    assert chip.peak("bfloat16") == 275e12


# --- detection ---


def device(platform: str, kind: str, **more: object) -> SimpleNamespace:
    return SimpleNamespace(platform=platform, device_kind=kind, **more)


def test_detecting_this_machine():
    chip = detect_chip()
    if jax.devices()[0].platform == "cpu":
        assert chip.kind == "cpu"
        assert chip.title
        assert chip.cores_per_chip
        assert chip.cores_per_chip >= 1
        assert chip.peaks == ()
        assert chip.hbm_bytes is None or chip.hbm_bytes > GIB / 2


def test_measured_rates_are_marked():
    chip = detect_chip(rates={"float32": 1.5e11})
    assert chip.peak("float32") == 1.5e11
    assert chip.measured
    source = chip.source("peak_flops")
    assert source is not None
    assert "measured" in source.title
    assert "measured" in str(chip)


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (device("tpu", "TPU v4"), "tpu-v4"),
        (device("tpu", "TPU v4", num_cores=2), "tpu-v4"),
        (device("tpu", "TPU v4", num_cores=1), "tpu-v4-core"),
        (device("tpu", "TPU v3", num_cores=1), "tpu-v3-core"),
        (device("tpu", "TPU v5 lite", num_cores=1), "tpu-v5e"),
        (device("tpu", "TPU v6 lite", num_cores=1), "tpu-v6e"),
        (device("gpu", "NVIDIA H100 PCIe"), "nvidia-h100-pcie"),
        (device("gpu", "NVIDIA H200"), "nvidia-h200"),
    ],
)
def test_detecting_accelerators_by_device_kind(fake, expected):
    assert detect_chip(fake).name == expected


def test_an_unknown_accelerator_has_a_name_and_no_figures():
    chip = detect_chip(device("gpu", "NVIDIA Z9000"))
    assert (chip.name, chip.kind, chip.peaks, chip.hbm_bytes) == ("NVIDIA Z9000", "gpu", (), None)
    assert chip_for_device_kind("NVIDIA Z9000") is None


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor : 0\nmodel name\t: AMD EPYC 9B14\n", "AMD EPYC 9B14"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd4f\n", "Arm Neoverse V2"),
        ("CPU part\t: 0xabc\n", "Arm CPU part 0xabc"),
    ],
)
def test_cpu_names(cpuinfo, expected):
    assert cpu_name(cpuinfo) == expected


def test_cpu_name_without_proc():
    assert cpu_name("")


@pytest.mark.parametrize(
    ("name", "board", "expected"),
    [
        ("Arm Neoverse V2", "Google\n", "arm-axion"),
        ("Arm Neoverse V2", "Amazon EC2\n", "cpu-arm"),
        ("AMD EPYC 9B14", "Google\n", "cpu-amd"),
        ("Intel(R) Xeon(R) Platinum 8481C", "", "cpu-intel"),
        ("Elbrus", "", "cpu"),
    ],
)
def test_which_cpu(name, board, expected):
    chip = _cpu_chip(name, board)
    assert isinstance(chip, Chip)
    assert chip.name == expected
