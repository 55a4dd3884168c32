"""Makes a log for `rayrec off-policy` of the service's request log, what was shown, and what was clicked.

    python join_outcomes.py REQUESTS SHOWN.parquet CLICKS.parquet OUT.parquet

SHOWN has a row for each answer: `request_id`, `items` as they were shown, from the top, and `propensities`:
the chance with which each of them was shown at its position. CLICKS has `request_id` and `item_id`. Both have
`row` as well if messages have several requests, as the Open Inference Protocol allows: their number, from 0.
"""

import sys

import pyarrow as pa
import pyarrow.parquet as pq

Answer = tuple[str, int]
"""Request id, and number in its message."""


def join_outcomes(requests: str, shown: str, clicks: str, out: str) -> int:
    """Write the log; returns the number of answers in it."""
    logged = pq.read_table(requests, columns=["request_id", "row", "user_key", "version"])
    of_request = dict[Answer, dict]()
    for row in logged.to_pylist():
        if (answer := answer_of(row)) in of_request:
            sys.exit(f"{requests}: the answer {answer} is there twice; give every request an id of its own")
        of_request[answer] = row
    # As texts, since one side may keep numbers that the other writes as such.
    clicked = {(answer_of(row), str(row["item_id"])) for row in pq.read_table(clicks).to_pylist()}
    seen, could_be_clicked = set[Answer](), set[tuple[Answer, str]]()
    rows = []
    for row in pq.read_table(shown).to_pylist():
        answer, items = answer_of(row), [str(item) for item in row["items"]]
        if answer in seen:
            sys.exit(f"{shown}: the answer {answer} is there twice; keep what was shown")
        seen.add(answer)
        could_be_clicked.update((answer, item) for item in items)
        if answer not in of_request:  # the log has a share of the requests
            continue
        rewards = [float((answer, item) in clicked) for item in items]
        further = {"recommended": items, "propensities": row["propensities"], "rewards": rewards}
        rows.append({**of_request[answer], **further})
    if strange := clicked - could_be_clicked:
        answer, item = min(strange)
        sys.exit(
            f"{clicks}: {len(strange)} clicks on what was not shown, as on {item!r} of the answer {answer}"
        )
    pq.write_table(pa.Table.from_pylist(rows), out)
    return len(rows)


def answer_of(row: dict) -> Answer:
    return str(row["request_id"]), int(row.get("row") or 0)


if __name__ == "__main__":
    print(join_outcomes(*sys.argv[1:]), "answers")
