"""index, search and kb: what is in a knowledge base, and how it gets there."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from localrag.citation import parse_label
from localrag.cli import indexing, options, render
from localrag.cli.files import STANDARD_OUTPUT, InputFile, binary_stdout, check_free_stdout
from localrag.cli.text import emit, note
from localrag.errors import InterruptedRunError, KnowledgeBaseError, UsageError, counted
from localrag.kb import MODES, IngestResult, KnowledgeBase, Mode, Tagging, Where, import_kb, list_kbs, shown
from localrag.kb.knowledge_base import FolderLocation
from localrag.session import Retriever, folder_rules, open_embedder, open_knowledge_bases, opened_reranker, prepare_queries
from localrag.settings import Settings
from localrag.text.sanitize import safe

_kb_option = click.option("--kb", "kb", required=True, metavar="NAME", help="The knowledge base.")


@click.command("index")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@_kb_option
@click.option(
    "--tag",
    "tags",
    multiple=True,
    metavar="TAG",
    help='A tag for these documents; replaces earlier tags, and "" clears them. Repeatable.',
)
@click.option(
    "--hidden", is_flag=True, help="Also index hidden files and files with keys or passwords. A later run without this option removes them."
)
@click.option("--watch", is_flag=True, help="Keep running, and index again whenever a file changes. Stop with Ctrl-C.")
@click.option("--dry-run", is_flag=True, help="Read the files and list what would be done with each. Write nothing.")
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
    """Add or update the documents under PATHS. Only what changed is read and embedded again; what vanished is removed.

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
        embedder = open_embedder(settings)

        def index(before: IngestResult | None) -> IngestResult:
            with indexing.IndexingBar(knowledge_base.address, again=before is not None) as bar:
                result = knowledge_base.ingest(
                    paths,
                    embedder,
                    bar,
                    tagging=Tagging(tags or None, folder_rules(settings)),
                    hidden=hidden,
                    on_wait=lambda: note(f"Another localrag is indexing into {knowledge_base.address}: waiting for it."),
                )
            indexing.indexed(knowledge_base.address, result, as_json=as_json, verbose=verbose, before=before)
            return result

        try:
            first = indexing.first(index) if watch else index(None)
            prepare_queries(embedder, settings, on_start=lambda: note("Making a copy of the embedder that starts faster, once."))
        except KeyboardInterrupt:
            raise InterruptedRunError("Interrupted.", hint="What was indexed is kept; the same command goes on from there.") from None
        return indexing.follow(paths, settings.kb_dir, index, first, as_json=as_json) if watch else 0


@click.command("search")
@click.argument("query", type=options.Text())
@click.option("--kb", "kbs", multiple=True, required=True, metavar="NAME", help="A knowledge base to search. Repeatable.")
@click.option("-k", "k", type=click.IntRange(1, 1000), default=8, show_default=True, metavar="N", help="Passages to show.")
@click.option("--mode", type=click.Choice(MODES), default="hybrid", show_default=True)
@options.where_option
@options.rerank_option
@options.models_file
@options.as_json
def search_command(
    query: str, kbs: tuple[str, ...], k: int, mode: Mode, where: Where, rerank: str | None, settings: Settings, as_json: bool
) -> None:
    """Find the passages that match QUERY best, each with what its score is made of. They are those that ask would find.

    \b
      localrag search "annealing temperature" --kb handbook --where source=materials/*
      localrag search "annealing temperature" --kb handbook --kb notes
    """
    if not query.strip():
        raise UsageError("The query is empty.", hint="Give some words to look for.")
    with ExitStack() as opened:
        found = open_knowledge_bases(kbs, settings=settings, opened=opened)
        reranker = opened.enter_context(opened_reranker(rerank, settings=settings))
        embedder = None if mode == "keyword" else open_embedder(settings, for_queries=True)
        retriever = Retriever(knowledge_bases=found, embedder=embedder, learning=settings.learn, reranker=reranker)
        hits = retriever.search(query, top_k=k, mode=mode, where=where)
        none_passes = not hits and bool(where) and not any(kb.sources(where) for kb in found)
    if none_passes and not as_json:
        for kb in dict.fromkeys(kbs):
            _note_none_passes(kb, where)
    else:
        render.hits(hits, as_json=as_json)


def _note_none_passes(kb: str, where: Where) -> None:
    note(f"No document of {shown(kb)} passes {safe(str(where))}. To see what they are: localrag kb show {shown(kb)}")


@click.group("kb")
def kb_command() -> None:
    """List, show, verify, remove, export and import knowledge bases."""


@kb_command.command("list")
@options.models_file
@options.as_json
def list_command(settings: Settings, as_json: bool) -> None:
    """List the knowledge bases of this home."""
    rows: list[dict[str, object]] = []
    for name in list_kbs(settings.kb_dir):
        try:
            with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
                numbers = (knowledge_base.num_documents, knowledge_base.num_chunks)
                rows.append({"name": name, "num_documents": numbers[0], "num_chunks": numbers[1]})
        except KnowledgeBaseError as error:  # one that is damaged hides no other
            rows.append({"name": name, "num_documents": None, "num_chunks": None, "error": error.to_dict()})
            if not as_json:
                note(f"{safe(error.message)}\n  {error.hint}")
    if as_json:
        emit({"knowledge_bases": rows})
    elif rows:
        columns = ("name", "num_documents", "num_chunks")
        render.table(("Name", "Documents", "Chunks"), [[row[name] for name in columns] for row in rows], right=("Documents", "Chunks"))
    else:
        note("There are none yet. Make one with: localrag index FOLDER --kb NAME")


@kb_command.command("show", short_help="Show the documents of a knowledge base, with their tags.")
@click.argument("name")
@options.where_option
@options.models_file
@options.as_json
def show_command(name: str, where: Where, settings: Settings, as_json: bool) -> None:
    """Show the documents of a knowledge base, each with its number of chunks, its tags and what its file says of itself."""
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
    """Check a knowledge base against itself and against the documents on disk; what is derived is repaired."""
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        found = knowledge_base.verify(on_wait=lambda: note(f"Another localrag is indexing into {shown(name)}: waiting for it."))
    indexing.verified(shown(name), found, as_json=as_json)
    return 0 if found.is_sound else KnowledgeBaseError.exit_code


@kb_command.command("export")
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@options.models_file
@options.as_json
def export_command(name: str, file: Path, settings: Settings, as_json: bool) -> None:
    """Write a knowledge base into one FILE, to keep or to take along. A FILE that exists is replaced; - is standard output.

    \b
      localrag kb export notes notes.kb
      localrag kb export notes - | ssh laptop localrag kb import -
    """
    if file == STANDARD_OUTPUT:
        check_free_stdout("FILE", as_json=as_json)
        with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base, binary_stdout("FILE") as made:
            knowledge_base.export(made)
        return
    if not file.parent.is_dir():
        raise UsageError(f"There is no folder {file.parent}.", hint="Make it, or name another FILE.")
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        knowledge_base.export(file)
        numbers = {"num_documents": knowledge_base.num_documents, "num_chunks": knowledge_base.num_chunks}
    if as_json:
        emit({"kb": shown(name), "file": str(file), **numbers, "num_bytes": file.stat().st_size})
    else:
        documents = counted(numbers["num_documents"], "document")
        note(f"Wrote {shown(name)} to {safe(str(file))}: {documents}, {render.size(file.stat().st_size)}.")


@kb_command.command("import")
@click.argument("file", type=InputFile(exists=True))
@click.option("--name", metavar="NAME", help="Name for the imported knowledge base.  [default: its exported name]")
@options.models_file
@options.as_json
def import_command(file: Path, name: str | None, settings: Settings, as_json: bool) -> None:
    """Make a knowledge base of a FILE that was exported.

    It is checked first. A FILE of - is standard input.
    """
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
    """Show which passages helped, mark some by their ID (12 or KB#12), or forget what is known.

    What people mark moves a passage up or down by a tenth of its score at most. How often it was found, supplied and cited is only
    shown, unless LOCALRAG_LEARN is "all"; "off" uses nothing of it.

    \b
      localrag kb feedback notes 12 KB#31 --useful
    """
    if reset and (ids or helped is not None):
        raise UsageError(
            "--reset forgets all of it, and takes no ID, --useful or --useless.", hint=f"localrag kb feedback {shown(name)} --reset"
        )
    if ids and helped is None:
        raise UsageError("Were they of use or not?", hint="Say --useful or --useless.")
    if helped is not None and not ids:
        raise UsageError(
            "Which passages? There is no ID.", hint=f"Give them as in a citation: localrag kb feedback {shown(name)} 12 --useful"
        )
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        if reset:
            knowledge_base.reset_feedback()
            note(f"Forgot what was known of the passages of {shown(name)}.")
        if ids:
            knowledge_base.mark([_chunk_id(each, knowledge_base.name) for each in ids], useful=bool(helped))
        known = knowledge_base.feedback()
    if as_json or not reset:
        indexing.feedback(known, learning=settings.learn, as_json=as_json)


def _chunk_id(text: str, kb: str) -> int:
    """The number of a passage of `kb`, from a label as answers show it; the label may name the knowledge base."""
    label = parse_label(text)
    if label is None:
        raise UsageError(f"{text[:40]!r} is not the id of a passage.", hint="Give it as in a citation: KB#12 or 12.")
    scope, number = label
    if scope not in ("", kb):
        raise UsageError(f"{text[:80]!r} is no passage of {kb}.", hint=f"Name that knowledge base in place of {kb}.")
    return number


@kb_command.command("remove")
@click.argument("name")
@options.models_file
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@options.as_json
def remove_command(name: str, settings: Settings, yes: bool, as_json: bool) -> None:
    """Delete a knowledge base, also a damaged one. The documents themselves are not touched."""
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


def _confirm(question: str) -> None:
    """InterruptedRunError unless a person says yes."""
    try:
        is_agreed = click.confirm(question, err=True)
    except click.Abort:  # Ctrl-C, or nobody to ask
        note("")
        is_agreed = False
    if not is_agreed:
        raise InterruptedRunError("Nothing was removed.", hint="--yes removes without asking.")
