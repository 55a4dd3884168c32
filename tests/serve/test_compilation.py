"""Compiled ranking beside requests: what is compiled ranks alike, and whatever fails leaves them eager."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient

from rayrec.models.compiled_ranking.buckets import Bucket, Buckets
from rayrec.models.compiled_ranking.packages import PackageError, PackageFolders, load
from rayrec.models.compiled_ranking.ranking import CompiledPrograms, CompiledRanking
from rayrec.models.quantization.network import QuantizationPlan
from rayrec.pipelines.config.ranking import RankingConfig
from rayrec.pipelines.inference.recommender import Recommender
from rayrec.pipelines.quantization.quantize import QuantizationRequest, quantize_run
from rayrec.serve.app.loading import load_api, load_service
from rayrec.serve.config.compile import CompileConfig
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.engine import compilation
from rayrec.serve.engine.compilation import CompilationFailedError, Compiler, CompileService
from rayrec.serve.engine.service import RecommendationService
from rayrec.serve.web.metrics import PrometheusMeter
from rayrec.serve.wire.schemas import RecommendRequest
from tests.helpers.ranking import prepared_clicks, ranker_run
from tests.helpers.runs import make_run
from tests.models.keras.programs import needs_tensorflow

# Each program takes a C++ compiler many seconds, and all of them are made before the first test.
pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler"
)
ONE = Bucket(1, 32, 16)


def compilations_here() -> Counter[str]:
    """What torch's compilers counted in this process."""
    counted = Counter[str]()
    if (utils := sys.modules.get("torch._dynamo.utils")) is not None:
        for part in ("stats", "aot_autograd", "inductor"):
            counted.update({f"{part} {name}": count for name, count in utils.counters[part].items()})
    if (metrics := sys.modules.get("torch._inductor.metrics")) is not None:
        counted["kernels"] = metrics.generated_kernel_count
    return +counted


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def compiled(run: Path) -> Iterator[tuple[CompileService, RecommendationService, Recommender, Counter[str]]]:
    """A service that was warmed up with one bucket, really compiled."""
    before = compilations_here()
    recommender = Recommender.load(run)
    service = RecommendationService(recommender, 100)
    config = CompileConfig(max_rows=1, max_length=32)
    compile_service = CompileService(run, config, threads=1)
    service.compile(compile_service)
    yield compile_service, service, recommender, before
    compile_service.close()


def rankings(recommender: Recommender) -> list[list[tuple[str, float]]]:
    """Of single queries, that go to the bucket of one row."""
    queries = [recommender.query_of_user(f"u{number}") for number in range(20)]
    return [
        [(item.item_key, item.score) for item in recommender.recommend([query], 10)[0]]
        for query in queries
        if query is not None
    ]


def assert_alike(one: list[list[tuple[str, float]]], other: list[list[tuple[str, float]]]) -> None:
    assert [[key for key, _ in row] for row in one] == [[key for key, _ in row] for row in other]
    for row, other_row in zip(one, other, strict=True):
        np.testing.assert_allclose([s for _, s in row], [s for _, s in other_row], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@needs_compiler
def test_programs_are_there_before_requests_and_rank_as_the_model_does(compiled, run):
    service, _, recommender, before = compiled
    answered = recommender._ranker.compiled.answered
    answered.clear()

    found = rankings(recommender)

    assert answered == {"compiled": len(found)}
    assert_alike(found, rankings(Recommender.load(run)))
    assert service.compiler.num_compiled == 1
    assert compilations_here() == before


@needs_compiler
def test_the_next_version_has_the_programs_at_once_with_its_own_weights(compiled, run):
    service = compiled[0]
    version, eager = Recommender.load(run), Recommender.load(run)
    with torch.no_grad():
        for each in (version, eager):
            for parameter in each._ranker.model.parameters():
                parameter.mul_(-1.5)

    ranking = service.give(version)

    assert_alike(rankings(version), rankings(eager))
    assert ranking.answered["eager"] == 0
    assert service.compiler.num_compiled == 1


@needs_compiler
def test_packages_come_with_the_run_and_are_loaded_by_the_next_process(compiled, run):
    recommender = Recommender.load(run)
    service = RecommendationService(recommender, 100)
    again = CompileService(run, CompileConfig(max_rows=1, max_length=32), threads=1)

    service.compile(again)
    again.close()

    assert (again.compiler.num_loaded, again.compiler.num_compiled) == (1, 0)
    assert len(list((run / "compiled").glob("*.pt2"))) == 1


@needs_compiler
def test_a_changed_package_is_refused_and_made_again(compiled, run, tmp_path, caplog):
    (package,) = (run / "compiled").glob("*.pt2")
    folder = tmp_path / "compiled"
    shutil.copytree(package.parent, folder)
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    (folder / package.name).write_bytes(content)
    with pytest.raises(PackageError, match="not as it was written"):
        load(folder / package.name)
    compiled_again: list[Path] = []

    def copied(job: Any, place: Path) -> None:
        compiled_again.append(place)
        shutil.copy(package, place)

    programs = ordered_from(Compiler(PackageFolders([folder]), copied), run)

    assert compiled_again == [folder / package.name]
    assert programs.ready == [ONE]
    assert "not as it was written" in caplog.text


@needs_compiler
def test_a_service_that_is_told_to_compiles_before_it_is_ready(compiled, run, caplog):
    caplog.set_level(logging.INFO)
    config = ServeConfig(compile=CompileConfig(max_rows=1, max_length=32), max_batch=1)

    with TestClient(load_api(run, config, PrometheusMeter())) as client:
        answer = client.post("/v1/recommend", json={"user_id": "u1", "k": 3}).json()

    eager = Recommender.load(run)
    expected = eager.recommend([eager.query_of_user("u1")], 3)[0]
    assert [item["item_id"] for item in answer["items"]] == [item.item_key for item in expected]
    assert "the programs of 1 shapes before requests" in caplog.text
    assert "stay with eager ranking" not in caplog.text


def programs_for(compiler: Compiler, recommender: Recommender) -> tuple[CompiledPrograms, CompiledRanking]:
    programs = CompiledPrograms(
        recommender.ranking_model, Buckets([1, 2, 4, 8], [32]), compiler.order, torch.device("cpu"), threads=1
    )
    return programs, recommender.rank_with(programs)


def ordered_from(compiler: Compiler, run: Path) -> CompiledPrograms:
    """One request, and what has come of it."""
    recommender = Recommender.load(run)
    programs, _ = programs_for(compiler, recommender)
    recommender.recommend([recommender.query_of_user("u1")], 10)
    assert compiler.wait(timeout_s=120)
    compiler.close()
    return programs


def test_no_request_waits_for_a_compiler(run, tmp_path):
    may_end = threading.Event()
    began = threading.Event()

    def compile_package(job: Any, place: Path) -> None:
        began.set()
        may_end.wait()
        raise CompilationFailedError("stopped")

    compiler = Compiler(PackageFolders([tmp_path]), compile_package)
    recommender = Recommender.load(run)
    _, ranking = programs_for(compiler, recommender)
    query = recommender.query_of_user("u1")

    recommender.recommend([query], 10)
    assert began.wait(60)
    recommender.recommend([query], 10)  # while it compiles: returns, or this test hangs
    assert ranking.answered == {"eager": 2}
    may_end.set()
    compiler.close()


def test_a_compiler_that_fails_is_not_asked_again_for_the_shape(run, tmp_path, caplog):
    asked: list[Bucket] = []

    def compile_package(job: Any, place: Path) -> None:
        asked.append(job.bucket)
        raise CompilationFailedError("the compiler's process ended with code -11")

    compiler = Compiler(PackageFolders([tmp_path]), compile_package)
    recommender = Recommender.load(run)
    programs, ranking = programs_for(compiler, recommender)
    queries = [recommender.query_of_user(f"u{number}") for number in range(8)]

    for _ in range(2):
        for size in (1, 2, 4, 8):
            assert all(recommender.recommend(queries[:size], 10))
            assert compiler.wait(timeout_s=60)
    compiler.close()

    assert asked == [Bucket(rows, 32, 16) for rows in (1, 2, 4)]  # three in a row, and then no more
    assert programs.ready == []
    assert ranking.answered == {"eager": 8}
    assert caplog.text.count("stay with eager ranking") == 3
    assert caplog.text.count("nothing more is compiled") == 1


def test_without_a_compiler_it_is_said_once_and_requests_are_answered(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    compiler = Compiler(PackageFolders([tmp_path / "packages"]))
    recommender = Recommender.load(run)
    programs, _ = programs_for(compiler, recommender)
    queries = [recommender.query_of_user(f"u{number}") for number in range(4)]

    for size in (1, 2, 4):
        assert all(recommender.recommend(queries[:size], 10))
    assert compiler.wait(timeout_s=120)
    compiler.close()

    assert programs.ready == []
    assert caplog.text.count("there is no C++ compiler") == 1


def test_a_quantized_run_stays_with_eager_ranking_and_it_is_said_why(run, tmp_path, caplog):
    request = QuantizationRequest(QuantizationPlan("w8a8"), calibrate=8, max_users=8)
    quantize_run(run, tmp_path / "quantized", request)
    compiler = Compiler(PackageFolders([tmp_path / "packages"]))
    recommender = Recommender.load(tmp_path / "quantized")
    programs, _ = programs_for(compiler, recommender)
    queries = [recommender.query_of_user(f"u{number}") for number in range(4)]

    for size in (1, 2, 4):
        assert all(recommender.recommend(queries[:size], 10))
    assert compiler.wait(timeout_s=120)
    compiler.close()

    assert programs.ready == []
    assert caplog.text.count("the run is quantized: programs take weights as they are saved") == 1
    assert not list(tmp_path.glob("packages/*.pt2"))


def test_a_compiling_process_that_is_killed_leaves_the_shape_eager(run, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(compilation, "COMPILE_TIMEOUT_S", 0.0)
    programs = ordered_from(Compiler(PackageFolders([tmp_path])), run)

    assert programs.ready == []
    assert "the compiler took over" in caplog.text
    assert not list(tmp_path.glob("*.pt2"))


def test_a_program_that_fails_when_it_is_first_run_is_not_taken(run, tmp_path, monkeypatch):
    def broken(weights: Any, inputs: Any) -> Any:
        raise RuntimeError("not for this processor")

    monkeypatch.setattr(compilation, "load", lambda package: broken)

    programs = ordered_from(Compiler(PackageFolders([tmp_path]), lambda job, place: None), run)

    assert programs.ready == []


def test_looking_for_a_package_that_fails_costs_its_order_alone(tmp_path, caplog):
    class Folders(PackageFolders):
        def find(self, key: str) -> Path | None:
            if key == "away":
                raise RuntimeError("the disk is gone")
            return super().find(key)

    asked = []

    def compile_package(job: Any, place: Path) -> None:
        asked.append(job.key)
        raise CompilationFailedError("stopped")

    class Programs:
        def __init__(self, key: str) -> None:
            self.key = key

        def job(self, bucket: Bucket) -> Any:
            return self

    compiler = Compiler(Folders([tmp_path]), compile_package)
    for key in ("away", "here"):
        compiler.order(Programs(key), ONE)
        assert compiler.wait(60)
    compiler.close()

    assert asked == ["here"]
    assert "stay with eager ranking: the disk is gone" in caplog.text


def test_a_folder_that_cannot_be_looked_at_has_no_package(tmp_path, monkeypatch):
    for name in ("away", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key.pt2").write_bytes(b"")
        (tmp_path / name / "key.json").write_text("{}")
    is_file = Path.is_file

    def is_file_unless_away(path: Path) -> bool:
        if path.parent.name == "away":
            raise OSError(errno.ESTALE, "Stale file handle")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", is_file_unless_away)

    folders = PackageFolders([tmp_path / "away", tmp_path / "here"])
    assert folders.find("key") == tmp_path / "here" / "key.pt2"


def test_packages_go_where_can_be_written_and_are_found_in_any_folder(tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    folders = PackageFolders([file / "compiled", tmp_path / "cache"])

    package = folders.place_for("key")
    assert package == tmp_path / "cache" / "key.pt2"
    package.write_bytes(b"half")
    assert folders.find("key") is None  # without its checksum it is none yet
    package.with_suffix(".json").write_text("{}")
    assert folders.find("key") == package
    folders.refuse(package)
    assert folders.find("key") is None

    with pytest.raises(PackageError, match="can be written to"):
        PackageFolders([file / "compiled"]).place_for("key")


def test_warming_up_waits_no_longer_than_it_may(run, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    recommender = Recommender.load(run)
    service = CompileService(run, CompileConfig(max_rows=1, wait_s=0, folder=str(tmp_path)), threads=1)
    RecommendationService(recommender, 100).compile(service)
    service.close()

    assert "0 of 1 programs are ready" in caplog.text


@needs_tensorflow
def test_a_ranking_model_of_tensorflow_scores_by_programs_of_xla(tmp_path, caplog):
    caplog.set_level("INFO")
    origins = {"user": "user", "item": "item", "sex": "item.title", "history": "history"}
    keras = {"name": "keras", "builder": "tests.models.keras.networks:mlp", "dim": 4}
    ranker = ranker_run(prepared_clicks(tmp_path / "clicks", origins=origins), tmp_path / "ranker", keras)
    run = make_run(tmp_path / "serve")
    ranking = RankingConfig(run=str(ranker), objective={"click": 1}, candidates=20)
    plain = load_service(run, ServeConfig(ranking=ranking), None)

    compiled = load_service(run, ServeConfig(ranking=ranking, compile=CompileConfig(max_rows=2)), None)

    assert "scores up to 40 rows by programs of XLA" in caplog.text
    for user in ("u1", "u2"):
        answers = [each.recommend(RecommendRequest(user_id=user, k=5)).items for each in (plain, compiled)]
        assert [item.item_id for item in answers[0]] == [item.item_id for item in answers[1]]
        for one, other in zip(*answers, strict=True):
            assert one.ranking.score == pytest.approx(other.ranking.score, abs=1e-6)
