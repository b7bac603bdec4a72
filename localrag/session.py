"""The walk: a question goes straight through the house."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from localrag import citation, prompt
from localrag.budget import Ledger, negotiate
from localrag.decoding import Completion, SamplingParams, Timings
from localrag.errors import ModelNotFoundError, UsageError
from localrag.messages import Message
from localrag.model import Slot
from localrag.passages import Citation, Hit
from localrag.settings import MAX_TEXT_BYTES, Settings

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.kb import KnowledgeBase
    from localrag.tokens import Embedder

DEFAULT_TOP_K = 4
DEFAULT_CONTEXT_RATIO = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A prompt that is ready to be sent: counted, fitted, and nothing evaluated yet."""

    prompt: prompt.Prompt
    slot: Slot
    num_chunks: int
    retrieve_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back, with what was sent and what was left out. `to_dict` is the answer object of the command line."""

    text: str
    finish_reason: str
    model: str
    slot: Slot
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ledger: Ledger
    hits: tuple[Hit, ...]
    hit_tokens: dict[str, int]
    citations: tuple[Citation, ...]
    chunks_in_kb: int
    timings: Timings

    @property
    def unsupported_citations(self) -> list[str]:
        return [each.label for each in self.citations if not each.supplied]

    def to_dict(self) -> dict[str, object]:
        return {
            "answer": self.text,
            "finish_reason": self.finish_reason,
            "model": self.model,
            "slot": self.slot.to_dict(),
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "total_tokens": self.prompt_tokens + self.completion_tokens,
                "cached_tokens": self.cached_tokens,
            },
            "ledger": self.ledger.to_dict(),
            "evidence": [evidence(hit, self.hit_tokens[hit.label]) for hit in self.hits],
            "citations": [{"id": each.label, "supplied": each.supplied} for each in self.citations],
            "unsupported_citations": self.unsupported_citations,
            "coverage": {"chunks_read": len(self.hits), "chunks_in_kb": self.chunks_in_kb},
            "timings": {name: round(getattr(self.timings, name), 4) for name in Timings.__slots__},
        }


def evidence(hit: Hit, tokens: int | None = None) -> dict[str, object]:
    """A hit as the answer object shows it; `tokens` is what it takes in the prompt, its tag line included, if it is in one."""
    chunk = hit.chunk
    counted = {} if tokens is None else {"tokens": tokens}
    return {
        "id": hit.label,
        "source": chunk.source,
        "heading": chunk.heading,
        "start": chunk.start,
        "end": chunk.end,
        "score": hit.score,
        "contributions": dict(hit.contributions),
        **counted,
    }


class Session:
    """An open model, the knowledge bases that are asked, and the window that both share."""

    def __init__(
        self,
        engine: Engine,
        *,
        knowledge_bases: Sequence[KnowledgeBase] = (),
        embedder: Embedder | None = None,
        n_ctx: int | None = None,
    ) -> None:
        self.engine = engine
        self.knowledge_bases = tuple(knowledge_bases)
        self.embedder = embedder
        self.slot = engine.make_slot(n_ctx)

    @classmethod
    def open(
        cls,
        model: str | None = None,
        *,
        kbs: Sequence[str] = (),
        n_ctx: int | None = None,
        chat_template: Path | None = None,
        vocab_only: bool = False,
        settings: Settings | None = None,
    ) -> Self:
        """Open a model by name or path (None for the default, `echo` for the engine that needs none) and knowledge bases by name."""
        settings = settings or Settings.from_env()
        knowledge_bases = [open_knowledge_base(name, settings=settings) for name in dict.fromkeys(kbs)]
        embedder = open_embedder(settings) if knowledge_bases else None
        engine = open_engine(model, settings=settings, chat_template=chat_template, vocab_only=vocab_only)
        return cls(engine, knowledge_bases=knowledge_bases, embedder=embedder, n_ctx=n_ctx)

    def prepare(
        self,
        question: str,
        *,
        system: str | None = None,
        top_k: int = DEFAULT_TOP_K,
        context_ratio: float = DEFAULT_CONTEXT_RATIO,
        max_tokens: int = prompt.ANSWER_BASIS,
        piped: str = "",
    ) -> Prepared:
        """Retrieve, measure, negotiate and compose; nothing is evaluated. `piped` text is evidence that comes with the question."""
        started = time.perf_counter()
        hits = self._hits(question, top_k, piped)
        retrieve_s = time.perf_counter() - started
        messages = [Message("user", question)]
        if system and system.strip():
            messages.insert(0, Message("system", system))
        counter, template = self.engine.counter, self.engine.template
        sections = prompt.measure(messages, hits, counter=counter, template=template, max_tokens=max_tokens, context_ratio=context_ratio)
        budget = negotiate(self.slot.n_ctx, sections)
        composed = prompt.compose(messages, hits, budget, counter=counter, template=template, max_tokens=max_tokens)
        num_chunks = sum(kb.num_chunks for kb in self.knowledge_bases)
        return Prepared(prompt=composed, slot=self.slot, num_chunks=num_chunks, retrieve_s=retrieve_s)

    def ask(
        self,
        question: str,
        *,
        system: str | None = None,
        top_k: int = DEFAULT_TOP_K,
        context_ratio: float = DEFAULT_CONTEXT_RATIO,
        sampling: SamplingParams | None = None,
        piped: str = "",
        on_text: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answer a question. `on_text` is called with each piece of the answer as it comes.

        Raises BudgetExceededError if the parts that cannot be cut do not fit. Ctrl-C ends the answer with `finish_reason` "cancelled".
        """
        sampling = sampling or SamplingParams()
        prepared = self.prepare(
            question, system=system, top_k=top_k, context_ratio=context_ratio, max_tokens=sampling.max_tokens, piped=piped
        )
        sampling = sampling.with_max_tokens(prepared.prompt.max_tokens)
        self.engine.reserve(len(prepared.prompt.token_ids) + sampling.max_tokens)
        completion = self.engine.generate(list(prepared.prompt.token_ids), sampling, on_text)
        return self._answer(prepared, completion)

    def retrieve(self, question: str, *, top_k: int = DEFAULT_TOP_K) -> list[Hit]:
        """The best chunks of all knowledge bases together, best first. Labels name the knowledge base where there are several."""
        if self.embedder is None:
            return []
        found = [
            replace(hit, chunk=replace(hit.chunk, scope=kb.name if len(self.knowledge_bases) > 1 else ""))
            for kb in self.knowledge_bases
            for hit in kb.retrieve(question, self.embedder, k=top_k)
        ]
        return sorted(found, key=lambda hit: (-hit.score, hit.label))[:top_k]

    def _hits(self, question: str, top_k: int, piped: str) -> list[Hit]:
        """All that is offered as evidence: what was piped in comes before what was found."""
        found = self.retrieve(question, top_k=top_k)
        if not piped.strip():
            return found
        from localrag.kb.piped import piped_hits  # noqa: PLC0415  # weight: most asks have no piped text

        return [*piped_hits(piped, question, self.engine.counter), *found]

    def _answer(self, prepared: Prepared, completion: Completion) -> Answer:
        composed = prepared.prompt
        spent = self.engine.load_s + prepared.retrieve_s
        timings = replace(
            completion.timings,
            load_s=self.engine.load_s,
            retrieve_s=prepared.retrieve_s,
            first_token_s=completion.timings.first_token_s + spent,
            total_s=completion.timings.total_s + spent,
        )
        return Answer(
            text=completion.text,
            finish_reason=completion.finish_reason,
            model=self.engine.name,
            slot=prepared.slot,
            prompt_tokens=completion.prompt_tokens,
            completion_tokens=completion.completion_tokens,
            cached_tokens=completion.cached_tokens,
            ledger=composed.ledger.with_used("answer", completion.completion_tokens),
            hits=composed.hits,
            hit_tokens=composed.hit_tokens,
            citations=tuple(citation.cite(completion.text, composed.hits)),
            chunks_in_kb=prepared.num_chunks,
            timings=timings,
        )

    def close(self) -> None:
        self.engine.close()
        for kb in self.knowledge_bases:
            kb.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_engine(model: str | None, *, settings: Settings, chat_template: Path | None = None, vocab_only: bool = False) -> Engine:
    """A model by its name in models.toml or by the path of its file; `echo` needs neither."""
    if model == "echo":
        from localrag.engine.echo import open_echo  # noqa: PLC0415  # weight

        return open_echo()
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight
    from localrag.engine.loading import open_model  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    spec = catalog.model(model)
    template = chat_template or spec.chat_template
    source = None if template is None else read_template(template)
    return open_model(catalog.open(spec), name=spec.name, n_ctx=spec.n_ctx, vocab_only=vocab_only, chat_template=source, home=settings.home)


def open_knowledge_base(name: str, *, settings: Settings, create: bool = False) -> KnowledgeBase:
    """A knowledge base of this home by its name. KnowledgeBaseNotFoundError unless it is there or `create` is given."""
    from localrag.kb import KnowledgeBase  # noqa: PLC0415  # weight: an ask without a knowledge base needs none of it

    return KnowledgeBase.open(settings.kb_dir, name, create=create)


def open_embedder(settings: Settings, name: str | None = None) -> Embedder:
    """An embedder by its name in models.toml or by the path of its folder."""
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight
    from localrag.kb.embedder import SentenceTransformerEmbedder  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    spec = catalog.embedder(name)
    return SentenceTransformerEmbedder(catalog.open(spec), sha256=spec.sha256)


def read_template(path: Path) -> str:
    """The source of a chat template from a file. ModelNotFoundError if there is none, UsageError if it is no text."""
    try:
        raw = path.expanduser().read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"The chat template {path} cannot be read: {error.strerror}.", hint="Check the path.") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise UsageError(f"The chat template {path} has {len(raw)} bytes; no template is so long.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"The chat template {path} is not UTF-8 text.", hint="Give the template's own file.") from None
