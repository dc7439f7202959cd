"""A configuration and its layout as settings of MaxText (https://github.com/AI-Hypercomputer/maxtext).

Names and meanings are those of ``src/maxtext/configs/base.yml`` and ``types.py`` at commit e591f30cb. What MaxText has
no setting for is refused by name if it changes the model or its training, and otherwise said in a note.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.plan.errors import PlanError
from capibara.plan.grids import DIMENSIONS, usual_grid

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig
    from capibara.config.sections import ModelSection
    from capibara.plan.slices import Slice
    from capibara.sharding import Layout

__all__ = ["MaxTextExport", "check_maxtext", "maxtext_settings"]

_COMMIT = "e591f30cb"
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu", "relu": "relu"}  # Flax's functions of these names
# The axes of a mesh but ``data``, which depends on the sharding of parameters.
_AXES = {
    "fsdp": "ici_fsdp_parallelism",
    "model": "ici_tensor_parallelism",
    "tensor": "ici_tensor_parallelism",
    "expert": "ici_expert_parallelism",
    "pipeline": "ici_pipeline_parallelism",
    "context": "ici_context_parallelism",
    "sequence": "ici_context_parallelism",
}
_REMAT = {"full": "full", "dots": "minimal", "none": "minimal_with_context"}
# Settings of a model with one value in every block that MaxText's decoders llama2, qwen3 and mixtral have in common.
_ONLY: Mapping[str, Any] = {
    "causal": True,
    "attention_output_bias": False,
    "attention_bias": False,
    "attention_scale": None,
    "attention_sinks": False,
    "mlp_bias": False,
    "embedding_scale": None,
    "embedding_norm": False,
    "positions": "rotary",
    "norm": "rms",
    "norm_offset": False,
    "norm_placement": "before",
    "residual": "compute",
    "rope.fraction": 1.0,
    "rope.interleaved": False,
    "rope.local_theta": None,
    "experts.router": "softmax",
    "experts.scale": 1.0,
    "experts.groups": 1,
    "experts.logit_bias": False,
    "experts.choice_bias": False,
    "experts.shared_dim": None,
    "experts.first_dense": 0,
    "latent.kv_rank": None,
}
# Of Llama 3.1's wavelengths MaxText has the numbers in its code.
_LLAMA3 = {"factor": 8.0, "original_length": 8192, "low_frequency_factor": 1.0, "high_frequency_factor": 4.0}


@dataclass(frozen=True)
class MaxTextExport:
    """Settings of MaxText.

    Attributes:
      settings: ``key: value``, as on its command line.
      flags: compiler options, ``(name, value)`` pairs.
      notes: what runs otherwise there than in the plan.
      compile_for: further settings with which MaxText compiles for the slices without them; empty if it has no name
        for such a slice.
    """

    settings: Mapping[str, str]
    flags: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    compile_for: Mapping[str, str]

    def arguments(self) -> list[str]:
        """``key=value`` arguments."""
        return [f"{key}={value}" for key, value in self.settings.items()]

    def script(self) -> str:
        """A shell script that trains so; further arguments (``run_name=…``, data) are appended to it."""
        flags = " ".join(f"--{name}={value}" for name, value in self.flags)
        lines = [
            "#!/bin/sh",
            "# Settings of MaxText for a layout that capibara planned. Append what is yours: run_name=…,",
            "# base_output_directory=…, dataset_type=…, tokenizer_path=….",
            f"# Names as in MaxText's src/maxtext/configs/base.yml at {_COMMIT}.",
            *(f"# Note: {note}." for note in self.notes),
            "set -e",
        ]
        if flags:
            lines.append(f'export LIBTPU_INIT_ARGS="{flags} $LIBTPU_INIT_ARGS"')
        if self.compile_for:
            words = " ".join(f"{key}={value}" for key, value in self.compile_for.items())
            lines.append(
                f"# To compile without the slices: maxtext.trainers.pre_train.train_compile … {words}"
            )
        settings = " \\\n".join(f"  {shlex.quote(argument)}" for argument in self.arguments())
        lines.append(f'python3 -m maxtext.trainers.pre_train.train \\\n{settings} \\\n  "$@"')
        return "\n".join(lines) + "\n"


def check_maxtext(config: ModularModelConfig, layout: Layout | None = None) -> None:
    """Refuse what MaxText has no settings for in a configuration and, if there is one already, a layout.

    Raises:
      PlanError: naming all of it.
    """
    refused = [
        *_refused_model(config.model),
        *_refused_training(config),
        *([] if layout is None else _refused_layout(config, layout)),
    ]
    if refused:
        raise PlanError(
            "MaxText has no setting for "
            + "; ".join(refused)
            + ". Export the layout with format 'jax', which has every array's sharding"
        )


def maxtext_settings(
    config: ModularModelConfig, layout: Layout, target: Slice, *, slices: int = 1
) -> MaxTextExport:
    """The settings with which MaxText trains the same model in the same layout.

    Args: as for :func:`capibara.plan.export.export_layout`.

    Raises:
      PlanError: MaxText has no settings for something in the configuration or the layout; all of it is named.
    """
    if target.generation not in DIMENSIONS:
        raise PlanError(f"{target}: settings of MaxText are exported for TPU slices")
    check_maxtext(config, layout)
    notes: list[str] = []
    settings = {**_model(config), **_training(config), **_layout(config, layout, target, slices, notes)}
    return MaxTextExport(
        {key: _text(value) for key, value in settings.items()},
        layout.flags,
        tuple(notes),
        _compile_for(target, slices),
    )


def _refused_model(model: ModelSection) -> Iterator[str]:
    for kind in dict.fromkeys(model.block_kinds):
        if kind != "attention":
            yield f"{kind} blocks (model.pattern)"
    for key, only in _ONLY.items():
        at, _, inner = key.partition(".")
        value = getattr(getattr(model, at), inner) if inner else getattr(model, at)
        if value != only and not (at == "experts" and not model.experts.count):
            yield f"model.{key}={value!r} (only {only!r})"
    if model.qk_norm == "all" or (model.qk_norm != "none" and model.experts.count):
        yield f"model.qk_norm={model.qk_norm!r} in such a block"
    if model.mlp == "none" or (model.mlp == "plain" and model.experts.count):
        yield f"model.mlp={model.mlp!r} in such a block"
    if model.activation not in _ACTIVATIONS:
        yield f"model.activation={model.activation!r} (only {', '.join(_ACTIVATIONS)})"
    if model.experts.count and not model.experts.normalise:
        yield "model.experts.normalise=False"
    rope = model.rope
    if rope.scaling == "yarn":
        yield "model.rope.scaling='yarn' in such a block"
    elif rope.scaling == "llama3":
        for key, value in _LLAMA3.items():
            if getattr(rope, key) != value:
                yield f"model.rope.{key}={getattr(rope, key)} with scaling='llama3' (only {value:g})"


def _refused_training(config: ModularModelConfig) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.name != "adamw":
        yield f"optimizer.name={optimizer.name!r} as it is here (only 'adamw')"
    if optimizer.schedule != "cosine":
        yield f"optimizer.schedule={optimizer.schedule!r} (only 'cosine')"
    if config.train.ema:
        yield f"train.ema={config.train.ema}"
    if config.finetune.method != "full":
        yield f"finetune.method={config.finetune.method!r}"
    if config.precision.accumulate_dtype != "float32":
        yield f"precision.accumulate_dtype={config.precision.accumulate_dtype!r} (only 'float32')"


def _refused_layout(config: ModularModelConfig, layout: Layout) -> Iterator[str]:
    sizes = layout.axis_sizes
    for axis, size in layout.mesh:
        if axis != "data" and axis not in _AXES and size > 1:
            yield f"the mesh axis {axis!r}"
    wanted = [_AXES[axis] for axis in sizes if axis in _AXES and sizes[axis] > 1]
    if len(set(wanted)) < len(wanted):
        yield f"two mesh axes for one kind of parallelism ({', '.join(sizes)})"
    if layout.parameters == "replicated" and layout.optimizer == "sharded" and sizes.get("fsdp", 1) > 1:
        yield "an optimizer that is sharded where parameters are not, beside an axis fsdp"
    if layout.stages > 1 and config.model.num_layers % layout.stages:
        yield f"{config.model.num_layers} layers in {layout.stages} stages of a pipeline"


def _model(config: ModularModelConfig) -> dict[str, Any]:
    model = config.model
    activation = _ACTIVATIONS[model.activation]
    block = "mixtral" if model.experts.count else "qwen3" if model.qk_norm == "head" else "llama2"
    found: dict[str, Any] = {
        "decoder_block": block,
        "base_emb_dim": model.embed_dim,
        "base_num_decoder_layers": model.num_layers,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads,
        "head_dim": model.resolved_head_dim,
        "base_mlp_dim": model.resolved_mlp_dim,
        "mlp_activations": [activation, "linear"] if model.mlp == "gated" else [activation],
        "vocab_size": model.vocab_size,
        "max_target_length": config.train.sequence_length,
        "normalization_layer_epsilon": model.norm_epsilon,
        "logits_via_embedding": model.tie_embeddings,
        # By default MaxText divides tied logits by the root of the width.
        "normalize_embedding_logits": False,
        "rope_max_timescale": model.rope_theta,
        "dropout_rate": model.dropout_rate,
        "enable_dropout": model.dropout_rate > 0,
        "scan_layers": model.scan_layers != "unroll",
        "dtype": config.precision.compute_dtype,
        "weight_dtype": config.precision.param_dtype,
        "attention": "autoselected",
    }
    if block == "qwen3":
        found["use_qk_norm"] = True
    if model.attention_softcap is not None:
        found["attn_logits_soft_cap"] = model.attention_softcap
    if model.logit_softcap is not None:
        found["final_logits_soft_cap"] = model.logit_softcap
    if model.rope.scaling == "linear":
        found["rope_linear_scaling_factor"] = model.rope.factor
    elif model.rope.scaling == "llama3":
        found["rope_type"] = "llama3.1"
    if model.experts.count:
        found |= {
            "num_experts": model.experts.count,
            "num_experts_per_tok": model.experts.per_token,
            "base_moe_mlp_dim": model.resolved_expert_dim,
            "base_mlp_dim": model.resolved_expert_dim,
        }
    return found


def _training(config: ModularModelConfig) -> dict[str, Any]:
    train, optimizer = config.train, config.optimizer
    return {
        "steps": train.steps,
        "opt_type": "adamw",
        "learning_rate": optimizer.learning_rate,
        "lr_schedule_type": "cosine",
        "warmup_steps_fraction": optimizer.warmup_steps / train.steps,
        "learning_rate_final_fraction": optimizer.final_learning_rate_fraction,
        "adam_b1": optimizer.beta1,
        "adam_b2": optimizer.beta2,
        "adam_weight_decay": optimizer.weight_decay,
        # Here only matrices decay.
        "adamw_mask": [".*norm.*", ".*bias.*"],
        "gradient_clipping_threshold": optimizer.grad_clip_norm,
    }


def _layout(
    config: ModularModelConfig, layout: Layout, target: Slice, slices: int, notes: list[str]
) -> dict[str, Any]:
    sizes = layout.axis_sizes
    devices = target.num_devices * slices
    found: dict[str, Any] = {
        "dcn_data_parallelism": slices,
        "ici_data_parallelism": 1,
        "ici_fsdp_parallelism": 1,
    }
    data = sizes.get("data", 1)
    if slices > 1:  # the outermost axis, over the slices
        if data % slices:
            raise PlanError(
                f"layout: the axis data has {data} devices, expected a multiple of the {slices} slices"
            )
        data //= slices
    sharded = layout.parameters == "sharded" and sizes.get("fsdp", 1) == 1
    found["ici_fsdp_parallelism" if sharded else "ici_data_parallelism"] = data
    for axis, size in sizes.items():
        if axis in _AXES and size > 1:
            found[_AXES[axis]] = size
    if "fsdp" in sizes and layout.parameters == "replicated":
        found["ici_data_parallelism"] *= found["ici_fsdp_parallelism"]
        found["ici_fsdp_parallelism"] = 1
    if layout.parameters == "replicated" and layout.optimizer == "sharded":
        found["shard_optimizer_over_data"] = True
    # As capibara arranges devices: a mesh axis may take a part of an axis of the grid.
    found["allow_split_physical_axes"] = True
    rows = config.train.batch_size
    if layout.stages > 1:
        found["num_pipeline_microbatches"] = layout.microbatches
        found["num_layers_per_pipeline_stage"] = config.model.num_layers // layout.stages
        parts = 1
    else:
        parts = layout.microbatches
    if rows % parts:
        raise PlanError(f"train.batch_size={rows} does not divide into {parts} microbatches")
    found["gradient_accumulation_steps"] = parts
    found["per_device_batch_size"] = _share(rows // parts, devices)
    found["remat_policy"] = _REMAT[layout.remat]
    if layout.remat == "none":
        notes.append(
            "MaxText always recomputes something; minimal_with_context keeps all matrix products and attention's "
            "output, and recomputes what is between them (planned: nothing)"
        )
    if layout.offload == "optimizer":
        found["optimizer_memory_host_offload"] = True
    return found


def _share(rows: int, devices: int) -> float:
    """Rows for each device, such that MaxText's ``int(devices * share)`` is the number of rows again."""
    share = rows / devices
    while int(devices * share) < rows:
        share = math.nextafter(share, math.inf)
    return share


def _compile_for(target: Slice, slices: int) -> dict[str, str]:
    if target.shape != usual_grid(target.generation, target.num_chips):
        return {}
    if target.generation == "v4" and target.view == "core":
        return {}
    name = target.slice_name.replace("v5litepod", "v5e")
    return {"compile_topology": name, "compile_topology_num_slices": str(slices)} if name else {}


def _text(value: Any) -> str:
    """As MaxText's command line and YAML read it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(value) + "]"
    if isinstance(value, float) and value.is_integer():  # some of its fields are integers
        return str(int(value))
    return str(value)
