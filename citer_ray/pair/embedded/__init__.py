"""The embedded pair: two tiny models, one tokenizer, and the synthetic problems that they were trained on.

``embedded_weights`` gives the shipped checkpoints; ``weights/README.md`` is their model card. ``build`` makes
such a pair again, ``problems`` its examples. Importing this package loads no model and no heavy library.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from citer_ray.errors import PairError

WEIGHTS = Path(__file__).parent / "weights"


def embedded_weights(role: Literal["slm", "llm"]) -> Path:
    """The folder of a shipped checkpoint: config, float32 safetensors and tokenizer, loadable by path.

    Raises:
        PairError: An unknown role, or weights that are missing from this installation.
    """
    if role not in ("slm", "llm"):
        raise PairError(f"unknown role {role!r} of the embedded pair: use slm or llm")
    folder = WEIGHTS / role
    if not (folder / "model.safetensors").is_file():
        raise PairError(f"no embedded weights in {folder}: install citer_ray again, or run `citer pair build`")
    return folder
