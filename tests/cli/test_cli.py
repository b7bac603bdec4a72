"""The command line as people and scripts meet it: what goes where, and what every bad input says."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from localrag.cli import COMMANDS, main, options, render
from localrag.cli.chat import settings as chat_settings
from localrag.cli.terminal import end_answer
from localrag.engine.echo import open_echo
from localrag.question import Question
from localrag.session import Session
from localrag.settings import Settings
from localrag.types import Chunk, Hit, SamplingParams
from tests import identities
from tests.gguf_files import write_model, write_vocab
from tests.homes import know_attention


@pytest.fixture
def run(home, capsys):
    """Runs a command line in this process; returns (exit code, stdout, stderr)."""

    def _run(*args):
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        return code, out, err

    return _run


def refusal(result, code):
    """The error line and the hint of a command that was refused."""
    got, out, err = result
    assert (got, out) == (code, ""), err
    assert "Traceback" not in err
    assert "\x1b" not in err
    first, *rest = err.strip().splitlines()
    assert first.startswith("Error: ")
    assert len(rest) <= 1
    return err


HEAVY = ("llama_cpp", "faiss", "torch", "sentence_transformers", "numpy", "pydantic", "huggingface_hub", "jinja2", "rich", "sqlite3")


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["ask", "--help"], ["index", "--help"], ["models", "--help"]])
def test_help_imports_nothing_heavy(args):
    names = HEAVY[: 4 if args[0] not in {"--help", "--version"} else None]
    code = f"import sys; from localrag.cli import main; code = main({args!r}); assert not set({names!r}) & set(sys.modules); sys.exit(code)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"\n  {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(run, name):
    code, out, _ = run(name, "--help")
    assert code == 0
    assert out.startswith(f"Usage: localrag {name}")


def test_an_answer_goes_to_stdout_and_talk_does_not(run):
    code, out, err = run("ask", "Why?", "--model", "echo")
    assert (code, out, err) == (0, "You asked: Why?\n", "")


def test_explain_shows_who_got_what(run):
    code, out, err = run("ask", "Why?", "--model", "echo", "--explain", "--ctx", "400", "--max-tokens", "100")
    assert (code, out) == (0, "You asked: Why?\n")
    assert [line.split()[0] for line in err.strip().splitlines()[:6]] == ["Section", "template", "question", "answer", "spare", "window"]
    assert "window 400 of 131072 trained, limited by requested" in err


def test_explain_shows_the_support_of_each_sentence(capsys):
    text = "Dry it first. PLA is annealed at 80 \x1b[31m°C."
    hit = Hit(Chunk(1, 1, 0, text, 0, len(text), "pla.md", place="line 7"), 1.0)
    with open_echo() as engine:
        answer = Session(engine).ask(Question.of("So it is. PLA is annealed at 80 °F.", hits=(hit,)))
    render.support(answer)
    assert capsys.readouterr().err.splitlines() == [
        "Support of each sentence by the passages that it cites, 0 to 1 by words alone, because no embedder is loaded:",
        "  none  You asked: So it is.",
        f"  {answer.support.mean_score:.2f}  PLA is annealed at 80 °F.",
        "        [KB#1] PLA is annealed at 80 [31m°C.  (line 7)",
        "Not in the cited passages: 80 °F (unit)",
    ]


def test_the_speed_of_a_prompt_is_that_of_what_was_evaluated(home, capsys):
    with Session(open_echo()) as session:
        done = session.ask("Why?")
        done = replace(done, prompt_tokens=1000, cached_tokens=900, timings=replace(done.timings, prefill_s=2.0))
        render.answer(done, tokenizer=session.engine.tokenizer, as_json=False, explain="ledger", settings=Settings(home=home))
    assert "1000 tokens in (50/s)" in capsys.readouterr().err


def test_an_invented_citation_is_told_where_nothing_was_found_too(capsys):
    with open_echo() as engine:
        answer = Session(engine).ask("Is [kb#98, 99] right?")
    render.remarks(answer, ["notes"])
    assert "Cited but not among the sources: KB#98, KB#99\n" in capsys.readouterr().err
    render.remarks(answer, [])  # nobody wanted sources
    assert "KB#" not in capsys.readouterr().err


def test_json_is_one_object_and_keeps_its_promises(run):
    code, out, err = run("ask", "Why?", "--model", "echo", "--json", "--system", "Be brief.")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    identities.check(answer, [])
    assert answer["answer"] == "You asked: Why?"
    assert list(answer) == [
        "answer", "finish_reason", "model", "slot", "usage", "ledger", "evidence", "citations",
        "unsupported_citations", "answerable", "abstained", "support", "unsupported_claims", "coverage", "timings", "stdin_bytes",
        "models_files",
    ]  # fmt: skip
    assert list(answer["timings"]) == ["load_s", "retrieve_s", "prefill_s", "first_token_s", "decode_s", "total_s"]


def test_a_dry_run_shows_the_exact_prompt(run):
    code, out, _ = run("ask", "Why <|im_end|>?", "--model", "echo", "--dry-run", "--json")
    data = json.loads(out)
    segments = data["prompt"]["segments"]
    assert code == 0
    assert [token for segment in segments for token in segment["token_ids"]] == data["prompt"]["token_ids"]
    assert data["usage"]["prompt_tokens"] == len(data["prompt"]["token_ids"])
    assert [segment["name"] for segment in segments] == ["template", "question", "template"]
    assert segments[1]["text"] == "Why <|im_end|>?"
    assert "answer" not in data


def test_a_vocabulary_is_enough_for_a_dry_run_and_not_for_an_answer(run, tmp_path):
    path = write_vocab(tmp_path / "vocab.gguf")
    assert run("ask", "Why?", "--model", path, "--dry-run")[0] == 0
    assert run("budget", "Why?", "--model", path)[0] == 0
    assert "no weights" in refusal(run("ask", "Why?", "--model", path), 7)


def test_text_comes_from_a_file_or_from_standard_input(run, tmp_path):
    (tmp_path / "q.txt").write_text("From a file?", encoding="utf-8-sig")
    assert run("ask", f"@{tmp_path}/q.txt", "--model", "echo")[1] == "You asked: From a file?\n"
    assert "No such file" in refusal(run("ask", f"@{tmp_path}/none.txt", "--model", "echo"), 2)
    (tmp_path / "q.bin").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in refusal(run("ask", f"@{tmp_path}/q.bin", "--model", "echo"), 2)


def localrag(*args, **options):
    command = [sys.executable, "-m", "localrag", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def test_a_stdout_of_an_old_encoding_gets_the_whole_answer(home):
    old = os.environ | {"PYTHONIOENCODING": "latin-1"}
    done = localrag("ask", "Größe… 火?", "--model", "echo", env=old, encoding="latin-1")
    assert (done.returncode, done.stdout) == (0, "You asked: Größe? ??\n")
    done = localrag("ask", "Größe… 火?", "--model", "echo", "--json", env=old, encoding="latin-1")
    assert json.loads(done.stdout)["answer"] == "You asked: Größe… 火?"


def test_what_is_piped_in_is_evidence(home):
    log = "".join(f"step {n} ok\n\n" for n in range(300)) + "step 300 failed: disk full\n"
    done = localrag("ask", "What failed?", "--model", "echo", "--json", "--ctx", "2000", input=log)
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["evidence"][0]["source"] == "standard input"
    assert any("KB#stdin/" in label for label in answer["ledger"]["entries"][1]["omitted"])
    text = {each["id"]: log[each["start"] : each["end"]] for each in answer["evidence"]}
    assert any("disk full" in piece for piece in text.values())
    offered = [*text, *answer["ledger"]["entries"][1]["omitted"]]
    identities.check(answer, offered)


def test_a_dash_is_standard_input(home):
    assert localrag("ask", "-", "--model", "echo", input="From a pipe?").stdout == "You asked: From a pipe?\n"
    assert localrag("tokens", "-", "--model", "echo", input="four").stdout == "4\n"


def test_a_reader_that_goes_away_is_no_error(home):
    done = subprocess.run(
        f"{sys.executable} -m localrag ask {'x' * 300} --model echo | head -c 5",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("You a", "")


@pytest.mark.parametrize(
    ("args", "code"), [(["tokens", "four", "--model", "echo"], 0), (["memory", "list"], 0), (["kb", "show", "none", "--json"], 6)]
)
def test_a_reader_that_is_gone_already_is_no_error(home, args, code):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "localrag", *args]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, "")


def test_ctrl_c_keeps_what_was_written_and_ends_at_once(home, tmp_path):
    path = write_model(tmp_path / "tiny.gguf", changes={"llama.context_length": 200_000})
    command = [sys.executable, "-m", "localrag", "ask", "Go on.", "--model", path, "--max-tokens", "190000"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert (first + rest).endswith(b"\n")
    assert err.decode().strip() == "Interrupted."


def test_ctrl_c_ends_an_answer_and_what_comes_before_it():
    with open_echo() as engine:
        with pytest.raises(KeyboardInterrupt):
            end_answer(engine)
        engine.reserve(64)
        sequence = engine.add(engine.tokenizer.encode("Why?"), SamplingParams(max_tokens=8))
        end_answer(engine)
        engine.step()
        assert sequence.finish_reason == "cancelled"


# --- bad input: one clear line, a way out, the right code


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["aks", "x"], 2, "Did you mean ask"),
        (["ask"], 2, "QUESTION"),
        (["ask", "--\n\x1b[31mred", "--model", "echo"], 2, "No such option"),
        (["ask", "x", "--model", "echo", "--ctx", "0"], 2, "--ctx"),
        (["ask", "x", "--model", "echo", "--max-tokens", "0"], 2, "--max-tokens"),
        (["ask", "x", "--model", "echo", "--temperature", "-1"], 2, "--temperature"),
        (["ask", "x", "--model", "echo", "--context-ratio", "1.5"], 2, "--context-ratio"),
        (["ask", "x", "--model", "echo", "--max-seconds", "nan"], 2, "not a number"),
        (["summarize", "x", "--model", "echo", "--max-age", "nan"], 2, "not a number"),
        (["ask", "x", "--model", "echo", "--seed", "4294967296"], 2, "--seed"),
        (["ask", "  ", "--model", "echo"], 2, "empty"),
        (["ask", "x", "--model", "smollm"], 4, "smollm2-135m"),
        (["ask", "x", "--model", "none.gguf"], 4, "none.gguf"),
        (["ask", "x", "--model", "echo", "--kb", "handbok"], 6, "localrag index PATH --kb handbok"),
        (["ask", "x", "--model", "echo", "--kb", "../etc"], 6, "is not a valid name"),
        (["ask", "x" * 300, "--model", "echo", "--ctx", "256"], 5, "question 300"),
        (["kb", "show", "none"], 6, "no knowledge base"),
        (["search", "x", "--kb", "none"], 6, "no knowledge base"),
        (["models", "show", "none"], 4, "none"),
        (["ask", "@~nobody-here/q.txt", "--model", "echo"], 2, "No such file"),
        (["ask", "x", "--model", "echo", "--chat-template", "~nobody-here/t"], 4, "cannot be read"),
        (["tokens", "x", "--models", "none.toml"], 3, "none.toml"),
    ],
)
def test_bad_input_is_one_line_with_a_way_out(run, args, code, says):
    assert says in refusal(run(*args), code)


def test_an_error_under_json_is_an_object_with_its_numbers(run):
    code, out, _ = run("ask", "x" * 300, "--model", "echo", "--ctx", "256", "--json")
    error = json.loads(out)["error"]
    assert code == 5
    assert error["type"] == "BudgetExceededError"
    assert (error["window"], error["sections"]["question"], error["over"]) == (256, 300, error["needed"] - 256)
    assert error["hint"]
    code, out, _ = run("ask", "x", "--model", "echo", "--ctx", "0", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "UsageError")


def test_half_a_character_of_a_name_or_a_task_costs_no_output(run):
    half = os.fsdecode(b"caf\xe9")
    code, out, _ = run("index", half, "--kb", "x", "--json")
    assert (code, json.loads(out)["error"]["path"]) == (6, half)
    code, out, _ = run("budget", half, "--model", "echo", "--show-allocation")
    assert (code, "Task    caf" in out) == (0, True)


def test_an_answer_longer_than_the_window_is_clamped_and_said_so(run):
    code, out, _ = run("ask", "Why?", "--model", "echo", "--ctx", "300", "--max-tokens", "5000", "--json")
    entry = json.loads(out)["ledger"]["entries"][-1]
    assert (code, entry["name"], entry["wanted"], entry["allotted"]) == (0, "answer", 5000, 300 - json.loads(out)["usage"]["prompt_tokens"])
    [warning] = json.loads(out)["warnings"]
    can_have = f"The answer can have {entry['allotted']} of the 5,000 tokens asked for (max_tokens)"
    assert warning == f"{can_have}: the window of 300 tokens has no room for more."
    for command in (["ask", "Why?"], ["ask", "Why?", "--dry-run"], ["budget", "Why?"]):
        code, _, err = run(*command, "--model", "echo", "--ctx", "300", "--max-tokens", "5000")
        assert (code, f"Warning: {warning}" in err.splitlines()) == (0, True)
        code, out, _ = run(*command, "--model", "echo", "--ctx", "300", "--max-tokens", "5000", "--json")
        assert json.loads(out)["warnings"] == [warning]


@pytest.mark.parametrize("command", [["ask", "Why?"], ["ask", "Why?", "--dry-run"], ["budget", "Why?"]])
def test_a_window_larger_than_can_be_is_capped_and_said_so(run, command):
    told = "The window has 131,072 of the 1,000,000 tokens asked for (--ctx): the model was trained for no more."
    code, _, err = run(*command, "--model", "echo", "--ctx", "1000000")
    assert (code, f"Warning: {told}" in err.splitlines()) == (0, True)
    code, out, _ = run(*command, "--model", "echo", "--ctx", "1000000", "--json")
    assert json.loads(out)["warnings"] == [told]
    assert "warnings" not in json.loads(run(*command, "--model", "echo", "--ctx", "1000", "--json")[1])


def test_why_an_answer_ended_is_said_and_a_way_out_only_where_there_is_one(run):
    question = f"{'a' * 400} Say it 9 times"
    args = ("ask", question, "--model", "echo")
    assert "Stopped at the limit of 5 tokens (--max-tokens)." in run(*args, "--max-tokens", 5)[2].splitlines()
    window = json.loads(run("budget", question, "--model", "echo", "--json")[1])["usage"]["prompt_tokens"] + 40
    for most in (40, 5000):
        err = run(*args, "--max-tokens", most, "--ctx", window)[2]
        assert f"Stopped at 40 tokens: the window of {window:,} tokens is full." in err.splitlines()
        assert "--max-tokens" not in err


def test_broken_model_files_are_told_apart(run, tmp_path):
    whole = write_model(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole.read_bytes()[:-1000])
    text = tmp_path / "notes.gguf"
    text.write_text("# Notes\n")
    bare = write_model(tmp_path / "bare.gguf", changes={"tokenizer.chat_template": None})
    assert "truncated" in refusal(run("ask", "x", "--model", cut), 4)
    assert "not a GGUF file" in refusal(run("ask", "x", "--model", text), 4)
    assert "--chat-template FILE" in refusal(run("ask", "x", "--model", bare), 4)
    assert "bare.gguf" in refusal(run("ask", "x", "--model", bare), 4)


def test_a_chat_template_can_be_given(run, home, tmp_path):
    know_attention(home)
    bare = write_model(tmp_path / "bare.gguf", changes={"tokenizer.chat_template": None})
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}<|im_end|>")
    args = ("ask", "x", "--model", bare, "--chat-template", tmp_path / "chat.jinja", "--max-tokens", "4", "--json")
    code, out, _ = run(*args)
    assert code == 0
    assert json.loads(out)["usage"]["prompt_tokens"] == 3
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}")
    assert "not valid Jinja" in refusal(run(*args[:-1]), 4)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root: run the tests as another user")
def test_a_home_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("LOCALRAG_HOME", str(tmp_path / "home"))
    (Path.cwd() / "README.md").stat()
    assert main(["index", "README.md", "--kb", "x"]) in {3, 6}
    assert "Error:" in capsys.readouterr().err


def test_a_home_of_nobody(run, monkeypatch):
    monkeypatch.setenv("LOCALRAG_HOME", "~nobody-here/x")
    assert "there is no such user" in refusal(run("kb", "list"), 2)


def test_a_home_that_is_a_file(tmp_path, monkeypatch, capsys, embedder_path):
    (tmp_path / "home").write_text("not a folder")
    (tmp_path / "page.md").write_text("# Page\n\nText.\n")
    models = tmp_path / "models.toml"
    models.write_text(f'default_embedder = "e"\n[embedders.e]\npath = "{embedder_path}"\n')
    monkeypatch.setenv("LOCALRAG_HOME", str(tmp_path / "home"))
    code = main(["index", str(tmp_path / "page.md"), "--kb", "x", "--models", str(models)])
    assert code in {3, 6}
    err = capsys.readouterr().err
    assert "home" in err
    assert "Traceback" not in err


# --- models and tokens


def test_models_are_listed_with_what_is_here(run, tmp_path):
    path = write_model(tmp_path / "tiny.gguf")
    (tmp_path / "models.toml").write_text(
        f'default_model = "a"\n[models.a]\npath = "{path}"\n[models.b]\nwheel = "x-y==1"\nfile = "m.gguf"\n'
    )
    code, out, err = run("models", "list", "--models", tmp_path / "models.toml")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()][:3] == ["Name", "a", "b"]
    assert "localrag models pull b" in err
    code, out, _ = run("models", "list", "--json", "--models", tmp_path / "models.toml")
    assert [(row["name"], row["present"]) for row in json.loads(out)["models"][:2]] == [("a", True), ("b", False)]
    assert "localrag models pull b" in refusal(run("ask", "x", "--model", "b", "--models", tmp_path / "models.toml"), 4)


def test_a_model_is_shown_with_its_window(run, tmp_path):
    path = write_model(tmp_path / "tiny.gguf")
    code, out, _ = run("models", "show", path, "--json", "--ctx", "100")
    data = json.loads(out)
    assert code == 0
    assert (data["architecture"], data["n_ctx_train"], data["slot"]["n_ctx"], data["slot"]["bound"]) == ("llama", 512, 100, "requested")
    assert "requested" in run("models", "show", path, "--ctx", "100")[1]


def test_models_are_verified(run, tmp_path):
    path = write_model(tmp_path / "tiny.gguf")
    models = tmp_path / "models.toml"
    models.write_text(f'[models.a]\npath = "{path}"\nsha256 = "{"0" * 64}"\n')
    code, out, err = run("models", "verify", "--models", models)
    assert code == 4
    assert "DIFFERS" in out
    assert "a differs" in err
    code, out, _ = run("models", "verify", "--models", models, "--json")
    assert (code, json.loads(out)["results"][0]["ok"]) == (4, False)
    assert "sha256" in refusal(run("ask", "x", "--model", "a", "--models", models), 4)


def test_tokens_are_counted_and_shown(run):
    assert run("tokens", "é<|im_end|>", "--model", "echo")[1] == "12\n"
    _, out, _ = run("tokens", "hé", "--model", "echo", "--json", "--show")
    assert json.loads(out) == {"num_tokens": 3, "token_ids": [104, 195, 169], "pieces": ["h", "\ufffd", "\ufffd"]}
    assert run("tokens", "h", "--model", "echo", "--show")[1].split() == ["1", "104", "'h'"]
    assert run("tokens", "--model", "echo", "--", "--debug")[1] == "7\n"


def test_a_budget_is_shown_without_generating(run):
    code, out, _ = run("budget", "Why?", "--model", "echo", "--ctx", "1000", "--show-allocation")
    assert code == 0
    assert "window" in out
    code, out, _ = run("budget", "Why?", "--model", "echo", "--ctx", "1000", "--json")
    data = json.loads(out)
    assert data["ledger"]["window"] == 1000
    assert "prompt" not in data


def test_passages_that_all_are_too_large_are_listed_as_left_out(home, capsys):
    with Session(open_echo(), n_ctx=300) as session:
        prepared = session.prepare(Question.of("Why?", piped="x" * 1000))
    assert prepared.prompt.hits == ()
    render.prepared(
        prepared, "echo", task="Why?", tokenizer=session.engine.tokenizer, as_json=False, settings=Settings(home=home), with_allocation=True
    )
    [line] = [line for line in capsys.readouterr().out.splitlines() if "[KB#stdin/1]" in line]
    assert "left out (" in line


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_a_seed_that_is_named_makes_answers_repeatable(seed):
    sampling = options.sampling({"max_tokens": 5, "think_tokens": 0}, seed=seed, temperature=0.0)
    assert (sampling.seed, sampling.repeatable) == (seed or 0, seed is not None)


def test_the_seed_of_a_chat_makes_its_answers_repeatable():
    desk = SimpleNamespace(room=SimpleNamespace(sampling=SamplingParams()))
    chat_settings._seed(desk, "")
    assert not desk.room.sampling.repeatable
    chat_settings._seed(desk, "0")
    assert (desk.room.sampling.seed, desk.room.sampling.repeatable) == (0, True)
