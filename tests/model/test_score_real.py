"""The relevance of files with the real default embedder."""

import pytest

from localrag.relevance import File, Weights, score

pytestmark = pytest.mark.model


def test_meaning_finds_what_no_word_names(embedder):
    files = [
        File("login.py", "def sign_in(user, password):\n    return check_credentials(user, password)\n"),
        File("colours.py", "RED = '#ff0000'\nGREEN = '#00ff00'\n"),
        File("base64.txt", "aGVsbG8gd29ybGQhIQ" * 4000),
        File("cjk.md", "打印温度是多少？" * 500 + "\ud800\0"),
    ]
    scores = score(files, "authentication is broken", weights=Weights(method="semantic"), embedder=embedder, now=0.0)
    meaning = {one.path: one.details["task_alignment"]["value"] for one in scores}
    assert max(meaning, key=meaning.get) == "login.py"
    assert meaning["login.py"] > 2 * meaning["colours.py"]
    assert all(0 <= value <= 1 for value in meaning.values())
    again = score(files[::-1], "authentication is broken", weights=Weights(method="semantic"), embedder=embedder, now=0.0)
    assert again == scores
