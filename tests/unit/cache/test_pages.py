"""Pages against a model of their contents: each session reads its own writes, and every page is accounted for."""

import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from corolla.cache.pages import PagePool
from corolla.cache.prefixes import ExpectedText
from corolla.cache.session_pages import MAX_TOKENS, SessionPages
from corolla.cache.tables import GroupRule
from corolla.chassis.errors import OutOfPages

PAGE_TOKENS, NUM_PAGES, MAX_STEP = 3, 14, 4
Token = tuple[str, int]

RULES = st.sampled_from(
    [
        (GroupRule(None, MAX_STEP),),
        (GroupRule(5, MAX_STEP),),
        (GroupRule(None, MAX_STEP), GroupRule(5, MAX_STEP)),
        (GroupRule(2, MAX_STEP), GroupRule(5, MAX_STEP), GroupRule(None, MAX_STEP)),
    ]
)
# Few texts and tenants, so that they meet.
LONG = [[(name, index) for index in range(15)] for name in "ab"]
# What one text goes on with, as an answer may.
ANSWERED = LONG[0][:7] + [("x", index) for index in range(7, 15)]
TEXTS = (*LONG, LONG[0][:7], ANSWERED)


def hashes_of(text: list[Token]) -> tuple[bytes, ...]:
    digests, before = [], b""
    for end in range(PAGE_TOKENS, len(text) + 1, PAGE_TOKENS):
        before = hashlib.sha256(before + repr(text[end - PAGE_TOKENS : end]).encode()).digest()[:16]
        digests.append(before)
    return tuple(digests)


@dataclass
class Held:
    """A session, and the tokens that it must read."""

    pages: SessionPages
    tokens: list[Token] = field(default_factory=list)
    text: list[Token] = field(default_factory=list)
    max_tokens: int = 0


class Pages(RuleBasedStateMachine):
    """Opens, writes, rolls back, forks, shares, parks and closes in any order."""

    @initialize(rules=RULES)
    def begin(self, rules: tuple[GroupRule, ...]) -> None:
        self.group_rules = rules
        self.pool = PagePool(NUM_PAGES, PAGE_TOKENS)
        self.held: list[Held] = []
        self.contents: dict[int, Token] = {}

    def some(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.held))

    @rule(max_tokens=st.integers(1, 20), text=st.sampled_from([None, *TEXTS]), tenant=st.sampled_from("tu"))
    def open(self, max_tokens: int, text: list[Token] | None, tenant: str) -> None:
        session = Held(SessionPages(self.pool, self.group_rules), max_tokens=max_tokens)
        needed, available = session.pages.worst_case(max_tokens), self.pool.num_available
        before = self.numbers()
        expected = text and ExpectedText(tenant.encode(), hashes_of(text), len(text))
        try:
            session.pages.allocate(max_tokens, expected or None)
        except OutOfPages:
            assert needed > available
            assert self.numbers() == before
            return
        assert needed <= available
        assert session.pages.num_tokens % PAGE_TOKENS == 0
        assert session.pages.num_tokens < len(text or []) or not session.pages.num_tokens
        if text is not None:
            session.text = [(tenant + name, index) for name, index in text]
            session.tokens = session.text[: session.pages.num_tokens]
        self.held.append(session)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_tokens=st.integers(1, MAX_STEP), is_sound=st.booleans())
    def step(self, data: st.DataObject, num_tokens: int, is_sound: bool) -> None:
        """Like a client: first the text, then any tokens; sometimes it truncates first."""
        session = self.some(data)
        oldest = max(0, len(session.tokens) - MAX_STEP)
        position = data.draw(st.integers(oldest, len(session.tokens)))
        num_tokens = min(num_tokens, session.max_tokens - position)
        if num_tokens < 1:
            return
        pages = session.pages
        if not pages.can_continue_from(position):
            # Only for what came from the prefix cache is the window so short.
            assert pages.min_position > position
            position = 0
            num_tokens = min(num_tokens, session.max_tokens)
        pages.truncate(position)
        del session.tokens[position:]
        copies = pages.make_writable(position, num_tokens)
        for source, target in copies:
            for offset in range(PAGE_TOKENS):
                self.contents.pop(target * PAGE_TOKENS + offset, None)
                if source * PAGE_TOKENS + offset in self.contents:
                    self.contents[target * PAGE_TOKENS + offset] = self.contents[source * PAGE_TOKENS + offset]
        follows_text = session.tokens == session.text[:position]
        new = session.text[position : position + num_tokens] if follows_text else []
        name = data.draw(st.sampled_from(["tx", "ty"]))
        new += [(name, index) for index in range(position + len(new), position + num_tokens)]
        for group in range(len(self.group_rules)):
            for slot, token in zip(pages.slots(position, num_tokens, group), new, strict=True):
                self.contents[slot] = token
        if is_sound:
            pages.commit(position + num_tokens)
            session.tokens += new
            if session.tokens[: len(session.text)] != session.text[: len(session.tokens)]:
                session.text = []
        note(f"{len(self.held)} sessions, {self.numbers()}")

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_more=st.integers(0, 6))
    def describe(self, data: st.DataObject, num_more: int) -> None:
        """Describes the tokens of a session at the end of an answer; tokens beyond those that it holds do not count."""
        session = self.some(data)
        tenants = {name[0] for name, _ in session.tokens}
        if len(tenants) == 1:
            held = len(session.tokens)
            described = [(name[1:], index) for name, index in session.tokens + session.text[held : held + num_more]]
            session.pages.set_page_hashes(tenants.pop().encode(), hashes_of(described))
            session.text = list(session.tokens)

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        """Beams change places: all sources are read before any row changes."""
        targets = data.draw(st.lists(st.sampled_from(range(len(self.held))), min_size=1, max_size=3, unique=True))
        sources = [data.draw(st.sampled_from(range(len(self.held)))) for _ in targets]
        twins = [(self.held[source].pages.fork(), list(self.held[source].tokens)) for source in sources]
        texts = [list(self.held[source].text) for source in sources]
        for target, (twin, tokens), text in zip(targets, twins, texts, strict=True):
            session = self.held[target]
            position = twin.nearest_position(min(len(tokens), session.max_tokens))
            twin.truncate(position)
            session.pages.adopt(twin)
            session.tokens, session.text = tokens[:position], text if len(tokens) == position else []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        session = self.some(data)
        session.pages.reserve(session.pages.num_tokens)
        session.max_tokens = session.pages.num_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session = self.some(data)
        self.held.remove(session)
        session.pages.clear()
        assert session.pages.num_pages == 0

    @invariant()
    def sessions_read_what_they_wrote(self) -> None:
        for session in getattr(self, "held", []):
            assert session.pages.num_tokens == len(session.tokens)
            for group, each in enumerate(self.group_rules):
                start = 0 if each.window is None else max(0, len(session.tokens) - each.window + 1)
                extents = session.pages.extents(len(session.tokens), start, group)
                read = [self.contents[slot] for first, count in extents for slot in range(first, first + count)]
                assert read == session.tokens[start:]

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        assert pool.num_used + pool.num_reserved + pool.num_cached + pool.num_free == NUM_PAGES
        assert min(pool.num_used, pool.num_reserved, pool.num_cached, pool.num_free) >= 0
        assert pool.num_used == len({page for each in self.held for table in each.pages.tables for page in table.pages})
        assert NUM_PAGES - pool.num_available == sum(each.pages.num_pages for each in self.held)
        for each in self.held:
            for table in each.pages.tables:
                assert table.num_pages <= table.num_promised

    def numbers(self) -> tuple[int, ...]:
        pool = self.pool
        return pool.num_used, pool.num_reserved, pool.num_available

    def teardown(self) -> None:
        for session in getattr(self, "held", []):
            session.pages.clear()
        if hasattr(self, "pool"):
            assert self.pool.num_available == NUM_PAGES
            everything = SessionPages(self.pool, [GroupRule()])
            everything.allocate(NUM_PAGES * PAGE_TOKENS)
            assert everything.extents(NUM_PAGES * PAGE_TOKENS) == ((0, NUM_PAGES * PAGE_TOKENS),)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@given(st.integers(1, 1000), st.integers(1, 64), st.integers(0, 10_000))
def test_pages_hold_the_tokens_with_less_than_a_page_to_spare(
    num_pages: int, page_tokens: int, num_tokens: int
) -> None:
    needed = PagePool(num_pages, page_tokens).pages_for(num_tokens)
    assert needed * page_tokens >= num_tokens > (needed - 1) * page_tokens


@pytest.mark.parametrize("num_pages, page_tokens", [(0, 1), (1, 0), (-1, 4)])
def test_a_pool_has_pages(num_pages: int, page_tokens: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        PagePool(num_pages, page_tokens)


def test_only_held_pages_can_be_released() -> None:
    pool = PagePool(4, 1)
    pool.promise(2)
    pages = pool.allocate(2)
    pool.release(pages)
    with pytest.raises(ValueError, match="no session held"):
        pool.release(pages)
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(pages)


def test_a_text_that_was_computed_again_is_as_new_in_all_groups() -> None:
    """A text's pages were evicted in one group only; those of the other groups would be the next to go."""
    pool = PagePool(24, PAGE_TOKENS)
    rules = (GroupRule(5, MAX_STEP), GroupRule(None, MAX_STEP))

    def opened(text: list[Token]) -> SessionPages:
        session = SessionPages(pool, rules)
        session.allocate(len(text), ExpectedText(b"t", hashes_of(text), len(text)))
        return session

    def compute(text: list[Token]) -> None:
        session = opened(text)
        while session.num_tokens < len(text):
            num_tokens = min(MAX_STEP, len(text) - session.num_tokens)
            session.make_writable(session.num_tokens, num_tokens)
            session.commit(session.num_tokens + num_tokens)
        session.clear()

    def evict(num_pages: int) -> None:
        num_promised = pool.num_available - pool.num_cached + num_pages
        pool.promise(num_promised)
        pool.promise(-num_promised)

    text, other = LONG[0][:7], LONG[1][:7]
    compute(text)
    evict(2)
    assert pool.num_cached == 2
    compute(other)
    compute(text)
    assert pool.num_cached == 8
    evict(2)
    assert opened(text).num_tokens == 6


class ComparedPage(int):
    """A page id that counts how often one of its kind is compared with another."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        ComparedPage.num_comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


class ComparedPages(PagePool):
    def allocate(self, num_pages: int, after: int | None = None) -> list[int]:
        return [ComparedPage(page) for page in super().allocate(num_pages, after)]


def test_the_adoption_of_a_long_session_looks_at_each_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """128,000 tokens: comparing each page with each other one would keep the event loop for a second."""
    monkeypatch.setattr(ComparedPage, "num_comparisons", 0)
    page_tokens, num_pages = 16, 8000
    pool = ComparedPages(3 * num_pages, page_tokens)
    source, target = (SessionPages(pool, [GroupRule()]) for _ in range(2))
    for session in (source, target):
        session.allocate(num_pages * page_tokens)
        session.make_writable(0, num_pages * page_tokens)
        session.commit(num_pages * page_tokens)
    own = target.tables[0].page(num_pages - 1)
    twin = source.fork()
    twin.truncate(num_pages // 2 * page_tokens)
    target.adopt(twin)
    assert target.tables[0].page(0) == source.tables[0].page(0)
    assert target.tables[0].page(num_pages - 1) == own
    assert pool.num_used == num_pages + num_pages // 2
    assert ComparedPage.num_comparisons <= 8 * num_pages


@given(RULES, st.integers(0, 40))
def test_the_longest_session_just_fits(rules: tuple[GroupRule, ...], num_pages: int) -> None:
    pages = SessionPages(PagePool(NUM_PAGES, PAGE_TOKENS), rules)
    num_tokens = pages.max_tokens_within(num_pages)
    assert pages.worst_case(num_tokens) <= num_pages
    assert pages.worst_case(num_tokens + 1) > num_pages or num_tokens == MAX_TOKENS
    if num_pages <= NUM_PAGES and num_tokens < MAX_TOKENS:
        SessionPages(PagePool(max(num_pages, 1), PAGE_TOKENS), rules).reserve(num_tokens)
        with pytest.raises(OutOfPages):
            SessionPages(PagePool(max(num_pages, 1), PAGE_TOKENS), rules).reserve(num_tokens + PAGE_TOKENS + 1)
