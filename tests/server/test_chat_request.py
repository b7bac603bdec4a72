"""The bypass and validation cases of the chat completion algorithm, by name."""

from __future__ import annotations

import pytest

from localrag.conversation import search_query, split
from localrag.server.chat_request import NO_QUESTION, ChatQuestion, read
from localrag.server.errors import Problem
from localrag.session.answer import Bypass

PLAIN = [{"role": "user", "content": "Hello, how are you?"}]


def asked(**body) -> ChatQuestion:
    return read({"model": "any", **body}, has_index=lambda name: name == "docs_index")


def refused(**body) -> tuple[int, str]:
    with pytest.raises(Problem) as raised:
        asked(**body)
    return raised.value.status, raised.value.detail


# --- the bypass conditions ---


def test_1_no_index_specified():
    given = asked(messages=PLAIN)
    assert given.bypass is Bypass.NO_KNOWLEDGE_BASE
    assert given.to_message()["kbs"] == []


def test_2_tools_or_functions_present():
    messages = [{"role": "user", "content": "What's the weather?"}]
    for offered in ({"tools": [{"type": "function", "function": {"name": "get_weather"}}]}, {"functions": [{"name": "get_weather"}]}):
        given = asked(messages=messages, index_name="docs_index", **offered)
        assert given.bypass is Bypass.TOOLS
        assert given.to_message()["kbs"] == []
        assert [each["name"] for each in given.to_message()["tools"]] == ["get_weather"]


def test_2_tools_with_an_index_are_refused_where_the_setting_says_so():
    body = {"messages": PLAIN, "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    with pytest.raises(Problem, match=r"tools and functions are not supported\."):
        read({**body, "index_name": "docs_index"}, has_index=lambda _: True, rejects_tools=True)
    assert read(body, has_index=lambda _: True, rejects_tools=True).tools is not None


def test_3_unsupported_message_roles():
    messages = [{"role": "function", "content": "Weather data: 75°F"}, {"role": "user", "content": "Thanks!"}]
    assert asked(messages=messages, index_name="docs_index").bypass is Bypass.ROLE


@pytest.mark.parametrize("role", ["tool", "function"])
def test_3_each_role_that_is_not_supported(role):
    messages = [{"role": role, "content": "Weather data: 75°F"}, {"role": "user", "content": "Thanks!"}]
    given = asked(messages=messages, index_name="docs_index")
    assert given.bypass is Bypass.ROLE
    assert given.to_message()["kbs"] == []
    assert given.to_message()["options"] == {}


def test_4_content_that_is_not_text_is_for_the_plain_model_which_reads_text_alone():
    parts = [{"type": "text", "text": "What's in this image?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}]
    assert refused(messages=[{"role": "user", "content": parts}], index_name="docs_index") == (400, "Only text content is supported.")


def test_parts_that_are_text_can_be_searched_for():
    given = asked(messages=[{"role": "user", "content": [{"type": "text", "text": "What is KAITO?"}]}], index_name="docs_index")
    assert given.bypass is None
    assert given.messages[0].content == "What is KAITO?"


# --- what is searched for ---


def test_example_1_simple_user_query():
    messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is KAITO?"}]
    given = asked(messages=messages, index_name="docs_index")
    assert given.bypass is None
    assert given.to_message()["kbs"] == ["docs_index"]
    assert [(each.role, each.content) for each in given.messages] == [(each["role"], each["content"]) for each in messages]


SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def processed(given: ChatQuestion) -> tuple[str, str, list[tuple[str, str]]]:
    """(user_prompt, system text, chat_history) as the document calls them."""
    parts = split(given.messages)
    return search_query(given.messages), parts.system, [(m.role, m.content) for each in parts.history for _, m in each.messages]


def test_example_2_multi_turn_conversation():
    history = [("user", "What is KAITO?"), ("assistant", "KAITO is a Kubernetes operator for AI workloads.")]
    messages = [SYSTEM, *({"role": role, "content": text} for role, text in history), {"role": "user", "content": "How do I install it?"}]
    given = asked(messages=messages, index_name="docs_index")
    assert given.bypass is None
    assert processed(given) == ("How do I install it?", SYSTEM["content"], history)


def test_example_3_multiple_consecutive_user_messages():
    history = [("user", "What is KAITO?"), ("assistant", "KAITO is a Kubernetes operator.")]
    asks = ["Tell me more about it.", "Specifically about GPU support."]
    messages = [SYSTEM, *({"role": role, "content": text} for role, text in history), *({"role": "user", "content": text} for text in asks)]
    given = asked(messages=messages, index_name="docs_index")
    assert given.bypass is None
    assert processed(given) == ("Tell me more about it.\n\nSpecifically about GPU support.", SYSTEM["content"], history)


def test_example_4_no_user_messages_after_assistant():
    messages = [{"role": "user", "content": "What is KAITO?"}, {"role": "assistant", "content": "KAITO is a Kubernetes operator."}]
    assert refused(messages=messages, index_name="docs_index") == (400, NO_QUESTION)
    for given in (
        {},
        {"index_name": "docs_index", "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
    ):  # nothing is searched, so it is passed on
        passed = asked(messages=messages, **given)
        assert passed.to_message()["options"] == {"needs_question": False}


@pytest.mark.parametrize("messages", [[SYSTEM], [{"role": "assistant", "content": "Hello."}]])
def test_what_holds_no_question_is_passed_on_without_an_index(messages):
    assert asked(messages=messages).to_message()["options"] == {"needs_question": False}
    assert refused(messages=messages, index_name="docs_index") == (400, NO_QUESTION)
    empty = [{**each, "content": " "} for each in messages]
    assert refused(messages=empty) == (400, NO_QUESTION)


# --- the checks, in their order ---


def test_more_than_one_answer_comes_first():
    assert refused(n=2, index_name="nowhere", context_token_ratio=7, messages=[])[1] == "n > 1 is not supported."


def test_then_an_index_that_is_not_there():
    assert refused(index_name="nowhere", context_token_ratio=7, messages=[])[0] == 404


@pytest.mark.parametrize("ratio", [0.19, 0.81, 0, 1, -1, "0.5", True])
def test_then_a_ratio_out_of_range(ratio):
    assert refused(index_name="docs_index", context_token_ratio=ratio, messages=[])[1].startswith("context_token_ratio")


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_ratios_that_are_taken(ratio):
    message = asked(index_name="docs_index", context_token_ratio=ratio, messages=PLAIN).to_message()
    assert message["options"]["context_ratio"] == ratio


def test_what_to_do_if_the_index_does_not_answer():
    message = asked(index_name="docs_index", unanswerable="error", messages=PLAIN).to_message()
    assert message["options"]["unanswerable"] == "error"
    assert refused(index_name="docs_index", unanswerable="perhaps", messages=PLAIN) == (400, "unanswerable must be say, answer or error.")


@pytest.mark.parametrize("messages", [None, [], "hello", {"role": "user"}, [1], [[]]])
def test_then_what_is_malformed(messages):
    assert refused(messages=messages)[0] == 400


def test_a_body_that_is_no_object():
    with pytest.raises(Problem, match="not a JSON object"):
        read([], has_index=lambda _: True)


def test_then_a_message_without_role_or_content():
    assert refused(messages=[{"content": "x"}]) == (400, "Message 1 has no role: messages must contain 'role'.")
    assert refused(messages=[*PLAIN, {"role": "user"}]) == (400, "Message 2: messages must contain 'content' for role 'user'.")
    assert refused(messages=[{"role": "user", "content": None}]) == (400, "Message 1: messages must contain 'content' for role 'user'.")


def test_an_unknown_role_is_refused():
    assert "Roles: system" in refused(messages=[{"role": "wizard", "content": "x"}])[1]


# --- what shapes the answer ---


def test_max_tokens_limits_the_answer_and_a_ratio_asks_for_all_that_fits():
    with_limit = asked(messages=PLAIN, index_name="docs_index", max_tokens=7).to_message()
    without = asked(messages=PLAIN, index_name="docs_index").to_message()
    assert with_limit["sampling"]["max_tokens"] == 7
    assert without["sampling"]["max_tokens"] is None  # what is left
    assert with_limit["options"] == without["options"] == {}
    with_ratio = asked(messages=PLAIN, index_name="docs_index", context_token_ratio=0.4, evidence_tokens=90).to_message()
    assert with_ratio["options"] == {"context_ratio": 0.4, "top_k": "fit", "evidence_tokens": 90}


def test_all_that_can_be_honoured_arrives():
    sampling = asked(
        messages=PLAIN, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, seed=7, stop="END", reasoning_effort="low"
    ).sampling
    assert sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "seed": 7,
        "repeatable": True,
        "stop": ["END"],
        "repeat_last_n": 1_000_000,
        "think_tokens": 512,
    }
    assert "repeatable" not in asked(messages=PLAIN, temperature=0.5).sampling


@pytest.mark.parametrize("given", [{"logit_bias": {"50256": -100}}, {"grammar": "root ::= x"}, {"audio": {}}])
def test_what_cannot_be_honoured_is_refused(given):
    assert "is not supported" in refused(messages=PLAIN, **given)[1]


@pytest.mark.parametrize("given", [{"logprobs": False}, {"logit_bias": {}}, {"user": "me"}, {"logprobs": None}, {"n": None}])
def test_what_asks_for_nothing_is_taken(given):
    assert asked(messages=PLAIN, **given).sampling == {}


@pytest.mark.parametrize(
    "given",
    [{"temperature": "hot"}, {"seed": 1.5}, {"max_tokens": True}, {"stop": 7}, {"stream": "yes"}, {"response_format": {"type": "x"}}],
)
def test_what_is_of_the_wrong_kind_is_refused(given):
    assert refused(messages=PLAIN, **given)[0] == 400
