"""tokens: the exact count of a text."""

from __future__ import annotations

from pathlib import Path

import click

from localrag.cli import display, options
from localrag.session import open_engine
from localrag.settings import Settings


@click.command("tokens")
@click.argument("text", type=options.Text())
@options.models_file
@options.model
@click.option("--show", is_flag=True, help="Show the pieces.")
@options.as_json
def tokens_command(text: str, settings: Settings, model: str | None, chat_template: Path | None, show: bool, as_json: bool) -> None:
    """Count the tokens of TEXT with the model's own tokenizer: plain text, special strings not parsed, no BOS."""
    with open_engine(model, settings=settings, chat_template=chat_template, vocab_only=True) as engine:
        token_ids = engine.tokenizer.encode(text)
        pieces = [engine.tokenizer.piece(token_id) for token_id in token_ids] if show else []
    display.tokens(token_ids, pieces, as_json=as_json, show=show)
