"""A session for asyncio: the model works in a thread of its own, and the event loop goes on."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from localrag.errors import LocalragError
from localrag.question import Question
from localrag.session.answer import Answer
from localrag.session.pipeline import Event
from localrag.session.session import Session

T = TypeVar("T")


class AsyncSession:
    """Answers questions in a thread of its own, one after another. `open` takes what `Session.open` takes.

        async with AsyncSession.open(kbs="handbook") as session:
            answer = await session.ask("At what temperature is PLA annealed?")

    Questions that are asked meanwhile wait. A task that is cancelled ends its answer, and so does leaving a stream early.
    """

    def __init__(self, open_session: Callable[[], Session]) -> None:
        """`open_session` is called in the thread, when the context is entered."""
        self._open_session = open_session
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="localrag")
        self._session: Session | None = None

    @classmethod
    def open(cls, *args: Any, **options: Any) -> Self:  # noqa: ANN401  # those of Session.open
        """Return a session that opens when it is entered (`async with`)."""
        return cls(functools.partial(Session.open, *args, **options))

    async def __aenter__(self) -> Self:
        try:
            self._session = await self._call(self._open_session)
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._call(self._opened.close)
        self._thread.shutdown(wait=False)

    @property
    def _opened(self) -> Session:
        if self._session is None:
            raise RuntimeError("This session is not open; use it as `async with AsyncSession.open(...) as session`.")
        return self._session

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def ask(self, question: Question | str) -> Answer:
        """Answer a question. Raises what `Session.ask` raises."""
        answer = None
        async for event in self.stream(question):
            answer = event.answer or answer
        if answer is None:
            raise RuntimeError("A question ended without an answer.")
        return answer

    async def stream(self, question: Question | str) -> AsyncIterator[Event]:
        """Answer a question and yield what happens, as `Session.stream` does. Leaving the loop early cancels the answer."""
        session, loop = self._opened, asyncio.get_running_loop()
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        is_left = False

        def work() -> LocalragError | None:
            try:
                for event in () if is_left else session.stream(question):
                    loop.call_soon_threadsafe(queue.put_nowait, event)
                    if is_left:
                        break
            except LocalragError as error:
                return error
            except KeyboardInterrupt:  # cancelled below
                pass
            finally:
                loop.call_soon_threadsafe(queue.put_nowait, None)
            return None

        done = loop.run_in_executor(self._thread, work)
        try:
            while (event := await queue.get()) is not None:
                yield event
            if (error := await done) is not None:
                raise error
        finally:
            is_left = True
            if not done.done():
                session.engine.cancel_all()
