"""The page: its flexbox gives what was negotiated, in a layout engine and in a browser, and nothing on it is markup but our own."""

import re
import shutil
import subprocess
import tempfile
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from random import Random

import pytest
from stretchable import Node, Style
from stretchable.style import AUTO

from localrag.budget import Entry, Ledger, Percent, Section, Shortened, TimeLimit, negotiate
from localrag.errors import BudgetExceededError
from localrag.journal import Journal, allotments
from localrag.report import report
from localrag.report.page import MARK, page, shrink_multiple
from tests.browser import FLAGS, NEEDS_CHROMIUM
from tests.budget.test_flex_oracles import SHARED
from tests.journal.asks import made_up, passage
from tests.journal.real_asks import real_asks
from tests.report.test_figures import stored

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NUM_CASES = 200
VOID = ("meta", "link", "img", "br")


def random_ask(random: Random):
    """An ask whose window was shared among random sections, in every way that negotiate knows."""
    while True:
        sections = [Section.fixed(f"fixed{i}", random.randint(0, 900)) for i in range(random.randint(0, 2))]
        for i in range(random.randint(1, 7)):
            low, high = sorted(random.choice([0, random.randint(0, 2000)]) for _ in range(2))
            sections.append(
                Section(
                    name=f"section{i}",
                    basis=Percent(random.randint(0, 80)) if random.random() < 0.3 else random.choice([0, random.randint(0, 6000)]),
                    min=low,
                    max=None if random.random() < 0.5 else high,
                    grow=random.choice([0, 0, 0.1, 0.25, 0.4, 1, 2]),
                    shrink=random.choice([0, 0.05, 0.2, 0.3, 0.5, 1, 1, 2, round(random.uniform(0, 5), 3)]),
                    spare=random.choice([0, 0, 0, 0.5, 1, 2]),
                    content=random.choice([None, None, random.randint(0, 9000)]),
                )
            )
        window = random.choice([1, 100, random.randint(1, 20_000)])
        try:
            budget = negotiate(window, sections)
        except BudgetExceededError:
            continue
        entries = [Entry(name, size, size, size // 2) for name, size in budget.allocations.items()] + [Entry("answer", 0, 0, 0)]
        random.shuffle(entries)
        return made_up(window=window, entries=entries, sections=allotments(budget))


class Drawn(HTMLParser):
    """The drawings of a page: for each its window in pixels, and the style and name of each section in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.windows, self.tags, self.open = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        self.open += [] if tag in VOID else [tag]
        if attrs.get("class") == "window given":
            self.windows.append((int(re.fullmatch(r"--width:(\d+)px", attrs["style"])[1]), []))
        if attrs.get("class") == "section":
            self.windows[-1][1].append((attrs["title"].rpartition(":")[0], attrs["style"]))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


ITEM = re.compile(r"flex:([\d.]+) ([\d.]+) (\d+)px;min-width:(\d+)px;max-width:(?:(\d+)px|none);--c:#[0-9a-f]{6}")


def lay_out(window: int, styles: list[str]) -> list[float]:
    """The widths that Taffy gives to flex items of these styles. It freezes what cannot flex only if both factors are 0, so both are."""
    items = [tuple(None if number is None else float(number) for number in ITEM.fullmatch(style).groups()) for style in styles]
    growing = sum(max(low, min(basis, basis if high is None else high)) for _, _, basis, low, high in items) < window
    boxes = []
    for grow, shrink, basis, low, high in items:
        is_flexible = grow if growing else shrink
        size = {"flex_basis": basis, "min_size": (low, 0), "max_size": (AUTO if high is None else high, AUTO)}
        factors = {"flex_grow": grow if is_flexible else 0, "flex_shrink": shrink if is_flexible else 0}
        boxes.append(Node(style=Style(**SHARED, **size, **factors)))
    row = Node(*boxes, style=Style(**SHARED, size=(window, 1)))
    row.compute_layout(use_rounding=False)
    return [box.border_box.width for box in row]


def test_a_layout_engine_gives_what_was_negotiated():
    random = Random(31)
    asks = stored(*(random_ask(random) for _ in range(NUM_CASES)))
    drawn = Drawn(page(report(asks))).windows
    seen = {"multiplied": 0, "growing": 0, "shrinking": 0}
    for ask, (window, items) in zip(reversed(asks), drawn, strict=True):
        assert window == ask.window
        given = {each.name: each.allotted for each in ask.sections}
        widths = lay_out(window, [style for _, style in items])
        assert {name for name, _ in items} == given.keys()
        for (name, _), width in zip(items, widths, strict=True):
            assert abs(width - given[name]) < 1 + 0.01, (ask.window, ask.sections)  # Taffy reckons in 32-bit floats
        seen["multiplied"] += shrink_multiple(window, ask.sections) != 1
        wanted = sum(each.basis for each in ask.sections)
        seen["growing" if wanted < window else "shrinking"] += 1
    assert min(seen.values()) > NUM_CASES // 20, seen


def test_the_very_numbers_are_drawn_wherever_css_is_exact():
    sections = [Section(name="history", basis=800, shrink=0.6), Section(name="evidence", basis=900, min=100, shrink=0.6, grow=2)]
    ask = made_up(window=1000, sections=allotments(negotiate(1000, sections)))
    text = page(report(stored(ask)))
    assert "flex:2 0.6 900px;min-width:100px;max-width:1000px" in text
    assert "Drawn with all shrink factors" not in text
    few = [Section(name="history", basis=800, shrink=0.5), Section(name="evidence", basis=900, min=100, shrink=0.25)]
    text = page(report(stored(made_up(window=1000, sections=allotments(negotiate(1000, few))))))
    assert "flex:0 1 900px" in text
    assert "Drawn with all shrink factors times 4, their ratio unchanged" in text


WIDTHS = """<pre id="widths"></pre><script>
  document.getElementById("widths").textContent = [...document.querySelectorAll(".window")].map(bar => {
    const inside = bar.getBoundingClientRect(), frame = bar.parentElement.getBoundingClientRect();
    const widths = [...bar.children].map(item => parseFloat(getComputedStyle(item).width));
    return [inside.width - frame.width, bar.parentElement.scrollWidth - frame.width, ...widths].join(" ");
  }).join("\\n");
</script></body>"""


def browse(text: str, folder: Path) -> list[list[float]]:
    """For each bar of a page in a real browser: how much wider it is than its frame, and the widths of its items before scaling."""
    policy = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
    assert len(policy.findall(text)) == 1
    copy = folder / "copy.html"
    copy.write_text(policy.sub("", text).replace("</body>", WIDTHS), encoding="utf-8")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [BROWSER, "--headless", *FLAGS, f"--user-data-dir={profile}"]
        done = subprocess.run([*command, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    lines = re.search(r'<pre id="widths">([^<]*)</pre>', done.stdout)[1].splitlines()
    return [[float(number) for number in line.split()] for line in lines]


@pytest.mark.skipif(BROWSER is None, reason=NEEDS_CHROMIUM)
def test_a_browser_gives_what_was_negotiated(tmp_path):
    random = Random(32)
    asks = stored(*real_asks(tmp_path, 5), *(random_ask(random) for _ in range(60)))
    text = page(report(asks))
    bars = browse(text, tmp_path)
    assert len(bars) == 2 * len(asks)
    drawn = Drawn(text).windows
    for ask, (_, items), negotiated, used in zip(reversed(asks), drawn, bars[::2], bars[1::2], strict=True):
        given = {each.name: each.allotted for each in ask.sections}
        for (name, _), width in zip(items, negotiated[2:], strict=True):
            assert abs(width - given[name]) < 1 + 0.02, (ask.window, ask.sections)  # a browser reckons in 64ths of a pixel
        assert used[2:] == [entry.allotted for entry in ask.ledger.entries]
        assert all(abs(over) < 1 for over in (*negotiated[:2], *used[:2]))  # the page scales a bar to its frame


def test_what_the_negotiation_gave_is_what_the_ledger_allotted(tmp_path):
    for ask in stored(*real_asks(tmp_path, 4)):
        assert {each.name: each.allotted for each in ask.sections} == {each.name: each.allotted for each in ask.ledger.entries}


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&</style></title><!-- \x00\x1b[31m\u202e --> ]]>"


def saying(word: str) -> str:
    """The page of an ask in which every text from outside is that word."""
    short, tier = Shortened(word, word, 1, 2), Entry(word, 9, 9, 9, (word,))
    entries = (Entry(word, 90, 50, 10, (word,), (short,), (word,), (tier,)), Entry("answer", 10, 10, 1))
    given = allotments(negotiate(1000, [Section(name=word, basis=500)]))
    passages = [passage(label=word, source=word, kb=word, tier=word, level=word) for _ in range(2)]
    words = dict.fromkeys(("session", "command", "model", "question", "finish_reason", "strategy", "bound"), word)
    return page(report(stored(made_up(entries=entries, sections=given, evidence=passages, **words))))


def test_text_from_outside_is_never_markup():
    text = saying(HOSTILE)
    tags = [tag for tag, _ in Drawn(text).tags]
    assert tags == [tag for tag, _ in Drawn(saying("word")).tags]
    assert not {"script", "img", "link", "iframe", "object", "form", "base", "svg", "a"} & set(tags)
    assert text.count("onerror=alert(1)&gt;") == saying("zebra").count("zebra")
    assert not re.search(r"[\x00-\x08\x1b]", text)


def test_the_page_needs_nothing_from_anywhere():
    text = page(report(stored(*(made_up(number=number) for number in range(3)))))
    assert MARK in text[:500]
    policy = next(attrs for tag, attrs in Drawn(text).tags if tag == "meta" and "http-equiv" in attrs)
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"
    assert "url(" not in text
    assert "@import" not in text
    assert "://" not in text
    assert not any(
        {"src", "href", "srcset"} & attrs.keys() or any(name.startswith("on") for name in attrs) for _, attrs in Drawn(text).tags
    )


def test_the_drawing_is_said_in_words_too():
    ask = made_up(window=1000)
    labels = [attrs["aria-label"] for _, attrs in Drawn(page(report(stored(ask)))).tags if "aria-label" in attrs]
    assert labels == [
        "Utilization by ask, one ask",
        "Allotted: question 100, answer 512",
        "Used: question 100 of 100, answer 50 of 500",
    ]


def test_what_was_left_out_is_all_there():
    labels = [f"KB#{number}" for number in range(40)]
    entries = (Entry("evidence", 900, 90, 9, tuple(labels), covered=("message 7",)), Entry("answer", 10, 10, 1))
    ledger = Ledger(1000, entries, TimeLimit(20.0, True, 18.2, 100.0, 10.0))
    text = page(report(stored(made_up(entries=entries, sections=(), ledger=ledger))))
    assert all(f"<bdi>{label}</bdi>" in text for label in labels)
    assert "and 28 more" in text
    assert "summarized: <bdi>message 7</bdi>" in text
    assert "limit 20 s, planned 18.2 s" in text


def test_times_that_no_clock_shows(tmp_path):
    with Journal.open(tmp_path) as journal:
        journal.record(made_up(started_at=1e300))
        asks = journal.asks()
    assert "? to ?" in unescape(page(report(asks)))
