"""From a run and settings to the application that answers for it, whatever process holds it."""

from __future__ import annotations

from pathlib import Path

import torch
from fastapi import FastAPI

from rayrec.pipelines.ranking_stage import RankingStage
from rayrec.pipelines.recommender import Recommender
from rayrec.serve.api import ANSWERING_ROUTES, build_api
from rayrec.serve.batching import Batcher
from rayrec.serve.config import ServeConfig
from rayrec.serve.events.config import EventsConfig
from rayrec.serve.events.intake import LOG_SCHEMA, EventIntake
from rayrec.serve.events.user_state import open_state
from rayrec.serve.metrics import Meter
from rayrec.serve.page.recent import RecentActivity
from rayrec.serve.parquet_log import ParquetLog
from rayrec.serve.request_log import RequestLog
from rayrec.serve.service import RecommendationService


def load_api(run: str | Path, config: ServeConfig, meter: Meter) -> FastAPI:
    """The application, warmed up; the time that batches take has been measured, which takes a moment.

    Sets the number of threads that PyTorch has in this process.

    Args:
        meter: for whoever operates the service.

    Raises:
        InputError: the run, or that of the ranking stage, cannot be loaded.
    """
    torch.set_num_threads(config.threads)
    service = load_service(run, config, config.device)
    intake = None
    if config.events is not None:
        intake = open_intake(service, config.events)
    request_log = None if config.request_log is None else RequestLog(config.request_log)
    service.warm_up()
    costs = service.measured_costs(config.max_batch, config.timeout_s / 2)
    meters = [meter, RecentActivity(ANSWERING_ROUTES)] if config.shows_page else [meter]

    def on_batch(num_requests: int, seconds: float) -> None:
        for each in meters:
            each.batch(num_requests, seconds)

    batcher = Batcher(service.recommend_all, costs, config.max_waiting, on_batch=on_batch)
    return build_api(service, batcher, config.timeout_s, config.access, meters, intake, request_log)


def open_intake(service: RecommendationService, config: EventsConfig) -> EventIntake:
    """Takes events; from now on the service knows them.

    Raises:
        InputError: the store or the log cannot be used, or the data set has no times of histories, which tell
            what is known twice.
        StoreUnavailableError: the store does not answer.
    """
    dataset = service.dataset
    dataset.check_times()
    log = None
    if config.log is not None:
        rows = config.log
        log = ParquetLog(rows.folder, LOG_SCHEMA, rows.roll_s, rows.roll_rows, rows.max_queued)
    try:
        service.user_state = open_state(config, dataset.manifest)
    except BaseException:
        if log is not None:
            log.close()
        raise
    return EventIntake(config, dataset, service.user_state, log)


def load_service(run: str | Path, config: ServeConfig, device: str | None) -> RecommendationService:
    """
    Args:
        device: to compute on; None takes that of the run.

    Raises:
        InputError: the run, or that of the ranking stage, cannot be loaded.
    """
    recommender = Recommender.load(run, config.snapshot, device, config.data)
    stage = None
    if config.ranking is not None:
        stage = RankingStage.load(recommender, config.ranking, device)
    return RecommendationService(recommender, config.max_k, stage)
