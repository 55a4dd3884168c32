"""Makes a log for `rayrec off-policy` of how much was computed of answers, and what they earned.

    python join_rewards.py REQUESTS CLICKS.parquet OUT.parquet

REQUESTS is the request log of a service with `allocate`. CLICKS has a row for each click, or whatever else
counts: `request_id`, and `row` where messages have several requests. An answer with any has earned the value
of its request.
"""

import sys
from collections import Counter

import pyarrow.parquet as pq

Answer = tuple[str, int]
"""Request id, and number in its message."""


def join_rewards(requests: str, clicks: str, out: str) -> int:
    """Write the log; returns the number of answers in it."""
    answers = pq.read_table(requests).to_pandas()
    answers = answers[answers["action"].notna()]  # others were decided about by nobody
    logged = [answer_of(row) for row in answers[["request_id", "row"]].to_dict("records")]
    if twice := [answer for answer, count in Counter(logged).items() if count > 1]:
        sys.exit(f"{requests}: the answer {twice[0]} is there twice; give every request an id of its own")
    clicked = {answer_of(row) for row in pq.read_table(clicks).to_pylist()}
    is_clicked = [answer in clicked for answer in logged]
    answers["reward"] = answers["value"].fillna(1.0).where(is_clicked, 0.0)
    answers.to_parquet(out, index=False)
    return len(answers)


def answer_of(row: dict) -> Answer:
    # The id as a text, since one side may keep numbers that the other writes as such.
    return str(row["request_id"]), int(row.get("row") or 0)


if __name__ == "__main__":
    print(join_rewards(*sys.argv[1:]), "answers")
