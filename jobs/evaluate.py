"""Accuracy against cost on the test examples.

python jobs/evaluate.py --config FILE [section.key=value ...]
ray job submit --working-dir . -- python jobs/evaluate.py --config FILE [section.key=value ...]
"""

from __future__ import annotations

import sys

from citer_ray.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
