"""Ask questions with known answers in several ways, by a single ask or a council. localrag/grading judges the outcomes.

`conversation_searches` searches for the questions of conversations, for localrag/kb/evaluate to measure.

The engine's caches are cleared between questions, so that no answer benefits from an earlier one. The seconds and tokens of a question
are therefore what it takes alone, with its model loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from localrag.budget import Profile
from localrag.conversation import search_query
from localrag.deliberation import Council
from localrag.errors import InterruptedRunError, LocalragError, UsageError, counted
from localrag.grading import Outcome, Passage
from localrag.question import DEFAULT_CITE, Cite, EvidenceKind, Question, Search, TopK, Unanswerable
from localrag.session.answer import Answer
from localrag.session.answerability import NUM_COMPARED, CalibrationFile, Features, Fit, Sample, fit
from localrag.session.council_run import CouncilRun
from localrag.session.opening import open_council, open_embedder, open_knowledge_bases, open_profile, read_template
from localrag.session.retrieval import FOLLOW_UP_DEPTH, EvidenceFile, Retriever, asked_before, retrieve_after
from localrag.session.session import Session
from localrag.settings import Settings
from localrag.types import Citation, Hit, Message

if TYPE_CHECKING:
    from localrag.kb import KnowledgeBase, Mode
    from localrag.kb.evaluate import Searching
    from localrag.kb.protocols import Reranker

_EVIDENCE = ("evidence", "cited")
"""Prompt sections that hold passages."""
_DIGEST_BYTES = 8

Answering = Callable[[str | Sequence[Message]], Outcome]
"""Answers a question, or the last one of a conversation. Raises InterruptedRunError if the user stops it; the outcome reports all other
errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The settings that all ways share. With None, each way uses its own window, number of passages or answer limit."""

    settings: Settings
    model: str | None = None
    chat_template: Path | None = None
    kbs: Sequence[str] = ()
    n_ctx: int | None = None
    top_k: TopK | None = None
    evidence: EvidenceKind | None = None
    evidence_tokens: int | None = None
    cite: Cite | None = None
    unanswerable: Unanswerable | None = None
    quote: bool = False
    max_tokens: int | None = None
    seed: int = 0
    repeatable: bool = False
    """See SamplingParams."""
    system: str | None = None
    collection: tuple[Path, str] | None = None
    """Folder and name of a knowledge base outside the home's, to answer from in place of `kbs`: the index of a test collection."""

    @contextmanager
    def opened_kbs(self) -> Iterator[list[KnowledgeBase]]:
        """Open the knowledge bases to answer from."""
        with ExitStack() as stack:
            if self.collection is not None:
                from localrag.kb import KnowledgeBase  # noqa: PLC0415  # weight

                yield [stack.enter_context(KnowledgeBase.open(*self.collection))]
            else:
                yield open_knowledge_bases(self.kbs, settings=self.settings, opened=stack)

    def __post_init__(self) -> None:
        Question.of("?", cite=self.cite, quote=self.quote)  # UsageError for options that contradict each other

    @property
    def model_name(self) -> str:
        """Name of the model for single asks. Raises ModelNotFoundError if it is not on this machine."""
        return str(_identity(self.model, self.settings)[0])

    def about(self) -> dict[str, object]:
        """Everything that an answer depends on, as JSON data. A stored answer is reused only if this is equal."""
        names = ("n_ctx", "top_k", "max_tokens", "seed", "system")
        options = {name: getattr(self, name) for name in names}
        kbs = list(self.kbs) if self.collection is None else [self.collection[1]]
        return {"model": _identity(self.model, self.settings, self.chat_template), "kbs": kbs} | options


class Way(Protocol):
    """A way of answering. `about` holds everything that its answers depend on, as JSON data."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> Mapping[str, object]: ...

    def opened(self) -> AbstractContextManager[Answering]:
        """Open what is needed to answer. Raises the errors of opening a model and knowledge bases."""
        ...


TUNED_SEARCHES = (
    *(Search(evidence="sentences", evidence_tokens=num) for num in (60, 120, 240)),
    *(Search(top_k=num) for num in (1, 2, 4, 8)),
)
"""The amounts of evidence that `localrag eval --tune-evidence` compares, least first."""


@dataclass(frozen=True, slots=True)
class AskWay:
    """A single ask. `context_ratio` is the maximum share of evidence in the window; None uses that of the current budget. `search` says how
    much evidence is sent, in place of the options in `means`.
    """

    means: Means
    context_ratio: float | None = None
    search: Search | None = None

    @property
    def name(self) -> str:
        if self.search is not None:
            top_k = self.search.top_k
            return counted(top_k, "passage") if isinstance(top_k, int) else f"sentences, {self.search.evidence_tokens} tokens"
        return "ask" if self.context_ratio is None else f"ask at {self.context_ratio:g}"

    @property
    def about(self) -> Mapping[str, object]:
        profile, _ = open_profile(None, settings=self.means.settings)
        budget = {} if profile == Profile() else {"budget": _digest(repr(profile))}
        quote = {"quote": True} if self.means.quote else {}
        options = {
            "context_ratio": self.context_ratio,
            "evidence": self._search.evidence,
            "evidence_tokens": self._search.evidence_tokens,
            "cite": self.means.cite or DEFAULT_CITE,
        }
        mode = {} if self.means.unanswerable is None else {"unanswerable": self.means.unanswerable}
        return self.means.about() | {"top_k": self._search.top_k} | options | quote | mode | budget

    @property
    def _search(self) -> Search:
        means = self.means
        return self.search or Search(top_k=means.top_k, evidence=means.evidence, evidence_tokens=means.evidence_tokens)

    @contextmanager
    def opened(self) -> Iterator[Answering]:
        means = self.means
        with Session.open(
            means.model, kbs=means.kbs, n_ctx=means.n_ctx, chat_template=means.chat_template, keep=False, settings=means.settings
        ) as session:
            if means.collection is None:
                yield partial(_ask, session, self._question)
                return
            with means.opened_kbs() as knowledge_bases:
                session.knowledge_bases = tuple(knowledge_bases)
                session.embedder = open_embedder(means.settings, for_queries=True)
                yield partial(_ask, session, self._question)

    def _question(self, asked: str | Sequence[Message]) -> Question:
        means = self.means
        question = Question.of(
            asked,
            system=means.system,
            context_ratio=self.context_ratio,
            top_k=self._search.top_k,
            seed=means.seed,
            repeatable=means.repeatable,
            evidence=self._search.evidence,
            evidence_tokens=self._search.evidence_tokens,
            cite=means.cite,
            unanswerable=means.unanswerable,
            quote=means.quote,
        )
        return question if means.max_tokens is None else question.but(max_tokens=means.max_tokens)


@dataclass(frozen=True, slots=True)
class CouncilWay:
    """A council of models.toml. The model, window, answer limit and number of passages in `means` override its own where set.

    Its models are loaded for each question; the load time is not counted.
    """

    means: Means
    council: Council

    @classmethod
    def of(cls, name: str, means: Means) -> CouncilWay:
        """Raises ConfigError if the council does not exist."""
        council = open_council(name, settings=means.settings)
        council = council.changed(
            model=means.model, n_ctx=means.n_ctx, seed=means.seed if means.repeatable else None, max_tokens=means.max_tokens
        )
        return cls(means, council if means.top_k is None else replace(council, top_k=means.top_k))

    @property
    def name(self) -> str:
        return f"council {self.council.name}"

    @property
    def about(self) -> Mapping[str, object]:
        models = {*(member.model for member in self.council.members), self.council.judge.model}
        identities = sorted((_identity(each, self.means.settings) for each in models), key=repr)
        return {"council": self.council.digest, "models": identities, "kbs": list(self.means.kbs)}

    @contextmanager
    def opened(self) -> Iterator[Answering]:
        yield partial(_ask_council, self.council, self.means)


def keep_tuned(means: Means, search: Search) -> None:
    """Store how much evidence to send to the model of `means`. Sessions with the same settings use it from then on."""
    with Session.open(means.model, chat_template=means.chat_template, vocab_only=True, keep=False, settings=means.settings) as session:
        EvidenceFile(means.settings.home).save(session.engine.info, search)


def _identity(model: str | None, settings: Settings, chat_template: Path | None = None) -> list[object]:
    """A model's name, and what identifies its file and chat template. Raises ModelNotFoundError if it is not on this machine."""
    name, file, template = "echo", "", chat_template
    if model != "echo":
        from localrag.catalog import Catalog  # noqa: PLC0415  # weight

        catalog = Catalog.load(settings)
        spec = catalog.model(model)
        name, file = spec.name, spec.sha256 or str(catalog.locate(spec).stat().st_size)
        template = chat_template or spec.chat_template
    return [name, file, "" if template is None else _digest(read_template(template))]


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _ask(session: Session, question_of: Callable[[str | Sequence[Message]], Question], asked: str | Sequence[Message]) -> Outcome:
    engine = session.engine
    engine.forget()
    started, loaded_s = time.perf_counter(), engine.load_s
    try:
        answer = session.ask(question_of(asked), keep_partial=True)
    except InterruptedRunError:
        raise
    except LocalragError as error:
        return _failed(error, time.perf_counter() - started)
    seconds = time.perf_counter() - started - (engine.load_s - loaded_s)  # not counting the creation of a context
    if answer.finish_reason == "cancelled":
        raise InterruptedRunError("Interrupted.")
    support = answer.support
    return Outcome(
        text=answer.text,
        citations=answer.citations,
        passages=_passages([answer]),
        prompt=_digest(repr(answer.prompt.token_ids)),
        finish_reason=answer.finish_reason,
        seconds=round(seconds, 4),
        prompt_tokens=answer.prompt_tokens,
        evaluated_tokens=answer.prompt_tokens - answer.cached_tokens,
        completion_tokens=answer.completion_tokens,
        evidence_tokens=sum(entry.used for entry in answer.ledger.entries if entry.name in _EVIDENCE),
        first_token_s=round(max(0.0, answer.timings.first_token_s - answer.timings.load_s), 4),
        support=support.mean_score,
        unsupported_claims=tuple(each.text for each in support.unsupported_claims),
    )


def _ask_council(council: Council, means: Means, question: str | Sequence[Message]) -> Outcome:
    """Ask a council. Without a verdict, the outcome is an error, with the seconds and tokens used."""
    if not isinstance(question, str):
        raise UsageError("A council cannot be asked in a conversation.", hint="Leave out --council.")
    events: dict[str, dict[str, Any]] = {}

    def hear(event: dict[str, Any]) -> None:
        events[event["event"]] = event

    with CouncilRun(council, question, settings=means.settings, kbs=means.kbs, on_event=hear, on_text=lambda _role, _text: None) as run:
        try:
            result = run.decide()
        except InterruptedRunError:
            raise
        except LocalragError as error:
            failed: LocalragError | None = error
        else:
            failed = None
    end = events["end"]
    seconds = end["total_s"] - sum(each["load_s"] for each in end["loads"])
    usage = {name: end["usage"][name] for name in ("prompt_tokens", "evaluated_tokens", "completion_tokens")}
    if failed is not None:
        return replace(_failed(failed, seconds), **usage)
    passages = {each.label: each for each in _passages(answer for _, answer in result.answers)}
    for each in events["verdict"]["sources"]:  # passages that the judge's tools found are not in any prompt's evidence
        passages.setdefault(each["id"], Passage(each["id"], each["source"], ""))
    return Outcome(
        text=f"{result.verdict.text} {result.verdict.decision}".strip(),
        citations=tuple(Citation(each.label, each.supplied) for each in result.verdict.citations),
        passages=tuple(passages.values()),
        finish_reason="stop" if result.verdict.is_whole else "length",
        seconds=round(seconds, 4),
        **usage,
    )


def calibrated(questions: Iterable[tuple[Sequence[Message], bool]], means: Means, *, on_question: Callable[[], None] = lambda: None) -> Fit:
    """Fit the probability that the knowledge bases answer a question, and store it for their embedder. No model is asked.

    `questions` are conversations that end with a question, each with whether the knowledge bases answer it. Raises UsageError if there are
    too few.
    """
    with means.opened_kbs() as knowledge_bases:
        embedder = open_embedder(means.settings, for_queries=True)
        retriever = Retriever(knowledge_bases=knowledge_bases, embedder=embedder, learning="off")
        samples = []
        for messages, is_answerable in questions:
            hits = retrieve_after(retriever, asked_before(messages), search_query(messages), top_k=NUM_COMPARED)
            samples.append(Sample(features=Features.of(hits), is_answerable=is_answerable))
            on_question()
        fitted = fit(samples)
        CalibrationFile(means.settings.home).save(embedder.fingerprint, fitted.calibration)
    return fitted


def _failed(error: LocalragError, seconds: float) -> Outcome:
    return Outcome(error=type(error).__name__, error_text=error.message, seconds=round(seconds, 4))


def _passages(answers: Iterable[Answer]) -> tuple[Passage, ...]:
    """The passages in the prompts of these answers, each once, as sent."""
    passages: dict[str, Passage] = {}
    for answer in answers:
        texts: dict[str, str] = {}
        for each in answer.prompt.parts:
            part = each.part
            if part.section in _EVIDENCE and part.item is not None:
                texts[part.item] = texts.get(part.item, "") + part.text
        for hit in answer.hits:
            passages.setdefault(hit.label, Passage(hit.label, hit.chunk.source, texts.get(hit.label, "").strip()))
    return tuple(passages.values())


def conversation_searches(
    retriever: Retriever, conversations: Mapping[str, Sequence[Message]], modes: Sequence[Mode], reranker: Reranker | None = None
) -> dict[str, Searching]:
    """Return name → search by the id of a conversation: "conversation" searches as every command does, with the turns before.

    The others search for the last turn alone, in each of `modes`. A `reranker` adds "conversation + rerank". Each search returns
    FOLLOW_UP_DEPTH hits, whose order does not depend on how many of them a command uses.
    """

    def after(retriever: Retriever) -> Searching:
        def search(one: str) -> list[Hit]:
            messages = conversations[one]
            return retrieve_after(retriever, asked_before(messages), search_query(messages), top_k=FOLLOW_UP_DEPTH)

        return search

    def alone(mode: Mode) -> Searching:
        return lambda one: retriever.search(search_query(conversations[one]), top_k=FOLLOW_UP_DEPTH, mode=mode)

    reranked = {} if reranker is None else {"conversation + rerank": after(replace(retriever, reranker=reranker))}
    return {"conversation": after(retriever), **{str(mode): alone(mode) for mode in modes}, **reranked}
