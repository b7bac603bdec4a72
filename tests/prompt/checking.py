"""What is true of every prompt, whatever was offered."""

import re
from collections import Counter
from itertools import pairwise

from localrag.conversation import split
from localrag.engine.echo import EchoTokenizer
from localrag.prompt.measure import MIN_PROPOSAL_TOKENS
from localrag.summary.shorten import MARK
from localrag.text.markup import as_content
from tests.prompt.building import shown

HEADER = re.compile(r"Sources(?: \(showing (\d+) of (\d+), ([\d,]+) of ([\d,]+) tokens\))?:\n\n")
TOKENIZER = EchoTokenizer()


def asked(offer):
    """The index of the last user message."""
    return max(n for n, m in enumerate(offer.messages) if m.role == "user")


def check(offer, composed, window):
    """The ledger is exact, the prompt fits, and everything is in it or named; gives the entries by name."""
    ledger = composed.ledger
    entries = {entry.name: entry for entry in ledger.entries}
    assert ledger.window == window
    assert ledger.prompt_tokens == len(composed.token_ids)
    beside = sum(entries[name].allotted for name in ("gap", "thinking") if name in entries)
    assert len(composed.token_ids) + composed.max_tokens + beside <= window
    assert sum(entry.allotted for entry in ledger.entries) + ledger.spare == window
    assert composed.settled.allocations == {name: entry.allotted for name, entry in entries.items()}
    used = Counter()
    for part in composed.parts:
        used[part.part.section] += len(part.token_ids)
    assert {name: entry.used for name, entry in entries.items() if entry.used} == +used
    check_names(offer, composed, entries)
    check_talk(offer, composed, entries)
    check_sources(offer, composed, entries)
    check_council(offer, composed, entries)
    return entries


def sent(composed, section):
    """The items of a section in the prompt, each once: a message with tool calls has several parts."""
    return list(dict.fromkeys(part.part.item for part in composed.parts if part.part.section == section and part.part.item))


def check_names(offer, composed, entries):
    names = {
        "cited": [each.label for each in offer.hits if each.label in offer.cited],
        "evidence": [each.label for each in offer.hits if each.label not in offer.cited],
        "attachments": [each.label for each in offer.attachments],
        "memories": [each.label for each in offer.memories],
        "proposals": [each.label for each in offer.proposals],
        "plan": ["plan"] if offer.plan.strip() else [],
    }
    for section, labels in names.items():
        if labels:
            assert sorted([*sent(composed, section), *entries[section].omitted]) == sorted(labels)
            assert {each.id for each in entries[section].shortened} <= set(sent(composed, section))
            assert all(each.tokens < each.of for each in entries[section].shortened)
        else:
            assert section not in entries


def check_talk(offer, composed, entries):
    text = shown(composed)
    if offer.tools:
        assert [tool.name for tool in offer.tools if tool.name not in entries["tools"].omitted] == [
            tool.name
            for tool in offer.tools
            if f'"name":"{tool.name}","description"' in text  # a call has none
        ]
        if offer.must_call:
            assert not set(offer.must_call) <= set(entries["tools"].omitted)
    last_answer = max((n for n, m in enumerate(offer.messages) if m.role == "assistant" and n < asked(offer)), default=-1)
    spoken = [f"message {n}" for n, m in enumerate(offer.messages, 1) if m.role != "system" and n <= last_answer + 1]
    pinned = [name for exchange in split(offer.messages, offer.pinned).pinned for name in exchange.names]
    assert sent(composed, "pinned") == pinned
    assert ("pinned" in entries) == bool(pinned)
    spoken = [name for name in spoken if name not in pinned]
    there = [*pinned, *sent(composed, "history")]
    if offer.profile.sections["history"].cut != "error":
        assert not {f"message {n}" for n in range(1, offer.settled + 1)} & set(sent(composed, "history"))
    assert {hit.label for hit in composed.earlier} <= {
        hit.label for n, given in offer.earlier.items() if f"message {n}" in there for hit in given
    }
    if spoken:
        assert sorted([*sent(composed, "history"), *entries["history"].omitted]) == sorted(spoken)
        if "summary" in entries:
            assert set(entries["summary"].covered) <= set(entries["history"].omitted)


def check_sources(offer, composed, entries):
    """The passages stand as `hits` has them, and what is said of them in numbers is true."""
    sections = ("cited", "evidence")
    parts = [part for part in composed.parts if part.part.section in sections]
    labels = [part.part.item for part in parts if part.part.item]
    assert labels == [hit.label for hit in composed.hits]
    for part in entries["evidence"].parts if "evidence" in entries else ():
        assert 0 <= part.used <= part.allotted
    wording = [part.part.text for part in parts if not part.part.item]
    if not labels:
        assert not wording
        return
    header = HEADER.fullmatch(wording[0])
    told = [number and int(number.replace(",", "")) for number in header.groups()]
    if not offer.tells_omitted or len(labels) == len(offer.hits):
        assert told == [None] * 4
        return
    num_shown, num_found, tokens, room = told
    assert (num_shown, num_found) == (len(labels), len(offer.hits))
    assert tokens == sum(TOKENIZER.count(part.part.text) for part in parts if part.part.item)
    used = sum(entries[name].used for name in sections if name in entries)
    others = composed.ledger.prompt_tokens - used + (entries["gap"].allotted if "gap" in entries else 0)
    assert tokens <= used <= room <= composed.ledger.window - others


def check_council(offer, composed, entries):
    """No proposal is left out; each has its beginning and its end. Instructions stand whole at the end of what is asked."""
    for each in offer.proposals:
        [part] = [part.part for part in composed.parts if (part.part.section, part.part.item) == ("proposals", each.label)]
        whole = as_content(each.text.strip(), TOKENIZER)
        cut = {one.id: one for one in entries["proposals"].shortened}.get(each.label)
        if cut is None:
            assert part.text.endswith(": " + whole if whole else ":")
            continue
        assert cut.tokens >= MIN_PROPOSAL_TOKENS // 2
        places = [match.start() for match in re.finditer(re.escape(MARK + " "), part.text)]
        assert any(is_cut(part.text, place, whole) for place in places), (part.text, each.text)
    texts = [(part.part.section, part.part.text) for part in composed.parts]
    assert ("instructions" in entries) == bool(offer.instructions.strip())
    if "instructions" in entries:
        at = [section for section, _ in texts].index("instructions")
        assert texts[at][1] == "\n\n" + offer.instructions.strip()
        cite = [text for section, text in texts[at + 1 : at + 2] if section in ("cited", "evidence", "pointers")]
        assert not cite or cite[0].startswith(offer.cite.partition("{label}")[0])
        assert texts[at + 1 + len(cite)][1].startswith("<|im_end|>")
    for part, following in pairwise(composed.parts):  # templates drop white space at the end of a message
        assert not following.part.is_markup or part.part.is_markup or part.part.text == part.part.text.rstrip()


def is_cut(text, place, whole):
    """Whether a proposal as it is sent is a beginning and an end of the whole, cut at that place."""
    head, tail = text[:place].partition(": ")[2], text[place + len(MARK) + 1 :]
    return bool(head and tail) and whole.startswith(head) and whole.endswith(tail) and len(head) + len(tail) < len(whole)
