"""A folder and a file beside it are followed, also when an editor puts a new file in the old one's place."""

import queue
import threading

from localrag.kb.watch import changes


def test_every_save_is_heard(tmp_path):
    notes, other = tmp_path / "notes", tmp_path / "other"
    notes.mkdir()
    other.mkdir()
    guide = other / "guide.md"
    guide.write_text("0")
    heard = queue.Queue()

    def listen():
        for num_changed in changes([notes, guide], but=tmp_path / "kb"):
            heard.put(num_changed)

    threading.Thread(target=listen, daemon=True).start()
    assert heard.get(timeout=30) == 0
    for number in (1, 2):
        (other / "new").write_text(str(number))
        (other / "new").replace(guide)
        assert heard.get(timeout=30) >= 1
    (other / "unrelated.md").write_text("x")
    (notes / "a.md").write_text("x")
    assert heard.get(timeout=30) == 1
