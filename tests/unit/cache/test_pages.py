"""Pages against a model of their contents: each session reads its own writes, and every page is accounted for."""

import hashlib
from dataclasses import dataclass, field

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from corolla.cache.host_pages import HostPages
from corolla.cache.pages import PagePool
from corolla.cache.prefixes import ExpectedText, PrefixKey, PrefixKeys
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
    tenant: str = ""


class Pages(RuleBasedStateMachine):
    """Opens, writes, rolls back, forks, shares, stores, parks and closes in any order."""

    @initialize(rules=RULES)
    def begin(self, rules: tuple[GroupRule, ...]) -> None:
        self.group_rules = rules
        self.pool = PagePool(NUM_PAGES, PAGE_TOKENS)
        self.held: list[Held] = []
        self.contents: dict[int, Token] = {}
        self.keys = PrefixKeys([rule.window for rule in rules])
        self.named: set[tuple[bytes, tuple[bytes, ...]]] = set()

    def some(self, data: st.DataObject) -> Held:
        return data.draw(st.sampled_from(self.held))

    @rule(
        max_tokens=st.integers(1, 20),
        text=st.sampled_from([None, *TEXTS]),
        tenant=st.sampled_from("tu"),
        write_start=st.sampled_from([0, 7, 20]),
        is_charged=st.booleans(),
    )
    def open(self, max_tokens: int, text: list[Token] | None, tenant: str, write_start: int, is_charged: bool) -> None:
        session = Held(SessionPages(self.pool, self.group_rules), max_tokens=max_tokens, tenant=tenant)
        if is_charged:
            session.pages.charge_to(tenant)
        before = self.numbers()
        expected = ExpectedText(tenant.encode(), hashes_of(text), len(text)) if text else None
        needed, available = session.pages.num_missing(max_tokens, expected, write_start), self.pool.num_available
        assert needed <= session.pages.worst_case(max_tokens)
        assert write_start or needed == session.pages.worst_case(max_tokens)
        try:
            session.pages.allocate(max_tokens, expected, write_start)
        except OutOfPages:
            assert needed > available
            assert self.numbers() == before
            return
        assert self.pool.num_available == available - needed
        assert session.pages.num_tokens % PAGE_TOKENS == 0
        assert session.pages.num_tokens < len(text or []) or not session.pages.num_tokens
        if text is not None:
            self.named.add((tenant.encode(), hashes_of(text)))
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
        assert pages.common_end <= pages.write_start
        before = self.numbers()
        try:
            pages.own_from(position)
        except OutOfPages:
            num_read = sum(max(0, table.num_common - position // PAGE_TOKENS) for table in pages.tables)
            assert num_read > self.pool.num_available
            assert self.numbers() == before or len(self.group_rules) > 1
            return
        pages.truncate(position)
        del session.tokens[position:]
        copies = pages.make_writable(position, num_tokens)
        for source, target in copies:
            self.copy(source, target)
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

    def of_tenant(self, tenant: str) -> list[int]:
        return [number for number, each in enumerate(self.held) if each.tenant == tenant]

    def copy(self, source: int, target: int) -> None:
        for offset in range(PAGE_TOKENS):
            self.contents.pop(target * PAGE_TOKENS + offset, None)
            if source * PAGE_TOKENS + offset in self.contents:
                self.contents[target * PAGE_TOKENS + offset] = self.contents[source * PAGE_TOKENS + offset]

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        max_tokens=st.integers(1, 20),
        text=st.sampled_from([None, *TEXTS]),
        write_start=st.sampled_from([0, 3, 7, 20]),
    )
    def open_again(self, data: st.DataObject, max_tokens: int, text: list[Token] | None, write_start: int) -> None:
        session = self.some(data)
        max_tokens, tenant = max(max_tokens, session.pages.num_tokens), session.tenant
        expected = ExpectedText(tenant.encode(), hashes_of(text), len(text)) if text and not session.tokens else None
        needed = session.pages.num_missing(max_tokens, expected, write_start, is_kept=True)
        before, available = self.numbers(), self.pool.num_available
        try:
            session.pages.allocate(max_tokens, expected, write_start)
        except OutOfPages:
            assert needed > available
            assert self.numbers() == before
            return
        assert self.pool.num_available == available - needed
        session.max_tokens, session.text = max_tokens, []
        if expected is not None and text is not None:
            self.named.add((tenant.encode(), expected.hashes))
            session.text = [(tenant + name, index) for name, index in text]
            session.tokens = session.text[: session.pages.num_tokens]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def charge_another(self, data: st.DataObject) -> None:
        session = self.some(data)
        session.pages.charge_to(None if session.pages.tables[0].account else session.tenant)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_more=st.integers(0, 6))
    def describe(self, data: st.DataObject, num_more: int) -> None:
        """Describes the tokens of a session at the end of an answer; tokens beyond those that it holds do not count."""
        session = self.some(data)
        tenants = {name[0] for name, _ in session.tokens}
        if len(tenants) == 1:
            held = len(session.tokens)
            described = [(name[1:], index) for name, index in session.tokens + session.text[held : held + num_more]]
            salt = tenants.pop().encode()
            self.named.add((salt, hashes_of(described)))
            session.pages.set_page_hashes(salt, hashes_of(described))
            session.text = list(session.tokens)

    @rule(text=st.sampled_from(TEXTS), tenant=st.sampled_from("tu"), num_together=st.integers(1, 3))
    def store(self, text: list[Token], tenant: str, num_together: int) -> None:
        """Stores pages that no session computed here, a few at a time, as long as there is room."""
        salt, hashes = tenant.encode(), hashes_of(text)
        self.named.add((salt, hashes))
        for first in range(0, len(hashes), num_together):
            indices = range(first, min(len(hashes), first + num_together))
            stored = [(index, names) for index in indices for names in self.keys.of_page(salt, hashes, index)]
            if len(stored) > self.pool.num_available:
                return
            pages = self.pool.take(len(stored))
            for page, (index, (key, before)) in zip(pages, stored, strict=True):
                for offset in range(PAGE_TOKENS):
                    name, number = text[index * PAGE_TOKENS + offset]
                    self.contents[page * PAGE_TOKENS + offset] = tenant + name, number
                self.pool.add_prefix(key, page, before)
            self.pool.give(pages)

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        """Beams change places: all sources are read before any row changes."""
        targets = data.draw(st.lists(st.sampled_from(range(len(self.held))), min_size=1, max_size=3, unique=True))
        sources = [data.draw(st.sampled_from(self.of_tenant(self.held[target].tenant))) for target in targets]
        twins = [(self.held[source].pages.fork(), list(self.held[source].tokens)) for source in sources]
        texts = [list(self.held[source].text) for source in sources]
        for target, (twin, tokens), text in zip(targets, twins, texts, strict=True):
            session = self.held[target]
            position = twin.nearest_position(min(len(tokens), session.max_tokens))
            twin.truncate(position)
            try:
                session.pages.adopt(twin)
            except OutOfPages:
                twin.clear()
                continue
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
                if not session.tokens:
                    continue  # the pages may be those of tokens that it has taken back
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
        tables = [table for each in self.held for table in each.pages.tables]
        common = {page for table in tables for page in table.pages[: table.num_common]}
        assert pool.num_common == len(common)
        assert NUM_PAGES - pool.num_available == sum(each.pages.num_pages for each in self.held) + len(common)
        assert pool.num_charged.total() == pool.num_common - pool.num_uncharged >= 0
        charged = {page for table in tables if table.account for page in table.pages[: table.num_common]}
        assert pool.num_charged.total() == len(charged)
        for table in tables:
            assert table.num_pages <= table.num_common + table.num_promised
            assert not (table.num_common and table.has_window)

    @invariant()
    def cached_pages_are_found_with_those_that_they_need(self) -> None:
        found: dict[int, PrefixKey] = {}
        for salt, hashes in getattr(self, "named", ()):
            for index in range(len(hashes)):
                for key, before in self.keys.of_page(salt, hashes, index):
                    if (page := self.pool.find_prefix(key)) is not None:
                        assert found.setdefault(page, key) == key, "a page has one name"
                        assert before is None or self.pool.find_prefix(before) is not None
        if hasattr(self, "pool"):
            assert self.pool.num_cached == sum(not self.pool.holders[page] for page in found)

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


def test_sessions_that_share_a_beginning_count_it_once() -> None:
    pool = PagePool(100, PAGE_TOKENS)
    text = [("a", index) for index in range(60)]
    expected = ExpectedText(b"t", hashes_of(text), len(text))

    def opened(write_start: int = len(text)) -> SessionPages:
        session = SessionPages(pool, [GroupRule()])
        session.allocate(len(text), expected, write_start)
        return session

    first = opened()
    first.make_writable(0, len(text))
    first.commit(len(text))
    assert (first.num_pages, pool.num_common, pool.num_available) == (0, 20, 80)
    sharers = [opened() for _ in range(64)]
    assert pool.num_available == 80 - 64  # each has the page of its last token to itself
    with pytest.raises(OutOfPages):
        opened(0)
    first.clear()
    assert pool.num_available == 80 - 64 + 1
    with pytest.raises(OutOfPages):
        sharers[0].own_from(0)
    for session in sharers[1:]:
        session.clear()
    sharers[0].own_from(0)
    assert (sharers[0].num_pages, pool.num_common, pool.num_available) == (20, 0, 80)
    assert not sharers[0].make_writable(0, len(text)), "the only holder needs no copies"


def kept(pool: PagePool, name: str, num_pages: int, *, together: int = 1) -> tuple[bytes, ...]:
    """Stores a text's pages as they come from elsewhere, and gives their digests."""
    hashes = hashes_of([(name, index) for index in range(num_pages * PAGE_TOKENS)])
    for first in range(0, num_pages, together):
        stored = range(first, min(num_pages, first + together))
        pages = pool.take(len(stored))
        for index, page in zip(stored, pages, strict=True):
            for key, before in PrefixKeys([None]).of_page(b"t", hashes, index):
                pool.add_prefix(key, page, before)
        pool.give(pages)
    return hashes


def num_kept(pool: PagePool, hashes: tuple[bytes, ...]) -> int:
    return sum(pool.find_prefix(PrefixKey(b"t", each, 0)) is not None for each in hashes)


@given(st.integers(1, 9), st.integers(1, 4), st.data())
def test_the_text_that_was_met_last_is_evicted_last_and_each_from_its_end(
    num_pages: int, together: int, data: st.DataObject
) -> None:
    pool = PagePool(3 * num_pages + 1, PAGE_TOKENS)
    older, newer = (kept(pool, name, num_pages, together=together) for name in "ab")
    if data.draw(st.booleans(), label="the older text is met again"):
        session = SessionPages(pool, [GroupRule()])
        num_tokens = num_pages * PAGE_TOKENS + 1
        session.allocate(num_tokens, ExpectedText(b"t", older, num_tokens))
        assert session.num_tokens == num_tokens - 1
        session.clear()
        older, newer = newer, older
    num_evicted = data.draw(st.integers(0, 2 * num_pages))
    pool.promise(num_pages + 1 + num_evicted)
    num_left = max(0, num_pages - num_evicted), min(num_pages, 2 * num_pages - num_evicted)
    for hashes, num_first in zip((older, newer), num_left, strict=True):
        assert num_kept(pool, hashes) == num_kept(pool, hashes[:num_first]) == num_first


def test_a_session_that_had_all_pages_leaves_its_text() -> None:
    pool = PagePool(5, PAGE_TOKENS)
    session = SessionPages(pool, [GroupRule()])
    session.allocate(15, ExpectedText(b"t", hashes_of(LONG[0]), 15))
    session.make_writable(0, 10)
    session.commit(10)
    session.reserve(10)
    assert (pool.num_used, pool.num_cached) == (4, 0)
    session.clear()
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 3, 2)


def test_chats_that_take_turns_stay_in_one_run_each() -> None:
    pool = PagePool(256, PAGE_TOKENS)
    for num_pages in range(3, 27, 3):
        for name in "abcd":
            text = [(name, index) for index in range(num_pages * PAGE_TOKENS)]
            session = SessionPages(pool, [GroupRule()])
            session.allocate(len(text) + PAGE_TOKENS, ExpectedText(b"t", hashes_of(text), len(text)))
            assert session.num_tokens == len(text) - 3 * PAGE_TOKENS
            session.make_writable(session.num_tokens, 3 * PAGE_TOKENS)
            session.commit(len(text))
            assert len(session.extents(len(text))) == 1
            session.clear()


def test_two_sessions_that_compute_one_text_leave_it_once() -> None:
    """The pages of the one that ends first would be evicted, and then nothing would find those of the other."""
    pool = PagePool(16, PAGE_TOKENS)
    text = LONG[0]
    longer, shorter = SessionPages(pool, [GroupRule()]), SessionPages(pool, [GroupRule()])
    for session, num_tokens in ((shorter, 6), (longer, 15)):
        session.allocate(num_tokens, ExpectedText(b"t", hashes_of(text), len(text)))
    for session, num_tokens in ((shorter, 6), (longer, 15)):
        session.make_writable(0, num_tokens)
        session.commit(num_tokens)
    shorter.clear()
    assert (pool.num_used, pool.num_cached) == (5, 0)
    pool.promise(11)
    longer.clear()
    assert pool.num_cached == 5
    pool.promise(3)
    assert pool.num_cached == 2
    pool.promise(-14)
    assert num_kept(pool, hashes_of(text)) == num_kept(pool, hashes_of(text)[:2]) == 2


def test_a_page_that_another_text_was_written_to_does_not_come_back() -> None:
    pool = PagePool(2, PAGE_TOKENS)
    pool.host = HostPages(2)
    keys = [PrefixKey(b"t", each, 0) for each in kept(pool, "a", 2)]
    kept(pool, "b", 1)
    assert [key in pool.host for key in keys] == [False, False]
    assert num_kept(pool, hashes_of(LONG[0][:3])) == 1


class ComparedPage(int):
    """A page id that counts how often one of its kind is compared with another."""

    num_comparisons = 0

    def __eq__(self, other: object) -> bool:
        ComparedPage.num_comparisons += 1
        return int(self) == other

    __hash__ = int.__hash__


class ComparedPages(PagePool):
    def allocate(self, num_pages: int, after: int | None = None, *, grows: bool = True) -> list[int]:
        return [ComparedPage(page) for page in super().allocate(num_pages, after, grows=grows)]


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


def test_two_sessions_have_the_tokens_of_common_pages_in_common() -> None:
    """A standby of the one need not get these again when it takes the tokens of the other."""
    pool = PagePool(16, 4)
    one, two = (SessionPages(pool, [GroupRule()]) for _ in range(2))
    for session in (one, two):
        session.reserve(16)
    one.make_writable(0, 10)
    one.commit(10)
    two.make_writable(0, 10)
    two.commit(10)
    for session, num_same in ((one, 0), (two, 8), (one, 12)):
        other = two if session is one else one
        session.num_unchanged_tokens = session.num_tokens
        session.adopt(other.fork())
        assert session.num_unchanged_tokens == min(num_same, session.num_tokens)
        for each in (one, two):
            each.make_writable(each.num_tokens, 3 if each is one else 2)
            each.commit(each.num_tokens + (3 if each is one else 2))
