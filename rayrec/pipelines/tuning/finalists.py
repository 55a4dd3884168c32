"""The leading trials of a search, judged once more on all validation users.

Trials are compared by a part of the users, and of many, the one that leads there is partly the one that these
users favor: judged on all of them, another one may be better.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from rayrec.pipelines.tuning.folder import TuningFolder
from rayrec.pipelines.tuning.running import Trials
from rayrec.pipelines.tuning.search import Tried
from rayrec.pipelines.tuning.trial import OUTCOME_FILE, TrialSpec

logger = logging.getLogger(__name__)


def restore(
    wanted: Sequence[Tried], folder: TuningFolder, trials: Trials, spec_of: Callable[[Tried], TrialSpec]
) -> None:
    """Train trials again whose runs are gone, as where a search goes on from its journal on another machine.

    Args:
        spec_of: what a trial has to know to be trained to its end.
    """
    # Also those that were cut short as they were trained again: they have snapshots, but no outcome.
    gone = [tried for tried in wanted if not (folder.trial_path(tried.number) / OUTCOME_FILE).is_file()]
    for tried in gone:  # one by one: the search says how many may run at once, and these are few
        trials.begin(spec_of(tried))
        outcome = trials.outcome(tried.number)
        told, found = tried.outcome.value, outcome.value
        if found != told:  # another machine rounds otherwise
            logger.warning(
                "trial %d was trained again, since its run is gone: %s, and it was %s then",
                tried.number,
                outcome.reason if found is None else found,
                told,
            )


def judged(leading: Sequence[Tried], folder: TuningFolder, trials: Trials, metric: str) -> dict[int, float]:
    """The metric on all validation users, by number of the trial; what the folder knows is not judged again.

    Args:
        leading: trials of the search; those whose snapshots were deleted are left out.
    """
    known = folder.read_judged()
    unknown = [tried.number for tried in leading if tried.number not in known]
    gone = [number for number in unknown if not folder.has_snapshots(number)]
    if gone:
        logger.warning("not judged on all users, since snapshots were deleted: trials %s", gone)
    unknown = [number for number in unknown if number not in gone]
    values = trials.judged([folder.trial_path(number) for number in unknown], metric)
    for number, value in zip(unknown, values, strict=True):
        known[number] = value
        folder.write_judged(known)  # one by one: each takes its time
        logger.info("trial %d: %s %.4f on all validation users", number, metric, value)
    return {tried.number: known[tried.number] for tried in leading if tried.number in known}


def winner(leading: Sequence[Tried], values: Mapping[int, float], is_larger_better: bool) -> Tried:
    """The best of the leading trials by these values; of equal ones the first. Without values, the first."""
    sign = 1.0 if is_larger_better else -1.0
    found = [tried for tried in leading if tried.number in values]
    return max(found, key=lambda tried: sign * values[tried.number], default=leading[0])
