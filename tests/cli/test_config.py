"""Defaults of options that people keep: where they come from, which one wins, and what a mistake in them says."""

import json
import tomllib

import pytest

from localrag import Settings
from localrag.cli import COMMANDS, CONFIGURED
from localrag.settings import OPTIONS, defaults, variable


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty folder in which the commands run."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def answer(localrag):
    """Asks echo something; the answer object."""

    def run(*args):
        code, out, err = localrag(*args, "--json")
        assert code == 0, err + out
        return json.loads(out)

    return run


def origins(localrag):
    return {row["name"]: (row["value"], row["from"]) for row in json.loads(localrag("config", "list", "--json")[1])["settings"]}


def test_every_setting_is_an_option_of_the_commands_that_it_names():
    assert {command for commands in OPTIONS.values() for command in commands} == CONFIGURED
    assert set(COMMANDS) > CONFIGURED


def test_what_is_set_counts_from_then_on_and_the_nearest_wins(localrag, answer, project, home, monkeypatch):
    assert localrag("config", "set", "model", "echo")[0] == 0
    assert localrag("config", "set", "max-tokens", "3")[0] == 0
    assert answer("ask", "hello")["usage"]["completion_tokens"] == 3
    assert localrag("config", "set", "max-tokens", "4", "--project")[2].splitlines() == [
        f"Set max-tokens to 4 in {project / 'localrag.toml'}."
    ]
    assert answer("ask", "hello")["usage"]["completion_tokens"] == 4
    assert f"Here, {project / 'localrag.toml'} sets it to 4, which wins." in localrag("config", "set", "max-tokens", "2")[2]
    monkeypatch.setenv("LOCALRAG_MAX_TOKENS", "5")
    assert answer("ask", "hello")["usage"]["completion_tokens"] == 5
    assert answer("ask", "hello", "--max-tokens", "6")["usage"]["completion_tokens"] == 6
    assert origins(localrag)["max-tokens"] == ("5", "environment")
    monkeypatch.delenv("LOCALRAG_MAX_TOKENS")
    assert origins(localrag)["max-tokens"] == (4, "project")
    monkeypatch.chdir(home)
    assert origins(localrag)["max-tokens"] == (2, "home")
    assert origins(localrag)["top-k"] == (None, "built in")
    assert origins(localrag)["model"] == ("echo", "home")
    assert (home / "config.toml").stat().st_mode & 0o777 == 0o600


def test_a_knowledge_base_that_is_set_is_indexed_searched_and_asked(localrag, answer, project):
    (project / "zebra.md").write_text("# Zebra\n\nA zebra has stripes.\n")
    assert "There is no knowledge base 'zoo' yet." in localrag("config", "set", "kb", "zoo")[2]
    assert localrag("index", project / "zebra.md")[:2] == (
        0,
        "zoo: 1 added, 0 updated, 0 unchanged, 0 removed, 0 skipped; 1 chunk, 1 new\n",
    )
    assert [hit["source"] for hit in json.loads(localrag("search", "stripes", "--json")[1])["hits"]] == ["zebra.md"]
    assert [hit["source"] for hit in answer("What has stripes?", "-m", "echo")["evidence"]] == ["zebra.md"]
    assert answer("What has stripes?", "-m", "echo", "--kb", "")["evidence"] == []
    assert localrag("config", "set", "kb", "zoo", "other")[0] == 0
    assert "--kb" in localrag("index", project / "zebra.md")[2]  # which of the two?
    assert localrag("config", "get", "kb")[:2] == (0, "zoo\nother\n")


def test_short_options_mean_what_the_long_ones_do(localrag, answer):
    assert localrag("search", "x", "--kb", "nowhere", "-k", "3")[0] == 6  # as before: a number of passages
    short = answer("ask", "hello", "-m", "echo", "-c", "700", "-n", "4")
    assert (short["model"], short["slot"]["n_ctx"], short["usage"]["completion_tokens"]) == ("echo", 700, 4)
    assert localrag("ask", "hello", "-m", "echo", "-k", "nowhere")[0] == 6
    for command in ("chat", "serve"):
        assert all(f"-{letter}, --" in localrag(command, "--help")[1] for letter in ("mc" if command == "serve" else "mkcn"))


@pytest.mark.parametrize("text", ["What is PLA?", "What is PLA", "なぜですか？", "list the kb"])
def test_a_question_alone_is_asked(answer, text):
    assert answer(text, "--model", "echo")["answer"] == f"You asked: {text}"


@pytest.mark.parametrize(("word", "says"), [("idnex", "Did you mean index?"), ("hello", "There is no command 'hello'.")])
def test_a_mistyped_command_is_not_a_question(localrag, word, says):
    code, _, err = localrag(word, "--model", "echo")
    assert (code, says in err) == (2, True)


def test_a_conversation_keeps_its_model_and_knowledge_bases(localrag, project, monkeypatch):
    """A default is for new ones; an option of the command line still changes it."""
    from localrag.cli.chat import chat_command  # noqa: PLC0415  # only here
    from localrag.cli.chat.state import ConversationChoice, Room  # noqa: PLC0415
    from localrag.cli.options import Asking  # noqa: PLC0415
    from localrag.types import SamplingParams  # noqa: PLC0415

    for name in ("zoo", "farm"):
        (project / f"{name}.md").write_text(f"# {name}\n\nA {name} has animals.\n")
        assert localrag("index", project / f"{name}.md", "--kb", name)[0] == 0

    def used(weak, **given):
        params = chat_command.make_context("chat", ["--model", "echo"]).params | given
        choice = ConversationChoice(name="kept", weak=frozenset(weak))
        room = Room({each: params[each] for each in Asking.__annotations__}, SamplingParams(), choice)
        room.open()
        try:
            return room.status.kbs
        finally:
            room.close()

    assert used([], kbs=("zoo",)) == ("zoo",)
    assert used(["kbs"], kbs=("farm",)) == ("zoo",)
    assert used([], kbs=("farm",)) == ("farm",)


def test_a_default_model_that_is_nearer_than_the_home_wins(localrag, project, home, tmp_path, monkeypatch):
    """./models.toml is nearer than config.toml of the home, and a file of --models than anything but --model."""
    monkeypatch.delenv("LOCALRAG_MODELS")
    (project / "near.toml").write_text('default_model = "near"\n[models.near]\npath = "near.gguf"\n')
    assert localrag("config", "set", "model", "echo")[0] == 0
    monkeypatch.delenv("LOCALRAG_MODELS", raising=False)
    assert localrag("tokens", "abc")[:2] == (0, "3\n")
    assert "near.gguf" in localrag("tokens", "abc", "--models", "near.toml")[2]
    (project / "models.toml").write_text((project / "near.toml").read_text())
    assert "near.gguf" in localrag("tokens", "abc")[2]
    assert localrag("config", "set", "model", "echo", "--project")[0] == 0
    assert localrag("tokens", "abc")[:2] == (0, "3\n")
    assert "near.gguf" in localrag("tokens", "abc", "--models", "near.toml")[2]


def test_a_file_keeps_its_comments(localrag, home):
    home.mkdir()
    (home / "config.toml").write_text('# mine\nkb = "zoo"  # the animals\nmax-tokens = 3\ncite = "free"')
    assert localrag("config", "set", "max-tokens", "7")[0] == 0
    assert (home / "config.toml").read_text() == '# mine\nkb = "zoo"  # the animals\nmax-tokens = 7\ncite = "free"\n'
    assert localrag("config", "unset", "cite", "seed")[2].count(" from ") == 1
    assert (home / "config.toml").read_text() == '# mine\nkb = "zoo"  # the animals\nmax-tokens = 7\n'
    (home / "config.toml").write_text('kb = [\n  "zoo",\n]\n')
    assert localrag("config", "set", "kb", 'a"b\\', "--json")[0] == 6  # not a name
    assert localrag("config", "set", "kb", "farm")[0] == 0
    assert tomllib.loads((home / "config.toml").read_text()) == {"kb": ["farm"]}


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["max-tokens", "many"], 2, "'many' is not a valid integer"),
        (["max-tokens", "0"], 2, "--max-tokens"),
        (["max-tokens", "1", "2"], 2, "takes one value"),
        (["max-token", "1"], 2, "Did you mean max-tokens?"),
        (["cite", "loosely"], 2, "'loosely' is not one of"),
        (["kb", "Not A Name"], 6, "not a valid name"),
        (["model", "nowhere"], 4, "nowhere"),
        (["budget", "nowhere"], 3, "nowhere"),
        (["temperature", "nan"], 2, "not a number"),
    ],
)
def test_a_value_that_the_option_would_not_take_is_not_set(refused, home, args, code, says):
    assert says in refused(code, "config", "set", *args)
    assert not (home / "config.toml").exists()


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("max-token = 1\n", 3, "There is no setting 'max-token'."),
        ("max-tokens = true\n", 3, "max-tokens must be a text or a number."),
        ("kb = [1]\n", 3, "kb must be a name or a list of names."),
        ("kb = \n", 3, "not valid TOML"),
        ("max-tokens = 'x'\n", 2, "The value comes from "),
        ("[kb]\n", 3, "kb must be"),
        ("#" * 70_000, 3, "more than 65536 bytes"),
    ],
)
def test_a_file_that_is_wrong_is_named(refused, localrag, home, text, code, says):
    home.mkdir()
    (home / "config.toml").write_text(text)
    said = refused(code, "ask", "hello", "--model", "echo")
    assert says in said
    assert str(home / "config.toml") in said
    assert localrag("ask", "--help")[0] == 0


def test_a_password_is_neither_stored_nor_shown(localrag, home, monkeypatch):
    address = "postgresql://me:swordfish@db.example/notes#zoo"
    _, out, err = localrag("config", "set", "kb", address)
    assert "The password is not stored." in err
    assert "swordfish" not in out + err + (home / "config.toml").read_text()
    monkeypatch.setenv("LOCALRAG_KB", address)
    assert "swordfish" not in "".join(map(str, localrag("config", "list")))
    assert localrag("config", "get", "kb")[1] == "postgresql://me@db.example/notes#zoo\n"
    assert defaults(home)["kb"].value == (address,)  # to be used


def test_a_folder_cannot_send_questions_to_a_server(refused, project):
    """A cloned repository may hold a localrag.toml."""
    address = "postgresql://me@db.example/notes#zoo"
    assert "leave out --project" in refused(2, "config", "set", "kb", address, "--project")
    (project / "localrag.toml").write_text(f'kb = ["{address}"]\n')
    assert "kb must not be on a server." in refused(3, "search", "x")


def test_variables_and_defaults_of_a_home_without_files(tmp_path):
    assert defaults(tmp_path, {}) == {}
    found = defaults(tmp_path, {variable("kb"): "a  b", "LOCALRAG_TOP_K": "3", "LOCALRAG_SEED": ""})
    assert {name: default.value for name, default in found.items()} == {"kb": ("a", "b"), "top-k": "3"}
    assert Settings.from_env({"LOCALRAG_HOME": str(tmp_path)}).home == tmp_path
