"""engine/llama_lib.py: of all that llama.cpp says, what explains a failure is kept."""

from __future__ import annotations

from localrag.engine.llama_lib import begin_log, complaint, first_error, keep_log

INFO, WARNING, ERROR, CONTINUED = 2, 3, 4, 5


def test_the_first_error_is_kept_however_much_is_said_before_it() -> None:
    begin_log()
    for number in range(1000):
        keep_log(WARNING, f"warning {number}\n".encode(), None)
    keep_log(CONTINUED, b".", None)
    keep_log(INFO, b"by the way", None)
    assert (first_error(), complaint()) == ("", "warning 999")
    for level, text in ((ERROR, b"\n"), (ERROR, b"the cause\n"), (ERROR, b"what follows"), (WARNING, b"and more")):
        keep_log(level, text, None)
    assert first_error() == complaint() == "the cause"
    begin_log()
    assert complaint() == ""
