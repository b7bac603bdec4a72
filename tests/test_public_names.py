"""What `import localrag` gives: every name, every type that a signature names, and clear words for what people try first."""

import ast
import dataclasses
import importlib
import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import localrag
from localrag import Attachment, KnowledgeBase, Message, Session, Settings, UsageError
from localrag.question import Question
from localrag.session import open_embedder
from localrag.session.council_run import council

OPAQUE = {"Engine", "Journal", "PromptInputs", "Prompt", "Text", "Demand"}
"""Given from one method to another: what they are made of is not for users."""

MADE_ELSEWHERE = {"Chat", "KnowledgeBase", "Texts"}
"""Users get them from another method, so the arguments that make them are not for users."""


def names_in(module):
    """The names of a module with those that only a type checker imports."""
    names = dict(vars(module))
    for block in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                for alias in node.names:
                    if isinstance(node, ast.ImportFrom):
                        names[alias.asname or alias.name] = getattr(importlib.import_module(node.module), alias.name)
                    else:
                        names[alias.asname or alias.name] = importlib.import_module(alias.name)
    return names


def hints_of(thing):
    names = names_in(sys.modules[thing.__module__])
    return typing.get_type_hints(thing, names, names).items()


def signatures(thing):
    """(where, type hint) of what is public in a class or a function."""
    if inspect.isfunction(thing):
        yield from hints_of(thing)
        return
    for cls in (each for each in thing.__mro__ if each.__module__.startswith("localrag.")):
        if dataclasses.is_dataclass(cls) or typing.is_typeddict(cls) or hasattr(cls, "_fields"):
            yield from ((name, hint) for name, hint in hints_of(cls) if not name.startswith("_"))
        for name, member in vars(cls).items():
            if name.startswith("_") and (name not in ("__init__", "__call__") or cls.__name__ in MADE_ELSEWHERE):
                continue
            function = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
            if inspect.isfunction(function) and function.__module__.startswith("localrag."):
                yield from ((f"{name}: {parameter}", hint) for parameter, hint in hints_of(function))


def classes_in(hint):
    if isinstance(hint, list):
        for each in hint:
            yield from classes_in(each)
    elif isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    else:
        for each in typing.get_args(hint):
            yield from classes_in(each)


def test_every_type_in_a_public_signature_is_public():
    public = {name: council if name == "council" else getattr(localrag, name) for name in localrag.__all__}
    missing, walked = set(), 0
    for name, thing in public.items():
        if name in OPAQUE or not (isinstance(thing, type) or inspect.isfunction(thing)):
            continue
        for where, hint in signatures(thing):
            for cls in classes_in(hint):
                walked += 1
                if cls.__module__.startswith("localrag.") and public.get(cls.__name__) is not cls:
                    missing.add(f"{cls.__module__}.{cls.__name__} in {name}.{where}")
    assert sorted(missing) == []
    assert walked > 300


def test_all_errors_are_public():
    errors = vars(importlib.import_module("localrag.errors")).values()
    assert {each.__name__ for each in errors if isinstance(each, type) and issubclass(each, Exception)} <= set(localrag.__all__)


def test_names_are_listed_before_they_are_imported():
    code = (
        "import localrag, sys, rlcompleter\n"
        "light = not {'numpy', 'pydantic', 'llama_cpp', 'faiss', 'sqlite3', 'click'} & set(sys.modules)\n"
        "assert light and len([m for m in sys.modules if m.startswith('localrag.')]) == 0\n"
        "assert set(localrag.__all__) <= set(dir(localrag)) and dir(localrag) == sorted(set(dir(localrag)))\n"
        "assert 'sys' not in dir(localrag)\n"
        "print(rlcompleter.Completer({'localrag': localrag}).complete('localrag.Sess', 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()[:16]) == (0, "localrag.Session"), done.stderr
    assert localrag.__all__ == sorted(localrag.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        localrag.nothing  # noqa: B018


def test_one_knowledge_base_needs_no_list(home, tiny_catalogue, tmp_path):
    settings = Settings(home=home, models_file=tiny_catalogue)
    (tmp_path / "zebra.md").write_text("# Zebra\n\nA zebra has stripes.\n")
    with KnowledgeBase.open(settings.kb_dir, "handbook", create=True) as kb:
        kb.ingest([tmp_path / "zebra.md"], open_embedder(settings))
    for kbs in ("handbook", ["handbook"], ("handbook",)):
        with Session.open("echo", kbs=kbs, settings=settings) as session:
            assert [each.name for each in session.knowledge_bases] == ["handbook"]
    assert localrag.council("What has a zebra?", kbs="handbook", model="echo", settings=settings).hits


@pytest.mark.parametrize(
    ("call", "says", "hint"),
    [
        (lambda: Session("echo"), "takes an open engine, not str", "Session.open('echo')"),
        (lambda: Session(None), "takes an open engine", "Session.open"),
        (lambda: KnowledgeBase("handbook"), "takes an open location, not str", "KnowledgeBase.open(settings.kb_dir, 'handbook')"),
        (lambda: Session.open("echo", kbs=Path("handbook")), "with a text, not PosixPath", "kbs="),
        (lambda: Session.open("echo", kbs=[None]), "with a text, not NoneType", "kbs="),
        (lambda: Session.open(5), "by its name or path, not by int", "echo"),
        (lambda: Session.open("echo", n_ctx="8192"), "whole number of tokens, not '8192'", "n_ctx=8192"),
        (lambda: asked(None), "not NoneType", "Message("),
        (lambda: asked([]), "list of Message", "Message("),
        (lambda: asked([{"role": "user", "content": "x"}]), "list of Message", "Message("),
        (lambda: asked(Message("user", "x")), "list of Message", "Message("),
        (lambda: asked("x", topk=3), "no option 'topk'", "top_k"),
        (lambda: asked("x", nonsense_at_all=3), "no option 'nonsense_at_all'", "There are: system"),
        (lambda: asked("x", attachments=Attachment(label="a", text="b")), "attachments is a list, not Attachment", "attachments="),
        (lambda: asked("x", attachments="a.txt"), "attachments is a list, not str", "attachments="),
        (lambda: asked("x", where="tag=price"), "where is a Where", "Where.parse"),
    ],
)
def test_what_people_try_first_is_answered_with_a_way_out(home, call, says, hint):
    with pytest.raises(UsageError) as caught:
        call()
    assert says in caught.value.message
    assert hint in (caught.value.hint or "")


def asked(question, **options):
    with Session.open("echo", keep=False) as session:
        return session.ask(Question.of(question, **options))


def test_a_path_is_taken_where_a_model_or_a_template_is(home, tmp_path):
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    for template in (tmp_path / "chat.jinja", str(tmp_path / "chat.jinja")):
        with Session.open("echo", chat_template=template, keep=False) as session:
            assert "<" in "".join(each.part.text for each in session.prepare("x").prompt.parts)
    with pytest.raises(localrag.ModelNotFoundError, match="There is no file"):
        Session.open(tmp_path / "none.gguf")
