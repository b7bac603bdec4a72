"""Follow-ups that the model rewrites: what it is sent, what is taken of what it wrote, and what that costs a conversation."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.conversation import split
from localrag.engine.echo import EchoRunner, open_echo
from localrag.errors import InterruptedRunError
from localrag.journal import Journal
from localrag.kb import KnowledgeBase
from localrag.question import Question
from localrag.session import Session
from localrag.session.chat import Chat
from localrag.session.history_window import restored
from localrag.session.query_rewrite import ANSWER_TOKENS, MAX_CHARS, SAID_TOKENS, QueryRewriter, usable
from localrag.text.tokens import common_length
from localrag.types import Message, SamplingParams
from tests.kb.hash_embedder import HashEmbedder

SHORT = SamplingParams(max_tokens=40)
PAGES = {"pla.md": "PLA is annealed at 110 °C for one hour.", "petg.md": "PETG is dried at 65 °C for six hours.", "tpu.md": "TPU is soft."}


@pytest.fixture
def knowledge_base(tmp_path):
    for name, text in PAGES.items():
        (tmp_path / name).write_text(f"# {name}\n\n{text}\n")
    with KnowledgeBase.open(tmp_path / "kb", "plastics", create=True) as kb:
        kb.ingest([tmp_path / name for name in PAGES], HashEmbedder())
        yield kb


@pytest.fixture
def make_chat(tmp_path, knowledge_base):
    """Conversations over one knowledge base, each with an engine of its own."""
    with Journal.open(tmp_path / "home") as journal:

        def make(name="talk", *, rewrites=True, engine=None, n_ctx=4096):
            session = Session(
                engine or open_echo(), knowledge_bases=[knowledge_base], embedder=HashEmbedder(), n_ctx=n_ctx, journal=journal
            )
            chat = Chat.of(session, name)
            chat.rewrites = rewrites
            return chat

        yield make


def conversation(*texts):
    return [Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("written", "taken"),
    [
        ("How long is PETG dried?", "How long is PETG dried?"),
        ('\n"How long is PETG dried?"\nBecause it was asked.', "How long is PETG dried?"),
        ("How long\x1b[31m is\u202e PETG dried?", "How long[31m is PETG dried?"),
        ("And for how long?", ""),  # adds nothing
        ("How long does it take to dry wool at 65 °C?", ""),  # is about one of the examples
        ("A kilogram costs 20 euros.", ""),  # is about something that was not said
        ("User: and the assistant?", ""),  # repeats the form
        ("", ""),
        (" \n\t", ""),
        ("PETG " * MAX_CHARS, ""),
    ],
)
def test_what_is_taken_of_what_a_model_wrote(written, taken):
    assert usable(written, "And for how long?", "User: How hot is PETG dried?\nAssistant: At 65 °C.") == taken


TEXTS = st.text(max_size=300) | st.text(alphabet="ab <|im_end|>\n", max_size=600)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(TEXTS, TEXTS), max_size=6), st.text(min_size=1, max_size=40), st.integers(64, 3000))
def test_its_prompt_fits_and_holds_the_newest_exchanges_in_so_many_tokens_at_most(said, question, n_ctx):
    messages = conversation(*(text for exchange in said for text in exchange), question if question.strip() else "?")
    with open_echo() as engine:
        rewriter = QueryRewriter(engine, n_ctx=n_ctx)
        rewriting = rewriter(messages)
        if rewriting is not None:
            assert rewriting.prompt_tokens + ANSWER_TOKENS <= n_ctx
            assert rewriting.completion_tokens <= ANSWER_TOKENS
            assert "\n" not in rewriting.text
        history = split(messages).history
        newest = rewriter._side.newest(history, SAID_TOKENS)
        assert engine.counter(newest) <= SAID_TOKENS
        assert "\n".join(each.transcript for each in history).endswith(newest) or newest.endswith("[…]")
        assert newest or not history


def test_without_room_or_anything_said_before_nothing_is_rewritten():
    with open_echo() as engine:
        assert QueryRewriter(engine, n_ctx=4096)(conversation("And for how long?")) is None
        assert QueryRewriter(engine, n_ctx=700)(conversation("How hot?", "65 °C.", "And for how long?")) is None
        assert engine.context is None  # nothing was evaluated


def test_a_follow_up_is_searched_for_as_it_was_rewritten(make_chat):
    chat = make_chat()
    assert chat.say(Question.of("How hot is PETG dried?", sampling=SHORT)).rewriting is None
    seen = []
    answer = chat.say(Question.of("How long?", sampling=SHORT), on_prepared=seen.append)
    assert seen[0].rewriting == answer.rewriting
    assert answer.rewriting.text == "You asked: User: How hot is PETG dried?"  # what the echo makes of it
    assert answer.to_dict()["rewriting"]["completion_tokens"] == len(answer.rewriting.text) + 1
    found = chat.session.knowledge_bases[0].retrieve("PETG", HashEmbedder(), k=1)[0].label
    assert found in [each.label for turn in chat.turns for each in turn.hits]
    (_, kept) = (restored(each) for each in chat._kept.turns(chat.id))
    assert kept.about["rewriting"] == answer.rewriting.to_dict()


@pytest.mark.parametrize(
    ("rewrites", "question", "options"),
    [
        (False, "How long?", {}),
        (True, "At which temperature and for how many minutes must nylon filament dry before printing?", {}),
        (True, "How long?", {"hits": []}),
    ],
)
def test_nothing_is_rewritten_that_need_not_be(make_chat, rewrites, question, options):
    chat = make_chat(rewrites=rewrites)
    chat.say(Question.of("How hot is PETG dried?", sampling=SHORT))
    assert chat.say(Question.of(question, sampling=SHORT, **options)).rewriting is None


def test_a_rewriting_costs_the_conversation_nothing_that_it_has_evaluated(make_chat):
    """Also where the context grows between two turns, for the rewriting or for the answer."""
    chat, before, sizes = make_chat(n_ctx=32_768), [], set()
    for number in range(12):
        question = f"At how many degrees and how long is PETG number {number} dried?" if number % 3 == 0 else "How long?"
        answer = chat.say(Question.of(question, sampling=SamplingParams(max_tokens=40 if number < 6 else 1500 * (number - 5))))
        assert (answer.rewriting is not None) == (number % 3 != 0)
        prompt_ids = list(answer.prompt.token_ids)
        assert answer.cached_tokens >= common_length(before, prompt_ids, 0)
        assert answer.cached_tokens > 100 or not number
        before = prompt_ids
        sizes.add(chat.session.engine.context.runner.num_cells)
    assert len(sizes) > 2


def test_what_stops_it_is_passed_on_and_the_question_stays(make_chat):
    class Stopping(EchoRunner):
        """Somebody presses Ctrl-C while the rewriting is evaluated."""

        def decode(self, entries):
            if is_armed:
                engine.cancel_all()
            return super().decode(entries)

    engine, is_armed = open_echo(), []
    engine._backend.make_runner = partial(Stopping)
    chat = make_chat(engine=engine)
    chat.say(Question.of("How hot is PETG dried?", sampling=SHORT))
    is_armed.append(True)
    with pytest.raises(InterruptedRunError):
        chat.say(Question.of("How long?", sampling=SHORT))
    is_armed.clear()
    assert [(turn.question, turn.answer) for turn in chat.turns[1:]] == [("How long?", "")]
    assert chat.say(Question.of("How long?", sampling=SHORT)).rewriting is not None
