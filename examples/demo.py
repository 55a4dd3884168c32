"""`make demo`: from a behavior log to recommendations over HTTP, in a few minutes.

Every step is one call that the `rayrec` command makes too. One Ray cluster serves all of them.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from movielens import TERMS, fetch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rayrec import prepare
from rayrec.pipelines import (
    MODEL,
    POPULARITY,
    EvaluationReport,
    RunConfig,
    TokenizeConfig,
    TrainingResult,
    evaluate,
    tokenize,
    train,
)
from rayrec.platform import ClusterConfig, InputError, progress_bar, ray_cluster
from rayrec.samples import Dataset, PrepareConfig, run_partitions_on_ray
from rayrec.serve import ServeConfig, serving

CHECKOUT = Path(__file__).resolve().parents[1]
DATA = CHECKOUT / "data" / "movielens-100k"
RUN = CHECKOUT / "runs" / "demo"
CONFIG = CHECKOUT / "configs" / "movielens-generative.yaml"
NUM_USERS, NUM_WATCHED, NUM_RECOMMENDED = 3, 6, 6

console = Console(width=110)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    logging.getLogger("rayrec").setLevel(logging.INFO)
    started = time.monotonic()

    chapter("1. Data", TERMS)
    source = fetch()

    # The dashboard is for runs that last; this one is over before it would be opened.
    cluster = ClusterConfig(dashboard=False)
    config = RunConfig.load(CONFIG, [f"data.path={DATA}"])
    with ray_cluster(cluster, cpus_needed=config.cpus_needed + 1):
        report = prepare(source, DATA, PrepareConfig(overwrite=True), run_partitions_on_ray)
        counts = report.manifest.counts
        console.print(
            f"  {counts['events']:,} ratings of {counts['items']:,} films by {counts['users']:,} people; "
            "the last one of each is held out."
        )

        chapter("2. Semantic IDs", "Films that are watched together get codes that begin alike.")
        tokenize(DATA, config=TokenizeConfig(codebook_size=64))
        show_codes(Dataset.open(DATA))

        chapter("3. Training", "Five stages on Ray, joined by one driver.")
        shutil.rmtree(RUN, ignore_errors=True)
        with progress_bar("  train") as progress:
            result = train(
                config, RUN, on_step=lambda done, total, loss: progress(done, total, f"loss {loss:.3f}")
            )
        show_training(result)

        chapter("4. Evaluation", "Every film is ranked for every person; films already seen are left out.")
        show_metrics(evaluate(RUN))

        chapter("5. Service", "The best snapshot answers over HTTP.")
        with serving(RUN, ServeConfig(port=free_port())) as url:
            show_recommendations(url, Dataset.open(DATA))

    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    chapter("Done", f"{minutes} min {seconds} s, everything stopped. What to try next:")
    for command, purpose in (
        (f"rayrec recommend {RUN.relative_to(CHECKOUT)} --user 42", "recommendations for one person"),
        (
            f"rayrec serve {RUN.relative_to(CHECKOUT)}",
            "the service, until Ctrl-C; its page of calls is at /docs",
        ),
        (
            f"rayrec train {CONFIG.relative_to(CHECKOUT)} --set model.backbone.dim=128 --run runs/wider",
            "another model",
        ),
        ("rayrec prepare YOUR_LOG data/yours", "your own data: a folder with interactions.csv or .parquet"),
    ):
        console.print(f"  [bold].venv/bin/{escape(command)}[/bold]\n      {purpose}")


def chapter(title: str, text: str) -> None:
    console.print(f"\n[bold cyan]{title}[/bold cyan]  {escape(text)}")


def show_codes(dataset: Dataset) -> None:
    """A few films that share their first two codes."""
    from rayrec.models import SemanticIdRegistry

    codes_IL = SemanticIdRegistry.load(DATA / "semantic_ids").codes_IL
    popular = dataset.items.train_counts_I.argmax()
    alike = (codes_IL[:, :2] == codes_IL[popular, :2]).all(axis=1).nonzero()[0][:5]
    for item in alike.tolist():
        codes = " ".join(f"{code:>2}" for code in codes_IL[item])
        console.print(f"  [magenta]{codes}[/magenta]  {escape(dataset.items.label(item))}")


def show_training(result: TrainingResult) -> None:
    stages = result.stages
    console.print(
        f"  {result.steps:,} steps at {result.steps_per_s:.1f} a second; "
        f"loss of the last one {result.final_loss:.3f}. "
        f"The trainer waited {stages['lookup_waiting_s']:.1f} s for embedding rows, "
        f"of {result.training_s:.0f} s in all."
    )


def show_metrics(report: EvaluationReport) -> None:
    metrics = ("recall@5", "recall@10", "recall@50", "ndcg@10")
    table = Table("", *metrics, title=f"{report.count} people, 95 % intervals", title_justify="left")
    for name in (MODEL, POPULARITY):
        estimates = [report.results[name][metric] for metric in metrics]
        table.add_row(name, *(f"{e.value:.3f}  [dim]{e.low:.3f} to {e.high:.3f}[/dim]" for e in estimates))
    console.print(table)


def show_recommendations(url: str, dataset: Dataset) -> None:
    users = dataset.users["user_key"].to_pylist()[:NUM_USERS]
    for user in users:
        history_ids = dataset.history_of(user)
        assert history_ids is not None
        watched = [
            dataset.items.label(item) for item in dataset.item_positions(history_ids[-NUM_WATCHED:]).tolist()
        ]
        answer = post(f"{url}/v1/recommend", {"user_id": user, "k": NUM_RECOMMENDED})
        table = Table(
            "watched last", "recommended", "log-probability", title=f"Person {user}", title_justify="left"
        )
        for title, item in zip(watched[::-1], answer["items"], strict=False):
            table.add_row(escape(title), escape(item["title"]), f"{item['score']:.2f}")
        console.print(table)
    stranger = post(f"{url}/v1/recommend", {"user_id": "nobody", "k": 3})
    titles = ", ".join(item["title"] for item in stranger["items"])
    console.print(f"  Someone unknown gets what is {stranger['source']}: {escape(titles)}.")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        decoded: dict[str, Any] = json.load(answer)
    return decoded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as after Ctrl-C
    try:
        main()
    except InputError as error:
        sys.exit(f"demo: {error}")
    except KeyboardInterrupt:
        sys.exit("demo: interrupted; everything stopped")
