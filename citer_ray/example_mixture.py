"""Several sources as one: training on a mixture of tasks, as in the transfer experiment (arXiv 2502.01976, section 4).

Read by `preparation`. The sources take turns, so that a limit takes alike from all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

from citer_ray.examples import Example, LoadedExamples


def load_mixture(
    sources: Sequence[str], limit: int | None, load: Callable[[str, int | None], LoadedExamples]
) -> LoadedExamples:
    """Load all sources and let them take turns; one source alone stays as it is.

    Args:
        sources: at least one.
        limit: examples in all; null is every one.
        load: loads one source with at most so many examples.

    Returns:
        The examples. In a mixture an id gets its source's number in front (`2:ID`): two files may both count from 1.

    Raises:
        DataError: as `load` does.
    """
    if len(sources) == 1:
        return load(sources[0], limit)
    loaded = [load(source, limit) for source in sources]
    numbered = [[_numbered(example, number) for example in one] for number, one in enumerate(loaded, 1)]
    turns = chain.from_iterable(zip_longest(*numbered))
    examples = tuple(example for example in turns if example is not None)[:limit]
    return LoadedExamples(examples, tuple(chain.from_iterable(one.quarantined for one in loaded)))


def _numbered(example: Example, number: int) -> Example:
    return example.model_copy(update={"id": f"{number}:{example.id}"})
