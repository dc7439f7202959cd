"""A byte-pair tokenizer, learned from text (Sennrich et al., arXiv:1508.07909, on bytes as in GPT-2)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from capibara.data.errors import TokenizerError
from capibara.data.tokenizer_file import TOKENIZER, FileTokenizer, _library
from capibara.data.tokens import BYTE_VALUES

__all__ = ["END_OF_TEXT", "train_tokenizer"]

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(
    texts: Iterable[str],
    *,
    vocab_size: int = 8192,
    special_tokens: Iterable[str] = (),
    progress: bool = False,
) -> FileTokenizer:
    """Learn a byte-level BPE tokenizer.

    Every text can be encoded, and decodes to itself: the 256 bytes are tokens. Token 0 ends a text.

    Args:
      texts: what to learn from.
      vocab_size: tokens, at least 257 and the special ones; fewer if the texts do not have as many pairs.
      special_tokens: more texts that are one token each, such as ``"<|user|>"``.
      progress: show a progress bar.

    Raises:
      TokenizerError: ``vocab_size`` is too small, or a special token is given twice.
      MissingExtraError: the package ``tokenizers`` is not installed.
    """
    specials = [END_OF_TEXT, *special_tokens]
    if len(set(specials)) != len(specials) or "" in specials:
        raise TokenizerError(
            f"special_tokens={specials[1:]!r:.200} must be different texts, without {END_OF_TEXT}"
        )
    if not BYTE_VALUES + len(specials) <= vocab_size < 1 << 24:
        raise TokenizerError(
            f"vocab_size={vocab_size} must be at least {BYTE_VALUES + len(specials)}: {BYTE_VALUES} bytes and "
            f"{len(specials)} special token{'s' if specials[1:] else ''}"
        )
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    return FileTokenizer(
        {
            TOKENIZER: tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
        }
    )
