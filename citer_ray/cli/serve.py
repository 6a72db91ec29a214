"""`citer serve`: the HTTP API, in the foreground, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from citer_ray.config_loading import load_config
from citer_ray.errors import ConfigError

Config = Annotated[Path, typer.Option("--config", "-c", help="Configuration file (configs/*.yaml).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings that win over the file: section.key=value.")]
Router = Annotated[str | None, typer.Option("--router", help="Folder of a router, or models:/NAME@champion.")]


def serve(config: Config, overrides: Overrides = None, router: Router = None) -> None:
    """Serve routed inference with an OpenAI-compatible API."""
    settings = list(overrides or [])
    if router is not None:
        settings.append(f"serve.router={router}")
    loaded = load_config(config, settings)
    name = loaded.serve.router
    if name is not None and not name.startswith("models:/") and not Path(name).is_dir():
        raise ConfigError(f"serve.router: {name} is not a folder; citer fit writes routers")
    from citer_ray.on_ray.serve_environment import use_fast_paths

    use_fast_paths()
    from citer_ray.on_ray.serve_run import serve_until_stopped

    console = Console()
    models = "slm and llm; without --router there is no routed" if name is None else "routed, slm, llm"
    serve_until_stopped(loaded, lambda address: console.print(f"serving on {address}/v1 (models: {models})"))
