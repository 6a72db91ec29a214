"""Routed inference over HTTP, until the job is stopped.

python jobs/serve.py --config FILE [--router FOLDER] [section.key=value ...]
ray job submit --working-dir . -- python jobs/serve.py --config FILE [--router FOLDER] [section.key=value ...]
"""

from __future__ import annotations

import sys

from citer_ray.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
