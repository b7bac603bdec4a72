"""What several prompts share, kept on disk: on the echo, whose states say what they are of."""

from contextlib import closing

import pytest

from localrag.engine.echo import open_echo
from localrag.engine.prefix_disk_cache import MIN_TOKENS, PrefixDiskCache, PrefixStore
from localrag.types import SamplingParams
from tests.engine.test_prefix_store import IDENTITY

PREFIX = [256, *b"user\n" + b"evidence " * 60]
SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture
def make_echo(tmp_path):
    """An engine with a keeper of this folder, for which evaluating takes long."""

    def make():
        engine = open_echo()
        engine.prefix_cache = PrefixDiskCache(lambda _: PrefixStore(tmp_path / "prefixes", IDENTITY, max_bytes=10**7), bytes_per_token=1)
        return engine

    return make


def answered(engine, prefix=PREFIX, num_cells=2000, num_sequences=3):
    """Three prompts that share a prefix, each with an end of its own."""
    engine.reserve(num_cells, num_sequences=num_sequences)
    with engine.sharing(prefix):
        prompts = [[*prefix, *f"\nQuestion: {number}".encode(), 257] for number in range(3)]
        sequences = [engine.add(ids, SAMPLING) for ids in prompts]
        while not engine.is_idle:
            engine.step()
    return [each.num_cached_tokens for each in sequences], [each.text for each in sequences]


def test_the_next_process_reads_what_prompts_share(make_echo):
    with closing(make_echo()) as first, closing(make_echo()) as second:
        cached, texts = answered(first)
        assert cached[0] == 0
        assert min(cached[1:]) >= len(PREFIX)
        again, texts_again = answered(second)
        assert min(again) >= len(PREFIX)
        assert texts_again == texts
        assert second.context.runner.num_evaluated_tokens < 100


def test_what_is_read_takes_the_cells_of_what_was_used_longest_ago(make_echo):
    with closing(make_echo()) as first, closing(make_echo()) as second:
        answered(first)
        other = [256, *b"user\n" + b"something else " * 40]
        answered(second, prefix=other, num_cells=1100)
        cached, _ = answered(second, num_cells=1100)
        assert min(cached) >= len(PREFIX)
        assert second.context.cells.num_free >= 0


def test_a_short_beginning_is_not_kept(make_echo, tmp_path):
    with closing(make_echo()) as engine:
        answered(engine, prefix=PREFIX[: MIN_TOKENS - 1])
    assert not list(tmp_path.glob("prefixes/*"))


def test_a_damaged_file_is_ignored_with_one_warning(make_echo, tmp_path):
    with closing(make_echo()) as engine:
        answered(engine)
    (file,) = tmp_path.glob("prefixes/*")
    file.write_bytes(file.read_bytes()[:-1])
    with closing(make_echo()) as engine:
        cached, _ = answered(engine)
        assert cached[0] == 0
        assert "damaged" in engine.prefix_cache.warning


def test_one_sequence_alone_goes_by_borders_instead(make_echo, tmp_path):
    with closing(make_echo()) as engine:
        engine.reserve(2000)
        with engine.sharing(PREFIX):
            engine.generate([*PREFIX, 257], SAMPLING)
    assert not list(tmp_path.glob("prefixes/*"))
