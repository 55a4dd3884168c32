"""Settings of version 0.1 are read under the names that they had."""

from __future__ import annotations

import pytest

from rayrec.models.base.cache_sizes import CacheSizes
from rayrec.platform.errors import InputError
from rayrec.serve.config.serve import ServeConfig


def test_settings_of_the_service_are_read_under_their_old_names():
    old = ServeConfig.parse(
        {
            "access": {"service": {"concurrency": 3}},
            "keep_contexts_mib": 8,
            "services": {"access": {"replicas": 2}},
        }
    )

    assert old.admission.service.concurrency == 3
    assert (old.prefix_cache_mib, old.context_sizes) == (8, CacheSizes(8 * 2**20))
    assert old.services.gateway.replicas == 2


@pytest.mark.parametrize("none", [None, 0])
def test_without_a_size_there_is_no_prefix_cache(none):
    config = ServeConfig.parse({"keep_contexts_mib": none})

    assert (config.has_prefix_cache, config.context_sizes) == (False, None)


def test_both_names_of_one_setting_are_refused():
    with pytest.raises(InputError, match="'access' is called 'admission' now; keep one of them"):
        ServeConfig.parse({"access": {}, "admission": {}})
