"""What every room stands on: devices, cluster, configuration, runs, metrics.

Start at `config.Config`, `devices.get_device` and `errors.InputError`.
May import no other room.
"""

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
