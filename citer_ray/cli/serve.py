"""`citer serve`: the HTTP API, in the foreground, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from citer_ray.config import CiterConfig
from citer_ray.config_loading import load_config
from citer_ray.errors import ConfigError
from citer_ray.storage import store_errors
from citer_ray.submitted_job import placed, placed_router

Config = Annotated[Path, typer.Option("--config", "-c", help="Configuration file (configs/*.yaml).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings that win over the file: section.key=value.")]
Router = Annotated[str | None, typer.Option("--router", help="Folder of a router, its URI, or models:/NAME@champion.")]


def serve(config: Config, overrides: Overrides = None, router: Router = None) -> None:
    """Serve routed inference with an OpenAI-compatible API."""
    settings = list(overrides or [])
    if router is not None:
        settings.append(f"serve.router={router}")
    loaded = _with_folders(placed(load_config(config, settings)))
    name = loaded.serve.router
    from citer_ray.on_ray.serve_environment import use_fast_paths

    use_fast_paths()
    from citer_ray.on_ray.serve_run import serve_until_stopped

    console = Console()
    models = "slm and llm; without --router there is no routed" if name is None else "routed, slm, llm"
    serve_until_stopped(loaded, lambda address: console.print(f"serving on {address}/v1 (models: {models})"))


def _with_folders(config: CiterConfig) -> CiterConfig:
    """The configuration with routers that are there.

    Raises:
        ConfigError: one is not.
    """
    found: dict[str, str] = {}
    for key in ("router", "canary_router"):
        name = getattr(config.serve, key)
        if name is None or name.startswith("models:/"):
            continue
        folder = placed_router(name)
        assert folder is not None
        with store_errors(folder, "cannot find"):
            if not folder.is_dir():
                raise ConfigError(f"serve.{key}: {name} is not a folder; citer fit writes routers")
        found[key] = str(folder)
    return config.model_copy(update={"serve": config.serve.model_copy(update=found)})
