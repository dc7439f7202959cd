"""Who holds which page, and what the prefix cache gives, against a model of sets and dictionaries."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from capibara.serve.engine.pages import PagePool

SIZE, PAGES = 2, 9


class Pages(RuleBasedStateMachine):
    """Texts of few letters come, take pages, fill them and go. ``truth`` is what each page holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SIZE)
        self.held: list[list[int]] = []
        self.truth: dict[int, tuple[bytes, tuple[int, ...]]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from([b"a", b"b"]),
    )
    def comes(self, tokens: list[int], salt: bytes) -> None:
        free = PAGES - 1 - len({page for pages in self.held for page in pages})
        assert self.pool.available == free
        shared = self.pool.find(tokens, salt)
        assert len(shared) <= (len(tokens) - 1) // SIZE
        for number, page in enumerate(shared):
            assert self.truth[page] == (salt, tuple(tokens[: (number + 1) * SIZE]))
        needed = -(-len(tokens) // SIZE) - len(shared)
        own = self.pool.take(needed)
        if own is None:
            assert needed > self.pool.available
            self.pool.give_back(shared)
            return
        assert not {page for pages in self.held for page in pages} & set(own)
        assert not set(own) & set(shared)
        pages, digest = shared + own, salt
        for page in own:
            self.truth.pop(page, None)
        for number in range(len(tokens) // SIZE):
            piece = tokens[number * SIZE : (number + 1) * SIZE]
            digest = self.pool.remember(pages[number], digest, piece)
            self.truth[pages[number]] = salt, tuple(tokens[: (number + 1) * SIZE])
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 99))
    def goes(self, which: int) -> None:
        self.pool.give_back(self.held.pop(which % len(self.held)))

    @invariant()
    def the_count_is_right(self) -> None:
        used = {page for pages in self.held for page in pages}
        assert self.pool.used == len(used)
        assert 0 not in used


Pages.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestPages = Pages.TestCase


def filled(pool: PagePool, tokens: list[int], salt: bytes = b"") -> list[int]:
    pages = pool.take(-(-len(tokens) // SIZE))
    assert pages is not None
    digest = salt
    for number in range(len(tokens) // SIZE):
        digest = pool.remember(pages[number], digest, tokens[number * SIZE : (number + 1) * SIZE])
    return pages


def test_a_text_finds_what_others_of_its_salt_have_left() -> None:
    pool = PagePool(PAGES, SIZE)
    pages = filled(pool, [1, 2, 3, 4, 5], b"mine")
    assert pool.find([1, 2, 3, 4], b"mine") == pages[:1]  # its last token is computed
    pool.give_back(pages)
    assert pool.used == 1
    assert pool.find([1, 2, 3, 4, 9], b"mine") == pages[:2]
    assert pool.find([1, 2, 3, 4, 9], b"other") == []
    assert pool.find([3, 4, 3, 4, 9], b"mine") == []  # the same tokens after others


def test_what_was_used_longest_ago_is_given_away_first() -> None:
    pool = PagePool(5, SIZE)
    first, second = filled(pool, [1, 1, 1, 1]), filled(pool, [2, 2])
    pool.give_back(first)
    pool.give_back(second)
    assert pool.take(2) is not None  # one was free; the end of the older text goes
    assert pool.find([1, 1, 1, 1, 1], b"") == first[:1]
    assert pool.find([2, 2, 2], b"") == second


def test_without_a_prefix_cache_nothing_is_found() -> None:
    pool = PagePool(5, SIZE, prefix=False)
    pool.give_back(filled(pool, [1, 1, 1, 1]))
    assert pool.find([1, 1, 1, 1, 1], b"") == []
    assert pool.available == 4
