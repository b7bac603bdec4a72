"""index, search and kb: what is in a knowledge base, and how it gets there."""

from __future__ import annotations

from pathlib import Path

import click

from localrag.cli import display, options
from localrag.cli.text import emit, note
from localrag.kb import MODES, KnowledgeBase, Mode, list_kbs
from localrag.session import open_embedder
from localrag.settings import Settings

_kb_option = click.option("--kb", "kb", required=True, metavar="NAME", help="The knowledge base.")


@click.command("index")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@_kb_option
@options.models_file
@options.as_json
def index_command(paths: tuple[Path, ...], kb: str, settings: Settings, as_json: bool) -> None:
    """Add or update the documents under PATHS. Only what changed is read and embedded again; what vanished is removed."""
    embedder = open_embedder(settings)
    with KnowledgeBase.open(settings.kb_dir, kb, create=True) as knowledge_base, display.Progress(f"Indexing {kb}") as progress:
        result = knowledge_base.ingest(
            paths, embedder, progress=lambda at: progress("reading and embedding", at.num_done, at.num_files, at.source)
        )
    display.indexed(kb, result, as_json=as_json)


@click.command("search")
@click.argument("query", type=options.Text())
@_kb_option
@click.option("-k", "k", type=click.IntRange(1, 1000), default=8, show_default=True, metavar="N", help="Passages to show.")
@click.option("--mode", type=click.Choice(MODES), default="hybrid", show_default=True)
@options.models_file
@options.as_json
def search_command(query: str, kb: str, k: int, mode: Mode, settings: Settings, as_json: bool) -> None:
    """Find the passages that match QUERY best, each with what its score is made of."""
    with KnowledgeBase.open(settings.kb_dir, kb) as knowledge_base:
        hits = knowledge_base.retrieve(query, None if mode == "keyword" else open_embedder(settings), k=k, mode=mode)
    display.hits(hits, as_json=as_json)


@click.group("kb")
def kb_command() -> None:
    """List, show and remove knowledge bases."""


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
@options.models_file
@options.as_json
def show_command(name: str, settings: Settings, as_json: bool) -> None:
    """Show the documents of a knowledge base, each with its number of chunks."""
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        sources = knowledge_base.sources()
        num_chunks = knowledge_base.num_chunks
    if as_json:
        documents = [{"source": source, "num_chunks": chunks} for source, chunks in sources]
        emit({"name": name, "num_documents": len(sources), "num_chunks": num_chunks, "documents": documents})
    else:
        display.table(("Document", "Chunks"), sources, right=("Chunks",))


@kb_command.command("remove")
@click.argument("name")
@options.models_file
@click.option("--yes", is_flag=True, help="Do not ask.")
def remove_command(name: str, settings: Settings, yes: bool) -> None:
    """Delete a knowledge base. The documents themselves are not touched."""
    with KnowledgeBase.open(settings.kb_dir, name) as knowledge_base:
        if not yes:
            click.confirm(f"Remove {name} with {knowledge_base.num_documents} documents?", abort=True, err=True)
        knowledge_base.remove()
    note(f"Removed {name}.")
