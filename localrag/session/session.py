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
from localrag.errors import UsageError
from localrag.files import secure_home
from localrag.prompt import CITE, Demand, PromptInputs
from localrag.session import recorder, retrieval
from localrag.session.answer import Answer, Prepared, ledger_warnings, window_warnings
from localrag.session.batch import MAX_SEQUENCES, Batch, Outcome, Request
from localrag.session.opening import names_of, open_embedder, open_engine, open_knowledge_bases, open_profile, open_reranker
from localrag.session.options import Options, check_options
from localrag.session.retrieval import DEFAULT_TOP_K, Retriever
from localrag.session.search_policy import Bypass, bypass, outcome
from localrag.session.shortening import Shortener
from localrag.session.timing import Plan, TimedReranker, check_seconds, plan
from localrag.settings import Learning, Settings, default_home
from localrag.types import Citation, Completion, Hit, Message, SamplingParams, expanded

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.journal import Journal
    from localrag.kb import KnowledgeBase
    from localrag.kb.filters import Where
    from localrag.kb.protocols import Reranker
    from localrag.text.tokens import ChatTemplate, Embedder

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
        if not hasattr(engine, "make_slot"):
            raise UsageError(
                f"Session takes an open engine, not {type(engine).__name__}.",
                hint=f"Session.open({str(engine)!r}) opens a model by its name or path.",
            )
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
        self.warnings = window_warnings(self.slot)
        self.template: ChatTemplate | None = None
        """In place of the model's own."""
        self._shorteners: dict[bool, Shortener] = {}

    @classmethod
    def open(
        cls,
        model: str | Path | None = None,
        *,
        kbs: str | Sequence[str] = (),
        n_ctx: int | None = None,
        chat_template: str | Path | None = None,
        vocab_only: bool = False,
        budget: str | None = None,
        name: str = "ask",
        keep: bool = True,
        rerank: str | None = None,
        settings: Settings | None = None,
    ) -> Self:
        """Open a model by name or path (None for the default, `echo` for the engine that needs none) and knowledge bases by name.

        `kbs` is one name or several; UsageError for an argument of another type.
        `budget` names a [budgets.NAME] table of models.toml; without `keep`, nothing is written to the journal. `rerank` is "llm", or a
        CrossEncoder by its name or folder (see open_reranker).
        """
        settings = settings or Settings.from_env()
        secured = secure_home(settings.home, default_home())
        model, chat_template = _name_of(model), None if chat_template is None else Path(chat_template)
        if n_ctx is not None and not isinstance(n_ctx, int):
            raise UsageError(f"n_ctx is a whole number of tokens, not {n_ctx!r}.", hint="Give a number, such as n_ctx=8192.")
        profile, weights = open_profile(budget, settings=settings)
        with ExitStack() as opened:
            knowledge_bases = open_knowledge_bases(names_of(kbs), settings=settings, opened=opened)
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
        session.warnings += [secured] if secured else []
        if keep:
            session.journal, warnings = recorder.open_journal(settings.home)
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
        max_tokens: int | None = prompt.ANSWER_BASIS,
        think_tokens: int = 0,
        write: bool = False,
        **options: Unpack[Options],
    ) -> Prepared:
        """Retrieve, measure, share and compose; nothing is evaluated, save that with `write` the model may write summaries.

        `question` is a text, or a whole conversation that ends with one. Without `max_tokens` (None) the answer has what the prompt
        leaves of the window, and with a limit of time 512 tokens. A model that can think has room for `think_tokens`, but none
        where time is limited: thoughts alone answer nothing.
        """
        begun = options.get("started_at") or time.perf_counter()
        check_options(options)
        messages = _conversation(question, options.get("system"))
        retriever = self.retriever_until(options.get("max_seconds"), begun)
        started, loaded_s = time.perf_counter(), self.engine.load_s
        unsearched = self.unsearched(messages, options)
        needs_question = options.get("needs_question", True)
        query = search_query(messages, needs_question=needs_question)
        searches = unsearched is None and bool(query)
        before = retrieval.asked_before(messages) if searches else ""
        hits = retriever.offered(query, options, before=before, searches=searches)
        distinct = hits if "left_out" in options else retrieval.distinct(hits)
        is_skipped = isinstance(retriever.reranker, TimedReranker) and retriever.reranker.is_skipped
        retrieve_s = time.perf_counter() - started - (self.engine.load_s - loaded_s)  # a reranker may have a context made
        offer = PromptInputs(
            messages=messages,
            needs_question=needs_question,
            pinned=frozenset(options.get("pinned", ())),
            settled=options.get("settled", 0),
            earlier=options.get("earlier", {}),
            again=options.get("again", ()),
            hits=distinct,
            left_out=options.get("left_out", {}),
            tools=options.get("tools", ()),
            must_call=options.get("must_call", ()),
            memories=options.get("memories", ()),
            attachments=options.get("attachments", ()),
            max_tokens=prompt.ANSWER_BASIS if max_tokens is None and options.get("max_seconds") else max_tokens,
            think_tokens=0 if options.get("max_seconds") else think_tokens,
            profile=self.profile_of(options),
            cite=options.get("cite", CITE),
        )
        wants = self.measure(offer)
        shortening = self._shortening(write=write and not options.get("max_seconds"))
        planned = self._plan(wants, options.get("max_seconds"), begun, skipped=("rerank",) if is_skipped else ())
        if planned is None:
            composed = prompt.compose(wants, wants.share(self.slot.n_ctx), shortening)
        else:
            composed = prompt.compose(
                wants, planned.budget, shortening, window=self.slot.n_ctx, time=planned.time, answer_limit=planned.answer_limit
            )
        return Prepared(
            prompt=composed,
            slot=self.slot,
            offered=tuple(expanded(hits)),
            num_chunks=self.num_chunks,
            retrieve_s=retrieve_s,
            deadline=None if planned is None else begun + planned.time.max_seconds,
            bypass=outcome(unsearched, hits, composed.hits),
        )

    def measure(self, offer: PromptInputs) -> Demand:
        """What each part of an offer wants, in tokens of this model."""
        return prompt.measure(offer, counter=self.engine.counter, template=self.template or self.engine.template)

    def compose(self, wants: Demand) -> prompt.Prompt:
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
        num_cells = min(self.slot.n_ctx, -(-prepared.prompt.num_cells // _ROUND_CELLS) * _ROUND_CELLS)
        self.engine.reserve(num_cells, repeatable=sampling.repeatable)
        completion = self.engine.generate(
            list(prepared.prompt.token_ids),
            sampling,
            on_text,
            deadline=prepared.deadline,
            breakpoints=prepared.prompt.breakpoints,
            thinking=prepared.prompt.thinking,
            on_thought=on_thought,
        )
        return self.finish(prepared, completion, question, **options)

    def finish(self, prepared: Prepared, completion: Completion, question: str | Sequence[Message], **options: Unpack[Options]) -> Answer:
        """What a completion of a prepared prompt says: its citations checked, its ledger kept in the journal."""
        if isinstance(question, str):
            asked = question
        else:
            asked = search_query(question, needs_question=options.get("needs_question", True)) or question[-1].content
        answer = self.to_answer(prepared, completion)
        warnings = retrieval.none_passes(self.knowledge_bases, options.get("where"), prepared.offered)
        if "hits" not in options:
            warnings += retrieval.left_unread(answer, asked)
        warnings += recorder.keep(
            answer,
            question=asked,
            session=self.name,
            journal=self.journal,
            knowledge_bases=self.knowledge_bases,
            profile=self.profile_of(options),
            engine=self.engine,
        )
        return replace(answer, warnings=(*answer.warnings, *warnings))

    def batch(
        self, requests: Iterable[Request], *, num_sequences: int = MAX_SEQUENCES, on_step: Callable[[int], None] = lambda _: None
    ) -> Iterator[Outcome]:
        """Answer many questions, up to `num_sequences` at once: (id, answer or error) of each, in the order in which they finish.

        Each is asked as `ask` would; numerically near ties of the model may fall otherwise, as side by side sums are added up in
        another order. Those with `max_seconds` are answered one after the other, behind the others of their window. An error of one
        question is its outcome, and the others go on. `on_step` is called with the tokens sampled since its last call, between steps
        and while prompts are prepared; what it raises ends the batch. Leaving the iterator cancels what runs; `engine.cancel_all`
        gives the running ones as they are, with `finish_reason` "cancelled".
        """
        return Batch(self, num_sequences=num_sequences, on_step=on_step).outcomes(requests)

    def retrieve(self, question: str, *, top_k: int = DEFAULT_TOP_K, where: Where | None = None) -> list[Hit]:
        """The best passages of all knowledge bases together, best first. See Retriever.search."""
        return self.retriever.search(question, top_k=top_k, where=where)

    @property
    def retriever(self) -> Retriever:
        """The search over its knowledge bases."""
        return Retriever(
            knowledge_bases=self.knowledge_bases,
            embedder=self.embedder,
            learning=self.learning,
            reranker=self.reranker,
            counter=self.engine.counter,
            n_ctx=self.slot.n_ctx,
            weights=self.weights,
        )

    def unsearched(self, messages: Sequence[Message], options: Options) -> Bypass | None:
        """Why nothing is searched for in a conversation; None if it is."""
        return bypass(messages, has_kb=bool(self.knowledge_bases), has_tools=bool(options.get("tools")))

    def profile_of(self, options: Options) -> Profile:
        """How the window is shared with these options."""
        profile = self.profile
        ratio = options.get("context_ratio")
        if ratio is not None:
            profile = profile.with_context_ratio(ratio)
        elif options.get("top_k") is not None:
            profile = profile.with_spare_for_evidence()
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

    def retriever_until(self, max_seconds: float | None, begun: float) -> Retriever:
        """The retriever, its reranker bound by the time limit if there is one. UsageError for an invalid limit."""
        retriever = self.retriever
        check_seconds(max_seconds)
        if max_seconds is None or retriever.reranker is None:
            return retriever
        self.engine.measure_speed()  # a model that reranks tells by it whether it can finish
        return replace(retriever, reranker=TimedReranker(retriever.reranker, begun + max_seconds))

    def _plan(self, wants: Demand, max_seconds: float | None, begun: float, *, skipped: tuple[str, ...]) -> Plan | None:
        if max_seconds is None:
            return None
        self.engine.measure_speed()
        left_s = begun + max_seconds - time.perf_counter()
        planned = plan(wants, self.slot.n_ctx, self.engine.speed, max_seconds=max_seconds, left_s=left_s)
        return replace(planned, time=replace(planned.time, skipped=skipped))

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
            citations=tuple(_cited(composed, completion)),
            chunks_in_kb=prepared.num_chunks,
            timings=timings,
            memory=self.engine.memory_plan,
            reasoning=completion.reasoning.strip(),
            reasoning_tokens=completion.reasoning_tokens,
            logprobs=completion.logprobs,
            bypass=prepared.bypass,
            rewriting=prepared.rewriting,
            warnings=(*self.warnings, *ledger_warnings(ledger)),
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


def _cited(composed: prompt.Prompt, completion: Completion) -> list[Citation]:
    hits = (*composed.hits, *composed.earlier)
    files = [each.part.text for each in composed.parts if each.part.section == "attachments"]
    return citation.cite(completion.text, hits, is_cut=completion.finish_reason != "stop", notes=files)


def _conversation(question: str | Sequence[Message], system: str | None) -> list[Message]:
    if isinstance(question, str):
        messages = [Message("user", question)]
    elif isinstance(question, list | tuple) and question and all(isinstance(each, Message) for each in question):
        messages = list(question)
    else:
        raise UsageError(
            f"A question is a text, or a list of Message that ends with one, not {type(question).__name__}.",
            hint='Ask "How are you?", or [Message("user", "How are you?")].',
        )
    return [Message("system", system), *messages] if system and system.strip() else messages


def _name_of(model: object) -> str | None:
    if model is None or isinstance(model, str | Path):
        return None if model is None else str(model)
    message = f"A model is the name or the path of one, not {type(model).__name__}."
    raise UsageError(message, hint='Session.open("echo") needs no model.')
