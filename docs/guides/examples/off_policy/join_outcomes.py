"""Makes a log for `rayrec off-policy` of the service's request log, what was shown, and what was clicked.

    python join_outcomes.py REQUESTS SHOWN.parquet CLICKS.parquet OUT.parquet

SHOWN has a row for each answer: `request_id`, `items` as they were shown, from the top, and `propensities`:
the chance with which each of them was shown at its position. CLICKS has `request_id` and `item_id`.
"""

import sys

import pyarrow as pa
import pyarrow.parquet as pq


def join_outcomes(requests: str, shown: str, clicks: str, out: str) -> int:
    """Write the log; returns the number of answers in it."""
    logged = pq.read_table(requests, columns=["request_id", "user_key", "version"])
    clicked = {(row["request_id"], row["item_id"]) for row in pq.read_table(clicks).to_pylist()}
    of_request = {row["request_id"]: row for row in logged.to_pylist()}
    rows = []
    for answer in pq.read_table(shown).to_pylist():
        if answer["request_id"] not in of_request:  # the log has a share of the requests
            continue
        rows.append(
            {
                **of_request[answer["request_id"]],
                "recommended": answer["items"],
                "propensities": answer["propensities"],
                "rewards": [float((answer["request_id"], item) in clicked) for item in answer["items"]],
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), out)
    return len(rows)


if __name__ == "__main__":
    print(join_outcomes(*sys.argv[1:]), "answers")
