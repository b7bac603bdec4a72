"""The slot: the least of what was requested, trained for and fits."""

from dataclasses import replace

import pytest

from localrag.engine import memory
from localrag.engine.echo import open_echo
from localrag.errors import EngineError, UsageError

INFO = replace(open_echo().info, file_size=100_000_000, num_kv_heads=(3,) * 30, head_size_k=64, head_size_v=64, n_ctx_train=8192)


def test_kv_bytes_are_those_that_were_measured():
    assert INFO.kv_bytes_per_token == 23_040  # the default model's shape


@pytest.mark.parametrize(
    ("requested", "fitting", "n_ctx", "bound"),
    [
        (None, 10**6, 8192, "training"),
        (4096, 10**6, 4096, "requested"),
        (8192, 10**6, 8192, "requested"),
        (100_000, 10**6, 8192, "training"),
        (None, 1000, 1000, "memory"),
        (4096, 1000, 1000, "memory"),
        (500, 1000, 500, "requested"),
    ],
)
def test_the_least_limit_binds_and_is_named(requested, fitting, n_ctx, bound):
    slot = memory.make_slot(INFO, requested, fitting=fitting)
    assert (slot.n_ctx, slot.bound, slot.requested, slot.n_ctx_train) == (n_ctx, bound, requested, 8192)


def test_memory_counts_the_weights_and_a_reserve():
    room = 1000 * INFO.kv_bytes_per_token
    assert memory.fitting_tokens(INFO, INFO.file_size + memory.RESERVE_BYTES + room) == 1000
    assert memory.fitting_tokens(INFO, INFO.file_size) == 0


def test_a_model_that_does_not_fit_and_a_window_of_nothing_are_refused():
    with pytest.raises(EngineError, match="does not fit"):
        memory.make_slot(INFO, None, fitting=0)
    with pytest.raises(UsageError):
        memory.make_slot(INFO, 0, fitting=10)
