"""Where relative paths of a submitted job lead: to the home folder, never into Ray's copy of the working directory.

`ray job submit --working-dir .` runs the command in an unpacked copy of the folder, which Ray deletes when it needs the
room. Results written there would be lost, and a job that is submitted again would not find what it can go on from. The
commands pass their configuration and their routers through here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from citer_ray.config import CiterConfig
from citer_ray.storage import is_remote, storage_path

logger = logging.getLogger(__name__)

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it for the command of a submitted job


def placed(config: CiterConfig, environ: Mapping[str, str] = os.environ) -> CiterConfig:
    """The configuration, in a submitted job with an `output_dir` that lasts; the user is told where it is."""
    root = storage_path(config.output_dir)
    if JOB_VARIABLE not in environ or is_remote(root) or root.is_absolute():
        return config
    lasting = Path.home() / root
    logger.warning(
        "output_dir %s is relative, and this job runs in a copy of the submitted folder that Ray deletes later: its "
        "output goes to %s, on the node of this job. Give an absolute path that all nodes see, or s3://bucket/folder",
        config.output_dir,
        lasting,
    )
    return config.model_copy(update={"output_dir": str(lasting)})


def placed_router(name: str | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """A router's folder by its name on the command line; in a submitted job, a relative one may be an earlier job's."""
    if name is None:
        return None
    folder = storage_path(name)
    if JOB_VARIABLE not in environ or is_remote(folder) or folder.is_absolute() or folder.exists():
        return folder
    return Path.home() / folder
