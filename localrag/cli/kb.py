"""index, search and kb: what is in a knowledge base, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from localrag.cli import display, indexing, options
from localrag.cli.text import emit, note, safe
from localrag.errors import KnowledgeBaseError, UsageError
from localrag.kb import MODES, KnowledgeBase, Mode, Tagging, Where, import_kb, list_kbs, shown
from localrag.session import folder_rules, open_embedder, prepare_queries
from localrag.settings import Settings

_kb_option = click.option("--kb", "kb", required=True, metavar="NAME", help="The knowledge base.")


@click.command("index")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@_kb_option
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="A tag for these documents, in place of tags given before; repeatable.")
@click.option("--hidden", is_flag=True, help="Read hidden files and key files too.")
@click.option("--watch", is_flag=True, help="Stay, and index again whenever a file changes. Ctrl-C ends it.")
@click.option("--dry-run", is_flag=True, help="List what would be read and what would be skipped, and do nothing.")
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
) -> None:
    """Add or update the documents under PATHS. Only what changed is read and embedded again; what vanished is removed."""
    with KnowledgeBase.open(settings.kb_dir, kb, create=True) as knowledge_base:
        if dry_run:
            indexing.planned(knowledge_base.address, knowledge_base.plan(paths, hidden=hidden), as_json=as_json, verbose=verbose)
            return
        embedder = open_embedder(settings)

        def index() -> None:
            with indexing.IndexingBar(knowledge_base.address) as bar:
                result = knowledge_base.ingest(
                    paths,
                    embedder,
                    bar,
                    tagging=Tagging(tags or None, folder_rules(settings)),
                    hidden=hidden,
                    on_wait=lambda: note(f"Another localrag is indexing into {knowledge_base.address}: waiting for it."),
                )
            indexing.indexed(knowledge_base.address, result, as_json=as_json, verbose=verbose)

        index()
        prepare_queries(embedder, settings, on_start=lambda: note("Making a copy of the embedder that starts faster, once."))
        if watch:
            _follow(paths, settings.kb_dir, index)


def _follow(paths: tuple[Path, ...], kb_dir: Path, index: Callable[[], None]) -> None:
    """Indexes again after every change. What goes wrong then is said, and the next change is another try."""
    from localrag.kb.watch import changes  # noqa: PLC0415  # weight

    note("Watching for changes; Ctrl-C ends it.")
    for _ in changes(paths, but=kb_dir):
        try:
            index()
        except KnowledgeBaseError as error:
            note(f"Error: {safe(error.message)}")


@click.command("search")
@click.argument("query", type=options.Text())
@_kb_option
@click.option("-k", "k", type=click.IntRange(1, 1000), default=8, show_default=True, metavar="N", help="Passages to show.")
@click.option("--mode", type=click.Choice(MODES), default="hybrid", show_default=True)
@options.where_option
@options.models_file
@options.as_json
def search_command(query: str, kb: str, k: int, mode: Mode, where: Where, settings: Settings, as_json: bool) -> None:
    """Find the passages that match QUERY best, each with what its score is made of."""
    with KnowledgeBase.open(settings.kb_dir, kb) as knowledge_base:
        hits = knowledge_base.retrieve(
            query, None if mode == "keyword" else open_embedder(settings, for_queries=True), k=k, mode=mode, where=where
        )
    display.hits(hits, as_json=as_json)


@click.group("kb")
def kb_command() -> None:
    """List, show, verify, remove, export and import knowledge bases."""


@kb_command.command("list")
@options.models_file
@options.as_json
def list_command(settings: Settings, as_json: bool) -> None:
    """List the knowledge bases of this home."""
    rows = []
    for name in list_kbs(settings.kb_dir):
        with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
            rows.append((name, knowledge_base.num_documents, knowledge_base.num_chunks))
    columns = ("name", "num_documents", "num_chunks")
    if as_json:
        emit({"knowledge_bases": [dict(zip(columns, row, strict=True)) for row in rows]})
    elif rows:
        display.table(("Name", "Documents", "Chunks"), rows, right=("Documents", "Chunks"))
    else:
        note("There are none yet. Make one with: localrag index FOLDER --kb NAME")


@kb_command.command("show")
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
    else:
        rows = [(source, chunks, ", ".join(fields.get(source, {}).get("tag", ()))) for source, chunks in sources]
        has_tags = any(tags for *_, tags in rows)
        display.table(
            ("Document", "Chunks", *(("Tags",) if has_tags else ())), [row if has_tags else row[:2] for row in rows], right=("Chunks",)
        )


@kb_command.command("verify")
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
def export_command(name: str, file: Path, settings: Settings) -> None:
    """Write a knowledge base into one FILE, to keep or to take along."""
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        knowledge_base.export(file)
    note(f"Wrote {shown(name)} to {safe(str(file))}.")


@kb_command.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--name", metavar="NAME", help="Its name here; otherwise the one it was exported by.")
@options.models_file
def import_command(file: Path, name: str | None, settings: Settings) -> None:
    """Make a knowledge base of a FILE that was exported. It is checked before it is there."""
    note(f"Imported {import_kb(settings.kb_dir, file, name)}.")


@kb_command.command("feedback")
@click.argument("name")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--useful/--useless", "helped", default=None, help="What a person says of these passages.")
@click.option("--reset", is_flag=True, help="Forget all of it.")
@options.models_file
@options.as_json
def feedback_command(name: str, ids: tuple[str, ...], helped: bool | None, reset: bool, settings: Settings, as_json: bool) -> None:
    """Show which passages helped, mark some by their ID (12 or KB#12), or forget what is known.

    What people mark moves a passage up or down by a tenth of its score at most. How often it was found, supplied and cited is only
    shown, unless LOCALRAG_LEARN is "all"; "off" uses nothing of it.
    """
    if reset == bool(ids) and (reset or helped is not None):
        raise UsageError(
            "IDs go with --useful or --useless, and neither goes with --reset.", hint=f"localrag kb feedback {shown(name)} 12 --useful"
        )
    if ids and helped is None:
        raise UsageError("Were they of use or not?", hint="Say --useful or --useless.")
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        if reset:
            knowledge_base.reset_feedback()
        if ids:
            knowledge_base.mark([_chunk_id(each) for each in ids], useful=bool(helped))
        known = knowledge_base.feedback()
    indexing.feedback(known, as_json=as_json)


def _chunk_id(text: str) -> int:
    number = text.strip("[]").rpartition("/")[2].removeprefix("KB#")
    if not number.isdecimal() or len(number) > 18:
        raise UsageError(f"{text[:40]!r} is not the id of a passage.", hint="Give it as in a citation: KB#12 or 12.")
    return int(number)


@kb_command.command("remove")
@click.argument("name")
@options.models_file
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove_command(name: str, settings: Settings, yes: bool) -> None:
    """Delete a knowledge base. The documents themselves are not touched."""
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        if not yes:
            click.confirm(f"Remove {shown(name)} with {knowledge_base.num_documents} documents?", abort=True, err=True)
        knowledge_base.remove()
    note(f"Removed {shown(name)}.")
