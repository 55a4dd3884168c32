"""Where numba keeps compiled kernels, chosen before it is imported.

Numba keeps them beside the module, or in the user's cache folder, and refuses to import a kernel where
neither can be written: an image with a read-only package, run as a user without a home. Imports nothing but
the standard library, since the package does this first.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

SETTING = "NUMBA_CACHE_DIR"


def choose_kernel_cache(package: Path) -> None:
    """Name a folder for kernels in the environment where numba would find none; child processes have it too.

    Args:
        package: folder of the modules with kernels.
    """
    if SETTING in os.environ or _can_write(package / "__pycache__") or _can_write(_user_cache()):
        return
    os.environ[SETTING] = str(_own_folder())


def _user_cache() -> Path:
    # As numba looks for it (appdirs); `~` stays as it is where there is no home.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")).absolute()


def _can_write(folder: Path) -> bool:
    """Whether a folder can be written to, or made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _own_folder() -> Path:
    """A folder below the temporary one that is this user's alone: what is loaded from it is executed."""
    folder = Path(tempfile.gettempdir()) / f"rayrec-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="rayrec-kernels-"))  # somebody else has the name: kernels of this run
