"""A folder with some 200 hostile files is indexed to its end, with each of them indexed or named."""

import os
import resource
import sys

import pytest

from localrag.kb import KnowledgeBase
from localrag.kb.names import escaped
from tests.kb.hash_embedder import HashEmbedder
from tests.kb.hostile_files import write_hostile


@pytest.mark.skipif(sys.platform == "win32", reason="pipes, sockets and links as POSIX has them")
@pytest.mark.timeout(280)
def test_every_hostile_file_is_indexed_or_named(tmp_path):
    folder = tmp_path / "hostile"
    paths = write_hostile(folder)
    (folder / "good.md").write_text("# Annealing\n\nPLA is annealed at 100 degrees.\n", encoding="utf-8")
    assert len(paths) >= 180
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    embedder = HashEmbedder(max_tokens=256)  # as many as usual
    with KnowledgeBase.open(tmp_path / "kb", "hostile", create=True) as kb:
        result = kb.ingest([folder], embedder)
        sources = {source for source, _ in kb.sources()}
        assert kb.verify().is_sound
        assert [hit.chunk.source for hit in kb.retrieve("annealing of PLA", embedder, k=1, mode="keyword")] == ["hostile/good.md"]
        again = kb.ingest([folder], embedder)
    named = {skip.source for skip in result.skipped}
    assert all(skip.reason for skip in result.skipped)
    shown = {"hostile/" + escaped(os.fsencode(path.relative_to(folder)).decode("utf-8", "backslashreplace")) for path in paths}
    lost = {each for each in shown if each not in sources and not any(each == name or each.startswith(f"{name}/") for name in named)}
    assert lost == set()
    assert (again.added, again.updated, again.num_embedded, len(again.skipped)) == (0, 0, 0, len(result.skipped))
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 600 * 1024, f"the indexer grew by {grown_kib // 1024} MiB"
