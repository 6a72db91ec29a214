"""Labels of the methods that CITER is compared with, from outcomes and probabilities. Pure functions of arrays.

All are `LabelRow`s with labels in [0, 1], 1 for the SLM, so that one training serves every method:

- RouteLLM-style (Ong et al., arXiv 2406.18665, as CITER's authors ran it): one label a query, at the end of its prompt;
  0 iff the LLM alone answers right and the SLM alone wrong. Ties go to the SLM.
- Co-LLM (Shen et al., arXiv 2403.03870): at every reference token x, P_slm(x) / (P_slm(x) + P_llm(x)), with which the
  objective `marginal` is Co-LLM's likelihood.
- R2R-style (Fu et al., arXiv 2505.21600): on the LLM's own response, 0 where going on from the SLM's token instead of
  the LLM's turns a right answer into a wrong one. The LLM writes both continuations, so this is `branches: mismatches`
  with the LLM's response as the reference and the LLM as the rollouts' policy. R2R asks a verifier model whether the
  sentence diverges; here the answer's grade decides.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from citer_ray.examples import Example
from citer_ray.label_rows import LabelRow


def query_label(*, slm_correct: bool, llm_correct: bool) -> float:
    """The label of a query: 0 iff only the LLM answers it right."""
    return 0.0 if llm_correct and not slm_correct else 1.0


def query_row(row: LabelRow, label: float) -> LabelRow:
    """A label row with one label, at the end of the prompt."""
    return replace(row, label=[label, *[None] * (len(row.label) - 1)], rollouts=0, rollout_tokens=0)


def marginal_labels(
    slm_logprob_T: npt.NDArray[np.floating], llm_logprob_T: npt.NDArray[np.floating]
) -> list[float | None]:
    """P_slm / (P_slm + P_llm) of each reference token."""
    gap_T = np.asarray(slm_logprob_T, np.float64) - np.asarray(llm_logprob_T, np.float64)
    labels: list[float | None] = np.exp(-np.logaddexp(0.0, -gap_T)).tolist()
    return labels


def with_reference(example: Example, response: str) -> Example:
    """The example with a model's response in place of its reference."""
    return example.model_copy(update={"reference": response})
