"""One module per subcommand; each has a typer application called `app`."""
