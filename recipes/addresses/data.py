"""Addresses as people write them, with every character labeled: records of kind `spans`.

train.jsonl, valid.jsonl, test.jsonl    of the same towns
unseen.jsonl                            of towns, with their villages, that no other file has
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipes.addresses.places import LEVELS, Place, read_places
from recipes.shared import write_lines

OTHER = "other"
LABELS = (*LEVELS, "road", "number", OTHER)
_BEFORE = (
    "收货地址：",
    "请寄到",
    "麻烦送到",
    "地址是",
    "我住在",
    "我家在",
    "地址:",
    "请送至",
    "你好，我在",
    "送货 ",
)
_AFTER = (
    "，谢谢",
    "，到了打电话",
    "，放门口就行",
    " 请尽快",
    "，{name}收",
    " {name} {phone}",
    "，电话{phone}",
    "（{name}）",
)
_BETWEEN = (" ", "，", "-", "/", "、")
_SURNAMES, _GIVEN = "王李张刘陈杨黄赵吴周徐孙马朱胡", "伟芳娜敏静丽强磊军洋勇艳杰娟涛明超秀霞平刚桂英"
_SIGNS = "人民中山解放建设新华和平胜利光明幸福友谊文化学府长江黄河迎宾朝阳东风红旗西湖滨海站前科技创业兴业"
_ROADS, _LANES = ("路", "街", "大道", "大街"), ("巷", "弄", "胡同")
_CHANCES = {"province": 0.75, "city": 0.8, "district": 0.9, "town": 0.75, "village": 0.5}


def make(folder: Path, small: bool, seed: int = 0) -> str:
    """Write the files, and say where the names come from."""
    num_towns, sizes = (120, (300, 40, 40, 40)) if small else (8_000, (12_000, 200, 600, 600))
    places, source = read_places(num_towns, seed)
    draw = random.Random(seed)
    towns = sorted({place.town for place in places})
    unseen = set(draw.sample(towns, max(1, len(towns) // 10)))
    seen = [place for place in places if place.town not in unseen]
    others = [place for place in places if place.town in unseen]
    known: set[str] = set()
    for name, count in zip(("train", "valid", "test", "unseen"), sizes, strict=True):
        records = addresses(others if name == "unseen" else seen, draw, known)
        write_lines(folder / f"{name}.jsonl", (next(records) for _ in range(count)))
    return source


def addresses(places: Sequence[Place], draw: random.Random, known: set[str]) -> Iterator[dict[str, Any]]:
    """Records that are not known yet, without end."""
    while True:
        parts = _written(draw.choice(places), draw)
        text = "".join(part for _, part in parts)
        if text in known or len(parts) < 2:
            continue
        known.add(text)
        spans, at = [], 0
        for label, part in parts:
            spans.append({"start": at, "end": at + len(part), "label": label})
            at += len(part)
        yield {"text": text, "spans": spans}


def _written(place: Place, draw: random.Random) -> list[tuple[str, str]]:
    """(label, part of the text), one after the other; no two neighbors have the same label."""
    names = _names(place, draw)
    detail = _detail(draw)
    if detail and draw.random() < 0.08:
        names = [*detail, (OTHER, draw.choice(("，", " "))), *names]  # the other way round
    else:
        names += detail
    parts: list[tuple[str, str]] = []
    if draw.random() < 0.3:
        parts.append((OTHER, draw.choice(_BEFORE)))
    separator = draw.choice(_BETWEEN) if draw.random() < 0.2 else ""
    for number, part in enumerate(names):
        if number and separator and part[0] != OTHER and parts[-1][0] != OTHER:
            parts.append((OTHER, separator))
        parts.append(part)
    if draw.random() < 0.3:
        name = draw.choice(_SURNAMES) + "".join(draw.sample(_GIVEN, draw.choice((1, 2))))
        phone = "1" + "".join(draw.choices("0123456789", k=10))
        parts.append((OTHER, draw.choice(_AFTER).format(name=name, phone=phone)))
    return parts


def _names(place: Place, draw: random.Random) -> list[tuple[str, str]]:
    found = []
    for level, whole, short in zip(LEVELS, place.names, place.short, strict=True):
        if not whole or draw.random() > _CHANCES[level]:
            continue
        name = short if short and draw.random() < 0.25 else whole
        if len(name) > 2 and draw.random() < 0.02:  # a character is missing
            left_out = draw.randrange(len(name))
            name = name[:left_out] + name[left_out + 1 :]
        found.append((level, name))
    return found


def _detail(draw: random.Random) -> list[tuple[str, str]]:
    found = []
    if draw.random() < 0.6:
        stem = "".join(draw.sample(_SIGNS, draw.choice((2, 2, 3))))
        found.append(("road", stem + draw.choice(_ROADS if draw.random() < 0.8 else _LANES)))
    if draw.random() < 0.7:
        number = f"{draw.randint(1, 999)}号" if found or draw.random() < 0.5 else ""
        if draw.random() < 0.5:
            number += f"{draw.randint(1, 30)}{draw.choice(('栋', '幢', '座', '号楼'))}"
        if draw.random() < 0.4:
            number += f"{draw.randint(1, 6)}单元"
        if draw.random() < 0.5:
            number += f"{draw.randint(1, 32)}{draw.randint(1, 8):02d}{draw.choice(('室', '', '房'))}"
        if number:
            found.append(("number", number))
    return found
