"""Everything that needs Ray."""

import os

# What waits between two pools of a collection is at most twice what the second has in hand. Ray Data holds to that by
# itself only once half of a pool's share of the object store is full of waiting hidden states. Read at import.
os.environ.setdefault("RAY_DATA_DOWNSTREAM_CAPACITY_OBJECT_STORE_BUDGET_UTIL_THRESHOLD", "0")
