"""Checkpoints of recurrent layers in llama.cpp: what they cost, which of them go first, and what a memory refuses without them."""

import pytest

from localrag.engine.kv_cache import Checkpoints
from localrag.engine.llama import LlamaContext, LlamaModel
from tests.zoo import write_kind
from tests.zoo_checks import ids


@pytest.fixture(params=["lfm2", "mamba2"])
def context(request, tmp_path):
    model = LlamaModel(write_kind(tmp_path, request.param))
    made = LlamaContext(model, num_cells=512, num_sequences=3, num_threads=1)
    yield made
    made.close()
    model.close()


def evaluate(context, seq_id, token_ids):
    start = context.num_tokens(seq_id)
    assert context.decode([(token, start + i, seq_id, i == len(token_ids) - 1) for i, token in enumerate(token_ids)])
    return context.logits(len(token_ids) - 1, (5, 6, 7))


def test_a_sequence_is_cut_where_a_checkpoint_was_taken_and_nowhere_else(context):
    stem, ending = ids("stem", 60), ids("ending", 5)
    evaluate(context, 0, stem)
    checkpoint = context.checkpoint(0)
    once = evaluate(context, 0, ending)
    assert context.cut(0, 60, checkpoint)
    assert context.num_tokens(0) == 60
    assert evaluate(context, 0, ending) == once
    assert context.copy(0, 1, 60, checkpoint)
    assert context.copy(0, 2, 65)
    assert evaluate(context, 1, ending) == pytest.approx(once, abs=1e-3)
    assert not context.copy(0, 2, 60)
    assert context.num_tokens(2) == 0
    assert not context.cut(0, 64)
    assert context.num_tokens(0) == 0


def test_the_ones_used_longest_ago_go_first(context):
    evaluate(context, 0, ids("stem", 10))
    size = len(context.checkpoint(0))
    held = Checkpoints(context, max_bytes=3 * size + 1)
    for position in (10, 20, 30):
        held.take(0, position)
    assert held.at(0, 10) is not None
    held.share(0, 1, 20)
    held.take(0, 40)
    assert (sorted(held.of(0)), sorted(held.of(1))) == ([10, 30, 40], [10])
    assert held.num_bytes == 3 * size
    held.cut(0, 30)
    held.cut(0, 0)
    assert held.num_bytes == size  # the copy still has it
    held.cut(1, 0)
    assert held.num_bytes == 0
    none = Checkpoints(context, max_bytes=size - 1)
    none.take(0, 10)
    assert none.of(0) == {}
