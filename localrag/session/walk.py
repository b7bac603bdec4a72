"""The walk: a question goes straight through the house."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

from localrag import citation, prompt
from localrag.budget import Profile
from localrag.conversation import search_query
from localrag.decoding import Completion, SamplingParams
from localrag.errors import UsageError
from localrag.messages import Message
from localrag.passages import Hit
from localrag.prompt import CITE, Offer, Wants
from localrag.session import finding, recording
from localrag.session.answers import Answer, Prepared
from localrag.session.batch import MAX_SEQUENCES, Batch, Outcome, Request
from localrag.session.bypass import outcome
from localrag.session.finding import DEFAULT_TOP_K
from localrag.session.opening import open_embedder, open_engine, open_knowledge_bases, open_profile, open_reranker
from localrag.session.options import Options
from localrag.session.shortening import Shortener
from localrag.session.timing import Plan, plan
from localrag.settings import Learning, Settings

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.journal import Journal
    from localrag.kb import KnowledgeBase
    from localrag.kb.filters import Where
    from localrag.kb.rerank import Reranker
    from localrag.tokens import ChatTemplate, Embedder

_ROUND_CELLS = 1024
"""A context is made a little too large, so that it need not grow with every turn of a conversation."""


class Session:
    """An open model, the knowledge bases that are asked, and the window that both share.

    `profile` says how the window is shared, `weights` are fields of relevance.Weights, `learning`
    is what moves passages that are found, `reranker` what reads the best of them again. With a
    `journal`, each answer leaves its ledger there under `name`, and summaries are kept in it. A
    fault of it costs no answer: it becomes a warning.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        knowledge_bases: Sequence[KnowledgeBase] = (),
        embedder: Embedder | None = None,
        n_ctx: int | None = None,
        profile: Profile | None = None,
        weights: Mapping[str, object] | None = None,
        journal: Journal | None = None,
        name: str = "ask",
        learning: Learning = "off",
        reranker: Reranker | None = None,
    ) -> None:
        self.engine = engine
        self.knowledge_bases = tuple(knowledge_bases)
        self.embedder = embedder
        self.slot = engine.make_slot(n_ctx)
        self.profile = profile or Profile()
        self.weights = weights or {}
        self.journal = journal
        self.name = name
        self.learning = learning
        self.reranker = reranker
        self.warnings: list[str] = []
        self.template: ChatTemplate | None = None
        """In place of the model's own."""
        self._shorteners: dict[bool, Shortener] = {}

    @classmethod
    def open(
        cls,
        model: str | None = None,
        *,
        kbs: Sequence[str] = (),
        n_ctx: int | None = None,
        chat_template: Path | None = None,
        vocab_only: bool = False,
        budget: str | None = None,
        name: str = "ask",
        keep: bool = True,
        rerank: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Open a model by name or path (None for the default, `echo` for the engine that needs none) and knowledge bases by name.

        `budget` names a [budgets.NAME] table of models.toml; without `keep`, nothing is written to the journal. `rerank` is "llm", or a
        CrossEncoder by its name or folder (see open_reranker).
        """
        settings = settings or Settings.from_env()
        profile, weights = open_profile(budget, settings=settings)
        with ExitStack() as opened:
            knowledge_bases = open_knowledge_bases(kbs, settings=settings, opened=opened)
            embedder = open_embedder(settings, for_queries=True) if knowledge_bases else None
            reranker = None if rerank in (None, "llm") else open_reranker(settings, rerank)
            engine = open_engine(model, settings=settings, chat_template=chat_template, vocab_only=vocab_only, keep=keep)
            opened.callback(engine.close)
            session = cls(
                engine,
                knowledge_bases=knowledge_bases,
                embedder=embedder,
                n_ctx=n_ctx,
                profile=profile,
                weights=weights,
                name=name,
                learning=settings.learn,
                reranker=open_reranker(settings, "llm", engine) if rerank == "llm" else reranker,
            )
            opened.pop_all()
        if keep:
            session.journal, warnings = recording.open_journal(settings.home)
            session.warnings += warnings
        return session

    @property
    def num_chunks(self) -> int:
        """In all knowledge bases together."""
        return sum(kb.num_chunks for kb in self.knowledge_bases)

    def prepare(
        self,
        question: str | Sequence[Message],
        *,
        max_tokens: int = prompt.ANSWER_BASIS,
        think_tokens: int = 0,
        write: bool = False,
        **options: Unpack[Options],
    ) -> Prepared:
        """Retrieve, measure, share and compose; nothing is evaluated, save that with `write` the model may write summaries.

        `question` is a text, or a whole conversation that ends with one. A model that can think has room for `think_tokens`, but none
        where time is limited: thoughts alone answer nothing.
        """
        begun = options.get("started_at") or time.perf_counter()
        messages = _conversation(question, options.get("system"))
        started, loaded_s = time.perf_counter(), self.engine.load_s
        unsearched = finding.unsearched(self, messages, options)
        hits = finding.offered(self, search_query(messages), options, searches=unsearched is None)
        retrieve_s = time.perf_counter() - started - (self.engine.load_s - loaded_s)  # a reranker may have a context made
        offer = Offer(
            messages=messages,
            pinned=frozenset(options.get("pinned", ())),
            settled=options.get("settled", 0),
            earlier=options.get("earlier", {}),
            again=options.get("again", ()),
            hits=hits,
            tools=options.get("tools", ()),
            memories=options.get("memories", ()),
            attachments=options.get("attachments", ()),
            max_tokens=max_tokens,
            think_tokens=0 if options.get("max_seconds") else think_tokens,
            profile=self.profile_of(options),
            cite=options.get("cite", CITE),
        )
        wants = self.measure(offer)
        shortening = self._shortening(write=write and not options.get("max_seconds"))
        planned = self._plan(wants, options.get("max_seconds"), begun)
        if planned is None:
            composed = prompt.compose(wants, wants.share(self.slot.n_ctx), shortening)
        else:
            composed = prompt.compose(
                wants, planned.budget, shortening, window=self.slot.n_ctx, time=planned.time, answer_limit=planned.answer_limit
            )
        return Prepared(
            prompt=composed,
            slot=self.slot,
            offered=tuple(hits),
            num_chunks=self.num_chunks,
            retrieve_s=retrieve_s,
            deadline=None if planned is None else begun + planned.time.max_seconds,
            bypass=outcome(unsearched, hits, composed.hits),
        )

    def measure(self, offer: Offer) -> Wants:
        """What each part of an offer wants, in tokens of this model."""
        return prompt.measure(offer, counter=self.engine.counter, template=self.template or self.engine.template)

    def compose(self, wants: Wants) -> prompt.Prompt:
        """The prompt that this window allows, without a limit of time; no model writes for it."""
        return prompt.compose(wants, wants.share(self.slot.n_ctx), self._shortening(write=False))

    def ask(
        self,
        question: str | Sequence[Message],
        *,
        sampling: SamplingParams | None = None,
        on_text: Callable[[str], None] | None = None,
        on_thought: Callable[[str], None] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """Answer a question. `on_text` is called with each piece of the answer as it comes, `on_thought` with what was thought before.

        Raises BudgetExceededError if the parts that cannot be cut do not fit, TimeLimitError if `max_seconds` are too few. Ctrl-C
        ends the answer with `finish_reason` "cancelled", the limit of time ends it with "time".
        """
        sampling = sampling or SamplingParams()
        prepared = self.prepare(question, max_tokens=sampling.max_tokens, think_tokens=sampling.room_to_think, write=True, **options)
        return self.answer(prepared, question, sampling=sampling, on_text=on_text, on_thought=on_thought, **options)

    def answer(
        self,
        prepared: Prepared,
        question: str | Sequence[Message],
        *,
        sampling: SamplingParams,
        on_text: Callable[[str], None] | None = None,
        on_thought: Callable[[str], None] | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """The answer to a prompt as it was prepared, with the question and the options that it was prepared with."""
        sampling = sampling.with_max_tokens(prepared.prompt.max_tokens)
        self.engine.reserve(min(self.slot.n_ctx, -(-prepared.prompt.num_cells // _ROUND_CELLS) * _ROUND_CELLS))
        completion = self.engine.generate(
            list(prepared.prompt.token_ids),
            sampling,
            on_text,
            deadline=prepared.deadline,
            borders=prepared.prompt.borders,
            thinking=prepared.prompt.thinking,
            on_thought=on_thought,
        )
        return self.finish(prepared, completion, question, **options)

    def finish(self, prepared: Prepared, completion: Completion, question: str | Sequence[Message], **options: Unpack[Options]) -> Answer:
        """What a completion of a prepared prompt says: its citations checked, its ledger kept in the journal."""
        asked = question if isinstance(question, str) else search_query(question)
        answer = self.to_answer(prepared, completion)
        warnings = finding.none_passes(self, options.get("where"), prepared.offered)
        if "hits" not in options:
            warnings += finding.left_unread(answer, asked)
        warnings += recording.keep(self, answer, asked, self.profile_of(options))
        return replace(answer, warnings=(*self.warnings, *warnings))

    def batch(
        self, requests: Iterable[Request], *, num_sequences: int = MAX_SEQUENCES, on_step: Callable[[int], None] = lambda _: None
    ) -> Iterator[Outcome]:
        """Answer many questions, up to `num_sequences` at once: (id, answer or error) of each, in the order in which they finish.

        Each is asked as `ask` would; numerically near ties of the model may fall otherwise, as side by side sums are added up in
        another order. An error of one question is its outcome, and the others go on. `on_step` is called with the tokens sampled
        since its last call, between steps and while prompts are prepared; what it raises ends the batch. Leaving the iterator
        cancels what runs; `engine.cancel_all` gives the running ones as they are, with `finish_reason` "cancelled".
        """
        return Batch(self, num_sequences=num_sequences, on_step=on_step).outcomes(requests)

    def retrieve(self, question: str, *, top_k: int = DEFAULT_TOP_K, where: Where | None = None) -> list[Hit]:
        """The best chunks of all knowledge bases together, best first. Labels name the knowledge base where there are several."""
        return finding.retrieve(self, question, top_k=top_k, where=where)

    def profile_of(self, options: Options) -> Profile:
        """How the window is shared with these options."""
        profile = self.profile
        ratio = options.get("context_ratio")
        if ratio is not None:
            profile = profile.with_context_ratio(ratio)
        for overflow, section in options.get("overflow", ()):
            profile = profile.with_overflow(overflow, section)
        error = self.engine.count_error
        if error and isinstance(profile.gap, int):  # counts are estimates: leave what they may be wrong by
            profile = replace(profile, gap=max(profile.gap, math.ceil(self.slot.n_ctx * error / (1 + error))))
        return profile

    def _shortening(self, *, write: bool) -> prompt.Shortening:
        if write not in self._shorteners:
            self._shorteners[write] = Shortener(self.engine, self.journal, window=self.slot.n_ctx, write=write)
        return self._shorteners[write].for_prompt()

    def _plan(self, wants: Wants, max_seconds: float | None, begun: float) -> Plan | None:
        if max_seconds is None:
            return None
        if not 0 < max_seconds < math.inf:
            raise UsageError(f"max_seconds is a number of seconds above 0, not {max_seconds!r}.", hint="Allow some seconds.")
        self.engine.measure_speed()
        left_s = begun + max_seconds - time.perf_counter()
        return plan(wants, self.slot.n_ctx, self.engine.speed, max_seconds=max_seconds, left_s=left_s)

    def to_answer(self, prepared: Prepared, completion: Completion) -> Answer:
        """What a completion of a prepared prompt says, its citations checked; nothing is kept of it."""
        composed = prepared.prompt
        ledger = composed.ledger.with_used("answer", completion.completion_tokens - completion.reasoning_tokens)
        if composed.thinking is not None:
            ledger = ledger.with_used("thinking", completion.reasoning_tokens)
        load_s = self.engine.take_load_s()
        spent = load_s + prepared.retrieve_s
        timings = replace(
            completion.timings,
            load_s=load_s,
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
            ledger=ledger,
            prompt=composed,
            offered=prepared.offered,
            citations=tuple(citation.cite(completion.text, (*composed.hits, *composed.earlier))),
            chunks_in_kb=prepared.num_chunks,
            timings=timings,
            memory=self.engine.memory_plan,
            reasoning=completion.reasoning.strip(),
            reasoning_tokens=completion.reasoning_tokens,
            logprobs=completion.logprobs,
            bypass=prepared.bypass,
            rewriting=prepared.rewriting,
        )

    def close(self) -> None:
        self.engine.close()
        for kb in self.knowledge_bases:
            kb.close()
        if self.journal is not None:
            self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _conversation(question: str | Sequence[Message], system: str | None) -> list[Message]:
    messages = [Message("user", question)] if isinstance(question, str) else list(question)
    return [Message("system", system), *messages] if system and system.strip() else messages
