"""Memories: what is kept, and what of it a question is told."""

import pytest

from localrag.errors import UsageError
from localrag.journal import Journal, StoredMemory
from localrag.session.memory import Recall, RecallRule

DAY_S = 86_400.0


@pytest.fixture
def memories(tmp_path):
    with Journal.open(tmp_path) as journal:
        yield journal.memories


def test_facts_are_kept_changed_and_forgotten(memories):
    first, second = memories.add("I print\n with  PETG."), memories.add("My nozzle has 0.4 mm.", 0.3)
    memories.edit(second, importance=0.9)
    memories.edit(first, text="I print with ABS.")
    assert [(each.text, each.importance) for each in memories.all()] == [("I print with ABS.", 0.8), ("My nozzle has 0.4 mm.", 0.9)]
    memories.forget(first)
    assert [each.id for each in memories.all()] == [second]
    assert memories.add("new") > second  # an id is never given twice


@pytest.mark.parametrize(("text", "importance"), [("", 0.5), (" \n", 0.5), ("x" * 2001, 0.5), ("x", 1.1), ("x", float("nan")), ("x", -0.1)])
def test_what_is_no_memory_is_refused(memories, text, importance):
    with pytest.raises(UsageError):
        memories.add(text, importance)
    assert memories.all() == []


def test_what_is_not_there_is_an_error(memories):
    for change in (lambda: memories.forget(7), lambda: memories.edit(7, text="x")):
        with pytest.raises(UsageError, match="no memory 7"):
            change()


def stored(number, text, importance=0.8, age_days=0.0):
    return StoredMemory(id=number, text=text, importance=importance, created_at=0.0, updated_at=100 * DAY_S - age_days * DAY_S)


def told(recall, kept, question):
    return [memory.label for memory in recall.memories(kept, question, now=100 * DAY_S)]


def test_the_important_new_ones_are_told_and_those_that_share_a_word():
    kept = [
        stored(1, "Important and new.", 0.61),
        stored(2, "Not important enough.", 0.6),
        stored(3, "Too old.", 1.0, age_days=7.1),
        stored(4, "Old, about nozzles and PETG.", 0.1, age_days=400),
    ]
    recall = Recall(RecallRule())
    assert told(recall, kept, "Which oven?") == ["memory 1"]
    assert told(recall, kept, "What about petg?") == ["memory 1", "memory 4"]
    assert told(recall, kept, "Which oven?") == ["memory 1", "memory 4"]  # what was told stays told
    assert told(recall, kept[1:], "Which oven?") == ["memory 4"]  # what was forgotten does not


def test_the_most_important_comes_first_and_both_bounds_can_be_set():
    kept = [stored(1, "a fact", 0.3), stored(2, "another fact", 0.5, age_days=20)]
    assert told(Recall(RecallRule(min_importance=0.2, max_age_days=30)), kept, "") == ["memory 2", "memory 1"]
    assert told(Recall(RecallRule(min_importance=0.2)), kept, "") == ["memory 1"]
