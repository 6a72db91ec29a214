"""Replicas and GPUs of a service for a load, on the command line; `citer_ray/sizing.py` says what is counted.

python infra/sizing.py --slm Qwen/Qwen3-0.6B --llm Qwen/Qwen3-32B --llm-gpus 1 --requests 5 --share 0.2

A model is a hub name or a folder (its config.json alone is read), or a key of the JSON file given as --configs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from citer_ray.config import ModelConfig
from citer_ray.cost import ModelCost
from citer_ray.errors import CiterError
from citer_ray.pair.models import load_hf_config
from citer_ray.sizing import Gpu, Load, ModelPlan, Plan, plan


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slm", required=True)
    parser.add_argument("--llm", required=True)
    parser.add_argument("--configs", type=Path, help="JSON file of published configs by name, instead of the hub")
    parser.add_argument("--requests", type=float, required=True, help="a second, at the peak")
    parser.add_argument("--prompt-tokens", type=int, default=300)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--share", type=float, required=True, help="LLM share")
    parser.add_argument("--slm-gpus", type=int, default=1, help="of one replica")
    parser.add_argument("--llm-gpus", type=int, default=1, help="of one replica (tensor parallel)")
    parser.add_argument("--rows", type=int, default=128, help="engine.max_rows")
    gpu = Gpu()
    parser.add_argument("--gpu-gb", type=float, default=gpu.gigabytes)
    parser.add_argument("--gpu-gb-per-s", type=float, default=gpu.gigabytes_per_s)
    parser.add_argument("--gpu-tflops", type=float, default=gpu.teraflops)
    parser.add_argument("--efficiency", type=float, default=gpu.efficiency)
    parser.add_argument("--price", type=float, default=gpu.price, help="of a GPU hour")
    return parser.parse_args()


def model_cost(name: str, configs: Path | None) -> ModelCost:
    """Of a published config, or of the hub's or a folder's."""
    if configs is None:
        return ModelCost.from_config(load_hf_config(ModelConfig(path=name)))
    published: dict[str, Any] = json.loads(configs.read_text("utf-8"))
    return ModelCost.from_config(published[name]["config"])


def row(title: str, made: Plan) -> str:
    """One line of the table."""

    def cells(model: ModelPlan | None) -> str:
        if model is None:
            return "- | - | - | - | -"
        return f"{model.replicas} | {model.batch:.0f} | {model.pass_ms:.1f} | {model.sessions:.0f} | {model.limit}"

    money = f" | {made.price_per_million_tokens:.2f}" if made.gpu.price else ""
    return f"| {title} | {cells(made.slm)} | {cells(made.llm)} | {made.gpus} | {made.token_ms:.0f}{money} |"


def main() -> None:
    """Print a table: routed, and the LLM alone for the same load."""
    given = arguments()
    gpu = Gpu(given.gpu_gb, given.gpu_gb_per_s, given.gpu_tflops, given.price, given.efficiency)
    slm, llm = model_cost(given.slm, given.configs), model_cost(given.llm, given.configs)
    load = Load(given.requests, given.prompt_tokens, given.new_tokens, given.share)
    sizes = {"slm_gpus": given.slm_gpus, "llm_gpus": given.llm_gpus, "rows": given.rows}
    columns = "SLM replicas | rows a pass | ms a pass | sessions | limit"
    columns += " | LLM replicas | rows a pass | ms a pass | sessions | limit | GPUs | ms a token"
    columns += " | price of 1M tokens" if gpu.price else ""
    lines = [f"| | {columns} |", "| --- " * (columns.count("|") + 2) + "|"]
    lines.append(row(f"routed, share {load.llm_share:g}", plan(slm, llm, load, gpu, **sizes)))
    lines.append(row("LLM alone", plan(slm, llm, replace(load, llm_share=1.0), gpu, **sizes)))
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    try:
        main()
    except CiterError as error:
        sys.exit(f"error: {error}")
