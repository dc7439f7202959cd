"""Text: documents, tokenizers and chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.data.batches import PackedBatches, packed_rows
    from capibara.data.chat import render_chat
    from capibara.data.conversations import Example, examples_of, is_text
    from capibara.data.documents import Documents
    from capibara.data.errors import ChatTemplateError, DocumentError, TokenizerError
    from capibara.data.packed import is_packed
    from capibara.data.packing import Piece, pack
    from capibara.data.pairs import PairedBatches, is_pair, pair_rows, pairs_of
    from capibara.data.records import JSONL_SUFFIXES, RECORD_SUFFIXES, read_jsonl, read_records
    from capibara.data.tokenizer_file import FileTokenizer, load_tokenizer, read_tokenizer_files
    from capibara.data.tokenizer_training import train_tokenizer
    from capibara.data.tokens import (
        BYTE_VALUES,
        ByteTokenizer,
        TextStream,
        Tokenizer,
        Utf8Stream,
        decode_stream,
    )

__all__ = [
    "BYTE_VALUES",
    "JSONL_SUFFIXES",
    "RECORD_SUFFIXES",
    "ByteTokenizer",
    "ChatTemplateError",
    "DocumentError",
    "Documents",
    "Example",
    "FileTokenizer",
    "PackedBatches",
    "PairedBatches",
    "Piece",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "Utf8Stream",
    "decode_stream",
    "examples_of",
    "is_packed",
    "is_pair",
    "is_text",
    "load_tokenizer",
    "pack",
    "packed_rows",
    "pair_rows",
    "pairs_of",
    "read_jsonl",
    "read_records",
    "read_tokenizer_files",
    "render_chat",
    "train_tokenizer",
]

_HOMES = {
    "batches": ("PackedBatches", "packed_rows"),
    "chat": ("render_chat",),
    "conversations": ("Example", "examples_of", "is_text"),
    "documents": ("Documents",),
    "errors": ("ChatTemplateError", "DocumentError", "TokenizerError"),
    "packed": ("is_packed",),
    "packing": ("Piece", "pack"),
    "pairs": ("PairedBatches", "is_pair", "pair_rows", "pairs_of"),
    "records": ("JSONL_SUFFIXES", "RECORD_SUFFIXES", "read_jsonl", "read_records"),
    "tokenizer_file": ("FileTokenizer", "load_tokenizer", "read_tokenizer_files"),
    "tokenizer_training": ("train_tokenizer",),
    "tokens": ("BYTE_VALUES", "ByteTokenizer", "TextStream", "Tokenizer", "Utf8Stream", "decode_stream"),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
