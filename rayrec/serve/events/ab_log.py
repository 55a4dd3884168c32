"""Requests by variant, out of the log of requests and the log of events of a service.

    request log: target or version, user, time, items, error ─┐
    event log:   user, item, time, behavior ──────────────────┴─► per request: what its user did with its
                                                                   items within a while after it

A variant is a target where several share the requests (`rayrec serve --services`), else a version, as of a
canary. Versions also follow each other, and days differ: only the time in which both answered is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads

from rayrec.pipelines.metrics.ab_test import VariantRows
from rayrec.platform.errors import InputError
from rayrec.platform.remote_files import remote_folder
from rayrec.samples.prepare.ids import hash_strings

By = Literal["target", "version"]
_COLUMNS = (
    "request_id",
    "row",
    "time",
    "user_key",
    "user_id",
    "recommended",
    "target",
    "version",
    "latency_ms",
)
_EVENT_COLUMNS = ("user_id", "item_id", "timestamp")
MOST_WINDOW_S = 30 * 86_400.0
_WITH_NULLS = {pa.int64(): pd.Int64Dtype()}
"""Where one is null, pandas takes integers for floats: ids of 64 bits lose some, and versions become 3.0."""


@dataclass(frozen=True)
class AbLog:
    """Of two variants."""

    by: By
    baseline: str
    variant: str
    rows: tuple[VariantRows, VariantRows]
    """Baseline first."""
    num_users: int
    """Of both; a request without a user counts as one of its own."""
    num_shared_users: int
    """That have seen both."""
    since: pd.Timestamp
    until: pd.Timestamp
    num_left_out: int
    """Requests of the two, outside the time in which both answered."""
    num_began: tuple[int, int]
    """Users by the variant of their first request; so each counts once, however requests are routed."""


def read_ab_log(
    requests: str,
    by: By | None = None,
    baseline: str | None = None,
    variant: str | None = None,
    events: str | None = None,
    window_s: float = 3600.0,
) -> AbLog:
    """Read the requests of two variants.

    Args:
        requests: folder or URL that `rayrec serve --request-log` wrote.
        by: None: targets where there are several, else versions.
        baseline: None: the variant of most requests.
        variant: None: of the others that of most requests.
        events: folder or URL of the log of events; None: without outcomes.
        window_s: after a request, in which what its user did counts.

    Raises:
        InputError: a log cannot be read, or does not tell variants apart.
    """
    frame = _requests(requests)
    by, names = _variants(frame, requests, by)
    baseline, variant = _chosen(names, requests, by, baseline, variant)
    column = frame[by].astype("string")
    frame = frame[column.isin([baseline, variant])].assign(variant=column, failed=frame["error"].notna())
    # A replica that was not heard may have answered the same message again. One that failed in a variant and
    # was asked of another one is a failure of the first all the same.
    frame = frame.drop_duplicates(["request_id", "row", "variant", "failed"], keep="last")
    frame = frame.reset_index(drop=True)
    first, last = (frame.groupby("variant")["time"].agg(each) for each in ("min", "max"))
    since, until = first.max(), last.min()
    together = frame[frame["time"].between(since, until)]
    counts = together["variant"].value_counts()
    if len(counts) < 2:
        raise InputError(
            f"{requests}: {by} {baseline} and {variant} never answered at the same time, and days differ; "
            "compare variants that share the requests"
        )
    key = together["user_key"].fillna("\0" + together["request_id"].astype("string"))
    codes, uniques = pd.factorize(key)
    together = together.assign(user=codes)
    outcomes = {} if events is None else _outcomes(together, events, window_s)
    rows = tuple(_rows_of(together, together["variant"] == name, outcomes) for name in (baseline, variant))
    seen = together.groupby("user")["variant"].nunique()
    began = together.sort_values("time", kind="stable").drop_duplicates("user")["variant"].value_counts()
    return AbLog(
        by=by,
        baseline=baseline,
        variant=variant,
        rows=(rows[0], rows[1]),
        num_users=len(uniques),
        num_shared_users=int((seen > 1).sum()),
        since=since,
        until=until,
        num_left_out=len(frame) - len(together),
        num_began=(int(began.get(baseline, 0)), int(began.get(variant, 0))),
    )


def _requests(folder: str) -> pd.DataFrame:
    frame = _read(folder, _COLUMNS, ("error",), "rayrec serve --request-log")
    if not len(frame):
        raise InputError(f"{folder}: no request was logged there")
    return frame


def _read(folder: str, columns: tuple[str, ...], optional: tuple[str, ...], writer: str) -> pd.DataFrame:
    place = remote_folder(folder)
    try:
        files = pads.dataset(place.path, filesystem=place.filesystem, format="parquet")
        # Of files, the first one says what there is: logs of older services lack what came later.
        schema = pa.unify_schemas([each.physical_schema for each in files.get_fragments()])
        if missing := [name for name in columns if name not in schema.names]:
            raise InputError(f"{folder}: no column {', '.join(missing)}; expected what `{writer}` writes")
        there = [name for name in (*columns, *optional) if name in schema.names]
        table = files.replace_schema(schema).to_table(columns=there)
    except (OSError, pa.ArrowInvalid) as error:
        raise InputError(
            f"{folder}: no log can be read there ({error}); rayrec serve writes one with request_log"
        ) from error
    for name in optional:
        if name not in there:
            table = table.append_column(name, pa.nulls(len(table), pa.string()))
    return table.to_pandas(types_mapper=_WITH_NULLS.get)


def _variants(frame: pd.DataFrame, folder: str, by: By | None) -> tuple[By, pd.Series]:
    """(What tells variants apart, requests of each)."""
    found: dict[By, pd.Series] = {
        "target": frame["target"].astype("string").value_counts(),
        "version": frame["version"].astype("string").value_counts(),
    }
    for each in ("target", "version") if by is None else (by,):
        if len(found[each]) > 1:
            return each, found[each]
    what = "neither several targets nor several versions" if by is None else f"no two {by}s"
    raise InputError(
        f"{folder}: {len(frame):,} requests of {what}, so there are no variants to compare; "
        "route the requests (rayrec serve --services), or start a canary (rayrec canary start)"
    )


def _chosen(
    names: pd.Series, folder: str, by: By, baseline: str | None, variant: str | None
) -> tuple[str, str]:
    known = [str(name) for name in names.index]
    for given in (baseline, variant):
        if given is not None and given not in known:
            raise InputError(f"{folder}: there is no {by} {given!r}; it has {', '.join(known)}")
    if baseline is not None and baseline == variant:
        raise InputError(f"{by} {baseline!r} would be compared with itself; name two")
    chosen = baseline or next(name for name in known if name != variant)
    return chosen, variant or next(name for name in known if name != chosen)


def _rows_of(frame: pd.DataFrame, is_own: pd.Series, outcomes: dict[str, np.ndarray]) -> VariantRows:
    own = is_own.to_numpy()
    return VariantRows(
        frame["user"].to_numpy(np.int64)[own],
        frame["error"].notna().to_numpy()[own],
        frame["latency_ms"].to_numpy(np.float64)[own],
        {name: values[own] for name, values in outcomes.items()},
    )


def _outcomes(frame: pd.DataFrame, events: str, window_s: float) -> dict[str, np.ndarray]:
    """By name, of each request: whether its user took one of its items, and how many; by behavior too, where
    events have one."""
    if not 0 < window_s <= MOST_WINDOW_S:
        raise InputError(f"window: {window_s:g} s; give from 1 s to {MOST_WINDOW_S:g} s")
    logged = _read(events, _EVENT_COLUMNS, ("behavior",), "rayrec serve --events")
    known = frame["user_id"].notna() & frame["error"].isna()
    asked = frame.loc[known, ["user_id", "time", "recommended"]].assign(request=np.flatnonzero(known))
    shown = asked.explode("recommended").dropna(subset=["recommended"])
    shown = shown.assign(item_id=_item_ids(shown["recommended"], logged["item_id"]))
    both = shown.merge(logged, on=["user_id", "item_id"])
    after_s = (both["timestamp"] - both["time"]).dt.total_seconds()
    both = both[(after_s >= 0) & (after_s <= window_s)]
    # An event is of the last request before it that showed the item, and counts once.
    both = both.sort_values("time").drop_duplicates(
        ["user_id", "item_id", "timestamp", "behavior"], keep="last"
    )

    def counted(some: pd.DataFrame) -> np.ndarray:
        return np.bincount(some["request"].to_numpy(np.int64), minlength=len(frame)).astype(np.float64)

    taken = counted(both)
    found = {"answers with an event": (taken > 0).astype(np.float64), "events per answer": taken}
    behaviors = sorted(both["behavior"].dropna().unique())
    if len(behaviors) > 1:
        for behavior in behaviors:
            found[f"{behavior} per answer"] = counted(both[both["behavior"] == behavior])
    return found


def _item_ids(keys: pd.Series, seen: pd.Series) -> np.ndarray:
    """Ids of items by their keys: the keys themselves where they are integers, else their hashes; a catalog
    whose keys happen to be digits may have hashes all the same, and events say which."""
    hashed = hash_strings(pa.array(keys.astype(str))) if len(keys) else np.empty(0, np.int64)
    plain = pd.to_numeric(keys, errors="coerce")
    if plain.isna().any() or (plain != plain.round()).any():
        return hashed
    as_integers = keys.astype("int64").to_numpy() if len(keys) else np.empty(0, np.int64)
    ids = seen.dropna().unique().astype(np.int64)
    return as_integers if np.isin(as_integers, ids).sum() >= np.isin(hashed, ids).sum() else hashed
