"""A session: an open model, the knowledge bases to answer from, and the pipeline from a question to an answer."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from localrag import citation, prompt
from localrag.budget import Profile
from localrag.conversation import search_query
from localrag.engine.jobs import SINGLE, Policy, last_event
from localrag.errors import UsageError
from localrag.files import secure_home
from localrag.prompt import CITE, PLAIN, Demand, PromptInputs
from localrag.prompt.measure import begins_with_token
from localrag.question import Question, Search
from localrag.session import recorder, retrieval
from localrag.session.answer import Answer, Bypass, Prepared, bypass, ledger_warnings, outcome, window_warnings
from localrag.session.answerability import UNCALIBRATED, Answerability, Calibration, CalibrationFile
from localrag.session.opening import fits, names_of, open_embedder, open_engine, open_knowledge_bases, open_profile, open_reranker
from localrag.session.pipeline import Event, InFlight, Pipeline, is_free_text, with_calls
from localrag.session.retrieval import DEFAULT_TOP_K, EvidenceFile, EvidenceRule, Retriever, Selection, rule_for, select
from localrag.session.shortening import Shortener
from localrag.session.timing import Plan, TimedReranker, check_seconds, plan
from localrag.settings import Learning, Settings, default_home
from localrag.types import Citation, Completion, Hit, expanded

if TYPE_CHECKING:
    from localrag.engine.engine import Engine
    from localrag.journal import Journal
    from localrag.kb import KnowledgeBase
    from localrag.kb.filters import Where
    from localrag.kb.protocols import Reranker
    from localrag.text.tokens import Embedder


class Session:
    """An open model, the knowledge bases to answer from, and the window shared by prompt and answer.

    `profile` divides the window among the sections of a prompt; `weights` are fields of relevance.Weights; `learning` says which votes
    affect the ranking; `reranker` reorders the best passages. With a `journal`, each answer's ledger is recorded there under `name`, and
    summaries are cached in it; if the journal fails, a warning is added. `policy` says how single questions use the KV cache. `settings`
    are used to open the knowledge bases that a question names (Search.kbs).
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
        policy: Policy = SINGLE,
        settings: Settings | None = None,
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
        self.policy = policy
        self.settings = settings
        self.warnings = window_warnings(self.slot)
        self._shorteners: dict[bool, Shortener] = {}
        self._scope: tuple[str, ...] | None = None
        """Knowledge base names of this session if it is a copy made by `scoped`."""
        self._in_flight: dict[str | int, InFlight] = {}
        self._calibrations: dict[str, Calibration | None] = {}
        self._embedders: dict[tuple[str, ...], Embedder] = {}
        """Embedders by the knowledge bases that questions name, where that of the session does not fit. Copies share them."""
        self._tuned: Search | None = None

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
        """Open a model by name or path (None for the default, "echo" for no file) and knowledge bases by name.

        `kbs` is one name or several. `budget` names a [budgets.NAME] table of models.toml. Without `keep`, nothing is written to the
        journal. `rerank` is "llm", or the name or path of a cross-encoder (see open_reranker). Raises UsageError for an argument of the
        wrong type.
        """
        settings = settings or Settings.from_env()
        secured = secure_home(settings.home, default_home())
        model, chat_template = _name_of(model), None if chat_template is None else Path(chat_template)
        if n_ctx is not None and not isinstance(n_ctx, int):
            raise UsageError(f"n_ctx is a whole number of tokens, not {n_ctx!r}.", hint="Give a number, such as n_ctx=8192.")
        profile, weights = open_profile(budget, settings=settings)
        with ExitStack() as stack:
            knowledge_bases = open_knowledge_bases(names_of(kbs), settings=settings, opened=stack)
            embedder = open_embedder(settings, for_queries=True, kbs=knowledge_bases) if knowledge_bases else None
            reranker = None if rerank in (None, "llm") else open_reranker(settings, rerank)
            engine = open_engine(model, settings=settings, chat_template=chat_template, vocab_only=vocab_only, keep=keep)
            stack.callback(engine.close)
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
                settings=settings,
            )
            stack.pop_all()
        session.warnings += [secured] if secured else []
        if keep:
            session.journal, warnings = recorder.open_journal(settings.home)
            session.warnings += warnings
        return session

    @property
    def num_chunks(self) -> int:
        """Number of chunks in all knowledge bases."""
        return sum(kb.num_chunks for kb in self.knowledge_bases)

    # --- the pipeline ---

    def prepare(self, question: Question | str, *, write: bool = False) -> Prepared:
        """Retrieve evidence, measure, share the window and compose: returns a question's prompt, counted and fitted. Nothing is evaluated,
        except that with `write` the model may write summaries.

        Raises BudgetExceededError if the sections that cannot be cut do not fit, TimeLimitError if the time limit is too short.
        """
        question = _question(question)
        if question.search.kbs not in (None, self._scope):
            with self.scoped(question) as session:
                return session.prepare(question, write=write)
        question = with_calls(question)
        started_at = question.budget.started_at or time.perf_counter()
        query = search_query(question.messages, needs_question=question.needs_question)
        retriever = self.retriever_until(question.budget.max_seconds, started_at)
        unsearched = self.unsearched(question)
        hits, answerability, retrieve_s = self._evidence(question, query, retriever, searches=unsearched is None)
        demand = self.measure(self._inputs(question, self.chosen(question, query, hits)), is_plain=question.is_plain)
        composed, deadline = self._composed(demand, question, retriever, started_at, write=write)
        return Prepared(
            question=question,
            prompt=composed,
            slot=self.slot,
            offered=tuple(expanded(hits)),
            num_chunks=self.num_chunks,
            retrieve_s=retrieve_s,
            deadline=deadline,
            bypass=outcome(unsearched, hits, composed.hits),
            answerability=answerability,
            notes=self._notes(question),
        )

    def _notes(self, question: Question) -> tuple[str, ...]:
        """What the last prompt did otherwise than the template, for tools and their calls."""
        has_calls = question.given.tools or any(message.tool_calls for message in question.messages)
        return self.engine.template.notes if has_calls and not question.is_plain else ()

    def run(self, questions: Iterable[Question | Prepared | None], *, policy: Policy | None = None) -> Iterator[Event]:
        """Answer questions under a policy. Every caller runs its questions through this method.

        Each question yields events: its prompt, the pieces of its answer, and finally the answer or an error. One that fails does not stop
        the others. Under a streaming policy (SERVE), `questions` yields None if none is waiting, and blocks while nothing runs. Under the
        others, questions with `max_seconds` are answered one at a time after the rest of their window of 256. Closing the iterator cancels
        running questions.
        """
        return Pipeline(self, policy or self.policy, self._in_flight).events(questions)

    def ask(
        self,
        question: Question | str,
        *,
        on_text: Callable[[str], None] | None = None,
        on_thought: Callable[[str], None] | None = None,
        keep_partial: bool = False,
    ) -> Answer:
        """Answer a question. `on_text` receives each piece of the answer, `on_thought` each piece of the reasoning before it.

        Raises the errors of `prepare`, and EngineError. The time limit ends the answer with `finish_reason` "time". Ctrl-C raises
        KeyboardInterrupt after the journal has what was written; with `keep_partial`, that is returned with "cancelled".
        """
        answer = self._answer(_question(question), on_text, on_thought)
        if answer.finish_reason == "cancelled" and not keep_partial:
            raise KeyboardInterrupt
        return answer

    def stream(self, question: Question | str) -> Iterator[Event]:
        """Answer a question and yield what happens: its prompt, pieces of thoughts and text, and at last the answer.

        Raises what `ask` raises. Ctrl-C raises KeyboardInterrupt after the last event, which has what was written. Closing the iterator
        cancels the answer.
        """
        with closing(cast("Generator[Event]", self.run([_question(question)]))) as events:
            for event in events:
                if event.error is not None:
                    raise event.error
                if event.question is not None:
                    yield event
                if event.answer is not None and event.answer.finish_reason == "cancelled":
                    raise KeyboardInterrupt

    def answer(
        self,
        prepared: Prepared,
        *,
        on_text: Callable[[str], None] | None = None,
        on_thought: Callable[[str], None] | None = None,
    ) -> Answer:
        """Answer a prompt made by `prepare`; see `ask`."""
        return self._answer(prepared, on_text, on_thought)

    def cancel(self, question_id: str | int) -> None:
        """Cancel a running question. No more events are sent for it, and nothing is recorded. Call it from the thread that runs it."""
        flight = self._in_flight.pop(question_id, None)
        if flight is not None:
            flight.is_dropped = True
            self.engine.cancel(flight.job)

    # --- its steps ---

    def _evidence(
        self, question: Question, query: str, retriever: Retriever, *, searches: bool
    ) -> tuple[list[Hit], Answerability | None, float]:
        """The evidence for a question, how likely it answers the question, and the seconds spent on retrieval."""
        started, loaded_s = time.perf_counter(), self.engine.load_s
        searches = searches and bool(query)
        before = retrieval.asked_before(question.messages) if searches else []
        hits, answerability = retriever.assessed(question, query, top_k=self.rule_for(question).top_k, before=before, searches=searches)
        return (
            hits,
            answerability,
            time.perf_counter() - started - (self.engine.load_s - loaded_s),
        )  # not counting a context made for reranking

    def rule_for(self, question: Question) -> EvidenceRule:
        """How much evidence to send with a question."""
        if self._tuned is None:
            home = None if self.settings is None else self.settings.home
            self._tuned = EvidenceFile(home).search_for(self.engine.info) or Search()
        return rule_for(question.search, self.engine.info, self._tuned)

    def chosen(self, question: Question, query: str, hits: Sequence[Hit]) -> Selection:
        """What to send of the hits that `query` retrieved, each text once. Hits given with the question are not chosen from, nor is piped
        text.
        """
        if question.given.hits is not None:
            left_out = question.given.left_out
            return Selection(list(hits) if left_out is not None else retrieval.distinct(hits), dict(left_out or {}))
        hits = retrieval.distinct(hits)
        piped = [hit for hit in hits if not hit.chunk.kb]
        searched = [hit for hit in hits if hit.chunk.kb]
        selection = select(searched, query, self.rule_for(question), self.engine.counter)
        return replace(selection, hits=[*piped, *selection.hits])

    def _inputs(self, question: Question, selection: Selection) -> PromptInputs:
        content, thread, is_timed = question.given, question.thread, question.budget.max_seconds is not None
        max_tokens = question.sampling.max_tokens
        think_tokens = 0 if is_timed else self._room_to_think(question)  # reasoning without an answer is useless
        form = self.engine.template.thinking if think_tokens else None
        is_enforceable = form is None or begins_with_token(form, self.engine.tokenizer)
        has_logprobs = question.sampling.logprobs is not None  # copied tokens have none
        quotes = question.quote and is_free_text(question) and is_enforceable and not has_logprobs
        return PromptInputs(
            messages=question.messages,
            needs_question=question.needs_question,
            pinned=thread.pinned,
            settled=thread.settled,
            earlier=thread.earlier,
            again=thread.again,
            hits=selection.hits,
            left_out=selection.left_out,
            tools=content.tools,
            must_call=content.must_call,
            memories=content.memories,
            attachments=content.attachments,
            max_tokens=prompt.ANSWER_BASIS if max_tokens is None and is_timed else max_tokens,
            think_tokens=think_tokens,
            profile=self.profile_of(question),
            cite=_instruction(question, quotes=quotes and bool(selection.hits)),
            quotes=quotes,
        )

    def _room_to_think(self, question: Question) -> int:
        """Tokens for thoughts. Before calls, the engine must see where thoughts end, since the grammar of calls begins there."""
        form = self.engine.template.thinking if question.calls is not None else None
        if form is None:
            return question.sampling.room_to_think
        is_seen = bool(form.closes) and begins_with_token(form, self.engine.tokenizer)
        return question.sampling.think_tokens if is_seen and question.sampling.logprobs is None else 0

    def measure(self, inputs: PromptInputs, *, is_plain: bool = False) -> Demand:
        """Measure the demand of each section in tokens of this model. `is_plain` skips the model's template."""
        return prompt.measure(inputs, counter=self.engine.counter, template=PLAIN if is_plain else self.engine.template)

    def _answer(
        self, question: Question | Prepared, on_text: Callable[[str], None] | None, on_thought: Callable[[str], None] | None
    ) -> Answer:
        answer = last_event(self.run([question]), self.engine.cancel_all, on_text=on_text, on_thought=on_thought).answer
        assert answer is not None, "it is the last event"
        return answer

    def compose(self, demand: Demand) -> prompt.Prompt:
        """Compose the prompt for this window, without a time limit. No summaries are written for it."""
        return prompt.compose(demand, demand.share(self.slot.n_ctx), self._shortening(write=False))

    def _composed(
        self, demand: Demand, question: Question, retriever: Retriever, started_at: float, *, write: bool
    ) -> tuple[prompt.Prompt, float | None]:
        """The prompt, and when its answer must end on the clock of time.perf_counter()."""
        max_seconds = question.budget.max_seconds
        shortening = self._shortening(write=write and max_seconds is None)
        if max_seconds is None:
            return prompt.compose(demand, demand.share(self.slot.n_ctx), shortening), None
        is_skipped = isinstance(retriever.reranker, TimedReranker) and retriever.reranker.is_skipped
        planned = self._plan(demand, max_seconds, started_at, skipped=("rerank",) if is_skipped else ())
        composed = prompt.compose(
            demand, planned.budget, shortening, window=self.slot.n_ctx, time=planned.time, answer_limit=planned.answer_limit
        )
        return composed, started_at + planned.time.max_seconds

    def finish(self, prepared: Prepared, completion: Completion) -> Answer:
        """Turn a completion into an answer: check its citations and record it in the journal."""
        question = prepared.question
        question_text = search_query(question.messages, needs_question=question.needs_question) or question.messages[-1].content
        answer = self.to_answer(prepared, completion)
        warnings = retrieval.none_passes(self.knowledge_bases, question.search.where, prepared.offered)
        if question.given.hits is None and not answer.abstained:
            warnings += retrieval.left_unread(answer, question_text)
        if question.unanswerable in ("say", "error") and self.embedder is not None and self._calibration is None:
            warnings.append(UNCALIBRATED)
        warnings += recorder.keep(
            answer,
            question=question_text,
            session=self.name,
            journal=self.journal,
            knowledge_bases=self.knowledge_bases,
            profile=self.profile_of(question),
            engine=self.engine,
        )
        return replace(answer, warnings=(*answer.warnings, *warnings))

    def retrieve(self, question: str, *, top_k: int = DEFAULT_TOP_K, where: Where | None = None) -> list[Hit]:
        """The best passages of all knowledge bases, best first. See Retriever.search."""
        return self.retriever.search(question, top_k=top_k, where=where)

    @property
    def retriever(self) -> Retriever:
        """The search over this session's knowledge bases."""
        return Retriever(
            knowledge_bases=self.knowledge_bases,
            embedder=self.embedder,
            learning=self.learning,
            reranker=self.reranker,
            counter=self.engine.counter,
            n_ctx=self.slot.n_ctx,
            weights=self.weights,
            calibration=self._calibration,
        )

    @property
    def _calibration(self) -> Calibration | None:
        """The calibration for the embedder; None if it has none."""
        if self.embedder is None:
            return None
        fingerprint = self.embedder.fingerprint
        if fingerprint not in self._calibrations:
            home = None if self.settings is None else self.settings.home
            self._calibrations[fingerprint] = CalibrationFile(home).calibration(fingerprint)
        return self._calibrations[fingerprint]

    @contextmanager
    def scoped(self, question: Question) -> Iterator[Session]:
        """This session, or a copy with the knowledge bases that the question names. They stay open within the block."""
        names = question.search.kbs
        if names is None or names == self._scope:
            yield self
            return
        settings = self.settings or Settings.from_env()
        with ExitStack() as stack:
            session = copy.copy(self)
            session._scope = names  # noqa: SLF001  # a copy of itself
            session.knowledge_bases = tuple(open_knowledge_bases(names, settings=settings, opened=stack))
            if names and not fits(self.embedder, session.knowledge_bases):
                session.embedder = self._other_embedder(names, session.knowledge_bases, settings)
            yield session

    def _other_embedder(self, names: tuple[str, ...], kbs: Sequence[KnowledgeBase], settings: Settings) -> Embedder:
        """Return the embedder of knowledge bases, kept for the next question unless they have been embedded again since."""
        kept = self._embedders.get(names)
        if kept is None or not fits(kept, kbs):
            kept = self._embedders[names] = open_embedder(settings, for_queries=True, kbs=kbs)
        if self.embedder is None:
            self.embedder = kept
        return kept

    def documents_of(self, hits: Sequence[Hit]) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """Map each hit's label to the id and metadata of its document. Documents deleted since are left out."""
        documents: dict[str, tuple[str, Mapping[str, Any]]] = {}
        for kb in self.knowledge_bases:
            own = [hit for hit in hits if hit.chunk.kb == kb.name]
            names = kb.texts.names([hit.chunk.document_id for hit in own])
            documents |= {hit.label: names[hit.chunk.document_id] for hit in own if hit.chunk.document_id in names}
        return documents

    def unsearched(self, question: Question) -> Bypass | None:
        """Why a question skips the search; None if it does not."""
        return bypass(question.messages, has_kb=bool(self.knowledge_bases), has_tools=bool(question.given.tools))

    def profile_of(self, question: Question) -> Profile:
        """The budget profile for a question."""
        profile, budget = self.profile, question.budget
        if budget.context_ratio is not None:
            profile = profile.with_context_ratio(budget.context_ratio)
        elif question.search.top_k is not None:
            profile = profile.with_spare_for_evidence()
        for overflow, section in budget.overflow:
            profile = profile.with_overflow(overflow, section)
        error = self.engine.count_error
        if error and isinstance(profile.gap, int):  # counts are estimates: reserve their possible error
            profile = replace(profile, gap=max(profile.gap, math.ceil(self.slot.n_ctx * error / (1 + error))))
        return profile

    def _shortening(self, *, write: bool) -> prompt.Shortening:
        def make() -> prompt.Shortening:
            if write not in self._shorteners:
                self._shorteners[write] = Shortener(self.engine, self.journal, window=self.slot.n_ctx, write=write)
            return self._shorteners[write].for_prompt()

        return prompt.Shortening.made_by(make)

    def retriever_until(self, max_seconds: float | None, begun: float) -> Retriever:
        """The retriever, with its reranker bound to the time limit, if any. Raises UsageError for an invalid limit."""
        retriever = self.retriever
        if max_seconds is None:
            return retriever
        check_seconds(max_seconds)
        if retriever.reranker is None:
            return retriever
        self.engine.measure_speed()  # a model that reranks needs it to predict whether it can finish
        return replace(retriever, reranker=TimedReranker(retriever.reranker, begun + max_seconds))

    def _plan(self, demand: Demand, max_seconds: float, started_at: float, *, skipped: tuple[str, ...]) -> Plan:
        self.engine.measure_speed()
        left_s = started_at + max_seconds - time.perf_counter()
        planned = plan(demand, self.slot.n_ctx, self.engine.speed, max_seconds=max_seconds, left_s=left_s)
        return replace(planned, time=replace(planned.time, skipped=skipped))

    def to_answer(self, prepared: Prepared, completion: Completion) -> Answer:
        """Turn a completion into an answer with its citations checked. Nothing is recorded."""
        composed = prepared.prompt
        num_answered = completion.completion_tokens - completion.reasoning_tokens
        ledger = composed.ledger.with_used("answer", num_answered, copied=completion.copied_tokens)
        if prepared.abstains:
            ledger = ledger.unsent()
        elif composed.thinking is not None:
            ledger = ledger.with_used("thinking", completion.reasoning_tokens)
        load_s = self.engine.take_load_s()
        overhead_s = load_s + prepared.retrieve_s
        timings = replace(
            completion.timings,
            load_s=load_s,
            retrieve_s=prepared.retrieve_s,
            first_token_s=completion.timings.first_token_s + overhead_s,
            total_s=completion.timings.total_s + overhead_s,
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
            quotes=None if composed.quotable is None else composed.quotable.quotes(completion.text, completion.copied),
            copied_tokens=completion.copied_tokens,
            chunks_in_kb=prepared.num_chunks,
            timings=timings,
            memory=self.engine.memory_plan,
            reasoning=completion.reasoning.strip(),
            reasoning_tokens=completion.reasoning_tokens,
            logprobs=completion.logprobs,
            bypass=prepared.bypass,
            rewriting=prepared.rewriting,
            answerability=prepared.answerability,
            abstained=prepared.abstains,
            embedder=self.embedder if any("semantic" in hit.scores for hit in prepared.offered) else None,
            warnings=(*self.warnings, *ledger_warnings(ledger), *prepared.notes),
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
    citations = citation.cite(completion.text, hits, is_cut=completion.finish_reason != "stop", notes=files)
    return citations if composed.quotable is None else _of_passages(citations, {hit.label for hit in hits})


def _of_passages(citations: Iterable[Citation], labels: Collection[str]) -> list[Citation]:
    """Count the tag of a sentence, `KB#12.3`, as a citation of its passage."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for each in citations:
        passage, _, _ = each.label.rpartition(".")
        spans.setdefault(passage if passage in labels else each.label, []).extend(each.spans)
    return [Citation(label, label in labels, tuple(sorted(places))) for label, places in spans.items()]


def _instruction(question: Question, *, quotes: bool) -> str:
    if question.cite_instruction is not None:
        return question.cite_instruction
    if not quotes:
        return CITE
    from localrag.prompt.quotes import QUOTE  # noqa: PLC0415  # weight: few answers quote

    return QUOTE


def _question(question: Question | str) -> Question:
    return question if isinstance(question, Question) else Question.of(question)


def _name_of(model: object) -> str | None:
    if model is None or isinstance(model, str | Path):
        return None if model is None else str(model)
    message = f"A model is given by its name or path, not by {type(model).__name__}."
    raise UsageError(message, hint='Session.open("echo") needs no model.')
