"""Fit a router on collected labels.

python jobs/fit.py --config FILE [section.key=value ...]
ray job submit --working-dir . -- python jobs/fit.py --config FILE [section.key=value ...]
"""

from __future__ import annotations

import sys

from citer_ray.cli import main

if __name__ == "__main__":
    main(["fit", *sys.argv[1:]])
