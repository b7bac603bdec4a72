"""The page at /, in a browser: what it shows, what it keeps, and that nothing from outside is more than text in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, suppress

import httpx
import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from localrag.budget.sections import SPECS, colour_of
from localrag.citation import cite
from localrag.server.status import policy_of
from localrag.types import Chunk, Hit
from tests.browser import FLAGS, NEEDS_CHROMIUM
from tests.server.live import served

WINDOW = 60_000
HOSTILE = "<img src=x onerror=window.hacked=1></script><script>window.hacked=1</script> [me](javascript:window.hacked=1) &lt;b&gt;"
TEXTS = [
    {"text": "PLA is annealed at 80 to 100 degrees for one hour.", "metadata": {"file_name": "pla.md"}},
    {"text": f"PLA and {HOSTILE}", "metadata": {"file_name": "<b onmouseover=alert(1)>pla.md"}},
]


FILES = [f"{folder}/{number}.md" for folder in ("heat", "print") for number in range(6)]


@pytest.fixture(scope="module")
def live(tmp_path_factory, tiny_catalogue):
    home, folder = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("handbook")
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"# {name}\n\nOf {name} alone.\n", encoding="utf-8")
    env = {"LOCALRAG_MODELS": str(tiny_catalogue)}
    index = [sys.executable, "-m", "localrag", "index", ".", "--kb", "handbook"]
    subprocess.run(index, cwd=folder, env={**os.environ, **env, "LOCALRAG_HOME": str(home)}, check=True, capture_output=True)
    with served(home, "--no-keep", "--ctx", str(WINDOW), env=env) as running:
        httpx.post(f"{running.url}/index", json={"index_name": "facts", "documents": TEXTS}, timeout=60).raise_for_status()
        yield running


@contextmanager
def browsing():
    """Debian's own Chromium; the paths are given, so that selenium looks for none in a network."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip(NEEDS_CHROMIUM)
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for each in ("--headless=new", "--window-size=1280,860", *FLAGS):
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        # sizes can be measured at once
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]})
        yield browser
    finally:
        browser.quit()


@pytest.fixture(scope="module")
def browser():
    with browsing() as browser:
        yield browser


@pytest.fixture
def page(browser, live):
    """The page as it is first seen. In the end nothing but this server was asked, nothing was hacked, and the console is silent."""
    browser.get(f"{live.url}/health")  # of the same origin
    browser.execute_script("sessionStorage.clear()")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(f"{live.url}/")
    page = Page(browser)
    page.until(lambda: page.text("#model") == "echo")
    page.until(lambda: "facts" in page.text("#kb"))
    yield page
    assert page.script("return window.hacked") is None
    assert [each for each in browser.get_log("browser") if each["level"] == "SEVERE"] == []
    asked = [json.loads(each["message"])["message"] for each in browser.get_log("performance")]
    urls = [each["params"]["request"]["url"] for each in asked if each["method"] == "Network.requestWillBeSent"]
    assert urls
    assert [url for url in urls if not url.startswith((live.url, "data:"))] == []


class Page:
    """What a person does with the page, and sees."""

    def __init__(self, browser: webdriver.Chrome) -> None:
        self.browser = browser

    def script(self, text: str, *given: object):
        return self.browser.execute_script(text, *given)

    def find(self, selector: str):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def until(self, holds, seconds: float = 60) -> None:
        WebDriverWait(self.browser, seconds, poll_frequency=0.05, ignored_exceptions=[StaleElementReferenceException]).until(
            lambda _: holds()
        )

    def choose(self, index: str) -> None:
        Select(self.find("#kb")).select_by_value(index)

    def write(self, question: str) -> None:
        self.find("#question").send_keys(question)

    def ask(self, question: str) -> str:
        """The answer, whole."""
        self.write(question + Keys.ENTER)
        self.ended()
        return self.answer

    def ended(self) -> None:
        self.until(lambda: self.text("#send") == "Send")
        self.until(lambda: any(each.is_displayed() for each in self.all(".exchange:last-child :is(.under, .error)")))

    @property
    def answer(self) -> str:
        return self.text(".exchange:last-child .prose")

    def kept(self) -> dict:
        """The last turn as the page keeps it."""
        return self.script("keep(); return JSON.parse(sessionStorage.localrag).turns.at(-1)")

    def at_most(self, tokens: str) -> None:
        self.find("#most").send_keys(Keys.CONTROL + "a" + Keys.NULL + Keys.DELETE + tokens)

    def open_documents(self) -> None:
        self.find("#tab-documents").click()
        self.until(lambda: self.all("#documents .drop"))

    def button(self, label: str):
        return next(each for each in self.all("button") if each.is_displayed() and each.text == label)


# --- without a browser ---


def test_the_page_is_whole_in_itself_and_nothing_else_runs_in_it(live):
    response = httpx.get(f"{live.url}/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    kept = {name: response.headers[name] for name in ("x-content-type-options", "referrer-policy", "cache-control")}
    assert kept == {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store"}
    policy = response.headers["content-security-policy"]
    assert policy == policy_of(response.text)
    for rule in ("default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"):
        assert rule in policy
    assert "unsafe" not in policy
    assert not re.search(r"\bsrc=|@import|\bimport\b.*from|href=\"(?!data:)|url\(|innerHTML|outerHTML|insertAdjacentHTML", response.text)
    assert "http://" not in response.text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in response.text


def test_every_section_has_its_colour_and_its_help(live):
    text = httpx.get(f"{live.url}/").text
    assert dict(re.findall(r'^\[data-section="(\w+)"\] \{ --c: (#\w+); \}$', text, re.MULTILINE)) == {
        name: spec.colour for name, spec in SPECS.items()
    }
    assert f"[data-section] {{ --c: {colour_of('of another version')}; }}" in text
    assert json.loads(re.search(r"const HELP = (\{.*\});", text)[1]) == {name: spec.help for name, spec in SPECS.items()}
    icon = re.search(r'<link rel="icon" href="([^"]*)"', text)[1]
    assert re.findall(r"fill='%23(\w+)'", icon) == [SPECS[name].colour[1:] for name in ("template", "evidence", "answer")]


# --- in a browser ---


def test_the_policy_lets_nothing_else_run(page, browser, live):
    refused = page.script(
        """
        const tries = [
          () => { const made = document.createElement("script"); made.textContent = "window.hacked = 1"; document.body.append(made); },
          () => { document.body.innerHTML = "<img src=x onerror='window.hacked = 1'>"; },
          () => { setTimeout("window.hacked = 1"); },
          () => { const link = document.createElement("div"); link.setAttribute("onclick", "window.hacked = 1"); link.click(); },
        ];
        return tries.map((each) => { try { each(); return ""; } catch (error) { return error.name; } });
        """
    )
    assert refused[:2] == ["TypeError", "TypeError"]
    outside = "const done = arguments[0]; fetch('http://127.0.0.1:9/').then(() => done('asked'), (error) => done(error.name))"
    assert browser.execute_async_script(outside) == "TypeError"
    said = [each["message"] for each in browser.get_log("browser")]  # taken, so that the console is silent again
    assert any("connect-src 'self'" in each for each in said)
    browser.get(f"{live.url}/")


def test_a_question_is_answered(page):
    assert page.ask("What is PLA?") == "You asked: What is PLA?"
    assert page.text(".exchange .question p") == "What is PLA?"
    assert page.text("#filled").endswith(f"/ {WINDOW:,}")
    assert page.find("#question").get_attribute("value") == ""


MEASURE = """
const frame = document.querySelector(".frame.given").getBoundingClientRect();
return {
  frame: frame.width,
  given: [...document.querySelectorAll("#given > *")].map((each) => {
    const { flexGrow, flexShrink, flexBasis, minWidth, maxWidth } = getComputedStyle(each);
    const css = `flex:${flexGrow} ${flexShrink} ${flexBasis};min-width:${minWidth};max-width:${maxWidth}`;
    return [each.dataset.section, each.getBoundingClientRect().width, css];
  }),
  used: [...document.querySelectorAll("#used > *")].map((each) =>
    [each.dataset.section, each.getBoundingClientRect().width, each.firstChild.getBoundingClientRect().width]),
};
"""


def test_the_browsers_own_flexbox_shares_the_window_out_as_was_negotiated(page, live):
    page.choose("facts")
    page.at_most("9000")
    for question in ("How is PLA annealed? " + "Really? " * 500, "How is PLA annealed? " * 100):
        page.script("document.querySelector('#question').value = arguments[0]", question)
        page.ask("")
    turn, drawn = page.kept(), page.script(MEASURE)
    scale = drawn["frame"] / WINDOW
    sections = {each["name"]: each for each in turn["sections"] if each["allotted"]}
    assert {"history", "evidence", "question", "answer"} <= sections.keys()
    assert {name for name, _, _ in drawn["given"]} == sections.keys()
    for name, width, css in drawn["given"]:
        assert abs(width - scale * sections[name]["allotted"]) < 1, name
        assert css == sections[name]["css"], "no rule of the page bends it otherwise"
    entries = {each["name"]: each for each in turn["ledger"]["entries"]}
    for name, width, used in drawn["used"]:
        assert abs(width - scale * entries[name]["allotted"]) < 1
        assert abs(used - scale * entries[name]["used"]) < 1
    assert sum(each["allotted"] for each in entries.values()) + turn["ledger"]["spare"] == WINDOW
    assert abs(sum(width for _, width, _ in drawn["used"]) - scale * (WINDOW - turn["ledger"]["spare"])) < 1
    assert turn["usage"]["completion_tokens"] == entries["answer"]["used"]

    page.find("#zoom").click()
    closer = page.script(MEASURE)
    widths = sum(width for _, width, _ in closer["used"])
    assert drawn["frame"] - 1 < widths < drawn["frame"] + 1


WATCH = """
window.seen = [];
new MutationObserver(() => {
  const part = document.querySelector("#used [data-section=answer] > i");
  if (document.querySelector("#send").textContent !== "Send")
    window.seen.push([parseFloat(part?.style.width) || 0, document.querySelector("#told").textContent]);
}).observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true });
"""


def test_the_answers_part_grows_while_it_is_written(page):
    page.at_most("8000")
    page.script(WATCH)  # in the page: what a driver sees from without depends on what else the machine does
    page.ask("Say it 3000 times")
    seen = page.script("return window.seen")
    widths = [width for width, _ in seen if width > 0]
    assert len(set(widths)) > 1
    assert widths == sorted(widths)
    assert any(re.fullmatch(r"prompt \d+ · answer [\d,]+ of 8,000", told) for _, told in seen)
    assert page.kept()["tokens"] + 1 >= page.kept()["usage"]["completion_tokens"]


def test_what_is_being_written_is_negotiated_before_it_is_sent(page):
    page.write("What is PLA?")
    page.until(lambda: page.text("#told").startswith("Next: prompt "))
    wanted = [each.get_attribute("data-section") for each in page.all("#given > *")]
    page.write(Keys.ENTER)
    page.ended()
    assert [each.get_attribute("data-section") for each in page.all("#given > *")] == wanted
    assert not page.text("#told").startswith("Next: ")


def test_a_question_that_does_not_fit_is_not_told_the_numbers_of_an_earlier_one(page):
    page.write("What is PLA?")
    page.until(lambda: page.text("#told").startswith("Next: prompt "))
    page.script("document.querySelector('#question').value = arguments[0]; planSoon()", "x" * 2 * WINDOW)
    page.until(lambda: page.text("#told").startswith("The window is empty"))
    page.browser.get_log("browser")  # Chromium notes every 400


def test_sections_are_told_by_the_keyboard(page):
    page.ask("What is PLA?")
    page.script("document.querySelector('#given > [tabindex=\"0\"]').focus()")
    first = page.text("#told")
    page.browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert re.match(r"\w+: wanted \d+, allotted \d+, used \d+", page.text("#told"))
    assert page.text("#told") != first
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert page.find("#account tr.told").is_displayed()


def test_a_citation_opens_its_source(page):
    page.choose("facts")
    label = re.search(r"KB#\d+", page.ask("How is PLA annealed?"))[0]
    page.open_documents()
    page.find(".prose .cite").click()
    card = page.find("#sources li.cited")
    assert card == page.browser.switch_to.active_element
    assert label in card.text
    sources = {each["node_id"]: each for each in page.kept()["nodes"]}
    assert sources[label]["text"] in card.text
    assert sources[label]["metadata"]["file_name"] in card.text


def test_what_supports_an_answer_is_marked_and_what_nothing_supports_is_told(page):
    page.choose("facts")
    page.ask("PLA is annealed at 80 to 999 degrees <b>in Prague</b>.")
    told = page.text(".exchange:last-child .notice")
    assert told == "Not in the cited passages: 999 degrees (number), Prague (name)"
    page.find(".prose .cite").click()
    assert re.fullmatch(r"Open source KB#\d+, support 0\.\d\d", page.find(".prose .cite").get_attribute("title"))
    assert page.text("#sources li.cited mark") == TEXTS[0]["text"]


def test_a_citation_that_was_not_supplied_is_struck(page):
    page.ask("Is it in KB#987654?")
    struck = page.find(".prose .cite.unsupported")
    assert struck.value_of_css_property("text-decoration-line") == "line-through"
    struck.click()
    assert "KB#987654 is cited, but was not in the prompt." in page.text("#sources")


@pytest.mark.parametrize(
    ("form", "labels"),
    [
        ("[99]", ["KB#99"]),
        ("[^99]", ["KB#99"]),
        ("[KB:99]", ["KB#99"]),
        ("kb #0099", ["KB#99"]),
        ("KB#mem_123", ["KB#mem_123"]),
        ("[KB#99a]", ["KB#99a"]),
        ("[KB#97-99]", ["KB#97", "KB#98", "KB#99"]),
        ("【KB#98, 99】", ["KB#98", "KB#99"]),
    ],
)
def test_every_form_that_the_server_counts_is_struck_where_it_stands(page, form, labels):
    page.ask(f"🐈🐈 *Is* **it in {form}**, _or_ a_b?")
    assert [each.text for each in page.all(".prose strong > .cite.unsupported")] == labels
    text = page.script("return document.querySelector('.prose').textContent")
    assert (
        text.removesuffix(f" {labels[0]}") == f"You asked: 🐈🐈 Is it in {''.join(labels)}, or a_b?"
    )  # the echo cites the first tag again
    assert [each.text for each in page.all("#sources .struck")] == labels


def test_a_range_marks_what_was_supplied_and_strikes_what_was_not(page):
    page.choose("facts")
    page.ask("How is PLA annealed, see [KB#1-50]?")
    supplied = {each["id"] for each in page.kept()["evidence"]}
    assert "KB#1" in supplied
    assert "KB#50" not in supplied
    chips = page.script("return [...document.querySelectorAll('.prose .cite')].map((each) => [each.textContent, each.className])")
    labels = [f"KB#{number}" for number in range(1, 51)]
    assert chips[:50] == [[label, "cite" if label in supplied else "cite unsupported"] for label in labels]


def test_hostile_text_stays_text(page):
    page.choose("facts")
    assert HOSTILE in page.ask(f"PLA {HOSTILE}")
    assert page.text(".question p") == f"PLA {HOSTILE}"
    shown = page.text("#sources")
    page.open_documents()
    page.until(lambda: "<b onmouseover" in page.text("#documents"))
    search = page.find("#documents input")
    search.send_keys("PLA" + Keys.ENTER)
    page.until(lambda: "best first" in page.text("#documents"))
    for text in (shown, page.text("#documents")):
        assert "<b onmouseover=alert(1)>pla.md" in text
        assert "<img src=x onerror=window.hacked=1>" in text
    assert page.all("body img, body a, body b[onmouseover], body script:not(:last-of-type)") == []


def test_stop_keeps_what_was_written(page):
    page.at_most("")
    for stop in (lambda: page.find("#send").click(), lambda: page.write(Keys.ESCAPE)):
        page.write("Say it 90000 times" + Keys.ENTER)
        page.until(lambda: len(page.answer) > 100)
        stop()
        page.ended()
        assert "Stopped." in page.text(".exchange:last-child")
        assert page.answer.startswith("You asked: Say it 90000 times")
        assert page.kept()["state"] == "stopped"
    page.at_most("100")
    assert page.ask("And now?") == "You asked: And now?"


RECORD = """
window.bodies = [];
const before = window.fetch;
window.fetch = (path, given) => {
  if (path === "/v1/chat/completions") window.bodies.push(given.body);
  return before(path, given);
};
"""


def test_a_question_that_was_stopped_before_its_first_token_stays_in_the_conversation(page):
    """Else a follow-up such as "And indoors?" is answered about another topic."""
    page.ask("Name a computer.")
    page.script("document.querySelector('#question').value = 'Is ASA weatherproof?'; send(); stop()")
    page.ended()
    assert (page.kept()["state"], page.kept()["text"]) == ("stopped", "")
    page.script(RECORD)
    page.ask("And indoors?")
    [body] = page.script("return bodies")
    assert json.loads(body)["messages"] == [
        {"role": "user", "content": "Name a computer."},
        {"role": "assistant", "content": "You asked: Name a computer."},
        {"role": "user", "content": "Is ASA weatherproof?"},
        {"role": "user", "content": "And indoors?"},
    ]
    history = next(each for each in page.kept()["ledger"]["entries"] if each["name"] == "history")
    assert history["used"] > len("Is ASA weatherproof?")
    assert history["omitted"] == []


def test_a_question_that_was_refused_is_not_asked_again_with_the_next_one(page):
    page.script("document.querySelector('#question').value = arguments[0]", "x" * 2 * WINDOW)
    page.ask("")
    assert page.kept()["state"] == "failed"
    assert page.ask("Shorter?") == "You asked: Shorter?"
    page.browser.get_log("browser")  # Chromium notes every 400


def test_a_reload_keeps_the_conversation(page, browser):
    page.choose("facts")
    page.ask("How is PLA annealed?")
    page.write("And ABS")
    before = page.text("#log"), page.text("#sources"), page.text("#filled")
    browser.refresh()
    page.until(lambda: page.text("#filled") == before[2])
    page.until(lambda: Select(page.find("#kb")).first_selected_option.text == "facts")
    assert (page.text("#log"), page.text("#sources")) == before[:2]
    assert page.find("#question").get_attribute("value") == "And ABS"
    page.button("New").click()
    assert page.all(".exchange") == []


def test_another_answer_and_another_question_take_the_place_of_the_last(page):
    page.ask("One?")
    page.ask("Two?")
    page.button("Regenerate").click()
    page.ended()
    assert [each.text for each in page.all(".prose")] == ["You asked: One?", "You asked: Two?"]
    page.find("#question").send_keys(Keys.ARROW_UP)
    assert page.find("#question").get_attribute("value") == "Two?"
    page.write(Keys.BACKSPACE + " or three?")
    page.write(Keys.ENTER)
    page.ended()
    assert [each.text for each in page.all(".prose")] == ["You asked: One?", "You asked: Two or three?"]


def test_an_error_is_one_line_and_can_be_tried_again(page, live):
    httpx.post(f"{live.url}/index", json={"index_name": "gone", "documents": TEXTS[:1]}).raise_for_status()
    page.browser.refresh()
    page.until(lambda: "gone" in page.text("#kb"))
    page.choose("gone")
    httpx.delete(f"{live.url}/indexes/gone").raise_for_status()
    page.ask("How is PLA annealed?")
    assert page.text(".error span") == "No such index: 'gone' exists."
    page.choose("facts")
    page.button("Try again").click()
    page.ended()
    assert page.answer.startswith("You asked: How is PLA annealed?")
    page.browser.get_log("browser")  # Chromium notes every 404


def test_a_file_is_added_found_and_deleted(page, live, tmp_path):
    (tmp_path / "abs.md").write_text("# ABS\n\nABS is printed in a closed chamber. " + "More of it. " * 30, encoding="utf-8")
    (tmp_path / "photo.txt").write_bytes(b"\xff\xfe\x00")
    page.open_documents()
    page.find("#documents input[type=text]").send_keys("plastics")
    page.find("#files").send_keys(f"{tmp_path / 'abs.md'}\n{tmp_path / 'photo.txt'}")
    page.until(lambda: "photo.txt: not UTF-8 text." in page.text("#documents"))
    assert "1–1 of 1 document" in page.text("#documents")
    assert Select(page.find("#kb")).first_selected_option.text == "plastics"
    stored = httpx.get(f"{live.url}/indexes/plastics/documents").json()["documents"]
    assert [each["metadata"] for each in stored] == [{"file_name": "abs.md"}]
    page.button("Delete").click()
    page.button("Confirm delete").click()
    page.until(lambda: "Deleted abs.md." in page.text("#documents"))
    assert httpx.get(f"{live.url}/indexes/plastics/documents").json()["total_items"] == 0
    httpx.delete(f"{live.url}/indexes/plastics").raise_for_status()


def test_documents_that_localrag_index_read_are_all_listed(page):
    """Not only texts that clients sent: a knowledge base made of files once showed none."""
    page.choose("handbook")
    page.open_documents()
    page.until(lambda: "1–10 of 12 documents" in page.text("#documents"))
    listed = [each.text.partition("/")[2] for each in page.all("#documents .cards > li b")]  # without the indexed folder's own name
    assert all(f"Of {name} alone." in page.text("#documents") for name in listed)
    page.button("Next").click()
    page.until(lambda: "11–12 of 12 documents" in page.text("#documents"))
    assert [*listed, *(each.text.partition("/")[2] for each in page.all("#documents .cards > li b"))] == FILES
    page.button("Previous").click()
    page.until(lambda: "1–10 of 12 documents" in page.text("#documents"))


MARKDOWN = """# Title

Some **bold with `code`**, *italic*, _too_, snake_case_name and 2 * 3 * 4.

1. One
2. Two
   - inner **KB#1**
   - more
3. Three

| a | b |
|---|--:|
| 1 | <i> |

```python
print("**no**")
```
> said
***
- [x](javascript:alert(1)) [KB#1, KB#2]"""


def citations_in(text, *ids):
    """As the server sends them of an answer that was given these passages."""
    hits = [Hit(Chunk(id=each, document_id=1, ordinal=each, text="", start=0, end=1, source="pla.md"), 1.0) for each in ids]
    return [{"id": each.label, "supplied": each.supplied, "spans": each.spans} for each in cite(text, hits)]


def test_markdown_is_drawn_the_same_however_it_comes(page):
    drawn = page.script(
        """
        const [text, citations] = arguments, turn = { text: "", evidence: [], citations: null, state: "done" };
        const grown = document.createElement("div"), blocks = [], whole = document.createElement("div");
        for (let end = 1; end <= text.length; end += 1) paintProse(grown, blocks, { ...turn, text: text.slice(0, end) });
        const plain = grown.textContent;
        paintProse(grown, blocks, { ...turn, text, citations });
        paintProse(whole, [], { ...turn, text, citations });
        const tags = [...whole.querySelectorAll("*")].map((each) => each.localName);
        return [grown.innerHTML === whole.innerHTML, tags, whole.querySelector("ol").textContent, whole.querySelector("pre").textContent,
                [...whole.querySelectorAll("strong, em")].map((each) => each.textContent), whole.textContent, plain];
        """,
        MARKDOWN,
        citations_in(MARKDOWN, 1),
    )
    same, tags, listed, code, marked, text, plain = drawn
    assert same
    assert [tag for tag in tags if tag in ("h3", "ol", "ul", "table", "pre", "blockquote", "hr", "a", "i")] == [
        "h3", "ol", "ul", "table", "pre", "blockquote", "hr", "ul"
    ]  # fmt: skip
    assert listed == "OneTwoinner KB#1moreThree"
    assert code == 'print("**no**")'
    assert marked == ["bold with code", "italic", "too", "KB#1"]
    assert "snake_case_name and 2 * 3 * 4." in text
    assert "[x](javascript:alert(1)) KB#1KB#2" in text
    assert "[x](javascript:alert(1)) [KB#1, KB#2]" in plain


MARKED = """# 🐈 Of KB#mem_1 and KB#mem_2 #

So *says KB#_3_* and `KB#4` and \\[KB\\#5\\] and **[KB:6,
7]**.

- one KB#8
  - two 【KB#9；10】

| a | b |
|---|---|
| KB#11 | x | [KB#12] |

```
x = KB#13 * 2 * KB#14
```
> said KB#15 a￼0￼b
````KB#16````"""


def test_no_markdown_takes_a_mark_away(page):
    """Whatever Markdown surrounds it, each citation is drawn once, in the order of the text."""
    citations = citations_in(MARKED, 4, 9)
    drawn = page.script(
        """
        const [text, citations] = arguments, whole = document.createElement("div");
        paintProse(whole, [], { text, citations, evidence: [], state: "done" });
        return [[...whole.querySelectorAll("button.cite")].map((each) => [each.textContent, each.className]), whole.textContent,
                [...whole.querySelectorAll("pre, em, td")].map((each) => each.textContent)];
        """,
        MARKED,
        citations,
    )
    marks, text, parts = drawn
    assert len(citations) == 16
    assert marks == [[each["id"], "cite" if each["supplied"] else "cite unsupported"] for each in citations]
    assert [each["id"] for each in citations if each["supplied"]] == ["KB#4", "KB#9"]
    assert parts == ["says KB#_3_", "KB#11", "x", "KB#12", "x = KB#13 * 2 * KB#14"]
    assert "a�0�b" in text


def test_an_answer_that_has_no_citations_yet_is_plain_text(page):
    drawn = page.script(
        """
        const [text, citations] = arguments, whole = document.createElement("div"), blocks = [];
        const turn = { text, evidence: [], state: "stopped", citations: null };
        const labels = () => [...whole.querySelectorAll("button.cite")].map((each) => each.className + " " + each.textContent);
        paintProse(whole, blocks, turn);
        const before = [labels(), whole.textContent];
        paintProse(whole, blocks, { ...turn, citations });
        return [before, [labels(), whole.textContent]];
        """,
        "[kb #0001, 99] and 【KB#2】\n\nso [KB#100",
        citations_in("[kb #0001, 99] and 【KB#2】\n\nso [KB#100"[:-6], 1),
    )
    assert drawn[0] == [[], "[kb #0001, 99] and 【KB#2】so [KB#100"]
    assert drawn[1] == [["cite KB#1", "cite unsupported KB#99", "cite unsupported KB#2"], "KB#1KB#99 and KB#2so [KB#100"]


def test_thoughts_are_folded_and_have_their_own_part_of_the_window(page):
    page.script(
        """
        const entry = (name, allotted, used) => ({ name, wanted: allotted, allotted, used, omitted: [] });
        const ledger = { window: 100, spare: 40, entries: [entry("question", 10, 10), entry("thinking", 30, 0), entry("answer", 20, 0)] };
        const turn = begin("Why?"), slot = { n_ctx: 100, n_ctx_train: 100, bound: "training" };
        show(turn);
        drawLog();
        take(turn, { choices: [{ delta: { role: "assistant", content: "" } }], localrag: { slot, ledger, sections: [], evidence: [] } });
        take(turn, { choices: [{ delta: { reasoning: "I <b>think</b>." } }], localrag: { completion_tokens: 12 } });
        take(turn, { choices: [{ delta: { content: "So." } }], localrag: { completion_tokens: 15 } });
        """
    )
    page.until(lambda: page.answer == "So.")
    assert page.text(".thoughts") == "Reasoning"
    page.find(".thoughts summary").click()
    assert page.text(".thoughts p") == "I <b>think</b>."
    used = dict(page.script("return [...used.children].map((e) => [e.dataset.section, e.firstChild.style.width])"))
    assert used == {"question": "10px", "thinking": "12px", "answer": "3px"}


NUMBERS = """
choosePane("account");
const rows = (at) => [...document.querySelectorAll("#account table")[at].querySelectorAll("tbody tr:not(.out, :has(.part))")];
const cells = (row) => [...row.children].map((each) => each.textContent);
return {
  bar: [...document.querySelectorAll("#given > *")].map((each) => [each.dataset.section, each.querySelector("small").textContent]),
  ledger: rows(0).map(cells).filter(([name]) => name !== "spare").map(([name, , allotted]) => [name, allotted]),
  negotiation: rows(1).map(cells).map((row) => [row[0], row[4]]),
  window: turnWindow(),
  zoom: document.querySelector("#zoom").textContent,
};
function turnWindow() { const { window, spare } = (plan ?? shown).ledger; return window - spare; }
"""


def test_a_section_has_one_number_everywhere_on_the_page(page):
    page.choose("facts")
    page.at_most("9000")
    for question in ("How is PLA annealed? " + "Really? " * 300, "How is PLA annealed? " * 50, "Why?"):
        page.script("document.querySelector('#question').value = arguments[0]", question)
        page.ask("")
    page.write("And how is it printed?")
    page.until(lambda: page.text("#told").startswith("Next: prompt "))
    for _ in ("planned", "answered"):
        told = page.script(NUMBERS)
        allotted = dict(told["ledger"])
        assert {"history", "evidence", "question", "answer"} <= allotted.keys()
        assert dict(told["negotiation"]) == allotted
        assert {name: label.partition(" · ")[0] for name, label in told["bar"]} == {k: v for k, v in allotted.items() if v != "0"}
        assert sum(int(each.replace(",", "")) for each in allotted.values()) == told["window"]
        assert told["zoom"] == f"zoom in on {told['window']:,}"
        page.ask("")


def test_no_speed_is_told_before_there_is_one(page):
    page.until(lambda: page.script("return performance.now() > 1000"))
    page.script(
        """
        const entry = (name, allotted) => ({ name, wanted: allotted, allotted, used: 0, omitted: [] });
        window.turn = begin("Why?");
        const ledger = { window: 100, spare: 80, entries: [entry("answer", 20)] };
        const slot = { n_ctx: 100, n_ctx_train: 100, bound: "training" };
        show(turn);
        drawLog();
        take(turn, { choices: [{ delta: { content: "" } }], localrag: { slot, ledger, sections: [], evidence: [], prompt_tokens: 0 } });
        drawMeter(turn);
        """
    )
    assert page.text("#speed") == "–", "the prompt is being read"
    page.script(
        "take(turn, { choices: [{ delta: { content: 'A' } }], localrag: { completion_tokens: 1 } }); turn.firstAt -= 2000; drawMeter(turn)"
    )
    assert page.text("#speed") == "–", "one token has no speed"
    page.script("take(turn, { choices: [{ delta: { content: 'B' } }], localrag: { completion_tokens: 21 } }); drawMeter(turn)")
    assert 0 < float(page.text("#speed")) <= 10, "20 tokens in 2 seconds or more"


def test_the_speed_of_an_answer_is_the_servers(page):
    page.at_most("4000")
    page.ask("Say it 900 times")
    speed = page.kept()["tokens_per_s"]
    assert speed > 0
    page.until(lambda: page.text("#speed") == (f"{speed:.1f}" if speed < 100 else f"{speed:,.0f}"))


@pytest.mark.parametrize(("width", "height"), [(360, 740), (800, 600)])
def test_on_a_phone_nothing_is_wider_than_it_is(page, browser, width, height):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 2, "mobile": True}
    )
    try:
        page.choose("facts")
        page.ask(f"PLA {'x' * 300}")
        for pane in ("sources", "account", "documents"):
            page.button("Details").click()
            page.find(f"#tab-{pane}").click()
            page.until(lambda: page.find("#side").is_displayed())
            assert page.script("return [document.documentElement.scrollWidth, document.querySelector('#side').scrollWidth]") == [width] * 2
            page.button("Close").click()
            page.until(lambda: not page.find("#side").is_displayed())
        for each in page.all(".head > *, .write button, .write input"):
            assert 0 <= each.rect["x"] <= each.rect["x"] + each.rect["width"] <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_token_is_asked_for_once(browser, tmp_path, tiny_catalogue):
    with served(tmp_path / "home", "--no-keep", env={"LOCALRAG_MODELS": str(tiny_catalogue)}, api_key="s3cret") as kept:
        assert httpx.get(f"{kept.url}/").status_code == 200
        assert httpx.get(f"{kept.url}/indexes").status_code == 401
        browser.get(f"{kept.url}/")
        page = Page(browser)
        page.until(lambda: page.find("#token").is_displayed())
        page.find("#token").send_keys(Keys.ESCAPE)
        page.until(lambda: page.find("#token").is_displayed())
        page.find("#token").send_keys("wrong" + Keys.ENTER)
        page.until(lambda: page.find("#token-error").is_displayed())
        page.find("#token").send_keys("s3cret" + Keys.ENTER)
        page.until(lambda: page.text("#model") == "echo")
        assert page.ask("What is PLA?") == "You asked: What is PLA?"
        browser.refresh()
        page.until(lambda: page.text("#model") == "echo")
        assert not page.find("#token").is_displayed()
        with suppress(KeyError):
            browser.get_log("browser")
