"""Report what is installed and running: versions, devices, memory, import names.

``capibara doctor``, ``capibara.jax.diagnostics`` and ``capibara.jax.get_backend_info`` all use this module.
Everything is looked up on request and nothing is assumed: a device is listed because the backend lists it, a version
because the package's metadata states it, and JAX counts as working because a small compiled computation returned
correct values. If JAX is missing or broken, the report says so.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError
from capibara.hardware.telemetry import DeviceMemory, device_memory, host_memory, live_array_bytes
from capibara.jax_versions import (
    INSTALL,
    RANGE,
    installed_version,
    libtpu_problem,
    required_libtpu,
    version_problem,
)

__all__ = [
    "Check",
    "DeviceFacts",
    "ImportName",
    "InstallationReport",
    "MemoryBytes",
    "MissingJaxError",
    "backend_error",
    "check_installation",
    "describe_devices",
    "device_memory_allocated",
    "device_memory_peak",
    "import_names",
    "memory_limit_bytes",
    "package_versions",
]

PACKAGES = (
    "capibara-jax",
    "jax",
    "jaxlib",
    "numpy",
    "scipy",
    "pydantic",
    "rich",
    "tomli-w",
    "optax",
    "orbax-checkpoint",
    "safetensors",
    "matplotlib",
    "torch",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "jax-rocm7-plugin",
    "fastapi",
    "uvicorn",
    "llguidance",
    "prometheus-client",
)

NAMES = ("capibara", "mithril", "independent_core")


class MissingJaxError(CapibaraError, ImportError):
    """``capibara.jax`` was imported, but JAX cannot be imported."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"capibara.jax needs JAX, and importing it failed: {reason}. "
            f"Install it with: {INSTALL} (for NVIDIA GPUs 'jax[cuda13]', for TPUs 'jax[tpu]')",
            name="jax",
        )


class MemoryBytes(int):
    """A number of bytes with its source: ``.source``."""

    source: str

    def __new__(cls, value: int, source: str) -> MemoryBytes:
        number = super().__new__(cls, value)
        number.source = source
        return number

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryBytes, (int(self), self.source)


@dataclass(frozen=True)
class Check:
    """One check. ``remedy`` is empty if it passed."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    required: bool = True


@dataclass(frozen=True)
class DeviceFacts:
    """One device, as JAX reports it. Byte counts are None if the backend does not report them."""

    id: int
    platform: str
    kind: str
    process: int
    memory_limit_bytes: int | None
    memory_in_use_bytes: int | None
    memory_peak_bytes: int | None


@dataclass(frozen=True)
class ImportName:
    """What ``import <name>`` finds. ``origin`` is a file, or None if the name is not importable."""

    name: str
    origin: str | None
    by_capibara: bool


@dataclass(frozen=True)
class InstallationReport:
    """The result of :func:`check_installation`.

    Attributes:
      jax_native_available: ``capibara.jax`` works here: every required check passed.
      error_message: the first failure and its remedy; empty when there is none.
      checks: all checks, in order.
      versions: installed version by package; None if it is not installed.
      devices: the devices of the default backend.
      backend: its platform, such as ``"cpu"``; None if no backend starts.
      python: version and implementation of the interpreter. system: operating system and processor.
    """

    jax_native_available: bool
    error_message: str
    checks: tuple[Check, ...]
    versions: Mapping[str, str | None]
    devices: tuple[DeviceFacts, ...]
    backend: str | None
    python: str
    system: str

    def to_dict(self) -> dict[str, Any]:
        """The same as plain dicts and lists, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = "capibara.jax works here" if self.jax_native_available else "capibara.jax does NOT work here"
        lines = [f"{head} ({self.backend or 'no backend'}, {len(self.devices)} device(s))"]
        lines += [f"  {'ok ' if check.ok else 'BAD'} {check.name}: {check.detail}" for check in self.checks]
        lines += [f"      remedy: {check.remedy}" for check in self.checks if not check.ok and check.remedy]
        return "\n".join(lines)


def package_versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Installed version of each distribution, from its metadata; None if it is not installed."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def import_names(names: tuple[str, ...] = NAMES) -> tuple[ImportName, ...]:
    """For each import name, the file that would be imported, and whether it belongs to Capibara."""
    found = []
    for name in names:
        module = sys.modules.get(name)
        try:
            spec = module.__spec__ if module is not None else importlib.util.find_spec(name)
        except ValueError:  # a module put there by hand, without a spec
            spec = None
        origin = spec.origin if spec is not None else getattr(module, "__file__", None)
        found.append(ImportName(name, origin, name == "capibara" or _is_ours(origin)))
    return tuple(found)


def _is_ours(origin: str | None) -> bool:
    """Whether a compatibility module is the one that comes with Capibara: its text re-exports capibara."""
    if origin is None or not origin.endswith("__init__.py"):
        return False
    try:
        with open(origin, encoding="utf-8", errors="replace") as file:
            return re.search(r"^\s*(from|import) capibara\b", file.read(65536), re.MULTILINE) is not None
    except OSError:
        return False


def backend_error() -> str | None:
    """Start JAX's default backend; the reason if that fails, else None."""
    import jax

    try:
        jax.devices()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def describe_devices() -> tuple[DeviceFacts, ...]:
    """The devices of JAX's default backend, with the memory figures that each one reports."""
    import jax

    facts = []
    for device in jax.devices():
        # Only a process's own devices can be asked.
        local = device.process_index == jax.process_index()
        memory = _memory(device) if local else DeviceMemory(str(device), None, None, None)
        facts.append(
            DeviceFacts(
                id=device.id,
                platform=device.platform,
                kind=device.device_kind,
                process=device.process_index,
                memory_limit_bytes=memory.limit,
                memory_in_use_bytes=memory.in_use,
                memory_peak_bytes=memory.peak,
            )
        )
    return tuple(facts)


def _memory(device: Any) -> DeviceMemory:
    """The device's own figures; all None where its runtime keeps none, or says that it cannot."""
    try:
        return device_memory([device])[0]
    except Exception as error:
        # The runtime's exception type differs between releases; only "not supported" is an answer.
        if not isinstance(error, NotImplementedError) and "UNIMPLEMENTED" not in str(error):
            raise
        return DeviceMemory(str(device), None, None, None)


def memory_limit_bytes(device: Any | None = None) -> MemoryBytes | None:
    """Memory that JAX may use on ``device`` (default: the first local one).

    If the backend reports a limit, that one. On a CPU it is the machine's: the smaller of installed memory and the
    control group's limit. None if neither is known.
    """
    import jax

    asked: Any = jax.local_devices()[0] if device is None else device
    limit = _memory(asked).limit
    if limit:
        return MemoryBytes(limit, f"the {asked.platform} backend's limit")
    return _host_memory_limit() if asked.platform == "cpu" else None


def _host_memory_limit() -> MemoryBytes | None:
    found = []
    if hasattr(os, "sysconf") and {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= set(os.sysconf_names):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        found.append(MemoryBytes(total, "the machine's memory"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:  # no control groups of this version
            continue
        if text.isdigit():
            found.append(MemoryBytes(int(text), "the control group's limit"))
    return min(found, default=None)


def device_memory_allocated(device: Any | None = None, *, exact: bool = True) -> MemoryBytes:
    """Bytes in use now on ``device``, or on all of this process's devices together.

    From ``device.memory_stats()["bytes_in_use"]`` (GPU, TPU). For a backend without such a count (CPU), it is the
    size of the live JAX arrays, each buffer once, without temporaries of running computations. ``.source`` of the
    result says which one was used.
    """
    import jax

    devices = jax.local_devices() if device is None else [device]
    counted = [_memory(each).in_use for each in devices]
    if all(count is not None for count in counted):
        return MemoryBytes(sum(count or 0 for count in counted), "device.memory_stats()['bytes_in_use']")
    return MemoryBytes(live_array_bytes(devices, exact=exact), "sizes of the live JAX arrays")


def device_memory_peak(device: Any | None = None) -> MemoryBytes:
    """Peak bytes in use on ``device``, or the sum of the peaks of this process's devices.

    From ``device.memory_stats()["peak_bytes_in_use"]`` (GPU, TPU). A CPU backend records no peak; there it is the
    peak resident set of the whole Python process, which includes the interpreter and the libraries: an upper bound.
    ``.source`` of the result says which one was used.

    Raises:
      NotImplementedError: neither the backend nor the operating system reports a figure.
    """
    import jax

    devices = jax.local_devices() if device is None else [device]
    counted = [_memory(each).peak for each in devices]
    if all(count is not None for count in counted):
        return MemoryBytes(sum(count or 0 for count in counted), "device.memory_stats()['peak_bytes_in_use']")
    peak = host_memory().peak if all(each.platform == "cpu" for each in devices) else None
    if peak is None:
        raise NotImplementedError(
            f"the {devices[0].platform} backend reports no peak memory; "
            "use jax.profiler.device_memory_profile()"
        )
    return MemoryBytes(peak, "peak resident memory of this process (the CPU backend keeps no peak)")


def check_installation(more: tuple[Check, ...] = ()) -> InstallationReport:
    """Test JAX from the import to a compiled computation, and report each step.

    Does not raise for a broken installation, but reports it. ``more`` are the caller's own checks, listed after
    these.
    """
    checks = [*_check_jax(), *more]
    works = any(check.ok for check in checks if check.name == "backend")
    devices = describe_devices() if works else ()
    bad = next((check for check in checks if check.required and not check.ok), None)
    message = "" if bad is None else f"{bad.name}: {bad.detail}" + (f". {bad.remedy}" if bad.remedy else "")
    return InstallationReport(
        jax_native_available=bad is None,
        error_message=message,
        checks=tuple(checks),
        versions=package_versions(),
        devices=devices,
        backend=devices[0].platform if devices else None,
        python=f"{platform.python_implementation()} {platform.python_version()}",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
    )


def _check_jax() -> list[Check]:
    try:
        import jax
    except Exception as error:
        # A mismatched jaxlib raises RuntimeError, a broken extension anything; each is the finding.
        install = f"Install it with: {INSTALL}"
        return [Check("import jax", False, f"{type(error).__name__}: {error}", install)]
    checks = [
        Check("import jax", True, f"JAX {jax.__version__} from {Path(jax.__file__).parent}"),
        _version(jax),
        *_tpu_compiler(),
    ]
    if any(check.required and not check.ok for check in checks):
        return checks  # nothing can be expected of such a JAX
    reason = backend_error()
    if reason is not None:
        remedy = "Set JAX_PLATFORMS=cpu to run on the CPU, or install the plugin of your accelerator"
        return [*checks, Check("backend", False, reason, remedy)]
    devices = jax.devices()
    detail = f"{devices[0].platform}, {len(devices)} device(s), first: {devices[0].device_kind}"
    return [*checks, Check("backend", True, detail), _computes(jax), *_unused_accelerators(jax)]


def _version(jax: Any) -> Check:
    kind, _ = version_problem(jax.__version__)
    if kind == "old":
        return Check("JAX version", False, f"{jax.__version__}; Capibara needs {RANGE}", INSTALL)
    if kind == "new":
        detail = f"{jax.__version__} is newer than what Capibara is tested with ({RANGE})"
        return Check("JAX version", False, detail, INSTALL, required=False)
    return Check("JAX version", True, f"{jax.__version__} ({RANGE})")


def _tpu_compiler() -> list[Check]:
    """Whether an installed libtpu is the one that the installed JAX is made for."""
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return []
    wanted = required_libtpu()
    if libtpu_problem(version):
        detail = f"{version}, and JAX {installed_version()} is made for {wanted}"
        return [Check("libtpu", False, detail, f"pip install 'libtpu=={wanted}'", required=False)]
    return [Check("libtpu", True, f"{version} ({wanted or 'JAX asks for none in particular'})")]


def _computes(jax: Any) -> Check:
    """Compile, differentiate and run something small whose answer is known: d/dx sum((x @ x)²) at 2·I."""
    import numpy as np

    try:
        x = 2.0 * jax.numpy.eye(4)
        gradient = jax.jit(jax.grad(lambda x: ((x @ x) ** 2).sum()))(x)
        # Each diagonal entry is x**4, so its slope is 4·2³; off the diagonal everything is 0.
        right = np.allclose(np.asarray(gradient), 32.0 * np.eye(4), rtol=1e-2)
    except Exception as error:
        return Check(
            "computation", False, f"{type(error).__name__}: {error}", "Reinstall jax and jaxlib together"
        )
    if not right:
        return Check(
            "computation", False, "a small gradient came out wrong", "Reinstall jax and jaxlib together"
        )
    return Check("computation", True, "a jitted gradient is correct")


def _unused_accelerators(jax: Any) -> list[Check]:
    """An accelerator that the system shows and JAX does not use is the commonest silent mistake."""
    if jax.default_backend() != "cpu" or os.environ.get("JAX_PLATFORMS"):
        return []
    seen = []
    if Path("/dev/nvidia0").exists():
        seen.append(("an NVIDIA GPU", "pip install 'jax[cuda13]'"))
    if Path("/dev/accel0").exists():
        seen.append(("an accelerator at /dev/accel0 (a TPU shows like this)", "pip install 'jax[tpu]'"))
    return [
        Check("accelerator", False, f"the system has {what}, but JAX runs on the CPU", remedy, required=False)
        for what, remedy in seen
    ]
