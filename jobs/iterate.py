"""Rounds of collect, fit and evaluate, then the report.

python jobs/iterate.py --config FILE [section.key=value ...]
ray job submit --working-dir . -- python jobs/iterate.py --config FILE [section.key=value ...]
"""

from __future__ import annotations

import sys

from citer_ray.cli import main

if __name__ == "__main__":
    main(["iterate", *sys.argv[1:]])
