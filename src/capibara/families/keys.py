"""The keys of a ``config.json``, and what they are as settings.

Every key has to be used: what a family does not read and what is not known to be without effect is refused by its
name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from capibara.errors import did_you_mean
from capibara.families.errors import FamilyError

__all__ = ["WITHOUT_EFFECT", "Keys", "shown_key"]

_MISSING = object()
_LARGEST = sys.float_info.max  # an integer may be larger

# What says nothing about the numbers that come out: who wrote the file, how texts become tokens and answers end, how a
# new model would be drawn, how a framework runs it, and heads of other tasks.
WITHOUT_EFFECT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "auto_map",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "ep_size",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "model_type",
        "n_ctx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "reorder_and_upcast_attn",
        "return_dict",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "unk_token_id",
        "use_cache",
    }
)
# What acts in training only: dropout, of which Capibara has its own, model.dropout_rate, and what evens routers out.
_TRAINING_ONLY = frozenset(
    {
        "attention_dropout",
        "attention_probs_dropout_prob",
        "aux_loss_alpha",
        "attn_pdrop",
        "classifier_dropout",
        "embd_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "seq_aux",
    }
)


def shown_key(key: str) -> str:
    """A key for a message."""
    return key if key.isidentifier() and len(key) <= 80 else f"{key!a:.80}"


class Keys:
    """A ``config.json`` that is being read.

    Args:
      values: its content. where: the file, for errors.

    Attributes:
      notes: what a model can be used without, and its user should know.
    """

    def __init__(self, values: Mapping[str, Any], where: object) -> None:
        self.values, self.where = values, where
        self.notes: list[str] = []
        self._read: set[str] = set()

    def take(self, key: str, default: Any = _MISSING) -> Any:
        """The value of a key, or ``default`` where it is missing.

        Raises:
          FamilyError: it is missing and there is no default.
        """
        self._read.add(key)
        if key in self.values:
            return self.values[key]
        if default is _MISSING:
            raise FamilyError(
                f"{self.where}: {key!r} is missing. Remedy: the config.json that was published with the weights"
            )
        return default

    def whole(self, key: str, default: Any = _MISSING, *, least: int = 1, most: int = (1 << 31) - 1) -> Any:
        """As :meth:`take`, an integer from ``least`` to ``most`` or what ``default`` is."""
        value = self.take(key, default)
        if key not in self.values or (value is None and default is None):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.wrong(key, f"an integer of at least {least} and at most {most}")
        return value

    def layers(self, key: str = "num_hidden_layers") -> int:
        """The number of layers; lists of their kinds are as long."""
        return self.whole(key, most=4096)

    def number(self, key: str, default: Any = _MISSING) -> Any:
        """As :meth:`take`, a finite number above zero or what ``default`` is."""
        value = self.take(key, default)
        if key not in self.values or (value is None and default is None):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _LARGEST:
            raise self.wrong(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """As :meth:`take`, true or false."""
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def choice(self, key: str, options: Mapping[str, Any], default: Any = _MISSING) -> Any:
        """What ``options`` has for the value."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in options:
            raise self.wrong(key, f"one of {', '.join(options)}")
        return options[value]

    def only(self, key: str, *known: Any) -> None:
        """Refuse any value but these; the first is what a missing key means."""
        value = self.take(key, known[0])
        if not any(type(value) is type(one) and value == one for one in known):
            raise self.wrong(key, " or ".join(map(repr, known)))

    def wrong(self, key: str, expected: str) -> FamilyError:
        """The error for a value that is not what is expected."""
        return FamilyError(
            f"{self.where}: {key}: got {self.values.get(key)!r:.200}, which is not supported; expected {expected}"
        )

    def finish(self) -> None:
        """Refuse what nobody has read.

        Raises:
          FamilyError: a key is neither read nor known to be without effect; the message names all of them.
        """
        for key in sorted(_TRAINING_ONLY & self.values.keys() - self._read):
            if self.values[key]:
                self.notes.append(f"{key}={self.values[key]!r:.80} acts in training only and is left out")
            self._read.add(key)
        # An empty value asks for nothing.
        unknown = [
            key
            for key, value in self.values.items()
            if key not in self._read
            and key not in WITHOUT_EFFECT
            and value is not None
            and value is not False
        ]
        if unknown:
            shown = ", ".join(f"{shown_key(key)}={self.values[key]!r:.80}" for key in unknown[:8])
            hint = did_you_mean(unknown[0], self._read)
            raise FamilyError(
                f"{self.where}: Capibara does not know what this asks for: {shown}.{hint} Remedy: remove keys that "
                "change nothing; others need a family of their own (docs/families.md)"
            )
