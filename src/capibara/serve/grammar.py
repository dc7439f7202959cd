"""Texts that follow a grammar: a JSON schema, a regular expression, some choices.

``llguidance`` (an Earley parser over a lexer of regular expressions, from Microsoft) says after each token which tokens
may follow; what may not gets a logit of −∞. Compiled grammars are kept, a few at a time.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from capibara.data import BYTE_VALUES, ByteTokenizer, FileTokenizer, Tokenizer
from capibara.errors import MissingExtraError
from capibara.serve.requests import Grammar, RequestError

__all__ = ["GrammarState", "compile_grammar"]

_LONGEST = 1 << 18  # characters of a grammar
_KEPT = 32
# Of the thread that computes steps, for a text: in all before it is judged, and for each token then.
_MOST_S, _MOST_S_EACH = 1.0, 0.02
_lock = threading.Lock()
_tokenizers: OrderedDict[int, tuple[Tokenizer, int, Any]] = OrderedDict()
_texts: OrderedDict[Grammar, str] = OrderedDict()


class GrammarState:
    """Where a text is in its grammar. Not for several threads at once.

    Args:
      matcher: an ``llguidance.LLMatcher``.
      vocabulary: token ids of the model.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._seconds, self._asked = 0.0, 0
        self._known: dict[tuple[int, ...], np.ndarray] = {}  # what may follow guesses, until a token comes

    def allowed(self, after: Sequence[int] = ()) -> np.ndarray:
        """Which tokens may follow: bool ``[vocabulary]``; none where the grammar does not go on.

        Args:
          after: tokens that are taken to come first. They leave no trace: what is wrong with them is not an error.

        Raises:
          RequestError: the grammar takes more work than it may.
        """
        key = tuple(after)
        if key not in self._known:
            self._known[key] = self._find_allowed(key)
        return self._known[key]

    def _find_allowed(self, after: tuple[int, ...]) -> np.ndarray:
        found = np.zeros(self._vocabulary, bool)
        with self._timed():
            matcher = self._matcher
            if after:
                matcher, there = self._follow(after)
                if there < len(after) or matcher.is_stopped():
                    return found
            packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if after and matcher.is_error():
            return found
        self._check()
        self._asked += 1
        # All texts that are written wait for this one.
        if not after and self._seconds > _MOST_S and self._seconds / self._asked > _MOST_S_EACH:
            each = 1e3 * self._seconds / self._asked
            raise RequestError(
                f"grammar: it takes {each:.0f} ms to find what may follow a token, expected at most "
                f"{1e3 * _MOST_S_EACH:g} ms. Give one that is less ambiguous."
            )
        bits = np.unpackbits(packed, bitorder="little")[: self._vocabulary].astype(bool)
        found[: len(bits)] = bits
        return found

    def follow(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come next, one after another."""
        with self._timed():
            return self._follow(tokens)[1] if tokens else 0

    def _follow(self, tokens: Sequence[int]) -> tuple[Any, int]:
        """A copy of the matcher that has read these tokens as far as they may come, and how far that is."""
        matcher = self._matcher.deep_copy()
        for count, token in enumerate(tokens):
            if matcher.is_stopped():
                return matcher, count
            matcher.consume_token(token)
            if matcher.is_error():
                return matcher, count
        return matcher, len(tokens)

    def forced(self) -> list[int]:
        """The tokens that come next whatever is chosen, as the tokenizer would cut them; the first few at least."""
        with self._timed():
            return list(self._matcher.compute_ff_tokens())

    @property
    def may_end(self) -> bool:
        """Whether the text is whole as it is."""
        return bool(self._matcher.is_accepting())

    def accept(self, token: int) -> bool:
        """Go on with a token; whether another may follow.

        Raises:
          RequestError: the token may not follow.
        """
        self._known.clear()
        self._matcher.consume_token(token)
        self._check()
        return not self._matcher.is_stopped()

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count what is done inside as work of this grammar, guesses included."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._seconds += time.thread_time() - begun

    def _check(self) -> None:
        if self._matcher.is_error():
            # After the reason come the parser's state and the grammar.
            reason = str(self._matcher.get_error()).partition("\n<state>")[0].strip()
            if reason == "NoExtensionBias":
                reason = "nothing can be written that satisfies it. Does a rule need itself without end?"
            raise RequestError(f"grammar: {reason[:500]}")


def compile_grammar(grammar: Grammar, tokenizer: Tokenizer, vocabulary: int) -> GrammarState:
    """A state at the beginning of a grammar.

    Raises:
      RequestError: the grammar is invalid, or uses what llguidance does not do.
      MissingExtraError: the package ``llguidance`` is not installed.
    """
    try:
        import llguidance
    except ImportError:
        raise MissingExtraError("llguidance", "serve", "a grammar") from None
    if len(grammar.text) > _LONGEST:
        raise RequestError(
            f"grammar has {len(grammar.text)} characters, expected at most {_LONGEST}. Give a smaller one."
        )
    with _lock:
        text = _kept(_texts, grammar, lambda: _text_of(llguidance, grammar))
        of = _tokenizer_of(llguidance, tokenizer, vocabulary)
    limits = llguidance.LLParserLimits(step_max_items=50_000, max_grammar_size=500_000)
    matcher = llguidance.LLMatcher(of, text, limits=limits, log_level=0)
    state = GrammarState(matcher, vocabulary)
    state._check()
    return state


def _kept(cache: OrderedDict[Any, Any], key: Any, make: Callable[[], Any]) -> Any:
    if key not in cache:
        cache[key] = make()
        if len(cache) > _KEPT:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


def _text_of(llguidance: Any, grammar: Grammar) -> str:
    """The grammar as llguidance takes it."""
    matcher, text = llguidance.LLMatcher, grammar.text
    try:
        if grammar.kind == "json":
            return matcher.grammar_from_json_schema({"type": "object"})
        if grammar.kind == "json_schema":
            schema = json.loads(text)
            if not isinstance(schema, dict | bool):
                raise RequestError(f"json_schema: got {text[:80]!r}, expected an object.")
            return matcher.grammar_from_json_schema(schema)
        if grammar.kind == "regex":
            return matcher.grammar_from_regex(text)
        if grammar.kind == "lark":
            return matcher.grammar_from_lark(text)
        choices = text.split("\n")
        if choices == [""]:
            raise RequestError("choice: there are no choices.")
        return matcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    except RequestError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{grammar.kind}: {str(error)[:500]}") from None


class _Bytes:
    """What llguidance asks of a tokenizer whose tokens are bytes; one more id ends a text."""

    eos_token_id = BYTE_VALUES
    bos_token_id = None

    def __init__(self) -> None:
        self.tokens = [bytes([value]) for value in range(BYTE_VALUES)] + [b"<end>"]
        self.special_token_ids = [BYTE_VALUES]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _with_end(content: str, token: int) -> str:
    """A ``tokenizer.json`` with one more special token."""
    read = json.loads(content)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    more = {"id": token, "content": "<|end of a grammar|>", "special": True, **flags}
    return json.dumps({**read, "added_tokens": [*read.get("added_tokens", []), more]})


def _tokenizer_of(llguidance: Any, tokenizer: Tokenizer, vocabulary: int) -> Any:
    """llguidance's form of a tokenizer, made once for each."""
    held = _tokenizers.get(id(tokenizer))
    if held is not None and held[0] is tokenizer and held[1] == vocabulary:
        return held[2]
    if isinstance(tokenizer, ByteTokenizer):
        made = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
    elif isinstance(tokenizer, FileTokenizer):
        content, ends = tokenizer.files["tokenizer.json"].decode(), sorted(tokenizer.stop_tokens)
        if not ends:  # llguidance needs one; the model does not have it, and never writes it
            ends = [max(vocabulary, tokenizer.vocab_size)]
            content = _with_end(content, ends[0])
        try:
            made = llguidance.LLTokenizer(content, eos_token=ends)
        except ValueError as error:
            raise RequestError(f"grammar: the model's tokenizer does not do: {str(error)[:300]}") from None
    else:
        raise RequestError(
            f"grammar: a tokenizer of type {type(tokenizer).__name__} is not known; expected bytes or a tokenizer.json."
        )
    _tokenizers[id(tokenizer)] = tokenizer, vocabulary, made
    if len(_tokenizers) > 4:
        _tokenizers.popitem(last=False)
    return made
