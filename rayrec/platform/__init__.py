"""What every room stands on: devices, cluster, configuration, runs, metrics.

    from rayrec.platform import Config, InputError, Registry

May import no other room.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayrec.platform.cluster import ClusterConfig as ClusterConfig
    from rayrec.platform.cluster import ray_cluster as ray_cluster
    from rayrec.platform.config import Config as Config
    from rayrec.platform.console import progress_bar as progress_bar
    from rayrec.platform.devices import get_device as get_device
    from rayrec.platform.errors import InputError as InputError
    from rayrec.platform.registry import Registry as Registry

if __name__ == "platform":
    # A shell that stands inside the package finds this room instead of Python's own module, which torch,
    # Ray and much of the standard library import. So under that name it is Python's own.
    import importlib.util
    import os
    import sys

    _file = os.path.join(os.path.dirname(os.__file__), "platform.py")
    _spec = importlib.util.spec_from_file_location("platform", _file)
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["platform"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["platform"])
else:
    from rayrec.platform.lazy_names import lazy_names

    __all__, __getattr__ = lazy_names(__name__, __file__)
