"""The case of seven articles in JSON: what two tool calls cost in tokens, serialised in four ways.

Each article has about 5,800 tokens of text and 1,000 to 2,000 tokens of metadata, as a tool returns it that puts the whole
front matter around every article, twice. A conversation with its system text takes 160,000 tokens of a window of 262,144, and
the same part of a smaller one. The second call finds three of the articles of the first again, and four others. localrag sends
passages of the same articles, whole ones and none twice, and lets one call take half of the room that is left.

Run it to print the table:  python examples/worked/json_overhead.py [MODEL]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, zip_longest
from pathlib import Path

from localrag.types import Chunk, Hit
from localrag.prompt.tool_results import ToolAccount, compact

HANDBOOK = Path(__file__).parents[1] / "handbook"
WINDOWS = (262_144, 32_768, 8_192)
CONVERSATION_TOKENS, CONVERSATION_WINDOW = 160_000, 262_144
ANSWER_SHARE = 64
"""The answer has one token in so many of the window."""
CALL_SHARE = 0.5
NUM_ARTICLES, NUM_FOUND_AGAIN = 7, 3
ARTICLE_TOKENS = 5_850
METADATA_TOKENS = (1_050, 1_950)
PASSAGE_TOKENS = 500

Count = Callable[[str], int]
NEEDS_MODEL = True


@dataclass(frozen=True, slots=True)
class Article:
    title: str
    source: str
    paragraphs: tuple[str, ...]
    metadata: dict[str, object]

    @property
    def content(self) -> str:
        return "\n\n".join(self.paragraphs)


@dataclass(frozen=True, slots=True)
class Row:
    """`tokens` of tool results, and `total` with the conversation and the room for the answer.

    Of `num_found` passages, `num_sent` were sent and `num_above` had been sent before; None where whole articles are sent.
    """

    window: int
    what: str
    tokens: int
    total: int
    num_sent: int | None = None
    num_above: int | None = None
    num_found: int | None = None

    @property
    def over(self) -> int:
        """Tokens above the window; below zero is what is left."""
        return self.total - self.window


def rows(count: Count, windows: Sequence[int] = WINDOWS) -> list[Row]:
    """Both calls in every way, for each window, counted by `count`."""
    articles = _articles(count)
    calls = [articles[:NUM_ARTICLES], articles[NUM_ARTICLES - NUM_FOUND_AGAIN :]]
    plain = {
        "raw content, as the retriever counted": sum(count(article.content) for call in calls for article in call),
        "pretty JSON with metadata": sum(count(json.dumps(_result(call), ensure_ascii=False, indent=2)) for call in calls),
        "compact JSON with metadata": sum(count(compact(_result(call))) for call in calls),
    }
    searches = [_passages(call, count) for call in calls]
    table = []
    for window in windows:
        taken = CONVERSATION_TOKENS * window // CONVERSATION_WINDOW + window // ANSWER_SHARE
        table += [Row(window, what, tokens, taken + tokens) for what, tokens in plain.items()]
        account = ToolAccount(window - taken, count, max_share=CALL_SHARE)
        tokens = 0
        for name, found in zip(("first", "second"), searches, strict=True):
            result = account.charge_hits("search", found)
            tokens += result.num_tokens
            passages = (len(result.used), len(result.above), len(found))
            table.append(Row(window, f"localrag, {name} call", result.num_tokens, taken + tokens, *passages))
    return table


def markdown(table: Sequence[Row]) -> str:
    lines = ["| window | tool results | tokens | whole prompt | over the window | passages sent |", "|---:|---|---:|---:|---:|---:|"]
    for row in table:
        sent = "all, whole" if row.num_sent is None else f"{row.num_sent} of {row.num_found}"
        if row.num_above:
            sent += f", {row.num_above} sent before"
        over = f"**{row.over:,}**" if row.over > 0 else "no"
        lines.append(f"| {row.window:,} | {row.what} | {row.tokens:,} | {row.total:,} | {over} | {sent} |")
    return "\n".join(lines)


def _articles(count: Count) -> list[Article]:
    """Articles of the handbook's pages, each beginning with another page and going on until it is long enough."""
    pages = [path.read_text(encoding="utf-8") for path in sorted(HANDBOOK.rglob("*.md"))]
    num = 2 * NUM_ARTICLES - NUM_FOUND_AGAIN
    return [_article(number, num, pages[2 * number :] + pages[: 2 * number], count) for number in range(num)]


def _article(number: int, num: int, pages: Sequence[str], count: Count) -> Article:
    paragraphs: list[str] = []
    size = 0
    for paragraph in cycle(chain.from_iterable(page.strip().split("\n\n") for page in pages)):
        size += count(paragraph + "\n\n")
        if size > ARTICLE_TOKENS:
            break
        paragraphs.append(paragraph)
    while count("\n\n".join(paragraphs)) > ARTICLE_TOKENS:
        paragraphs.pop()
    title, source = pages[0].partition("\n")[0].lstrip("# "), f"handbook/article-{number + 1}.md"
    low, high = METADATA_TOKENS
    metadata = _metadata(title, source, pages, low + (high - low) * number // num, count)
    return Article(title, source, tuple(paragraphs), metadata)


def _metadata(title: str, source: str, pages: Sequence[str], num_tokens: int, count: Count) -> dict[str, object]:
    """Front matter as such tools return it: everything that is known of an article, much of it twice."""
    related: list[dict[str, object]] = []
    front_matter = {"title": title, "author": "The workshop", "date": "2025-11-03", "tags": title.lower().split(), "source_file": source}
    metadata = {**front_matter, "kbId": source, "article_url": f"https://handbook.example/{source}", "frontmatter": front_matter}
    size = count(compact(metadata))
    for page in cycle(pages):
        if size >= num_tokens:
            break
        name = page.partition("\n")[0].lstrip("# ")
        related.append({"title": name, "tags": name.lower().split(), "article_url": f"https://handbook.example/{len(related)}"})
        size += count(compact(related[-1])) + 1
    return {**metadata, "related": related}


def _result(articles: Sequence[Article]) -> dict[str, object]:
    """What the tool of the case returns."""
    found = [
        {"kb_id": each.source, "title": each.title, "url": f"https://handbook.example/{each.source}", "content": each.content}
        | {"metadata": each.metadata}
        for each in articles
    ]
    return {"articles": found, "metadata": {"num_articles": len(found)}}


def _passages(articles: Sequence[Article], count: Count) -> list[Hit]:
    """The same articles as localrag finds them: in passages, the first of each article before the second of any."""
    ranked = chain.from_iterable(zip_longest(*(_chunks(article, count) for article in articles)))
    return [Hit(chunk, 1 / (60 + rank)) for rank, chunk in enumerate(chunk for chunk in ranked if chunk is not None)]


def _chunks(article: Article, count: Count) -> Iterator[Chunk]:
    number = int(article.source.partition("-")[2].removesuffix(".md"))
    texts: list[str] = []
    size = ordinal = 0
    for paragraph in (*article.paragraphs, None):
        cost = 0 if paragraph is None else count(paragraph + "\n\n")
        if texts and (paragraph is None or size + cost > PASSAGE_TOKENS):
            text = "\n\n".join(texts)
            yield Chunk(1000 * number + ordinal, number, ordinal, text, 0, len(text), article.source, article.title)
            texts, size, ordinal = [], 0, ordinal + 1
        if paragraph is not None:
            texts.append(paragraph)
            size += cost


def tables(model: str | None = None) -> dict[str, str]:
    """The table by the name of its place in docs/explanation/budget.md."""
    from localrag.session import open_engine
    from localrag.settings import Settings

    with open_engine(model, settings=Settings.from_env(), vocab_only=True) as engine:
        return {"json-overhead": markdown(rows(engine.counter))}


def main() -> None:
    print(tables(sys.argv[1] if len(sys.argv) > 1 else None)["json-overhead"])


if __name__ == "__main__":
    main()
