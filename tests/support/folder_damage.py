"""Damage to the files of a published folder, and what an attacker would write into them."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = [
    "OUTSIDE",
    "SECRET",
    "TEMPLATES",
    "damaged_bytes",
    "damaged_gguf",
    "damaged_json",
    "damaged_tensors",
    "evil_tokenizer",
    "gguf_value",
    "gguf_with",
    "json_bomb",
]

SECRET = "outside-of-the-folder"
HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    4096,
    10**6,
    2**31 - 1,
    2**31,
    2**63,
    10**400,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    0.5,
    "",
    "x" * 5000,
    "\ud800",
    "\x1b[2J\x00",
    "../../etc/passwd",
    "/etc/passwd",
    [],
    [[]],
    {},
    {"a": {"b": []}},
    [1, "2", None],
]
KEYS = ["x", "rope_scaling", "quantization_config", "auto_map", "\ud800", "\x1b]0;x\x07", "", "k" * 3000]
TEMPLATES = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'x' * 9999 }}{% endfor %}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self._TemplateReference__context }}",
    "{{ '%999999999d' % 1 }}",
    "{{ 'x' * 10**10 }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 10**10**10 }}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% include '/etc/passwd' %}",
    "{% extends '../" + SECRET + "' %}",
    "{% import 'os' as os %}",
    "{% set x = namespace(a=[]) %}{% for i in range(10**7) %}{% set x.a = x.a + [x.a] %}{% endfor %}",
    "{% set x = namespace(a='x') %}{% for i in range(99) %}{% set x.a = x.a + x.a %}{% endfor %}{{ x.a }}",
    "{{ (lambda: 1)() }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | attr('__class__') }}",
    "{% generation %}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('no' * 10**6) }}",
    "{{ strftime_now('%Y' * 10**6) }}",
    "{{ strftime_now(strftime_now) }}",
    "{{ messages[0]['content'].format_map({'a': 1}) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ undefined_name.attribute }}",
    "{{ messages | tojson(indent=10**9) }}",
    "(" * 5000 + "{{ " + "(" * 5000,
]
# Of an index: names that lead out of the folder, or to what is not a file of tensors.
OUTSIDE = [
    f"../{SECRET}",
    f"../{SECRET}.safetensors",
    "/etc/passwd",
    "a/b.safetensors",
    "..",
    "",
    "x\0.safetensors",
]


def damaged_json(rng: random.Random, value: Any) -> bytes:
    """A JSON value with some of its parts replaced, removed or added, or its text cut or changed."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        holders = [one for one in _holders(value) if one]
        if not holders:
            break
        holder = rng.choice(holders)
        key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        action = rng.random()
        if action < 0.7:
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif action < 0.85:
            del holder[key]
        elif isinstance(holder, dict):
            holder[rng.choice([*KEYS, str(key) + "_"])] = copy.deepcopy(rng.choice(HOSTILE))
    text = json.dumps(value, ensure_ascii=True).encode()
    action = rng.random()
    if action < 0.1:
        return damaged_bytes(rng, text)
    if action < 0.12:
        return b"[" * rng.choice([10, 10**5]) + text
    return text


def damaged_bytes(rng: random.Random, whole: bytes) -> bytes:
    """Cut, or with other bytes."""
    if rng.random() < 0.5:
        return whole[: rng.randrange(len(whole) + 1)]
    changed = bytearray(whole)
    for _ in range(rng.choice([1, 3, 30])):
        changed[rng.randrange(len(whole))] = rng.randrange(256)
    return bytes(changed)


def _holders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from _holders(one)


def damaged_tensors(rng: random.Random, whole: bytes) -> bytes:
    """A safetensors file with another header, or cut, or with other bytes."""
    (length,) = struct.unpack("<Q", whole[:8])
    header, data = json.loads(whole[8 : 8 + length]), whole[8 + length :]
    action = rng.random()
    if action < 0.1:
        return whole[: rng.randrange(len(whole))]
    if action < 0.2:
        wrong = rng.choice([0, 1, length - 1, length + 1, len(whole), 2**31, 2**63, 2**64 - 1])
        return struct.pack("<Q", wrong) + whole[8:]
    if action < 0.25:  # other numbers, which are as good as any
        at = rng.randrange(8 + length, len(whole))
        return whole[:at] + bytes([rng.randrange(256)]) + whole[at + 1 :]
    if action < 0.3:
        return damaged_bytes(rng, whole[: 8 + length]) + data
    for _ in range(rng.choice([1, 1, 3])):
        name = rng.choice([key for key in header if key != "__metadata__"] or ["x"])
        entry = header.setdefault(name, {})
        if not isinstance(entry, dict):
            continue
        field = rng.choice(["dtype", "shape", "data_offsets", "name", "all", "metadata"])
        if field == "dtype":
            entry["dtype"] = rng.choice(["F64", "BF16", "I32", "I8", "F8_E4M3", "BOOL", "F4", "x", 3, None])
        elif field == "shape":
            entry["shape"] = rng.choice([[], [-1], [2**40, 2**40], [0], "x", [1.5], [2**63], None])
        elif field == "data_offsets":
            ends = [-1, 0, 4, len(data), len(data) + 1, 2**63, 2**64, "x", None]
            entry["data_offsets"] = rng.choice([[rng.choice(ends), rng.choice(ends)], [0], []])
        elif field == "name":
            header[rng.choice(["", "../x", "x" * 10**4, "\ud800", "\x1b[2J", name + "x"])] = header.pop(name)
        elif field == "metadata":
            header["__metadata__"] = copy.deepcopy(rng.choice(HOSTILE))
        else:
            header[name] = copy.deepcopy(rng.choice(HOSTILE))
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


_BERT = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")


def evil_tokenizer(rng: random.Random, value: dict[str, Any]) -> None:
    """Give a ``tokenizer.json`` parts whose output, or whose work, grows without bounds."""
    long = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * rng.choice([10, 1000, 10**6])}
    empty = {"type": "Replace", "pattern": {"Regex": rng.choice(["", "x*", "(?=.)"])}, "content": "ab" * 1000}
    slow = {
        "type": "Split",
        "pattern": {"Regex": rng.choice(["(a+)+$", "(a|a)*b", "((a*)*)*c", "(.*)\\1{9}x", "["])},
        "behavior": "Isolated",
        "invert": False,
    }
    before = {"type": "Prepend", "prepend": "a" * rng.choice([1, 10**5, 10**7])}
    nested: dict[str, Any] = {"type": "Sequence", "normalizers": [long] * rng.choice([1, 3, 20])}
    for _ in range(rng.choice([0, 1, 200])):
        nested = {"type": "Sequence", "normalizers": [nested]}
    # Each is harmless by itself.
    wide: dict[str, Any] = {"type": "Replace", "pattern": {"String": rng.choice("aا")}, "content": "ﷺ"}
    forms: list[dict[str, Any]] = [
        {"type": kind} for kind in ("NFKC", "NFKD", "NFD", "Lowercase", "StripAccents", "ByteLevel")
    ]
    forms.append({"type": "BertNormalizer"} | dict.fromkeys(_BERT, True))
    mixed = [rng.choice([wide, rng.choice(forms)]) for _ in range(rng.choice([2, 8, 30]))]
    meta = {"type": "Metaspace", "prepend_scheme": "always", "split": True}
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
    each = slow | {"pattern": {"Regex": "."}}
    split = [rng.choice([meta | {"replacement": rng.choice("▁xa")}, level, each]) for _ in range(20)]
    joined: dict[str, Any] = {"type": "BPEDecoder", "suffix": ""}
    for one in (wide, joined, mixed[0]):
        if rng.random() < 0.1:  # the package reads these by their keys
            one["type"] = rng.choice([None, "Sequence", "x"])
    part = rng.choice(["normalizer", "pre_tokenizer", "decoder", "post_processor", "model", "added_tokens"])
    if part == "normalizer":
        value[part] = rng.choice(
            [long, empty, before, nested]
            + [{"type": "Sequence", "normalizers": parts} for parts in ([before, long], mixed, mixed)]
        )
    elif part == "pre_tokenizer":
        value[part] = rng.choice(
            [slow]
            + [{"type": "Sequence", "pretokenizers": parts} for parts in ([slow, slow], split, split[:3])]
        )
    elif part == "decoder":
        value[part] = rng.choice(
            [long]
            + [{"type": "Sequence", "decoders": [one] * rng.choice([1, 3, 20, 40])} for one in (long, joined)]
        )
    elif part == "post_processor":
        pieces = [{"SpecialToken": {"id": "!", "type_id": 0}}] * rng.choice([1, 10**5])
        ids = {"!": {"id": "!", "ids": [0] * rng.choice([1, 10**4]), "tokens": ["!"]}}
        value[part] = {
            "type": "TemplateProcessing",
            "single": [*pieces, *[{"Sequence": {"id": "A", "type_id": 0}}] * rng.choice([1, 1, 10, 10**5])],
            "pair": [],
            "special_tokens": ids,
        }
    elif part == "model":
        other = [
            {"type": "Unigram", "unk_id": rng.choice([0, 5, None]), "vocab": [["a", -1.0], ["b", 10.0]]},
            {"type": "WordPiece", "unk_token": "?", "vocab": {"a": 0}, "max_input_chars_per_word": 2**40},
            {"type": "WordLevel", "unk_token": "?", "vocab": {"a": 2**31}},
            {"type": "BPE", "vocab": {"a": 0, "b": 1, "x" * 10**6: 2}, "merges": [["a", "b"]]},
            {"type": "BPE", "vocab": {"a": 0, "a" * 10**5: 1}, "merges": [], "unk_token": "a" * 10**5},
        ]
        value[part] = rng.choice(other)
    else:
        content = rng.choice(["a" * 10**6, "", "a", "\x1b[2J"])
        token = {
            "id": rng.choice([0, 300, 2**31, 2**32 - 1]),
            "content": content,
            "special": rng.random() < 0.5,
        }
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        value[part] = [token | plain]


def json_bomb(rng: random.Random, size: int) -> bytes:
    """An object of about ``size`` bytes of which parsing makes many times as many."""
    one = rng.choice([b"{}", b"[]", b'{"":{}}', b'{"":[]}', b"[[]]", b'{"a":0}'])
    key = rng.choice([b"weight_map", b"metadata", b"x"])
    return b'{"' + key + b'":[' + b",".join([one] * (size // (len(one) + 1))) + b"]}"


# Of GGUF: the widths of numbers and booleans, by the number of their type.
_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_FORMS = {"u8": (0, "<B"), "u16": (2, "<H"), "u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f")}
_FORMS |= {"bool": (7, "<B"), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d")}


def gguf_value(form: str, value: Any) -> bytes:
    """The type and the bytes of a value of GGUF's metadata: ``"u32"`` … ``"str"``; an array of them for a list."""
    number, pack = (8, "") if form == "str" else _FORMS[form]

    def plain(one: Any) -> bytes:
        return _text(one.encode()) if form == "str" else struct.pack(pack, one)

    if not isinstance(value, list):
        return struct.pack("<I", number) + plain(value)
    return struct.pack("<IIQ", 9, number, len(value)) + b"".join(map(plain, value))


def gguf_with(whole: bytes, changes: Mapping[str, bytes | None]) -> bytes:
    """A GGUF file with other values, as :func:`gguf_value` gives them, of some keys; ``None``: without the key."""
    version, tensors, keys = struct.unpack_from("<IQQ", whole, 4)
    at, values = 24, {}
    for _ in range(keys):
        (size,) = struct.unpack_from("<Q", whole, at)
        key, begin = whole[at + 8 : at + 8 + size].decode(), at + 8 + size
        at = _value_end(whole, struct.unpack_from("<I", whole, begin)[0], begin + 4)
        values[key] = whole[begin:at]
    begin = at
    for _ in range(tensors):
        at += 8 + struct.unpack_from("<Q", whole, at)[0]
        at += 4 + 8 * struct.unpack_from("<I", whole, at)[0] + 12
    infos, data = whole[begin:at], whole[-(-at // 32) * 32 :]
    values = {key: value for key, value in {**values, **changes}.items() if value is not None}
    header = b"GGUF" + struct.pack("<IQQ", version, tensors, len(values))
    header += b"".join(_text(key.encode()) + value for key, value in values.items()) + infos
    return header + bytes(-len(header) % 32) + data


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def _value_end(whole: bytes, kind: int, at: int) -> int:
    if kind == 8:
        return at + 8 + struct.unpack_from("<Q", whole, at)[0]
    if kind != 9:
        return at + _WIDTHS[kind]
    inner, count = struct.unpack_from("<IQ", whole, at)
    at += 12
    if inner != 8:
        return at + count * _WIDTHS[inner]
    for _ in range(count):
        at = _value_end(whole, inner, at)
    return at


_GGUF_KEYS = [
    "general.alignment",
    "general.architecture",
    "split.count",
    *(f"llama.{key}" for key in ("expert_count", "block_count", "attention.head_count", "rope.freq_base")),
    *(f"llama.rope.scaling.{key}" for key in ("type", "factor", "original_context_length")),
    *(f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges", "scores")),
    *(f"tokenizer.ggml.{key}_token_id" for key in ("bos", "eos", "unknown", "padding", "eot")),
    *(f"tokenizer.ggml.{key}" for key in ("add_bos_token", "add_space_prefix")),
    "tokenizer.chat_template",
    "tokenizer.huggingface.json",
    "llama.x",
    "\x1b[2J",
]
_GGUF_VALUES: list[tuple[str, Any]] = [
    *((form, value) for form in ("u8", "u16", "u32", "u64", "bool") for value in (0, 1, 2, [], [1], [1, 0])),
    *((form, value) for form in ("i32", "i64") for value in (-1, [-1])),
    *((form, value) for form in ("f32", "f64") for value in (0.5, float("nan"), float("inf"), [0.5, 1.0])),
    *(
        ("str", value)
        for value in ("", "x", "x" * 5000, "\x1b[2J", "llama", "gpt2", "{}", [], ["a"], ["a", "b"])
    ),
    ("u64", (1 << 64) - 1),
    ("u8", [1] * 5000),
]


def damaged_gguf(rng: random.Random, whole: bytes) -> bytes:
    """A GGUF file with values of other types, some of them for keys that it does not have."""
    changes: dict[str, bytes | None] = {}
    if rng.random() < 0.6:  # otherwise that is read and not llama.cpp's vocabulary
        changes["tokenizer.huggingface.json"] = None
        changes["tokenizer.ggml.model"] = gguf_value("str", rng.choice(["llama", "gpt2"]))
    for _ in range(rng.choice([1, 1, 3])):
        form, value = rng.choice(_GGUF_VALUES)
        changes[rng.choice(_GGUF_KEYS)] = gguf_value(form, value)
    return gguf_with(whole, changes)
