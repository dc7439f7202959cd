"""What a trainer's options turn into: compiler options, a policy of what is kept, an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from capibara.compose.backends.jax_repeat import keep_products
from capibara.compose.physical.explicit import automatic_mesh
from capibara.config.axes import AxisRules
from capibara.config.flags import split_flag
from capibara.config.sections import OptimizerSection
from capibara.errors import ConfigError, did_you_mean
from capibara.hardware import build_mesh, chip_for_device_kind
from capibara.memory.offload import HOST_MEMORY
from capibara.sharding import ASYNCHRONOUS, options_for
from capibara.sharding.communication import whole_products
from capibara.train import extras
from capibara.train.frameworks import unwrapped
from capibara.train.optimizer import build_optimizer, learning_rate_schedule, named_optimizer
from capibara.train.pipelines import check_pipeline
from capibara.train.rematerialise import recomputed

__all__ = [
    "asynchronous_options",
    "check_axes",
    "chosen_optimizer",
    "flags_note",
    "offload_policy",
    "training_mesh",
    "with_recomputing",
]

_BATCH_AXES = ("data", "fsdp", "expert")


def asynchronous_options(device: Any) -> dict[str, Any]:
    """The compiler options that let collectives run beside computation.

    Raises:
      ConfigError: the platform's compiler has none.
    """
    if device.platform not in ASYNCHRONOUS:
        raise ConfigError(
            f"async_gradient_communication=True: no compiler option is known for {device.platform} devices, only for "
            f"{', '.join(ASYNCHRONOUS)}. Leave it out"
        )
    if device.platform != "tpu":
        return dict(ASYNCHRONOUS[device.platform])
    chip = chip_for_device_kind(device.device_kind)
    return dict(whole_products(None if chip is None else chip.name.removeprefix("tpu-")))


def flags_note(flags: Sequence[str], placement: Any) -> str | None:
    """What to say of the compiler options of a run with a mesh, if anything: left out, or not given.

    Args:
      flags: the setting ``tpu.flags``.
      placement: of the run.
    """
    platform = placement.devices[0].platform
    taken = options_for(platform, dict(map(split_flag, flags)))
    if left := [flag for flag in flags if split_flag(flag)[0] not in taken]:
        if not taken and platform not in ("tpu", "gpu"):
            return f"tpu.flags are options of a TPU's or GPU's compiler: left out on {platform}"
        return f"tpu.flags that are options of another compiler: left out on {platform}: {', '.join(left)}"
    if not flags and platform == "tpu" and len(placement.devices) > 1:
        return (
            "tpu.flags is empty: gathers of parameters do not run beside whole products. capibara plan finds options, "
            "and production/tpu_v4 has some"
        )
    return None


def offload_policy(device: Any) -> Callable[..., Any]:
    """A policy of ``jax.checkpoint``: the results of matrix products go to the host's memory.

    Raises:
      ConfigError: the devices cannot reach it.
    """
    there = {memory.kind for memory in device.addressable_memories()}
    if HOST_MEMORY not in there:
        raise ConfigError(
            f"activation_offloading=True: {device.platform} devices here cannot reach the host's memory "
            f"({HOST_MEMORY!r} is not among {', '.join(sorted(there))}). Leave it out"
        )
    return keep_products(HOST_MEMORY)


class with_recomputing:
    """A model whose loss computes activations again in the backward pass; otherwise the same."""

    def __init__(self, model: Any, policy: Callable[..., Any] | None) -> None:
        self._model, self._policy = model, policy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def loss(self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True) -> Any:
        """As the model's."""

        def run(params: Any, batch: Any, state: Any, key: Any) -> Any:
            return self._model.loss(params, batch, state=state, key=key, train=train)

        return recomputed(run, self._policy)(params, batch, state, key)


def check_axes(model: Any, mesh: Any, *, named: bool) -> None:
    """Refuse a mesh axis along which every device would do the same work.

    Raises:
      ConfigError: it names the axis.
    """
    given, model = model, unwrapped(model)
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    rules = AxisRules()
    known = {
        name
        for table in (rules.parameters, rules.activations)
        for places in table.values()
        for place in places
        for name in place.split("+")
    }
    for axis, size in sizes.items():
        if axis not in known:
            raise ConfigError(
                f"mesh: nothing is sharded along {axis!r}, so that its {size} devices would all do the same work; "
                f"expected any of {', '.join(sorted(known))}.{did_you_mean(axis, sorted(known))}"
            )
        if axis == "pipeline":
            check_pipeline(given, mesh)
        composed = hasattr(model, "on_mesh")
        if axis in ("context", "sequence") and not composed:
            raise ConfigError(
                f"mesh: {axis!r} shards the positions of Capibara's own models; a function of another framework would "
                "compute all of them on every device. Use the axes data, fsdp and model"
            )
        if axis not in _BATCH_AXES and not (composed or named or _names_axes(model)):
            raise ConfigError(
                "mesh: this model does not name the dimensions of its parameters, so nothing would be sharded along "
                f"{axis!r}. Give param_axes=, nested like the parameters, as {{'kernel': ('embed', 'mlp')}}, or use "
                "the axes data and fsdp"
            )


def _names_axes(model: Any) -> bool:
    """Whether a model's own parameters have names of dimensions that are not guessed."""
    return getattr(model, "axes", None) is not None or (
        not hasattr(model, "loss_of") and getattr(model, "param_axes", None) is not None
    )


def chosen_optimizer(
    given: Any,
    model: Any,
    *,
    optimizer: Any,
    learning_rate: Any,
    weight_decay: float | None,
    max_grad_norm: float | None,
) -> tuple[Any, Any]:
    """``(gradient transformation, schedule)``; the schedule of one's own transformation is not known: None.

    Raises:
      ConfigError: an unknown name, something that is not a transformation, or settings that it would ignore.
    """
    settings: Mapping[str, Any] = {
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
    }
    axes = getattr(model, "axes", None) if hasattr(model, "make") else getattr(model, "param_axes", None)
    said = {name: value for name, value in settings.items() if value is not None}
    if optimizer is not None and not isinstance(optimizer, str):
        if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
            raise ConfigError(
                f"optimizer: got {type(optimizer).__name__}, expected an optax.GradientTransformation or one of "
                f"{', '.join(OptimizerSection.model_fields['name'].annotation.__args__)}"  # type: ignore[union-attr]
            )
        if said:
            raise ConfigError(
                f"{', '.join(said)}: an optimizer of your own has these itself, and would ignore them here. Leave them "
                "out, or name the optimizer: optimizer='adamw'"
            )
        return optimizer, None
    config = getattr(model, "config", None)
    if optimizer is None and not said and hasattr(config, "optimizer"):
        return build_optimizer(config, param_axes=axes), learning_rate_schedule(config)
    set_name = getattr(getattr(config, "optimizer", None), "name", "adamw")
    if optimizer is None and set_name != "adamw":  # without a name it would be AdamW
        raise ConfigError(
            f"{', '.join(said)}: the model's settings have optimizer.name={set_name}, of which they are settings, too. "
            f"Name the optimizer here (optimizer={set_name!r}), or set optimizer.learning_rate, "
            "optimizer.weight_decay and optimizer.grad_clip_norm in the model's settings instead"
        )
    rate = 1e-3 if learning_rate is None else learning_rate
    schedule = rate if callable(rate) else extras.optax().constant_schedule(_rate(rate))
    own = OptimizerSection(name="adamw" if optimizer is None else _known(optimizer))
    built = named_optimizer(
        own.name,
        schedule,
        betas=(own.beta1, own.beta2),
        weight_decay=weight_decay or 0.0,
        grad_clip_norm=max_grad_norm or 0.0,
        param_axes=axes,
    )
    return built, schedule


def _rate(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 10:
        raise ConfigError(
            f"learning_rate: got {value!r}, expected a number above 0, or a function of the step"
        )
    return float(value)


def _known(name: str) -> Any:
    from typing import get_args

    names = get_args(OptimizerSection.model_fields["name"].annotation)
    if name not in names:
        raise ConfigError(
            f"optimizer: got {name!r}, expected one of {', '.join(names)}.{did_you_mean(name, names)}"
        )
    return name


def training_mesh(mesh: Any) -> jax.sharding.Mesh:
    """A mesh with automatic axes; of all devices along ``data`` if there is none.

    Raises:
      ConfigError: it is something else.
    """
    if mesh is None:
        devices = jax.devices()
        return build_mesh((len(devices),), ("data",), devices)
    mesh = getattr(mesh, "mesh", mesh)  # of create_mesh_sharding
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ConfigError(
            f"mesh: got {type(mesh).__name__}, expected a jax.sharding.Mesh, such as "
            "create_training_mesh(total_chips=8, data_parallel_size=4, model_parallel_size=2)"
        )
    return automatic_mesh(mesh)
