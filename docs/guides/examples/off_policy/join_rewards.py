"""Makes a log for `rayrec off-policy` of how much was computed of answers, and what they earned.

    python join_rewards.py REQUESTS CLICKS.parquet OUT.parquet

REQUESTS is the request log of a service with `allocate`. CLICKS has a row for each click, or whatever else
counts: `request_id`, and `row` where messages have several requests. An answer with any has earned the value
of its request.
"""

import sys

import pyarrow.parquet as pq


def join_rewards(requests: str, clicks: str, out: str) -> int:
    """Write the log; returns the number of answers in it."""
    answers = pq.read_table(requests).to_pandas()
    answers = answers[answers["action"].notna()]  # others were decided about by nobody
    clicked = pq.read_table(clicks).to_pandas()
    by = [name for name in ("request_id", "row") if name in clicked]
    keys = set(clicked[by].itertuples(index=False, name=None))
    is_clicked = [key in keys for key in answers[by].itertuples(index=False, name=None)]
    answers["reward"] = answers["value"].fillna(1.0).where(is_clicked, 0.0)
    answers.to_parquet(out, index=False)
    return len(answers)


if __name__ == "__main__":
    print(join_rewards(*sys.argv[1:]), "answers")
