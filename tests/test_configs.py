"""Every file in configs/ is one that its command reads."""

import pytest

from rayrec.pipelines.config.run import RunConfig
from rayrec.pipelines.tuning.config import TuningConfig
from rayrec.pipelines.tuning.space import SearchSpace
from rayrec.platform.checkout import CHECKOUT
from rayrec.rl.config import RlConfig
from rayrec.samples.text.prepare import TextPrepareConfig
from rayrec.serve.config.events import EventsConfig, RequestLogConfig
from rayrec.serve.config.nearline import NearlineReadConfig
from rayrec.serve.config.services import ServicesConfig

OTHERS = {
    "events": EventsConfig,
    "nearline": NearlineReadConfig,
    "request_log": RequestLogConfig,
    "services": ServicesConfig,
    "text": TextPrepareConfig,
}
FILES = sorted((CHECKOUT / "configs").glob("*.yaml"))
SEARCHES = sorted((CHECKOUT / "configs" / "tuning").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_settings_can_be_read(path):
    read = OTHERS.get(path.stem, RlConfig if path.stem.endswith("-rl") else RunConfig)
    read.load(path)


@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.stem)
def test_a_search_can_begin_with_its_config(path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)

    space = SearchSpace.of(TuningConfig.load(path))

    assert space.settings_of_base().keys() == space.dimensions.keys()


def test_all_methods_get_the_same_budget_and_space():
    searches = [TuningConfig.load(path) for path in SEARCHES]

    assert len(searches) > 4
    for search in searches[1:]:
        assert search.model_copy(update={"config": searches[0].config}) == searches[0]
