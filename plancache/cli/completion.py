"""`plancache completion`: the script by which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in SHELL.

    \b
    bash  eval "$(plancache completion bash)"    # in ~/.bashrc
    zsh   eval "$(plancache completion zsh)"     # in ~/.zshrc, behind compinit
    fish  plancache completion fish > ~/.config/fish/completions/plancache.fish
    """
    from plancache.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "plancache", "_PLANCACHE_COMPLETE").source())
