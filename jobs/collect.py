"""Label the tokens of a data set.

python jobs/collect.py --config FILE [section.key=value ...]
ray job submit --working-dir . -- python jobs/collect.py --config FILE [section.key=value ...]
"""

from __future__ import annotations

import sys

from citer_ray.cli import main

if __name__ == "__main__":
    main(["collect", *sys.argv[1:]])
