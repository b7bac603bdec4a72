"""A conversation over a session, with the echo engine: what is kept, what is sent again, what gives way."""

import itertools
import os
import random
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.echo import EchoRunner, open_echo
from localrag.engine.prefix_disk_cache import PrefixDiskCache, PrefixStore
from localrag.errors import BudgetExceededError, InterruptedRunError, UsageError
from localrag.journal import Journal
from localrag.kb import KnowledgeBase
from localrag.question import Question
from localrag.session import Session
from localrag.session.chat import Chat
from localrag.session.history_window import HistoryWindow
from localrag.types import Chunk, Hit, SamplingParams
from tests.engine.test_prefix_store import IDENTITY
from tests.kb.hash_embedder import HashEmbedder

SHORT = SamplingParams(max_tokens=40)
NUM_TURNS = int(os.environ.get("LOCALRAG_TEST_TURNS", "200"))  # 500 fitted too


@pytest.fixture
def journal(tmp_path):
    with Journal.open(tmp_path) as opened:
        yield opened


def chat_in(journal, name="talk", *, n_ctx=4096, system="Be brief."):
    kept = journal.conversations
    row = kept.named(name)
    session = Session(open_echo(), n_ctx=n_ctx, journal=journal, name=name)
    return Chat(session, journal, row.id if row else kept.create(name, {}), system=system)


def passage(number, text=""):
    text = text or f"Passage number {number} says that {number} is a number. " * 3
    return Hit(Chunk(number, 1, number, text, 0, len(text), "book.md", kb="book"), 1.0 / number)


def prompt_text(chat, prepared):
    pieces = chat.session.engine.tokenizer
    return b"".join(pieces.piece(token) for token in prepared.prompt.token_ids).decode("utf-8", "replace")


def check(answer, n_ctx):
    """The promises of every answer."""
    assert sum(entry.used for entry in answer.ledger.entries if entry.name != "answer") == answer.prompt_tokens
    assert answer.prompt_tokens + answer.ledger.entry("answer").allotted <= n_ctx


def test_a_turn_goes_on_from_the_very_end_of_the_last_answer(journal):
    chat = chat_in(journal)
    before = chat.say(Question.of("What is PLA made of?", sampling=SHORT))
    after = chat.say(Question.of("And what is PETG?", sampling=SHORT))
    whole = len(before.prompt.token_ids) + before.completion_tokens
    assert whole - 3 <= after.cached_tokens <= whole
    assert before.text in prompt_text(chat, chat.prepare(Question.of("x", sampling=SamplingParams(max_tokens=10))))


def test_a_passage_is_given_once_and_named_when_it_matters_again(journal):
    chat = chat_in(journal)
    first = chat.say(Question.of("Which?", sampling=SHORT, hits=[passage(1), passage(2)]))
    again = chat.prepare(Question.of("And?", sampling=SHORT, hits=[passage(2), passage(3)]))
    text = prompt_text(chat, again)
    assert [hit.label for hit in again.prompt.hits] == ["KB#3"]
    assert [hit.label for hit in again.prompt.earlier] == ["KB#1", "KB#2"]
    assert (text.count("[KB#2] Passage number 2"), text.count("[KB#3] Passage")) == (1, 1)
    assert "See also [KB#2] above." in text
    assert list(again.prompt.token_ids)[: len(first.prompt.token_ids)] == list(first.prompt.token_ids)


def test_a_text_that_was_given_under_another_label_is_named_and_not_given_again(journal):
    chat = chat_in(journal)
    chat.say(Question.of("Which?", sampling=SHORT, hits=[passage(1), passage(2)]))
    copy = passage(7, passage(2).chunk.text.upper())
    again = chat.prepare(Question.of("And?", sampling=SHORT, hits=[copy, passage(3), passage(8, passage(3).chunk.text)]))
    assert [hit.label for hit in again.prompt.hits] == ["KB#3"]
    entry = again.prompt.ledger.entry("evidence")
    assert entry.omitted_reasons == {"KB#7": "identical to KB#2", "KB#8": "identical to KB#3"}
    assert sorted(entry.omitted) == ["KB#7", "KB#8"]
    assert "See also [KB#2] above." in prompt_text(chat, again)
    only = chat.prepare(Question.of("And?", sampling=SHORT, hits=[copy]))
    assert only.bypass is None
    assert only.prompt.ledger.entry("evidence").omitted == ("KB#7",)


@pytest.mark.model
def test_a_follow_up_is_searched_for_with_the_question_before_it(journal, handbook, embedder):
    with closing(open_echo()) as engine:
        session = Session(engine, knowledge_bases=[handbook], embedder=embedder, journal=journal)
        session.engine.share_contexts()
        chat = Chat.of(session, "talk")
        chat.say(Question.of("Is polycarbonate safe for food?", sampling=SHORT))
        prepared = chat.prepare(Question.of("What is it made from?", sampling=SHORT))
        texts = [hit.chunk.text for hit in (*prepared.prompt.hits, *prepared.prompt.earlier)]
        assert any("bisphenol A" in text for text in texts)
        for hit in prepared.prompt.hits:
            assert hit.score == sum(hit.contributions.values())
            assert hit.contributions.keys() <= {"question", "with the one before"}
        alone = chat.prepare(Question.of("At which nozzle temperature is ASA printed on a heated bed?", sampling=SHORT))
        assert all(hit.contributions.keys() <= {"semantic", "keyword", "votes"} for hit in alone.prompt.hits)


def test_a_citation_of_an_earlier_passage_is_supplied(journal):
    chat = chat_in(journal)
    chat.say(Question.of("Which?", sampling=SHORT, hits=[passage(1)]))
    answer = chat.say(Question.of("[KB#1] or [KB#9]?", sampling=SHORT))  # the echo repeats its question
    assert [(each.label, each.supplied) for each in answer.citations] == [("KB#1", True), ("KB#9", False)]


def test_passages_of_earlier_turns_can_be_quoted_where_their_sentences_were_numbered(journal):
    chat = chat_in(journal)
    chat.say(Question.of("Which?", sampling=SHORT, hits=[passage(1)], quote=True))
    chat.say(Question.of("And?", sampling=SHORT, hits=[passage(2)]))
    ready = chat.prepare(Question.of("Now?", sampling=SHORT, hits=[passage(1), passage(2), passage(3)], quote=True))
    assert {hit.label for hit in ready.prompt.earlier} == {"KB#1", "KB#2"}
    assert {label: len(spans) for label, spans in ready.prompt.quotable.spans.items()} == {"KB#1": 3, "KB#3": 3}


def test_passages_that_take_too_much_of_the_window_leave_the_prompt_and_are_given_anew(journal):
    chat = chat_in(journal, n_ctx=2048)
    for number in range(1, 40):
        hits = [passage(number), passage(number + 1)]
        answer = chat.say(Question.of(f"Question {number}?", sampling=SHORT, hits=hits))
        check(answer, 2048)
        shown = {hit.label for hit in (*answer.prompt.hits, *answer.prompt.earlier)}
        assert {hit.label for hit in hits} <= shown
        carried = HistoryWindow.of(chat.turns).carrying(chat.turns[:-1])
        assert sum(chat.session.engine.counter(chat.turns[at].sent) for at in carried) <= 1024


def test_a_tag_that_means_another_passage_now_does_not_stand_for_the_old_one(journal):
    chat = chat_in(journal)
    chat.say(Question.of("Which?", sampling=SHORT, hits=[passage(1), passage(2)]))
    other = passage(1, "Something else altogether, of a knowledge base that was made anew.")
    answer = chat.say(Question.of("And?", sampling=SHORT, hits=[other]))
    assert [hit.chunk.text for hit in (*answer.prompt.hits, *answer.prompt.earlier)] == [other.chunk.text]
    assert "Passage number 1" not in prompt_text(chat, chat.prepare(Question.of("Then?", sampling=SHORT)))


def test_the_conversation_comes_back_with_its_passages(journal):
    chat = chat_in(journal)
    chat.say(Question.of("Which?", sampling=SHORT, hits=[passage(1)]))
    chat.say(Question.of("And?", sampling=SHORT))
    chat.pin(1)
    back = chat_in(journal)
    assert [(turn.question, turn.answer, turn.is_pinned, turn.hits) for turn in back.turns] == [
        (turn.question, turn.answer, turn.is_pinned, turn.hits) for turn in chat.turns
    ]
    both = [each.prepare(Question.of("Then?", sampling=SHORT)).prompt.token_ids for each in (chat, back)]
    assert both[0] == both[1]


def test_what_was_kept_of_a_turn_and_cannot_be_read_costs_no_conversation(journal):
    chat = chat_in(journal)
    chat.say(Question.of("Which?", sampling=SHORT, hits=[passage(1)]))
    for about in ('{"hits": [{"id": 1}], "sent": "x"}', '{"hits": 3}', '{"hits": [{"score": "much"}]}'):
        journal._db.execute("UPDATE turns SET about = ?", (about,))
        (turn,) = chat_in(journal).turns
        assert (turn.question, turn.hits, turn.sent) == ("Which?", (), "")


@pytest.mark.long
def test_hundreds_of_turns_in_a_small_window(journal):
    chat = chat_in(journal, n_ctx=2048)
    pinned = {3: "My name is Ada and I print with a bed of 60 °C.", NUM_TURNS // 2: "Remember the number 4711."}
    covered_any = False
    for number in range(1, NUM_TURNS + 1):
        question = pinned.get(number, f"Question {number}: what about {random.Random(number).choice(['beds', 'nozzles', 'resin'])}? " * 4)
        answer = chat.say(Question.of(question, sampling=SHORT))
        check(answer, 2048)
        if number in pinned:
            chat.pin(number)
        entries = {entry.name: entry for entry in answer.ledger.entries}
        if "summary" in entries:
            covered_any = True
            omitted = set(entries["history"].omitted)
            assert set(entries["summary"].covered) <= omitted  # it says which messages it stands for
            assert chat.forgotten(answer.ledger).summarised
    assert covered_any
    text = prompt_text(chat, chat.prepare(Question.of("Who am I?", sampling=SHORT)))
    assert all(said in text for said in pinned.values())


def test_pinned_turns_that_fill_the_window_are_an_error_with_numbers(journal):
    chat = chat_in(journal, n_ctx=512)
    chat.say(Question.of("word " * 40, sampling=SHORT))
    chat.pin(1)
    with pytest.raises(BudgetExceededError, match="pinned"):
        chat.say(Question.of("more " * 80, sampling=SHORT))
    assert [turn.question for turn in chat.turns] == [("word " * 40)]
    chat.pin(1, is_pinned=False)
    chat.say(Question.of("more " * 30, sampling=SHORT))


def test_a_conversation_whose_pinned_turns_fill_a_smaller_window_can_be_opened_and_mended(journal, tmp_path):
    chat = chat_in(journal)
    chat.say(Question.of("word " * 40, sampling=SHORT))
    chat.pin(1)
    back = chat_in(journal, n_ctx=256)
    back.session.engine.prefix_cache = PrefixDiskCache(
        lambda _: PrefixStore(tmp_path / "prefixes", IDENTITY, max_bytes=10**7), bytes_per_token=1
    )
    back.recall(Question.of("?", sampling=SHORT))
    assert not back.forgets(Question.of("?", sampling=SHORT))
    with pytest.raises(BudgetExceededError, match="pinned"):
        back.say(Question.of("Now?", sampling=SHORT))
    back.pin(1, is_pinned=False)
    check(back.say(Question.of("Now?", sampling=SHORT)), 256)


def test_undo_fork_and_turns_that_are_not_there(journal):
    chat = chat_in(journal)
    for question in ("one", "two", "three"):
        chat.say(Question.of(question, sampling=SHORT))
    fork = Chat(chat.session, journal, chat.fork(2, "fork"), system="")
    assert [turn.question for turn in chat.undo(2)] == ["two", "three"]
    assert [turn.question for turn in fork.turns] == ["one", "two"]
    assert [turn.question for turn in chat_in(journal).turns] == ["one"]
    for wrong in (0, 2, -2, 9):
        with pytest.raises(UsageError, match="no turn"):
            chat.turn(wrong)
    with pytest.raises(UsageError, match="Cannot undo"):
        chat.undo(2)


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_was_written(journal):
    chat = chat_in(journal)

    def stop(_):
        chat.session.engine.cancel_all()

    answer = chat.say(Question.of("A question that is long enough to be stopped in the middle", sampling=SHORT), on_text=stop)
    assert answer.finish_reason == "cancelled"
    (turn,) = chat_in(journal).turns
    assert (turn.state, turn.answer) == ("stopped", answer.text)
    chat.say(Question.of("Go on.", sampling=SHORT))


def test_a_question_that_failed_is_asked_again_with_the_next(journal):
    chat = chat_in(journal)

    def fail(_):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        chat.say(Question.of("First?", sampling=SHORT), on_text=fail)
    assert chat.turns[0].state == "stopped"  # something was written
    journal._db.execute("UPDATE turns SET answer = '', state = 'failed'")
    back = chat_in(journal)
    assert back.say(Question.of("Second?", sampling=SHORT)).prompt_tokens
    assert "First?" in prompt_text(back, back.prepare(Question.of("x", sampling=SamplingParams(max_tokens=5))))


def interrupted(_):
    raise InterruptedRunError("Interrupted.")


@pytest.mark.parametrize("stop", [interrupted, lambda _: (_ for _ in ()).throw(KeyboardInterrupt)])
def test_a_question_that_is_stopped_before_its_answer_begins_stays(journal, tmp_path, stop):
    chat = chat_in(journal)
    chat.say(Question.of("What is a computer?", sampling=SHORT))
    with pytest.raises((InterruptedRunError, KeyboardInterrupt)):
        chat.say(Question.of("Which plastic lasts outdoors?", sampling=SHORT), on_prepared=stop)
    for each in (chat, chat_in(journal)):
        assert [(turn.question, turn.answer, turn.state) for turn in each.turns[1:]] == [("Which plastic lasts outdoors?", "", "stopped")]
        text = prompt_text(each, each.prepare(Question.of("And indoors?", sampling=SHORT)))
        assert text.index("What is a computer?") < text.index("Which plastic lasts outdoors?") < text.index("And indoors?")
    for name, text in (("plastics", "ASA is a plastic that lasts outdoors."), ("computers", "A computer adds numbers.")):
        (tmp_path / f"{name}.md").write_text(text)
    with KnowledgeBase.open(tmp_path / "kb", "notes", create=True) as kb:
        kb.ingest([tmp_path], HashEmbedder())
        chat.session.knowledge_bases, chat.session.embedder = (kb,), HashEmbedder()
        answer = chat.say(Question.of("And indoors?", sampling=SHORT))
    check(answer, 4096)
    assert answer.offered[0].chunk.source.endswith("plastics.md")
    assert len(chat_in(journal).turns) == 3


def test_a_question_that_is_stopped_while_its_prompt_is_read_stays(journal):
    class Stopping(EchoRunner):
        """Somebody presses Ctrl-C while the prompt is evaluated."""

        def decode(self, _entries):
            engine.cancel_all()
            return False

    engine = open_echo()
    engine._backend.make_runner = Stopping
    session = Session(engine, n_ctx=4096, journal=journal)
    stopped = Chat.of(session, "talk").say(Question.of("Which plastic lasts outdoors?", sampling=SHORT))
    assert (stopped.finish_reason, stopped.text) == ("cancelled", "")
    back = chat_in(journal)
    assert [(turn.question, turn.state) for turn in back.turns] == [("Which plastic lasts outdoors?", "stopped")]
    assert "Which plastic lasts outdoors?" in prompt_text(back, back.prepare(Question.of("And indoors?", sampling=SHORT)))


def test_a_question_that_does_not_fit_does_not_stay(journal):
    chat = chat_in(journal, n_ctx=512)
    with pytest.raises(BudgetExceededError):
        chat.say(Question.of("Why? " * 200, sampling=SHORT))
    assert (chat.turns, chat_in(journal, n_ctx=512).turns) == ([], [])
    assert chat.say(Question.of("Why?", sampling=SHORT)).text == "You asked: Why?"


def test_a_stopped_question_that_leaves_no_room_for_the_next_is_an_error_that_says_so(journal):
    chat = chat_in(journal, n_ctx=512)
    with pytest.raises(InterruptedRunError):
        chat.say(Question.of("Why? " * 70, sampling=SHORT), on_prepared=interrupted)
    with pytest.raises(BudgetExceededError) as raised:
        chat.say(Question.of("Why not? " * 10, sampling=SHORT))
    assert "/undo" in raised.value.hint
    chat.undo()
    assert chat.say(Question.of("Why not? " * 10, sampling=SHORT)).text


def test_sources_of_a_question_without_an_answer_are_given_anew(journal):
    chat = chat_in(journal)
    silent = chat.say(Question.of("Which?", sampling=SamplingParams(max_tokens=40, stop=("You",)), hits=[passage(1)]))  # the echo begins so
    assert (silent.text, [hit.label for hit in silent.hits]) == ("", ["KB#1"])
    for each in (chat, chat_in(journal)):
        again = each.prepare(Question.of("Which one?", sampling=SHORT, hits=[passage(1)]))
        assert [hit.label for hit in again.prompt.hits] == ["KB#1"]
        assert "See also" not in prompt_text(each, again)


def test_looking_ahead_names_what_is_left_out(journal):
    chat = chat_in(journal, n_ctx=1024)
    for number in itertools.count(1):
        chat.say(Question.of(f"Question {number}? " * 8, sampling=SHORT))
        if forgotten := chat.forgets(Question.of("?", sampling=SHORT)):
            break
    numbers = (*forgotten.summarised, *forgotten.left_out)
    assert 1 in numbers
    assert max(numbers) < number


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whatever_is_done_every_prompt_fits(tmp_path_factory, data):
    with Journal.open(tmp_path_factory.mktemp("any")) as journal:
        n_ctx = data.draw(st.sampled_from([512, 1024, 3000]))
        chat = chat_in(journal, n_ctx=n_ctx, system=data.draw(st.sampled_from(["", "Be brief."])))
        for _ in range(data.draw(st.integers(1, 12))):
            action = data.draw(st.sampled_from(["say", "say", "say", "stop", "pin", "unpin", "undo", "reload"]))
            if action == "say":
                question = data.draw(st.text(min_size=1, max_size=60)).strip() or "?"
                hits = [passage(number) for number in data.draw(st.lists(st.integers(1, 9), max_size=4, unique=True))]
                try:
                    check(chat.say(Question.of(question, sampling=SHORT, hits=hits)), n_ctx)
                except BudgetExceededError:
                    assert any(turn.is_pinned or not turn.is_answered for turn in chat.turns)
            elif action == "stop":
                with pytest.raises((InterruptedRunError, BudgetExceededError)):
                    chat.say(Question.of("Stop?", sampling=SHORT), on_prepared=interrupted)
            elif action == "reload":
                chat = chat_in(journal, n_ctx=n_ctx, system=chat.system)
            elif chat.turns:
                if action == "undo":
                    chat.undo(data.draw(st.integers(1, len(chat.turns))))
                else:
                    chat.pin(data.draw(st.integers(1, len(chat.turns))), is_pinned=action == "pin")
