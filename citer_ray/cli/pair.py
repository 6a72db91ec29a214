"""`citer pair`: build the embedded pair, check a pair, import a GGUF file, prune a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from citer_ray.config_loading import load_config

pair_app = typer.Typer(help="Models: build, check, import, prune.", no_args_is_help=True)

Output = Annotated[Path, typer.Option("--output", "-o", help="Folder to write; must not exist.")]


@pair_app.command()
def build(
    output: Output,
    seed: Annotated[int, typer.Option(help="Seed of the data and the training.")] = 0,
) -> None:
    """Train the embedded pair from scratch (about 15 minutes on 2 cores)."""
    from citer_ray.pair.embedded.build import build_pair
    from citer_ray.pair.embedded.recipe import PairRecipe

    build_pair(output, PairRecipe(seed=seed))
    Console().print(f"wrote {output}/slm and {output}/llm")


@pair_app.command()
def check(
    config: Annotated[Path, typer.Option("--config", "-c", help="Configuration file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
) -> None:
    """Check that the SLM and the LLM of a configuration belong together; no weights are loaded."""
    from citer_ray.pair.check import check_pair

    info = check_pair(load_config(config, overrides or []).pair)
    Console().print_json(json.dumps(info.to_json()))


@pair_app.command("import-gguf")
def import_gguf_file(
    gguf: Annotated[Path, typer.Argument(help="The GGUF file.")],
    output: Output,
) -> None:
    """Turn a GGUF file into a checkpoint that transformers and vLLM load (dequantized)."""
    from citer_ray.pair.gguf import import_gguf

    import_gguf(gguf, output)
    Console().print(f"wrote {output}")


@pair_app.command()
def prune(
    source: Annotated[str, typer.Argument(help="Checkpoint folder or hub name.")],
    output: Output,
    keep: Annotated[int, typer.Option(min=1, help="Decoder layers to keep.")],
) -> None:
    """Drop decoder layers of a checkpoint: a quick SLM for trying things."""
    from citer_ray.pair.prune import prune_layers

    prune_layers(source, output, keep=keep)
    Console().print(f"wrote {output}")
