"""The commands index, search and kb: fill, search and manage knowledge bases."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import click

from localrag.citation import parse_label
from localrag.cli import indexing, options, render
from localrag.cli.config import rename_in_config
from localrag.cli.files import STANDARD_OUTPUT, InputFile, binary_stdout, check_free_stdout
from localrag.cli.terminal import emit, note
from localrag.errors import ConfigError, InterruptedRunError, KnowledgeBaseError, UsageError, counted
from localrag.kb import MODES, IngestResult, KnowledgeBase, Mode, Tagging, Where, import_kb, list_kbs, shown
from localrag.kb.knowledge_base import FolderLocation
from localrag.session import Retriever, folder_rules, open_embedder, open_knowledge_bases, opened_reranker, prepare_queries
from localrag.settings import Settings
from localrag.text.sanitize import safe

_MAX_NAMED = 10
"""Number of documents to name before they are removed."""

_kb_option = click.option("--kb", "-k", "kb", required=True, metavar="NAME", help="The knowledge base.")


@click.command("index")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@_kb_option
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="TAG",
    help='Tag for these documents. Replaces earlier tags; "" removes them. Repeatable.',
)
@click.option(
    "--hidden",
    is_flag=True,
    help="Also index hidden files and files that may hold keys or passwords. A later run without this option removes them.",
)
@click.option("--watch", is_flag=True, help="Keep running and index again whenever a file changes. Stop with Ctrl-C.")
@click.option("--dry-run", is_flag=True, help="List what would be done with each file. Write nothing.")
@click.option("--verbose", is_flag=True, help="Name every skipped file.")
@options.models_file
@options.as_json
def index_command(
    paths: tuple[Path, ...],
    kb: str,
    tags: tuple[str, ...],
    hidden: bool,
    watch: bool,
    dry_run: bool,
    verbose: bool,
    settings: Settings,
    as_json: bool,
) -> int:
    """Add or update the documents under PATHS. Only changed files are read and embedded again. Deleted files are removed.

    \b
      localrag index notes --kb notes --dry-run
      localrag index notes guide.pdf --kb notes --tag work
      localrag index notes --kb notes --watch
    """
    if watch and dry_run:
        raise UsageError("--watch and --dry-run exclude each other.", hint="Leave one out.")
    indexing.check_paths(paths)
    with KnowledgeBase.open(settings.kb_dir, kb, create=True) as knowledge_base:
        if dry_run:
            with indexing.IndexingBar(knowledge_base.address, title="Reading", again=True) as bar:
                plan = knowledge_base.plan(paths, hidden=hidden, progress=bar)
            indexing.planned(knowledge_base.address, plan, as_json=as_json, verbose=verbose)
            return 0
        with render.Progress(f"Indexing {knowledge_base.address}: loading the embedder"):
            embedder = open_embedder(settings, kbs=[knowledge_base])

        def index(before: IngestResult | None) -> IngestResult:
            with indexing.IndexingBar(knowledge_base.address, again=before is not None) as bar:
                result = knowledge_base.ingest(
                    paths,
                    embedder,
                    bar,
                    tagging=Tagging(tags or None, folder_rules(settings)),
                    hidden=hidden,
                    on_wait=lambda: note(f"Waiting: another localrag is indexing into {knowledge_base.address}."),
                )
            indexing.indexed(knowledge_base.address, result, as_json=as_json, verbose=verbose, before=before)
            return result

        try:
            first = indexing.first(index) if watch else index(None)
            prepare_queries(embedder, settings, on_start=lambda: note("Converting the embedder to a faster format. This is done once."))
        except KeyboardInterrupt:
            raise InterruptedRunError("Interrupted.", hint="Indexed documents are kept. Run the same command to continue.") from None
        return indexing.follow(paths, settings.kb_dir, index, first, as_json=as_json) if watch else 0


@click.command("search")
@click.argument("query", type=options.Text())
@click.option("--kb", "kbs", multiple=True, required=True, metavar="NAME", help="A knowledge base to search. Repeatable.")
@click.option("-k", "k", type=click.IntRange(1, 1000), default=8, show_default=True, metavar="N", help="Number of passages to show.")
@click.option("--mode", type=click.Choice(MODES), default="hybrid", show_default=True, help="Search mode.")
@options.where_option
@options.rerank_option
@options.models_file
@options.as_json
def search_command(
    query: str, kbs: tuple[str, ...], k: int, mode: Mode, where: Where | None, rerank: str | None, settings: Settings, as_json: bool
) -> None:
    """Find the passages that best match QUERY, with a breakdown of each score. ask retrieves the same passages.

    \b
      localrag search "annealing temperature" --kb handbook --where source=materials/*
      localrag search "annealing temperature" --kb handbook --kb notes
    """
    if not query.strip():
        raise UsageError("The query is empty.", hint="Give some words to search for.")
    with ExitStack() as stack:
        knowledge_bases = open_knowledge_bases(kbs, settings=settings, opened=stack)
        reranker = stack.enter_context(opened_reranker(rerank, settings=settings))
        embedder = None if mode == "keyword" else open_embedder(settings, for_queries=True, kbs=knowledge_bases)
        retriever = Retriever(knowledge_bases=knowledge_bases, embedder=embedder, learning=settings.learn, reranker=reranker)
        hits = retriever.search(query, top_k=k, mode=mode, where=where)
        none_passes = not hits and where is not None and not any(kb.sources(where) for kb in knowledge_bases)
    if none_passes and not as_json:
        for kb in dict.fromkeys(kbs):
            _note_none_passes(kb, where)
    else:
        render.hits(hits, as_json=as_json)


def _note_none_passes(kb: str, where: Where | None) -> None:
    note(f"No document of {shown(kb)} matches {safe(str(where))}. To list its documents and tags: localrag kb show {shown(kb)}")


@click.group("kb")
def kb_command() -> None:
    """List, show, verify, reembed, export, import, rename and remove knowledge bases."""


@kb_command.command("list", short_help="List the knowledge bases, with their sizes and ages.")
@options.models_file
@options.as_json
def list_command(settings: Settings, as_json: bool) -> None:
    """List the knowledge bases in localrag's home, with their sizes on disk and the times when they were last indexed."""
    rows: list[dict[str, object]] = []
    for name in list_kbs(settings.kb_dir):
        row: dict[str, object] = {"name": name, "num_documents": None, "num_chunks": None, "size_bytes": None, "indexed_at": None}
        try:
            with suppress(OSError):  # removed or renamed meanwhile
                location = FolderLocation(settings.kb_dir, name)
                row |= {"size_bytes": location.num_bytes, "indexed_at": location.indexed_at}
            with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
                row |= {"num_documents": knowledge_base.num_documents, "num_chunks": knowledge_base.num_chunks}
        except KnowledgeBaseError as error:  # still list the others if one is damaged
            row["error"] = error.to_dict()
            if not as_json:
                note(f"{safe(error.message)}\n  {error.hint}")
        rows.append(row)
    if as_json:
        emit({"knowledge_bases": rows})
    elif rows:
        indexing.knowledge_bases(rows)
    else:
        note("There are no knowledge bases yet. To create one: localrag index FOLDER --kb NAME")


@kb_command.command("show", short_help="Show the documents of a knowledge base, with their tags.")
@click.argument("name")
@options.where_option
@options.models_file
@options.as_json
def show_command(name: str, where: Where | None, settings: Settings, as_json: bool) -> None:
    """Show the documents of a knowledge base, each with its number of chunks, its tags and its file's metadata."""
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        sources, fields = knowledge_base.sources(where), knowledge_base.fields(where)
    num_chunks = sum(chunks for _, chunks in sources)
    if as_json:
        documents = [{"source": source, "num_chunks": chunks, "fields": fields.get(source, {})} for source, chunks in sources]
        emit({"name": shown(name), "num_documents": len(sources), "num_chunks": num_chunks, "documents": documents})
    elif where and not sources:
        _note_none_passes(name, where)
    else:
        indexing.documents(sources, fields)
        note(f"{shown(name)}: {counted(len(sources), 'document')}, {counted(num_chunks, 'chunk')}")


@kb_command.command("verify", short_help="Check a knowledge base, and repair derived data.")
@click.argument("name")
@options.models_file
@options.as_json
def verify_command(name: str, settings: Settings, as_json: bool) -> int:
    """Check a knowledge base for damage and compare it with the files on disk. Derived data is repaired."""
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        result = knowledge_base.verify(on_wait=lambda: note(f"Waiting: another localrag is indexing into {shown(name)}."))
    indexing.verified(shown(name), result, as_json=as_json)
    return 0 if result.is_sound else KnowledgeBaseError.exit_code


@kb_command.command("reembed", short_help="Embed all passages with another embedder.")
@click.argument("name")
@click.option("--embedder", required=True, metavar="EMBEDDER", help="An embedder in models.toml, a .gguf file or a folder.")
@options.models_file
@options.as_json
def reembed_command(name: str, embedder: str, settings: Settings, as_json: bool) -> None:
    """Embed all passages of a knowledge base with another embedder, and switch to it at the end.

    Until then, searches use the old vectors. If this is interrupted, they stay in use, and the same command goes on where it stopped.
    Passages keep their numbers, tags and marks. Later searches use the new embedder if models.toml names it.

    \b
      localrag models pull bge-m3
      localrag kb reembed notes --embedder bge-m3
    """
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        other = open_embedder(settings, embedder)
        try:
            with render.Progress(f"reembed {shown(name)}") as progress:
                result = knowledge_base.reembed(
                    other,
                    lambda done, total: progress("embedding", done, total),
                    on_wait=lambda: note(f"Waiting: another localrag is indexing into {shown(name)}."),
                )
            prepare_queries(other, settings, on_start=lambda: note("Converting the embedder to a faster format. This is done once."))
        except KeyboardInterrupt:
            raise InterruptedRunError("Interrupted.", hint="The old vectors are in use. Run the same command to continue.") from None
    if as_json:
        emit({"kb": shown(name), "embedder": embedder, **result.to_dict()})
    elif result.num_embedded or not result.num_chunks:
        note(f"{shown(name)}: embedded {counted(result.num_embedded, 'text')} with {embedder}, in {result.dim} dimensions.")
    else:
        note(f"{shown(name)} already uses {embedder}.")


@kb_command.command("export", short_help="Write a knowledge base to a single file.")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@options.models_file
@options.as_json
def export_command(name: str, file: Path, settings: Settings, as_json: bool) -> None:
    """Write a knowledge base to a single FILE, for a backup or another machine. An existing FILE is replaced; - is standard output.

    \b
      localrag kb export notes notes.kb
      localrag kb export notes - | ssh laptop localrag kb import -
    """
    if file == STANDARD_OUTPUT:
        check_free_stdout("FILE", as_json=as_json)
        with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base, binary_stdout("FILE") as path:
            knowledge_base.export(path)
        return
    if not file.parent.is_dir():
        raise UsageError(f"There is no folder {file.parent}.", hint="Create it, or name another FILE.")
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        knowledge_base.export(file)
        numbers = {"num_documents": knowledge_base.num_documents, "num_chunks": knowledge_base.num_chunks}
    if as_json:
        emit({"kb": shown(name), "file": str(file), **numbers, "num_bytes": file.stat().st_size})
    else:
        documents = counted(numbers["num_documents"], "document")
        note(f"Wrote {shown(name)} to {safe(str(file))}: {documents}, {render.size(file.stat().st_size)}.")


@kb_command.command("import", short_help="Import an exported knowledge base.")
@click.argument("file", type=InputFile(exists=True))
@click.option("--name", metavar="NAME", help="Name for the imported knowledge base.  [default: its exported name]")
@options.models_file
@options.as_json
def import_command(file: Path, name: str | None, settings: Settings, as_json: bool) -> None:
    """Import a knowledge base from an exported FILE, or from standard input if FILE is -. The file is checked first."""
    name = import_kb(settings.kb_dir, file, name)
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        numbers = {"num_documents": knowledge_base.num_documents, "num_chunks": knowledge_base.num_chunks}
    if as_json:
        emit({"kb": name, **numbers})
    else:
        note(f"Imported {name}: {counted(numbers['num_documents'], 'document')}, {counted(numbers['num_chunks'], 'chunk')}.")


@kb_command.command("feedback", short_help="Show which passages helped, mark passages, or reset all marks.")
@click.argument("name")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--useful/--useless", "helped", default=None, help="Mark these passages as useful or useless.")
@click.option("--reset", is_flag=True, help="Delete all feedback.")
@options.models_file
@options.as_json
def feedback_command(name: str, ids: tuple[str, ...], helped: bool | None, reset: bool, settings: Settings, as_json: bool) -> None:
    """Show which passages helped, mark passages by ID (12 or KB#12), or delete all feedback.

    Marks change a passage's score by at most 10 %. Counts of how often a passage was found, supplied and cited are shown, but affect the
    score only if LOCALRAG_LEARN is "all". With "off", no feedback is used.

    \b
      localrag kb feedback notes 12 KB#31 --useful
    """
    if reset and (ids or helped is not None):
        raise UsageError("--reset does not work with an ID, --useful or --useless.", hint=f"localrag kb feedback {shown(name)} --reset")
    if ids and helped is None:
        raise UsageError("An ID needs --useful or --useless.", hint="Add one of them.")
    if helped is not None and not ids:
        raise UsageError(
            "The ID of a passage is missing.", hint=f"Give it as in a citation: localrag kb feedback {shown(name)} 12 --useful"
        )
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        if reset:
            knowledge_base.reset_feedback()
            note(f"Deleted all feedback on {shown(name)}.")
        if ids:
            knowledge_base.mark([_chunk_id(each, knowledge_base.name) for each in ids], useful=bool(helped))
        passages = knowledge_base.feedback()
    if as_json or not reset:
        indexing.feedback(passages, learning=settings.learn, as_json=as_json)


def _chunk_id(text: str, kb: str) -> int:
    """Parse a passage's number from a label as in answers, with or without the name of the knowledge base `kb`."""
    label = parse_label(text)
    if label is None:
        raise UsageError(f"{text[:40]!r} is not the id of a passage.", hint="Give it as in a citation: KB#12 or 12.")
    scope, number = label
    if scope not in ("", kb):
        raise UsageError(f"{text[:80]!r} is not a passage of {kb}.", hint=f"Name that knowledge base instead of {kb}.")
    return number


@kb_command.command("rename", short_help="Give a knowledge base another name.")
@click.argument("old")
@click.argument("new")
@options.models_file
@options.as_json
def rename_command(old: str, new: str, settings: Settings, as_json: bool) -> None:
    """Rename the knowledge base OLD to NEW. On a server, OLD is an address, and NEW is the name alone.

    Nothing is indexed again. Conversations, councils and programs that name OLD must be changed; your own default is.
    """
    with KnowledgeBase.open(settings.kb_dir, old) as knowledge_base:
        knowledge_base.rename(new)
        address = knowledge_base.address
    changed = None
    with suppress(ConfigError):  # the rename is done, and a broken file must not make it look like a failure
        changed = rename_in_config(settings, old, address)
    if as_json:
        emit({"kb": address, "old": shown(old)})
        return
    note(f"Renamed {shown(old)} to {address}.")
    if changed:
        note(f"The default knowledge base is now {address} ({safe(str(changed))}).")


@kb_command.command("remove", short_help="Delete a knowledge base, or some of its documents.")
@click.argument("name")
@click.argument("documents", metavar="[DOCUMENT]...", nargs=-1)
@options.models_file
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.as_json
def remove_command(name: str, documents: tuple[str, ...], settings: Settings, yes: bool, as_json: bool) -> None:
    """Delete a knowledge base, even if it is damaged, or with DOCUMENT only those documents of it. The original files are not touched.

    A DOCUMENT is the path of an indexed file or folder, or a name as in `kb show`, in which * and ? match any characters.

    \b
      localrag kb remove notes
      localrag kb remove notes "notes/2019/*" guide.pdf
    """
    if documents:
        _remove_documents(name, documents, settings, yes=yes, as_json=as_json)
        return
    is_here = name in list_kbs(settings.kb_dir)
    try:
        with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
            question = f"Remove {shown(name)} with {counted(knowledge_base.num_documents, 'document')}?"
    except KnowledgeBaseError as error:
        if not is_here:
            raise
        question = f"{safe(error.message)}\nRemove {name}?"
    if not yes:
        _confirm(question)
    if is_here:
        FolderLocation(settings.kb_dir, name).remove()  # without opening it
    else:
        with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
            knowledge_base.remove()
    if as_json:
        emit({"kb": shown(name), "removed": True})
    else:
        note(f"Removed {shown(name)}.")


def _remove_documents(name: str, documents: tuple[str, ...], settings: Settings, *, yes: bool, as_json: bool) -> None:
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        sources = knowledge_base.matching(documents)
        if not yes:
            for source in sorted(sources.values())[:_MAX_NAMED]:
                note(f"  {safe(source)}")
            if len(sources) > _MAX_NAMED:
                note(f"  and {len(sources) - _MAX_NAMED:,} more")
            _confirm(f"Remove {counted(len(sources), 'document')} from {shown(name)}?")
        removed = knowledge_base.remove_documents(
            sources, on_wait=lambda: note(f"Waiting: another localrag is indexing into {shown(name)}.")
        )
        numbers = {"num_documents": knowledge_base.num_documents, "num_chunks": knowledge_base.num_chunks}
    if as_json:
        emit({"kb": shown(name), "removed": sorted(sources[path] for path in removed), **numbers})
        return
    left = f"{counted(numbers['num_documents'], 'document')}, {counted(numbers['num_chunks'], 'chunk')}"
    note(f"Removed {counted(len(removed), 'document')} from {shown(name)}. It now has {left}.")
    if any(Path(path).is_file() for path in removed):
        note("The next index of their folder adds them again. To prevent this, name them in its file .localragignore.")


def _confirm(question: str) -> None:
    """Ask for confirmation. InterruptedRunError unless the answer is yes."""
    try:
        is_agreed = click.confirm(question, err=True)
    except click.Abort:  # Ctrl-C, or standard input has ended
        note("")
        is_agreed = False
    if not is_agreed:
        raise InterruptedRunError("Nothing was removed.", hint="Use --yes to remove without confirmation.")
