"""The commands of `citer`. Each loads the configuration, calls one library function, and says where its output is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from citer_ray.cli.pair import pair_app
from citer_ray.cli.respond import chat, decode
from citer_ray.cli.serve import serve
from citer_ray.config import CiterConfig
from citer_ray.config_loading import dump_yaml, load_config
from citer_ray.errors import ConfigError
from citer_ray.submitted_job import placed, placed_router

app = typer.Typer(
    help="Token-level routing between a small and a large language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(pair_app, name="pair")
app.command()(decode)
app.command()(chat)
app.command()(serve)

Config = Annotated[Path, typer.Option("--config", "-c", help="Configuration file (configs/*.yaml).")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings that win over the file: section.key=value.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the complete configuration and stop.")]
Router = Annotated[str | None, typer.Option("--router", help="Folder of a router, or its URI.")]


def embedded_config() -> Path:
    """`configs/embedded.yaml` of the checkout, or the copy that the package carries."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "configs", package / "configs"):
        if (folder / "embedded.yaml").is_file():
            return folder / "embedded.yaml"
    raise ConfigError("configs/embedded.yaml is neither in the checkout nor in the package; give --config")


def _load(path: Path, overrides: list[str] | None, print_config: bool) -> CiterConfig:
    config = placed(load_config(path, overrides or []))
    if print_config:
        Console().print(dump_yaml(config), markup=False, highlight=False, end="")
        raise typer.Exit(0)
    return config


@app.command("config")
def show_config(config: Config, overrides: Overrides = None) -> None:
    """Check a configuration and print it complete, as `run.yaml` would hold it."""
    _load(config, overrides, print_config=True)


@app.command()
def quickstart(
    overrides: Overrides = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Another configuration.")] = None,
    print_config: PrintConfig = False,
) -> None:
    """The whole loop on the embedded pair: collect, fit and iterate, then a table and a plot."""
    iterate(config or embedded_config(), overrides, print_config)


@app.command()
def collect(
    config: Config,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("--round", min=1, help="Round; 2 and later roll out with a router.")] = 1,
    router: Router = None,
    print_config: PrintConfig = False,
) -> None:
    """Label the tokens of a data set; goes on where an earlier collection stopped."""
    loaded = _load(config, overrides, print_config)
    from citer_ray.on_ray.experiment import Experiment

    with Experiment.start(loaded, sys.argv) as experiment:
        manifest = experiment.collect(number, placed_router(router))
        experiment.show_labels(number, manifest)


@app.command()
def fit(
    config: Config,
    overrides: Overrides = None,
    labels: Annotated[str, typer.Option(help="Name of the labels: round-1, round-2, ..., citer_s.")] = "round-1",
    print_config: PrintConfig = False,
) -> None:
    """Fit a router on labels, and measure its calibration table on the validation examples."""
    loaded = _load(config, overrides, print_config)
    from citer_ray.on_ray.experiment import Experiment

    with Experiment.start(loaded, sys.argv) as experiment:
        experiment.show_fit(labels, experiment.fit(labels))


@app.command()
def iterate(config: Config, overrides: Overrides = None, print_config: PrintConfig = False) -> None:
    """Rounds of collect, fit and evaluate, then the report; goes on where an earlier run stopped."""
    loaded = _load(config, overrides, print_config)
    from citer_ray.on_ray.experiment import Experiment

    with Experiment.start(loaded, sys.argv) as experiment:
        experiment.show_report(experiment.iterate())


@app.command()
def evaluate(
    config: Config,
    overrides: Overrides = None,
    router: Annotated[list[str] | None, typer.Option(help="Routers; null takes all of the run's.")] = None,
    methods: Annotated[str | None, typer.Option(help="`all`, or names with commas (docs/evaluation.md).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Test examples at most.")] = None,
    print_config: PrintConfig = False,
) -> None:
    """Accuracy against cost on the test examples: report.json, report.md, plots and pages."""
    settings = list(overrides or [])
    if limit is not None:
        settings.append(f"data.test_limit={limit}")
    if methods is not None:
        settings.append(f"evaluate.methods=[{methods}]")
    loaded = _load(config, settings, print_config)
    from citer_ray.methods import chosen_methods

    folders = [folder for name in router or [] if (folder := placed_router(name)) is not None]
    chosen_methods(loaded.evaluate.methods)  # an unknown name is said before anything starts
    from citer_ray.on_ray.experiment import Experiment

    with Experiment.start(loaded, sys.argv) as experiment:
        experiment.show_report(experiment.evaluate_and_track(folders or None))
