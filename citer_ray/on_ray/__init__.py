"""Everything that needs Ray."""

import os

# A pool of a collection may run two chunks a worker ahead of the next pool. Ray Data checks this by itself only once half
# of the pool's share of the object store is full, so the store would fill with hidden states that wait. Read at import.
os.environ.setdefault("RAY_DATA_DOWNSTREAM_CAPACITY_OBJECT_STORE_BUDGET_UTIL_THRESHOLD", "0")
