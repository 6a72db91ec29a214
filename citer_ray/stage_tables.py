"""What a user sees at the end of a stage: one small table each, for the terminal.

`Experiment.show_*` prints them; nothing here computes.
"""

from __future__ import annotations

from rich.table import Table

from citer_ray.label_store import LabelManifest
from citer_ray.router_artifact import RouterMetadata


def labels_table(number: int, manifest: LabelManifest) -> Table:
    """Counts of a label set, and how fast it was made."""
    table = Table(title=f"labels of round {number}", show_header=False)
    table.add_row("examples", f"{manifest.examples:,} ({manifest.quarantined} set aside)")
    table.add_row("positions", f"{manifest.positions:,}")
    for case, count in manifest.cases.items():
        table.add_row(case, f"{count:,} ({count / max(manifest.positions, 1):.1%})")
    mean = manifest.slm_labels / manifest.labels if manifest.labels else float("nan")
    table.add_row("labels", f"{manifest.labels:,}, {mean:.1%} prefer the SLM")
    table.add_row("rollouts", f"{manifest.rollouts:,}, {manifest.rollout_tokens:,} tokens")
    table.add_row("speed", f"{manifest.tokens_per_second:,.0f} tokens/s")
    return table


def router_table(name: str, metadata: RouterMetadata, area: float) -> Table:
    """A router's quality on held-out examples."""
    table = Table(title=f"router {name}", show_header=False)
    for key, value in ({} if metadata.metrics is None else metadata.metrics.flat()).items():
        table.add_row(key, f"{value:,.4g}")
    table.add_row("validation area", f"{area:.4f}")
    return table
