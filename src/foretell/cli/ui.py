"""``foretell ui``: the local page."""

from __future__ import annotations

from typing import Annotated

import typer

from foretell.cli.app import app


@app.command()
def ui(
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Port on this machine; 0 for any that is free.", min=0, max=65535)
    ] = 8765,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Only print the address.")] = False,
) -> None:
    """A page in your browser to predict from; served to this machine only. Ctrl-C ends it."""
    from foretell.ui import Server

    with Server(port) as server:
        try:
            typer.echo(f"Foretell is at {server.url}\nCtrl-C ends it.")
            if not no_browser:
                import webbrowser

                webbrowser.open(server.url)
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            typer.echo("")
