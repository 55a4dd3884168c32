"""Every file in configs/ is one that its command reads."""

import pytest

from rayrec.pipelines.config.run import RunConfig
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_of_settings_can_be_read(path):
    read = OTHERS.get(path.stem, RlConfig if path.stem.endswith("-rl") else RunConfig)
    read.load(path)
