"""The JAX backend: device and precision of composed models, and methods on arrays."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from capibara.compose.backends.base import Backend
from capibara.compose.errors import CompileError, InputError
from capibara.compose.physical.randomness import as_key
from capibara.compose.precision import Precision
from capibara.config.axes import AxisRules
from capibara.errors import ConfigError, did_you_mean
from capibara.jax_versions import require_supported_jax

__all__ = ["JaxBackend"]


class JaxBackend(Backend):
    """The JAX backend: how compiled models run, and methods on arrays. Creating one does not change JAX's settings.

    Args:
        dtype: dtype of parameters and arithmetic (``"float32"``, ``"bfloat16"``, ``"float16"``, ``"float64"``).
            ``float64`` is enabled only while the compiled model runs; see :meth:`scope` for transformations.
        policy: parameter, compute and accumulation dtypes one by one (a :class:`Precision`) instead of ``dtype``.
        jit: compile ``evaluate`` with ``jax.jit``.
        device: ``"cpu"``, ``"gpu:1"`` or a JAX device; where ``evaluate`` and new parameters go.
        device_mesh: a ``jax.sharding.Mesh``, or a shape such as ``(4, 8)`` over the first 32 devices with the axes
            of ``mesh_axes``. Parameters are sharded over it by ``rules``.
        mesh_axes: names of the mesh's axes, when ``device_mesh`` is a shape.
        rules: the mesh axis of each logical axis. With rules or a mesh, compiling refuses unknown axis names; without
            either, names have no effect.
        platform: the platform to compile for; by default that of the device or mesh. Without a device or mesh, its
            first device is used. A platform that is not on this machine can only be used for lowering
            (``jax.jit(model.apply).trace(…).lower(lowering_platforms=…)``): the backend's own methods refuse to
            create arrays there.
        precision: of matrix products, in the forward and the backward pass: a ``jax.lax.Precision``, or a value of
            ``jax.default_matmul_precision`` (``"highest"``, ``"bfloat16_3x"`` …).
        debug: check every result for NaN (``jax.debug_nans``) while ``evaluate`` runs, or ``apply`` outside of a
            trace. A ``jax.jit`` of your own around ``apply`` is checked if it is *called* in :meth:`scope`.

    Raises:
        CompileError: the device is not available (the error lists those that are), the mesh is too large, or JAX does
            not know the precision.
    """

    type = "jax"
    ops_module = "capibara.compose.backends.jax_ops"
    eager_module = "capibara.compose.backends.jax_eager"

    def __init__(
        self,
        dtype: Any = "float32",
        *,
        policy: Precision | None = None,
        jit: bool = True,
        device: Any | str | None = None,
        device_mesh: Any | Sequence[int] | None = None,
        mesh_axes: Sequence[str] = ("data", "model"),
        rules: AxisRules | None = None,
        platform: str | None = None,
        precision: Any | None = None,
        debug: bool = False,
    ) -> None:
        require_supported_jax()
        self._start(dtype, policy)
        for name, flag in (("jit", jit), ("debug", debug)):
            if not isinstance(flag, bool):
                raise CompileError(f"{name}={flag!r} must be True or False")
        self.jit_default = jit
        self.rules = AxisRules() if rules is None else rules
        if not isinstance(self.rules, AxisRules):
            raise CompileError(f"rules={rules!r} must be a capibara.config.axes.AxisRules")
        if platform is not None and platform not in _PLATFORMS:
            raise CompileError(
                f"platform={platform!r} is not one of {', '.join(_PLATFORMS)}.{did_you_mean(str(platform), _PLATFORMS)}"
            )
        if device is not None and device_mesh is not None:
            raise CompileError(
                f"device={device!r} and device_mesh={device_mesh!r:.80} both say where: give one of them"
            )
        found = [] if platform is None else _devices(platform)
        self._absent = platform is not None and not found
        if device is None and device_mesh is None and found and found[0] != _devices(None)[0]:
            device = found[0]
        self.device = _device(device, platform)
        self.mesh = make_mesh(device_mesh, mesh_axes, platform)
        self._checks_axes = rules is not None or self.mesh is not None
        self._platform = platform
        self.precision = precision
        self._matmul_precision = _precision(precision)
        self.debug = debug

    @property
    def platform(self) -> str:
        """The platform that models compiled on this backend run on: "cpu", "gpu" or "tpu"."""
        import jax

        if self._platform is not None:
            return self._platform
        if self.device is not None:
            return self.device.platform
        if isinstance(self.mesh, jax.sharding.Mesh):  # an abstract one has no devices
            return self.mesh.devices.flat[0].platform
        return jax.default_backend()

    @property
    def knows_platform(self) -> bool:
        """Whether :attr:`platform` can be told without starting JAX's devices."""
        import jax

        return (
            self._platform is not None or self.device is not None or isinstance(self.mesh, jax.sharding.Mesh)
        )

    def check_axes(self, arrays: Mapping[str, Sequence[str | None] | None]) -> None:
        """Refuse unknown logical axis names, if rules or a mesh were given.

        Args:
            arrays: the axis names of each array of a model, by the array's name.

        Raises:
            CompileError: for the first such name, with the array that has it.
        """
        if not self._checks_axes:
            return
        mesh_axes = () if self.mesh is None else tuple(self.mesh.axis_names)
        for place, names in arrays.items():
            try:
                self.rules.check(names or (), mesh_axes, place)
            except ConfigError as error:
                raise CompileError(str(error)) from None

    @property
    def lowers_only(self) -> bool:
        """Whether a platform was given without a device or mesh, so that it need not be present."""
        return self._platform is not None and self.device is None and self.mesh is None

    def check_present(self) -> None:
        """Refuse to run for a platform that is not on this machine (lowering for one needs no such device).

        Raises:
            CompileError: ``platform`` was given, and JAX has no device of it here.
        """
        import jax

        if not self.lowers_only:
            return
        try:
            jax.devices(self._platform)
        except RuntimeError:
            there = ", ".join(f"{d.platform}:{d.id}" for d in jax.devices())
            raise CompileError(
                f"platform={self._platform!r}: this machine has no such device, so the model can be lowered for it "
                f"(jax.jit(compiled.apply).trace(…).lower(lowering_platforms=…)) but not run. There are: {there}"
            ) from None

    def scope(self) -> AbstractContextManager[Any]:
        """A context manager with the JAX settings that this backend needs.

        A compiled model enters it automatically. Transformations do part of their work outside the function that they
        transform, so enter it around them if the whole computation needs the settings, as for ``float64``::

            with backend.scope():
                gradients = jax.jit(jax.grad(loss))(params)
        """
        import jax

        stack = contextlib.ExitStack()
        if self.needs_x64:
            stack.enter_context(jax.enable_x64(True))
        if self._matmul_precision is not None:
            stack.enter_context(jax.default_matmul_precision(self._matmul_precision))
        if self.debug:
            stack.enter_context(jax.debug_nans(True))
        if self.device is not None:
            stack.enter_context(jax.default_device(self.device))
        return stack

    # ---- arrays outright ----------------------------------------------------------------------------------

    def get_backend_array_type(self) -> Any:
        """``jax.Array``."""
        import jax

        return jax.Array

    @staticmethod
    def get_available_devices() -> list[str]:
        """The devices of JAX's default platform, as values of ``device=``."""
        import jax

        return [f"{d.platform}:{d.id}" for d in jax.devices()]

    def to_numpy(self, input: Any) -> Any:
        """A NumPy copy of an array."""
        import numpy as np

        return np.array(input)

    def to_device(self, data: Any, device: Any, asynchronous: bool = True) -> Any:
        """The array on another device: ``jax.device_put``."""
        import jax

        with self._wide(data):
            moved = jax.device_put(data, _device(device, None))
        return moved if asynchronous else jax.block_until_ready(moved)

    def block_until_ready(self, data: Any) -> Any:
        """Wait until an array (or a nested dict of them) has been computed, and return it."""
        import jax

        return jax.block_until_ready(data)

    def empty_cache(self) -> None:
        """Clear JAX's compilation caches: ``jax.clear_caches()``."""
        import jax

        jax.clear_caches()

    def _new_key(self, seed: Any) -> Any:
        return as_key(seed)

    def _given(self, value: Any) -> Any:
        import jax
        import numpy as np

        if isinstance(value, list):
            return self.array(value)
        if isinstance(value, np.ndarray):
            return jax.numpy.asarray(value)
        return value

    def _wide(self, *values: Any) -> AbstractContextManager[Any]:
        """float64 and int64 for as long as the block lasts, if any of the values has them."""
        import jax

        for value in values:
            if str(getattr(value, "dtype", value)) in ("float64", "int64", "uint64"):
                return jax.enable_x64(True)
        return contextlib.nullcontext()

    def _call(self, function: str, *args: Any, **options: Any) -> Any:
        with self._wide(*args, *options.values()):
            return super()._call(function, *args, **options)

    def _make(self, function: str, *args: Any, **options: Any) -> Any:
        if self._absent and self.device is None and self.mesh is None:
            raise CompileError(
                f"platform={self._platform!r} is not available, so no arrays can be created on it. {_there()}"
            )
        mesh = options.pop("device_mesh", None)
        split = options.pop("tensor_split", None)
        if mesh is None and split is not None and self.mesh is None:
            raise InputError(f"tensor_split={tuple(split)!r} needs device_mesh, the devices to split over")
        if function == "array":
            with self._wide(*args, options["dtype"]), self.scope():
                made = self._function("as_array")(*args, options["dtype"], self.dtype)
        else:
            made = self._call(function, *args, **options)
        if mesh is None and split is None:
            return made
        import jax

        from capibara.compose.backends.meshes import split_over

        with self._wide(made):
            return jax.device_put(made, split_over(self, tuple(made.shape), mesh, split))

    def __repr__(self) -> str:
        where = self.device or (dict(self.mesh.shape) if self.mesh is not None else self.platform)
        return f"JaxBackend({self.policy.param}/{self.policy.compute}, {where})"


def _precision(precision: Any) -> Any:
    """A precision as ``jax.default_matmul_precision`` takes it."""
    import jax

    if precision is None:
        return None
    name = precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
    name = getattr(name, "name", name)  # a jax.lax.DotAlgorithmPreset
    try:
        with jax.default_matmul_precision(name):
            return name
    except (ValueError, TypeError):
        raise CompileError(
            f"precision={precision!r} is not a precision of matrix products: use a jax.lax.Precision such as "
            "jax.lax.Precision.HIGHEST, or one of 'default', 'high', 'highest'"
        ) from None


_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def _devices(platform: str | None) -> list[Any]:
    """The devices of a platform (None: the default one); none if it is not on this machine."""
    import jax

    try:
        return jax.devices(platform)
    except RuntimeError:
        return []


def _there() -> str:
    names = ", ".join(f"{d.platform}:{d.id}" for d in _devices(None))
    return f"The devices of this machine are: {names}"


def _device(device: Any, platform: str | None) -> Any:
    import jax

    if device is None or isinstance(device, jax.Device):
        return device
    if not isinstance(device, str) or not device:
        raise CompileError(f"device={device!r} must be a name such as 'gpu:0', or a JAX device. {_there()}")
    kind, _, index = device.partition(":")
    if index and not index.isdigit():
        raise CompileError(f"device={device!r}: write a platform and a number, as in 'gpu:0'")
    found = _devices(kind)
    number = int(index or 0)
    if number >= len(found):
        raise CompileError(f"device={device!r} is not available. {_there()}")
    return found[number]


def make_mesh(mesh: Any, names: Sequence[str], platform: str | None) -> Any:
    if mesh is None or hasattr(mesh, "axis_names"):
        return mesh
    from capibara.hardware import build_mesh

    if isinstance(mesh, str) or not isinstance(mesh, Sequence):
        raise CompileError(f"device_mesh={mesh!r} must be a jax.sharding.Mesh or a shape such as (2, 4)")
    if any(isinstance(n, bool) or not hasattr(n, "__index__") for n in mesh):
        raise CompileError(f"device_mesh={mesh!r}: every size must be an integer")
    shape = tuple(int(n) for n in mesh)
    if not shape or any(n < 1 for n in shape):
        raise CompileError(f"device_mesh={mesh!r}: every size must be at least 1")
    named = () if isinstance(names, str) or not isinstance(names, Sequence) else names
    if not named or not all(isinstance(n, str) for n in named) or len(set(named)) != len(named):
        raise CompileError(f"mesh_axes={names!r} must be different names, such as ('data', 'model')")
    if len(names) < len(shape):
        raise CompileError(
            f"device_mesh={mesh!r} has {len(shape)} axes, mesh_axes={tuple(names)!r} names {len(names)}"
        )
    devices = _devices(platform)
    if not devices:
        raise CompileError(f"platform={platform!r} is not available, so it has no mesh. {_there()}")
    need = math.prod(shape)
    if need > len(devices):
        raise CompileError(
            f"device_mesh={mesh!r} needs {need} devices, this machine has {len(devices)}. On CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={need} before JAX starts to emulate them."
        )
    return build_mesh(shape, names[: len(shape)], devices[:need])
