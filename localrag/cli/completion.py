"""completion: what makes a shell complete commands, options and names."""

from __future__ import annotations

import click

_SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="Print what makes a shell complete commands and names.")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def completion_command(ctx: click.Context, shell: str) -> None:
    """Print a script for SHELL; with it, Tab completes commands, options, and the names of models, knowledge bases and councils.

    \b
      localrag completion bash >> ~/.bashrc
      localrag completion zsh >> ~/.zshrc
      localrag completion fish > ~/.config/fish/completions/localrag.fish
    """
    from click.shell_completion import get_completion_class  # noqa: PLC0415  # only here

    kind = get_completion_class(shell)
    assert kind is not None, "one of click's own"
    script = kind(ctx.find_root().command, {}, "localrag", "_LOCALRAG_COMPLETE")
    click.echo(script.source_template % script.source_vars())  # its own `source` starts a bash to ask for the version
