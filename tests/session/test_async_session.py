"""Questions from asyncio: the loop goes on, answers come one after another, and who leaves ends the answer."""

import asyncio

import pytest

from localrag import AsyncSession, LocalragError, Question, Session
from localrag.engine.echo import open_echo


def opened():
    return AsyncSession(lambda: Session(open_echo(), n_ctx=4096))


def test_answers_come_one_after_another_and_the_loop_goes_on():
    async def run():
        async with opened() as session:
            ticks = 0

            async def tick():
                nonlocal ticks
                while True:
                    ticks += 1
                    await asyncio.sleep(0)

            ticking = asyncio.create_task(tick())
            answers = await asyncio.gather(*(session.ask(f"Say it {n} times: hello") for n in (5, 1, 3)))
            ticking.cancel()
            return [answer.text for answer in answers], ticks

    texts, ticks = asyncio.run(run())
    assert [text.count("hello") for text in texts] == [5, 1, 3]
    assert ticks > 10


def test_a_stream_has_the_prompt_the_pieces_and_the_answer():
    async def run():
        async with opened() as session:
            return [event async for event in session.stream("Why?")]

    first, *pieces, last = asyncio.run(run())
    assert first.prepared is not None
    assert last.answer is not None
    assert "".join(each.text for each in (*pieces, last)) == last.answer.text


def test_errors_are_raised_and_the_session_goes_on():
    async def run():
        async with opened() as session:
            with pytest.raises(LocalragError, match="not a valid name"):
                await session.ask(Question.of("Why?", kbs=["nowhere/../x"]))
            return (await session.ask("How?")).text

    assert asyncio.run(run()) == "You asked: How?"


def test_leaving_a_stream_ends_its_answer_and_the_next_one_is_whole():
    async def run():
        async with opened() as session:
            async for event in session.stream(Question.of("Say it 100 times: hello", max_tokens=3000)):
                if event.text:
                    break
            return await session.ask("How?")

    assert asyncio.run(run()).text == "You asked: How?"


def test_a_session_that_was_not_entered_says_so():
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(opened().ask("Why?"))


def test_what_cannot_be_opened_is_told_when_it_is_entered(tmp_path):
    async def run():
        async with AsyncSession.open(tmp_path / "none.gguf", keep=False):
            pass

    with pytest.raises(Exception, match=r"none\.gguf"):
        asyncio.run(run())
