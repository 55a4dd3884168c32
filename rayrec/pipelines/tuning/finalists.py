"""The leading trials of a search, judged once more on all validation users.

Trials are compared by a part of the users, and of many, the one that leads there is partly the one that these
users favor: judged on all of them, another one may be better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rayrec.pipelines.tuning.folder import TuningFolder
from rayrec.pipelines.tuning.running import Trials
from rayrec.pipelines.tuning.search import Tried


def judged(leading: Sequence[Tried], folder: TuningFolder, trials: Trials, metric: str) -> dict[int, float]:
    """The metric on all validation users, by number of the trial; what the folder knows is not judged again.

    Args:
        leading: trials of the search.
    """
    known = folder.read_judged()
    unknown = [tried.number for tried in leading if tried.number not in known]
    values = trials.judged([folder.trial_path(number) for number in unknown], metric)
    known |= dict(zip(unknown, values, strict=True))
    found = {tried.number: known[tried.number] for tried in leading}
    folder.write_judged(found)
    return found


def winner(leading: Sequence[Tried], values: Mapping[int, float], is_larger_better: bool) -> Tried:
    """The best of the leading trials by these values; of equal ones the first."""
    sign = 1.0 if is_larger_better else -1.0
    return max(leading, key=lambda tried: sign * values[tried.number])
