"""The trie of what a KV cache holds, against lists of tokens; and placing sequences on the echo engine."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from localrag.engine.context import Context
from localrag.engine.echo import EchoRunner, open_echo
from localrag.engine.kv_cache import MIN_SHARED_TOKENS, HostSwap
from localrag.engine.radix_tree import RadixTree
from localrag.text.tokens import common_length
from localrag.types import SamplingParams


def naive_common(first, second):
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(0, 10))
def test_common_length_is_that_of_a_loop(tokens, ids, start):
    start = min(start, len(ids))
    assert common_length(tokens, ids, start) == naive_common(tokens, ids[start:])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_the_trie_holds_what_lists_of_cells_hold(seed):
    """Cells are numbered as they are made; sequences that share a prefix share its cells."""
    rng, cache, held, made = random.Random(seed), RadixTree(), {}, 0
    for _ in range(60):
        seq_id = rng.randrange(6)
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        action = rng.choice(["extend", "extend", "share", "cut", "drop"])
        if action == "extend":
            held.setdefault(seq_id, []).extend((token, made + place) for place, token in enumerate(tokens))
            made += len(tokens)
            cache.extend(seq_id, tokens)
        elif action == "share" and held.get(seq_id):
            target = next((each for each in range(6) if not held.get(each)), None)
            if target is None:
                continue
            length = rng.randint(1, len(held[seq_id]))
            held[target] = held[seq_id][:length]
            cache.share(seq_id, target, length)
        elif action == "cut" and held.get(seq_id):
            length = rng.randint(0, len(held[seq_id]))
            held[seq_id] = held[seq_id][:length]
            cache.cut(seq_id, length)
        elif action == "drop":
            held.pop(seq_id, None)
            cache.drop(seq_id)
        lists = {each: [token for token, _ in cells] for each, cells in held.items() if cells}
        assert {each for each in range(6) if each in cache} == set(lists)
        assert all(cache.tokens(each) == tokens for each, tokens in lists.items())
        assert cache.num_cells == len({cell for cells in held.values() for cell in cells})
        for each, cells in held.items():
            others = {cell for other, more in held.items() if other != each for cell in more}
            assert cache.num_own_cells(each) == len(set(cells) - others)
        some = rng.sample(sorted(held), rng.randint(0, len(held)))
        assert cache.num_cells_of(some) == len({cell for each in some for cell in held[each]})
        prompt = [rng.randrange(2) for _ in range(12)]
        best = max((naive_common(tokens, prompt) for tokens in lists.values()), default=0)
        found = cache.longest(prompt)
        assert (0 if found is None else found[1]) == best
        if found is not None:
            assert naive_common(lists[found[0]], prompt) == best


def prompt_of(engine, text):
    return engine.tokenizer.encode(text)


SYSTEM = "You answer from these sources, and from nothing else. " * 4


def test_a_council_evaluates_what_it_shares_once():
    with open_echo() as engine:
        engine.reserve(4000, num_sequences=3)
        members = [engine.add(prompt_of(engine, SYSTEM + f"You are number {n}."), SamplingParams(max_tokens=8)) for n in range(3)]
        while not engine.is_idle:
            engine.step()
        cached = [member.completion().cached_tokens for member in members]
        assert cached[0] == 0
        assert min(cached[1:]) >= len(SYSTEM)
        assert engine.context.cells.cache.num_cells < 2 * len(SYSTEM)


def context_of(num_cells, *, num_slots, most_kept):
    return Context.make(
        EchoRunner, num_cells, num_slots, host_swap=HostSwap(), bytes_per_token=0, prompt_room=lambda _: 512, most_kept=lambda: most_kept
    )


def test_what_has_no_cells_left_comes_back_from_the_host_swap():
    texts = [letter * 200 for letter in "abc"]
    with open_echo() as engine:
        engine.reserve(520, num_sequences=2)  # two of them and an answer
        for text in texts:
            engine.generate(prompt_of(engine, text), SamplingParams(max_tokens=8))
        again = [engine.generate(prompt_of(engine, text), SamplingParams(max_tokens=8)).cached_tokens for text in (texts[2], texts[0])]
        assert again == [199, 199]
        engine.forget()
        assert engine.generate(prompt_of(engine, texts[0]), SamplingParams(max_tokens=8)).cached_tokens == 0


def test_what_is_kept_slows_those_that_run_but_little_and_nothing_is_evaluated_twice():
    """Three conversations take turns in a context that would hold them all."""
    with open_echo() as engine:
        engine.context = context_of(20_000, num_slots=2, most_kept=100)
        said = {name: prompt_of(engine, name * 300) for name in "abc"}
        for turn in range(4):
            for name, ids in said.items():
                before = len(ids)
                done = engine.generate(ids, SamplingParams(max_tokens=20))
                assert done.cached_tokens == (0 if turn == 0 else before - 31)  # all but the last token of the answer, and what is new
                assert engine.context.cells.cache.num_cells <= before + 20 + 100
                ids += [*done.completion_ids, *prompt_of(engine, name.upper() * 30)]
                assert len(done.completion_ids) == 20


def test_a_larger_context_goes_on_with_all_that_the_smaller_one_held():
    texts = [letter * 200 for letter in "abc"]
    with open_echo() as engine:
        engine.reserve(1000, num_sequences=2)
        for text in texts:
            engine.generate(prompt_of(engine, text), SamplingParams(max_tokens=8))
        engine.reserve(2000, num_sequences=3)
        again = [engine.generate(prompt_of(engine, text), SamplingParams(max_tokens=8)).cached_tokens for text in texts]
        assert again == [199, 199, 199]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_no_cell_is_ever_missing_or_lost_and_texts_are_those_of_a_fresh_engine(seed):
    rng = random.Random(seed)
    stems = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 120))) for _ in range(3)]
    prompts = [rng.choice(stems) + "".join(rng.choice("ab") for _ in range(rng.randint(1, 60))) for _ in range(12)]
    with open_echo() as engine:
        most_kept = rng.choice([0, 50, 10_000])
        engine.context = context_of(rng.randint(250, 900), num_slots=rng.randint(2, 5), most_kept=most_kept)
        waiting, all_of_them = list(prompts), []
        while waiting or not engine.is_idle:
            if waiting and rng.random() < 0.5:
                text = waiting.pop()
                all_of_them.append((text, engine.add(prompt_of(engine, text), SamplingParams(max_tokens=rng.randint(1, 30)))))
            if all_of_them and rng.random() < 0.05:
                engine.cancel(rng.choice(all_of_them)[1])
            engine.step()
        cells = engine.context.cells
        assert cells.num_free + cells.cache.num_cells == engine.context.runner.num_cells
        for text, sequence in all_of_them:
            assert sequence.is_finished
            done = sequence.completion()
            if done.finish_reason != "cancelled":
                with open_echo() as fresh:
                    fresh.reserve(900)
                    alone = fresh.generate(prompt_of(fresh, text), SamplingParams(max_tokens=sequence.sampling.max_tokens))
                assert (alone.text, alone.completion_ids) == (done.text, done.completion_ids)


def test_a_short_beginning_is_not_worth_sharing():
    with open_echo() as engine:
        engine.reserve(500, num_sequences=2)
        engine.generate(prompt_of(engine, "x" * (MIN_SHARED_TOKENS - 1) + "one"), SamplingParams(max_tokens=4))
        assert engine.generate(prompt_of(engine, "x" * (MIN_SHARED_TOKENS - 1) + "two"), SamplingParams(max_tokens=4)).cached_tokens == 0
