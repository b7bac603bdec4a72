"""Models, knowledge bases and embedders by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.budget import Profile
from localrag.errors import ConfigError, ModelNotFoundError, UsageError
from localrag.settings import MAX_TEXT_BYTES, Settings, expanded

if TYPE_CHECKING:
    from localrag.deliberation import Council
    from localrag.engine.engine import Engine
    from localrag.kb import KnowledgeBase
    from localrag.kb.filters import FolderRule
    from localrag.kb.protocols import Reranker
    from localrag.text.tokens import Embedder


def open_engine(
    model: str | None, *, settings: Settings, chat_template: Path | None = None, vocab_only: bool = False, keep: bool = False
) -> Engine:
    """A model by its name in models.toml or by the path of its file; `echo` needs neither.

    With `keep`, what took long to evaluate is kept in the home, for the next process whose prompt begins with it.
    """
    if model == "echo":
        from localrag.engine.echo import SPEEDUP, EchoTokenizer, open_echo  # noqa: PLC0415  # weight

        if chat_template is None:
            return open_echo(speedup=SPEEDUP)
        from localrag.engine.template import JinjaChatTemplate  # noqa: PLC0415  # weight

        origin = chat_template.name
        made = JinjaChatTemplate(read_template(chat_template), eos_text=EchoTokenizer.eos_text, origin=origin)
        return open_echo(template=made, speedup=SPEEDUP)
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight
    from localrag.engine.loading import open_model  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    spec = catalog.model(model)
    template = chat_template or spec.chat_template
    source = None if template is None else read_template(template)
    return open_model(
        catalog.open(spec),
        name=spec.name,
        n_ctx=spec.n_ctx,
        vocab_only=vocab_only,
        chat_template=source,
        home=settings.home,
        is_trusted=spec.sha256 is not None,  # the catalogue has compared it
        sha256=spec.sha256,
        prefix_bytes=settings.prefix_bytes if keep else 0,
    )


def open_profile(name: str | None, *, settings: Settings) -> tuple[Profile, Mapping[str, object]]:
    """A budget by its name in models.toml, and what is set there of how the relevance of files is weighed, as fields of Weights.

    Without a name it is the table [budgets.default] if there is one, else what is built in.
    """
    if name is None and not settings.models_files():
        return Profile(), {}
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    return catalog.budget(name), catalog.relevance()


def open_council(name: str, *, settings: Settings) -> Council:
    """A council by its name in models.toml. ConfigError for one that is not there."""
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    return Catalog.load(settings).council(name)


def open_knowledge_base(name: str, *, settings: Settings, create: bool = False) -> KnowledgeBase:
    """A knowledge base of this home by its name. KnowledgeBaseNotFoundError unless it is there or `create` is given."""
    from localrag.kb import KnowledgeBase  # noqa: PLC0415  # weight: an ask without a knowledge base needs none of it

    return KnowledgeBase.open(settings.kb_dir, name, create=create)


def names_of(kbs: str | Sequence[str]) -> list[str]:
    """The names of knowledge bases: one, or several. UsageError for anything else."""
    names = [kbs] if isinstance(kbs, str) else list(kbs) if isinstance(kbs, Sequence) else [kbs]
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"A knowledge base is given by its name, not by {type(name).__name__}.", hint='Give kbs="handbook" or a list.')
    return names


def open_knowledge_bases(names: Sequence[str], *, settings: Settings, opened: ExitStack) -> list[KnowledgeBase]:
    """Those of these names, each once, left to `opened` to close. UsageError for two whose labels would be the same."""
    found = [opened.enter_context(open_knowledge_base(each, settings=settings)) for each in dict.fromkeys(names)]
    if len({kb.name for kb in found}) < len(found):
        raise UsageError(
            "Two of the knowledge bases have the same name, so citations would not tell them apart.", hint="Ask one at a time."
        )
    return found


def folder_rules(settings: Settings) -> tuple[FolderRule, ...]:
    """The rules of [tags] in models.toml. ConfigError for an invalid pattern."""
    if not settings.models_files():
        return ()
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight
    from localrag.kb.filters import FolderRule  # noqa: PLC0415  # weight

    try:
        return tuple(FolderRule(pattern, tags) for pattern, tags in Catalog.load(settings).tags.items())
    except UsageError as error:
        raise ConfigError(f"[tags] of models.toml: {error.message}", hint=error.hint) from None


def open_embedder(settings: Settings, name: str | None = None, *, for_queries: bool = False) -> Embedder:
    """An embedder by its name in models.toml or by the path of its folder or .gguf file.

    `for_queries` gives the copy of a folder that llama.cpp runs, which needs no torch, where indexing made one (`prepare_queries`).
    """
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    spec = catalog.embedder(name)
    path = catalog.open(spec)
    if path.is_file():
        from localrag.engine.embed import LlamaEmbedder  # noqa: PLC0415  # weight

        return LlamaEmbedder(path, home=settings.home, is_trusted=spec.sha256 is not None, sha256=spec.sha256)
    from localrag.kb.embedder import SentenceTransformerEmbedder  # noqa: PLC0415  # weight

    original = SentenceTransformerEmbedder(path, sha256=spec.sha256)
    if not for_queries:
        return original
    from localrag.engine.query_embedder import query_embedder  # noqa: PLC0415  # weight

    return query_embedder(original, settings)


@contextmanager
def opened_reranker(
    name: str | None, *, settings: Settings, model: str | None = None, chat_template: Path | None = None
) -> Iterator[Reranker | None]:
    """`open_reranker` where no model is open yet: for "llm" one is opened, and closed in the end. None for no name."""
    if name == "llm":
        with open_engine(model, settings=settings, chat_template=chat_template) as engine:
            yield open_reranker(settings, name, engine)
    else:
        yield None if name is None else open_reranker(settings, name)


def open_reranker(settings: Settings, name: str, engine: Engine | None = None) -> Reranker:
    """What reads the best passages again: "llm", which is the open `engine`, or a CrossEncoder by its name in models.toml or its folder."""
    if name == "llm" and engine is not None:
        from localrag.session.llm_reranker import Judge  # noqa: PLC0415  # weight

        return Judge(engine)
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight
    from localrag.kb.embedder import CrossEncoderReranker  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    return CrossEncoderReranker(catalog.open(catalog.reranker(name)))


def prepare_queries(embedder: Embedder, settings: Settings, *, on_start: Callable[[], None]) -> None:
    """Have questions embedded without torch from now on, where llama.cpp gives the same vectors; `on_start` is called if it takes long."""
    from localrag.engine.query_embedder import convert_for_queries  # noqa: PLC0415  # weight

    convert_for_queries(embedder, settings, on_start=on_start)


def read_template(path: Path) -> str:
    """The source of a chat template from a file. ModelNotFoundError if there is none, UsageError if it is no text."""
    try:
        raw = expanded(path).read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"The chat template {path} cannot be read: {error.strerror}.", hint="Check the path.") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise UsageError(f"The chat template {path} has {len(raw)} bytes; no template is so long.", hint="Give the template's own file.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"The chat template {path} is not UTF-8 text.", hint="Give the template's own file.") from None
