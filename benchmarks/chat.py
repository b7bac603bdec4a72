"""Measure the evaluated tokens and the time to first token of each turn in a ten-turn conversation about the handbook.

The baseline is create_chat_completion with the passages of the same searches, once in the system message, as is common in chat programs,
and once in the last message.

    python -m benchmarks.chat
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

from benchmarks import peers, shared
from benchmarks.council_run import KB, handbook_home, held_by
from localrag.journal import Journal
from localrag.prompt.layout import source_text
from localrag.question import Question
from localrag.session import Session, retrieval
from localrag.session.chat import Chat
from localrag.settings import Settings
from localrag.text.tokens import common_length
from localrag.types import Hit, Message, SamplingParams

TURNS = (
    "At what temperature is PLA annealed?",
    "And for how long?",
    "Does it shrink when that is done?",
    "What about PETG, can it be annealed too?",
    "Which of the two withstands heat better?",
    "How is nylon dried before printing?",
    "What happens if it is printed wet?",
    "Which nozzle is needed for filament with carbon fibre?",
    "Why does a brass one not do?",
    "So what should I print a bracket for a car in summer with?",
)
SYSTEM = "You answer questions about 3D printing from the sources that you are given."
OURS = "localrag chat"
IN_SYSTEM = "create_chat_completion, passages in the system message"
IN_LAST = "create_chat_completion, passages in the last message"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took."""

    prompt_tokens: int
    evaluated_tokens: int
    first_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="counted runs of each (default 3)")
    parser.add_argument("--max-tokens", type=int, default=96, help="the longest answer (default 96)")
    parser.add_argument("--ctx", type=int, default=8192, help="the window (default 8192)")
    given = parser.parse_args()
    with handbook_home() as settings, closing(peers.ChatCompletion(shared.default_model(), n_ctx=given.ctx)) as peer:
        found: list[list[Hit]] = []
        programs: dict[str, Callable[[], list[Turn]]] = {
            OURS: lambda: ours(settings, given.ctx, given.max_tokens, found),
            IN_SYSTEM: lambda: theirs(peer, found, given.max_tokens, in_system=True),
            IN_LAST: lambda: theirs(peer, found, given.max_tokens, in_system=False),
        }
        programs[OURS]()  # the others need what it found
        runs: dict[str, list[list[Turn]]] = {name: [] for name in programs}
        for _ in range(given.runs):
            for name, program in programs.items():
                runs[name].append(program())
                print(f"{name}: {[turn.evaluated_tokens for turn in runs[name][-1]]}", file=sys.stderr, flush=True)
    rows = [row(number, runs) for number in range(len(TURNS))]
    late = {name: [sum(turn.evaluated_tokens for turn in run[2:]) for run in each] for name, each in runs.items()}
    totals = {name: statistics.median(each) for name, each in late.items()}
    shared.report_table(
        "chat",
        rows,
        runs=given.runs,
        window=given.ctx,
        evaluated_from_turn_3_on=totals,
        ratio_to_passages_in_the_system_message=round(totals[OURS] / totals[IN_SYSTEM], 3),
        highest_of_a_turn=round(max(each["ratio"] for each in rows[2:]), 3),  # type: ignore[type-var]  # numbers
    )


def ours(settings: Settings, n_ctx: int, max_tokens: int, found: list[list[Hit]]) -> list[Turn]:
    """The whole conversation, from a model that is loaded and holds nothing; `found` becomes what was searched for each turn."""
    found.clear()
    turns = []
    with Session.open(kbs=[KB], n_ctx=n_ctx, keep=False, settings=settings) as session, Journal.open(settings.home) as journal:
        conversation = journal.conversations.create(f"bench {len(journal.conversations.all())}", {})
        chat = Chat(session, journal, conversation, system=SYSTEM)
        for question in TURNS:
            before = [turn.question for turn in chat.turns]
            found.append(retrieval.retrieve_after(session.retriever, before, question, top_k=retrieval.DEFAULT_TOP_K))
            answer = chat.say(Question.of(question, sampling=SamplingParams(max_tokens=max_tokens)))
            first_s = answer.timings.first_token_s - answer.timings.load_s
            turns.append(Turn(answer.prompt_tokens, answer.prompt_tokens - answer.cached_tokens, first_s))
    return turns


def theirs(peer: peers.ChatCompletion, found: Sequence[Sequence[Hit]], max_tokens: int, *, in_system: bool) -> list[Turn]:
    """The same questions with the same passages; each turn goes on from what its prompt has in common with the one before."""
    peer.llama.reset()
    history: list[Message] = []
    turns = []
    for question, hits in zip(TURNS, found, strict=True):
        sources = "Sources:\n\n" + "".join(source_text(hit) for hit in hits)
        system = Message("system", f"{SYSTEM}\n\n{sources}" if in_system else SYSTEM)
        asked = Message("user", question if in_system else f"{sources}Question: {question}")
        held = held_by(peer)
        text, first_s, num_prompt = answer_of(peer, [system, *history, asked], max_tokens)
        shared_tokens = min(common_length(held, held_by(peer)), num_prompt - 1)
        turns.append(Turn(num_prompt, num_prompt - shared_tokens, first_s))
        history += [Message("user", question), Message("assistant", text)]
    return turns


def answer_of(peer: peers.ChatCompletion, messages: Sequence[Message], max_tokens: int) -> tuple[str, float, int]:
    """The answer, the seconds to its first token, and the tokens of the prompt."""
    started, first_s, text, num_pieces = time.perf_counter(), 0.0, "", 0
    stream = peer.llama.create_chat_completion(peers.as_dicts(messages), max_tokens=max_tokens, temperature=0.0, top_k=1, stream=True)
    for chunk in stream:
        piece = chunk["choices"][0]["delta"].get("content")
        if piece:
            first_s = first_s or time.perf_counter() - started
            text += piece
            num_pieces += 1
    written = len(peer.llama.tokenize(text.encode(), add_bos=False, special=False))
    return text, first_s, len(held_by(peer)) - written + (num_pieces == max_tokens)


def row(number: int, runs: dict[str, list[list[Turn]]]) -> dict[str, object]:
    line: dict[str, object] = {"turn": number + 1}
    for name, label in ((OURS, "ours"), (IN_SYSTEM, "in system"), (IN_LAST, "in last")):
        turns = [run[number] for run in runs[name]]
        line[f"{label}: tokens evaluated"] = round(statistics.median(turn.evaluated_tokens for turn in turns))
        line[f"{label}: first token, s"] = round(statistics.median(turn.first_s for turn in turns), 2)
    line["ratio"] = float(line["ours: tokens evaluated"]) / float(line["in system: tokens evaluated"])  # type: ignore[arg-type]  # numbers
    return line


if __name__ == "__main__":
    main()
