"""Prompts of those who see the same are the same up to their instructions, which is what is evaluated once for all."""

import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localrag import prompt
from localrag.engine.echo import EchoTemplate, EchoTokenizer
from localrag.engine.llama import LlamaModel, LlamaTokenizer
from localrag.engine.template import JinjaChatTemplate
from localrag.errors import BudgetExceededError
from localrag.prompt.compose import MIN_SHARED_TOKENS
from localrag.text.tokens import TokenCounter
from tests import material
from tests.chat_templates import CHATML, NOW, PATHS
from tests.engine.test_twelve_templates import bpe_vocabulary, spm_vocabulary
from tests.gguf_files import write_gguf
from tests.prompt.building import extractive, random_offer, with_council

PLAIN = "{% for m in messages %}### {{ m.role }}\n\n{{ m.content }}\n\n{% endfor %}### assistant\n\n"
PERSONAS = ("You are Ann. You doubt.", "I", "You are Bo\n\nthe user is the one. 温度 " * 9, "the", "- [KB#3]", "(Cy) obeys </s> <think>?")


def composed(demand, window):
    return prompt.compose(demand, demand.share(window), extractive(demand.counter))


def before_instructions(made):
    """The tokens up to the instructions."""
    at = [part.part.section for part in made.parts].index("instructions")
    return [token for part in made.parts[:at] for token in part.token_ids]


def check_alike(offer, personas, window, counter, template):
    """Whether all had room; then their prompts are the same up to the instructions, and so are their budgets."""
    measured = [prompt.measure(replace(offer, instructions=each), counter=counter, template=template) for each in personas]
    try:
        made = [composed(demand, window) for demand in prompt.alike(measured)]
    except BudgetExceededError:
        return False
    beginnings = [before_instructions(each) for each in made]
    assert all(beginning == beginnings[0] for beginning in beginnings)
    assert all(list(each.token_ids[: len(beginnings[0])]) == beginnings[0] for each in made)
    assert len({tuple(hit.label for hit in each.hits) for each in made}) == 1
    for each in made:
        assert len(each.token_ids) + each.max_tokens <= window
        assert each.ledger.prompt_tokens == len(each.token_ids)
        assert each.breakpoints[-1:] == ((len(beginnings[0]) - 1,) if len(beginnings[0]) > MIN_SHARED_TOKENS else ())
    return True


def council_offer(rng, **options):
    made = with_council(rng, random_offer(rng, size=4), **options)
    return replace(made, profile=replace(made.profile, limits={}))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), window=st.integers(800, 12_000))
@example(seed=319, window=894)  # the beginning is too short to be shared, the instructions are long
def test_who_sees_the_same_is_sent_the_same(seed, window):
    rng = random.Random(seed)
    personas = [material.text(rng, rng.randint(1, 80)) for _ in range(3)]
    if all(each.strip() for each in personas):
        check_alike(council_offer(rng), personas, window, TokenCounter(EchoTokenizer()), EchoTemplate())


def test_most_of_them_have_room():
    counter = TokenCounter(EchoTokenizer())
    held = [check_alike(council_offer(random.Random(seed)), PERSONAS, 6000, counter, EchoTemplate()) for seed in range(8)]
    assert sum(held) > 5


def test_without_setting_aside_they_differ():
    """What the test above can find."""
    counter = TokenCounter(EchoTokenizer())
    differ = 0
    for seed in range(8):
        offer = council_offer(random.Random(seed))
        try:
            made = [
                composed(prompt.measure(replace(offer, instructions=each), counter=counter, template=EchoTemplate()), 3000)
                for each in PERSONAS
            ]
        except BudgetExceededError:
            continue
        differ += any(before_instructions(each) != before_instructions(made[0]) for each in made)
    assert differ > 2


def test_each_is_held_to_its_own_limit_and_not_to_the_longest():
    offer = council_offer(random.Random(5))
    offer = replace(offer, profile=replace(offer.profile, limits={"instructions": 30}))
    demand = [
        prompt.measure(replace(offer, instructions=each), counter=TokenCounter(EchoTokenizer()), template=EchoTemplate())
        for each in ("Brief.", "Long. " * 20)
    ]
    brief, long = prompt.alike(demand)
    assert brief.share(9000).allocations["instructions"] > 100
    with pytest.raises(BudgetExceededError):
        long.share(9000)


@pytest.fixture(scope="module", params=[CHATML, PLAIN, *PATHS], ids=["chatml", "plain", *(path.stem for path in PATHS)])
def source(request):
    return request.param if isinstance(request.param, str) else request.param.read_text("utf-8")


@pytest.mark.parametrize("vocabulary", [bpe_vocabulary, spm_vocabulary], ids=["bpe", "spm"])
def test_so_it_is_with_real_templates(source, vocabulary, tmp_path):
    tokenizer = LlamaTokenizer(LlamaModel(write_gguf(tmp_path / "vocab.gguf", vocabulary(source)), vocab_only=True))
    counter = TokenCounter(tokenizer)
    with JinjaChatTemplate(source, bos_text="<s>", eos_text="</s>", time_limit_s=10, clock=lambda: NOW) as template:
        offers = {window: replace(council_offer(random.Random(window), chars=600), tools=()) for window in (2000, 6000)}
        held = [check_alike(offer, PERSONAS, window, counter, template) for window, offer in offers.items()]
    assert any(held)
