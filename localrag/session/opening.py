"""Open models, knowledge bases, embedders and rerankers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from localrag.budget import Profile
from localrag.errors import ConfigError, LocalragError, ModelNotFoundError, UsageError
from localrag.settings import MAX_TEXT_BYTES, Settings, expanded
from localrag.text.tokens import PrefixedEmbedder, prefixed_fingerprint

if TYPE_CHECKING:
    from localrag.catalog import Catalog
    from localrag.deliberation import Council
    from localrag.engine.engine import Engine
    from localrag.kb import KnowledgeBase
    from localrag.kb.filters import FolderRule
    from localrag.kb.protocols import Reranker
    from localrag.text.tokens import Embedder
    from localrag.types import ModelSpec


def open_engine(
    model: str | None, *, settings: Settings, chat_template: Path | None = None, vocab_only: bool = False, keep: bool = False
) -> Engine:
    """Open a model by its name in models.toml or by the path of its file. "echo" needs neither.

    With `keep`, prefixes that took long to evaluate are stored on disk in the home, for later processes.
    """
    if model == "echo":
        from localrag.engine.echo import SPEEDUP, EchoTokenizer, open_echo  # noqa: PLC0415  # weight

        if chat_template is None:
            return open_echo(speedup=SPEEDUP)
        from localrag.engine.template import JinjaChatTemplate  # noqa: PLC0415  # weight

        origin = chat_template.name
        jinja_template = JinjaChatTemplate(read_template(chat_template), eos_text=EchoTokenizer.eos_text, origin=origin)
        return open_echo(template=jinja_template, speedup=SPEEDUP)
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
        is_trusted=spec.sha256 is not None,  # the catalogue has verified the hash
        sha256=spec.sha256,
        prefix_bytes=settings.prefix_bytes if keep else 0,
    )


def open_profile(name: str | None, *, settings: Settings) -> tuple[Profile, Mapping[str, object]]:
    """Return a budget by its name in models.toml, and the relevance settings there as fields of Weights.

    Without a name, it is the table [budgets.default] if it exists, else the built-in budget.
    """
    if name is None and not settings.models_files():
        return Profile(), {}
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    return catalog.budget(name), catalog.relevance()


def open_council(name: str, *, settings: Settings) -> Council:
    """Return a council by its name in models.toml. Raises ConfigError if it does not exist."""
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    return Catalog.load(settings).council(name)


def open_knowledge_base(name: str, *, settings: Settings, create: bool = False) -> KnowledgeBase:
    """Open a knowledge base of this home by name. Raises KnowledgeBaseNotFoundError if it does not exist and `create` is not set."""
    from localrag.kb.knowledge_base import KnowledgeBase  # noqa: PLC0415  # weight: an ask without a knowledge base needs none of it

    return KnowledgeBase.open(settings.kb_dir, name, create=create)


def names_of(kbs: str | Sequence[str]) -> list[str]:
    """Return the names of one or several knowledge bases as a list. Raises UsageError for anything other than strings."""
    names = [kbs] if isinstance(kbs, str) else list(kbs) if isinstance(kbs, Sequence) else [kbs]
    for name in names:
        if not isinstance(name, str):
            raise UsageError(f"Name a knowledge base with a text, not {type(name).__name__}.", hint='Give kbs="handbook" or a list.')
    return names


def open_knowledge_bases(names: Sequence[str], *, settings: Settings, opened: ExitStack) -> list[KnowledgeBase]:
    """Open knowledge bases by name, each once; `opened` closes them. Raises UsageError if two would have the same labels."""
    knowledge_bases = [opened.enter_context(open_knowledge_base(each, settings=settings)) for each in dict.fromkeys(names)]
    if len({kb.name for kb in knowledge_bases}) < len(knowledge_bases):
        raise UsageError(
            "Two of the knowledge bases have the same name, so their citations could not be told apart.", hint="Ask one at a time."
        )
    return knowledge_bases


def folder_rules(settings: Settings) -> tuple[FolderRule, ...]:
    """Return the rules of [tags] in models.toml. Raises ConfigError for an invalid pattern."""
    if not settings.models_files():
        return ()
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight
    from localrag.kb.filters import FolderRule  # noqa: PLC0415  # weight

    try:
        return tuple(FolderRule(pattern, tags) for pattern, tags in Catalog.load(settings).tags.items())
    except UsageError as error:
        raise ConfigError(f"[tags] of models.toml: {error.message}", hint=error.hint) from None


def open_embedder(settings: Settings, name: str | None = None, *, for_queries: bool = False, kbs: Sequence[KnowledgeBase] = ()) -> Embedder:
    """Open an embedder by its name in models.toml, or by the path of its folder or .gguf file.

    Without a name, it is the one in models.toml that embedded the knowledge bases `kbs`, else the default. With `for_queries`, use the
    folder's llama.cpp copy if indexing has made one (see `prepare_queries`). It does not need torch.
    """
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    spec = catalog.embedder(_embedder_of(kbs, catalog) if name is None else name)
    path = catalog.open(spec)
    sha256 = spec.sha256 or (catalog.digest(spec) if path.is_file() else None)  # part of its identity; hashed once
    embedder = _embedder_at(path, spec, settings, sha256, for_queries=for_queries)
    if not spec.query_prefix and not spec.passage_prefix:
        return embedder
    return PrefixedEmbedder(embedder, query_prefix=spec.query_prefix, passage_prefix=spec.passage_prefix)


def fits(embedder: Embedder | None, kbs: Sequence[KnowledgeBase]) -> bool:
    """Return whether this embedder made the vectors of all of these knowledge bases, as far as they have any."""
    return embedder is not None and all(kb.embedder is None or kb.embedder[0] == embedder.fingerprint for kb in kbs)


def _embedder_of(kbs: Sequence[KnowledgeBase], catalog: Catalog) -> str | None:
    """Return the name of the embedder in models.toml that embedded all of these knowledge bases; None for the default, or if unknown."""
    fingerprints = {kb.embedder[0] for kb in kbs if kb.embedder is not None}
    if len(fingerprints) != 1:
        return None
    specs = sorted(catalog.embedders.values(), key=lambda spec: spec.name != catalog.default_embedder)  # the others seldom matter
    return next((spec.name for spec in specs if _fingerprint(spec, catalog) in fingerprints), None)


def _fingerprint(spec: ModelSpec, catalog: Catalog) -> str | None:
    """Return the fingerprint of an embedder without loading it; None for one that cannot be used."""
    try:
        path = catalog.locate(spec)
        if path.is_file():
            own = spec.sha256 or catalog.digest(spec)
        else:
            from localrag.kb.embedder import SentenceTransformerEmbedder  # noqa: PLC0415  # weight

            own = SentenceTransformerEmbedder(path, sha256=spec.sha256).fingerprint
    except LocalragError:
        return None
    return prefixed_fingerprint(own, spec.query_prefix, spec.passage_prefix)


def _embedder_at(path: Path, spec: ModelSpec, settings: Settings, sha256: str | None, *, for_queries: bool) -> Embedder:
    if path.is_file():
        from localrag.engine.embed import LlamaEmbedder  # noqa: PLC0415  # weight

        return LlamaEmbedder(path, home=settings.home, is_trusted=spec.sha256 is not None, sha256=sha256)
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
    """Like `open_reranker` when no model is open yet: "llm" opens one for the duration of the block. Yields None without a name."""
    if name == "llm":
        with open_engine(model, settings=settings, chat_template=chat_template) as engine:
            yield open_reranker(settings, name, engine)
    else:
        yield None if name is None else open_reranker(settings, name)


def open_reranker(settings: Settings, name: str, engine: Engine | None = None) -> Reranker:
    """Open a reranker: "llm" uses the open `engine`; any other name is a cross-encoder in models.toml, a .gguf file or a folder.

    A folder is scored by its llama.cpp copy, which is made if it does not exist; by sentence-transformers if llama.cpp cannot replace it.
    """
    if name == "llm" and engine is not None:
        from localrag.session.llm_reranker import Judge  # noqa: PLC0415  # weight

        return Judge(engine)
    from localrag.catalog import Catalog  # noqa: PLC0415  # weight
    from localrag.engine.rerank import LlamaReranker, open_copy  # noqa: PLC0415  # weight

    catalog = Catalog.load(settings)
    spec = catalog.reranker(name)
    path = catalog.open(spec)
    if path.is_file():
        return LlamaReranker(path, home=settings.home, is_trusted=spec.sha256 is not None, sha256=spec.sha256)
    from localrag.kb.embedder import CrossEncoderReranker  # noqa: PLC0415  # weight

    original = CrossEncoderReranker(path, sha256=catalog.digest(spec))
    return open_copy(original, settings) or original


def prepare_queries(embedder: Embedder, settings: Settings, *, on_start: Callable[[], None]) -> None:
    """Prepare to embed questions without torch, if llama.cpp gives the same vectors. `on_start` is called before a long conversion."""
    from localrag.engine.query_embedder import convert_for_queries  # noqa: PLC0415  # weight

    convert_for_queries(embedder.original if isinstance(embedder, PrefixedEmbedder) else embedder, settings, on_start=on_start)


def read_template(path: Path) -> str:
    """Read the source of a chat template. Raises ModelNotFoundError if the file cannot be read, UsageError if it is not a text file."""
    try:
        raw = expanded(path).read_bytes()
    except OSError as error:
        raise ModelNotFoundError(f"The chat template {path} cannot be read: {error.strerror}.", hint="Check the path.") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise UsageError(f"The chat template {path} is too large: {len(raw)} bytes.", hint="Give the template's own file.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"The chat template {path} is not UTF-8 text.", hint="Give the template's own file.") from None
