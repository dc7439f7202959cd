"""What ``capibara inspect`` tells of a model: family, sizes, parameters, formats, tokenizer. No weights are read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["describe_model", "print_model"]


def describe_model(path: Path) -> dict[str, Any]:
    """The facts of a published model's folder, a GGUF file or a run, as plain values.

    Raises:
      CapibaraError: there is no model, or it is damaged.
    """
    from capibara.cli._models import is_published, warn_on_stderr
    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel
    from capibara.families import Pretrained, is_gguf, open_tensors, read_config, settled, tokenizer_files_of
    from capibara.families.folder import TensorFiles
    from capibara.families.gguf.file import GgufFile
    from capibara.serve.load import find_checkpoint
    from capibara.train.saved import Facts

    facts: dict[str, Any] = {"path": str(path)}
    stored: Counter[str] = Counter()
    if not is_published(path):
        checkpoint = find_checkpoint(path, warn=warn_on_stderr)
        config = ModularModelConfig.from_toml(checkpoint.config_path)
        record = Facts.of(checkpoint).pretrained
        source = None if record is None else Pretrained.from_json(record, checkpoint.path)
        facts |= {"kind": "run", "checkpoint": str(checkpoint.path), "step": checkpoint.step}
        files = [one for one in checkpoint.path.rglob("*") if one.is_file()]
        tokenizer = tokenizer_files_of(checkpoint.tokenizer_path)
    else:
        config, source = read_config(path)
        tokenizer = tokenizer_files_of(path)
        if is_gguf(path):
            facts["kind"] = "gguf"
            with GgufFile(path) as file:
                for tensor in file.tensors.values():
                    stored[tensor.kind.name] += math.prod(tensor.shape)
                facts["version"] = file.version
            files = [path]
        else:
            facts["kind"] = "folder"
            with TensorFiles(path) as opened:
                for _, one in opened.tensors.values():
                    stored[one.form.name] += math.prod(one.shape)
                files = [path / name for name in {file.path.name for file, _ in opened.tensors.values()}]
        with open_tensors(path, source) as tensors:
            config, source = settled(tensors, config, source)
    model = ModularCapibaraModel(config)
    section = config.model
    if not stored:
        stored[config.precision.param_dtype] = model.num_params
    facts |= {
        "family": None if source is None else source.family.name,
        "parameters": model.num_params,
        "parts": _parts(model),
        "bytes": sum(file.stat().st_size for file in files),
        "stored": dict(stored.most_common()),
        "quantization": _quantization(facts["kind"], stored, source, config),
        "sizes": {
            "layers": section.num_layers,
            "width": section.embed_dim,
            # What no block has is 0, and is left out of the lines.
            "heads": section.num_heads if section.attends else 0,
            "kv_heads": section.num_kv_heads if section.attends else 0,
            "head_dim": section.resolved_head_dim if section.attends else 0,
            "state_dim": section.ssm.state_dim if "ssm" in section.block_kinds else 0,
            "mlp_dim": section.feedforward_dim,
            "experts": section.experts.count,
            "vocab": section.vocab_size,
            "context": section.max_sequence_length,
            "window": section.window,
        },
        "tokenizer": _tokenizer(tokenizer, source),
        "notes": [] if source is None else list(source.notes),
    }
    return facts


def _parts(model: Any) -> dict[str, int]:
    """Scalars by part of the model."""
    found: Counter[str] = Counter()
    for path, spec in model.compiled.params.items():
        name = next((one for one in path if one in ("attention", "mlp", "ssm", "vq")), None)
        if "adapter" in path[-1] or any("lora" in one for one in path):
            name = "adapters"
        elif name is None:
            name = "norms" if any("norm" in one for one in path) else path[0]
        found[name] += math.prod(spec.sizes({}, "a parameter"))
    return dict(found.most_common())


def _quantization(kind: str, stored: Mapping[str, int], source: Any, config: Any) -> str | None:
    if source is not None and source.scheme is not None:
        return str(source.scheme)
    if kind == "gguf":
        coded = [name for name in stored if name.startswith("Q")]
        return ", ".join(coded) or None
    return None if config.finetune.base == "none" else f"{config.finetune.base}, beside adapters"


def _tokenizer(files: Mapping[str, bytes], source: Any) -> dict[str, Any] | None:
    from capibara.data import FileTokenizer

    if not files:
        return {"kind": "bytes", "tokens": 256, "chat_template": False} if source is None else None
    found = FileTokenizer(files)
    return {
        "kind": "tokenizer.json",
        "tokens": found.vocab_size,
        "special": dict(found.special_tokens),
        "stop_tokens": sorted(found.stop_tokens),
        "chat_template": found.template is not None,
    }


def print_model(facts: Mapping[str, Any]) -> None:
    """Print the facts as lines."""
    count = facts["parameters"]
    family = facts["family"] or "a model of Capibara"
    print(f"{facts['path']}: {family}, {count:,} parameters, {facts['bytes']:,} bytes")
    if facts["kind"] == "run":
        print(f"checkpoint: {facts['checkpoint']}, step {facts['step']}")
    rows = {
        "sizes": ", ".join(f"{k} {v}" for k, v in facts["sizes"].items() if v),
        "parts": ", ".join(f"{k} {v:,} ({v / max(count, 1):.1%})" for k, v in facts["parts"].items()),
        "stored": ", ".join(f"{k} {v:,}" for k, v in facts["stored"].items()),
        "quantization": facts["quantization"] or "none",
        "tokenizer": _told(facts["tokenizer"]),
    }
    for name, text in rows.items():
        print(f"{name}: {text}")
    for note in facts["notes"]:
        print(f"note: {note}")


def _told(tokenizer: Mapping[str, Any] | None) -> str:
    if tokenizer is None:
        return "none"
    chat = "a chat template" if tokenizer["chat_template"] else "no chat template"
    return f"{tokenizer['kind']}, {tokenizer['tokens']:,} tokens, {chat}"
