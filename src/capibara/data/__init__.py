"""Text: documents, tokenizers and chat templates."""

from __future__ import annotations

from capibara.data.chat import render_chat
from capibara.data.errors import ChatTemplateError, DocumentError, TokenizerError
from capibara.data.jsonl import JSONL_SUFFIXES, read_jsonl
from capibara.data.tokenizer_file import FileTokenizer, load_tokenizer, read_tokenizer_files
from capibara.data.tokenizer_training import train_tokenizer
from capibara.data.tokens import BYTE_VALUES, ByteTokenizer, TextStream, Tokenizer, Utf8Stream, decode_stream

__all__ = [
    "BYTE_VALUES",
    "JSONL_SUFFIXES",
    "ByteTokenizer",
    "ChatTemplateError",
    "DocumentError",
    "FileTokenizer",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "Utf8Stream",
    "decode_stream",
    "load_tokenizer",
    "read_jsonl",
    "read_tokenizer_files",
    "render_chat",
    "train_tokenizer",
]
