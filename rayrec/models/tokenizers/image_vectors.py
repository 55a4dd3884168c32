"""Item vectors of pictures, by a vision model of the package `transformers` that was saved to a folder.

Axes: I items in catalog order, D dimensions of a vector, B pictures of a batch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rayrec.models.tokenizers.vector_sources import ItemData, ItemVectorSource, Progress
from rayrec.platform.arrays import Float32Array
from rayrec.platform.errors import InputError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


class ImageVectors(ItemVectorSource):
    """Vectors of the items' pictures: the features of a model of images and text such as CLIP, or the mean
    over what the last layer says. Nothing is downloaded, and no code of a folder is run."""

    images: str
    """Folder with a picture of each item, `KEY.jpg`, `.jpeg`, `.png` or `.webp`."""
    model: str
    """Folder with `config.json`, safetensors and `preprocessor_config.json`, as transformers saves them."""
    batch_size: int = Field(32, ge=1)
    """Pictures that run together."""

    def vectors(self, items: ItemData, progress: Progress | None = None) -> Float32Array:
        files = [_picture_of(Path(self.images), str(key)) for key in items.keys]
        present = [place for place, file in enumerate(files) if file is not None]
        if items.sequences is not None and not present:
            raise InputError(
                f"{self.images}: has no picture of any item of {items.dataset}; expected "
                f"{items.keys[0]}.jpg, say"
            )
        processor, model = _tower(Path(self.model))
        rows: list[np.ndarray] = []
        for start in range(0, len(present), self.batch_size):
            batch = [_opened(files[place]) for place in present[start : start + self.batch_size]]
            rows.append(_features(processor, model, batch))
            if progress is not None:
                progress(min(start + self.batch_size, len(present)), len(present))
        if not rows:
            # Rows that know nothing are as wide as those of other items, which a blank picture tells.
            rows.append(_features(processor, model, [_blank()])[:0])
        found_BD = np.concatenate(rows)
        vectors_ID = np.full((len(files), found_BD.shape[1]), np.nan, dtype=np.float32)
        vectors_ID[present] = found_BD
        return vectors_ID


def _picture_of(folder: Path, key: str) -> Path | None:
    if "/" in key or key in ("", ".", ".."):
        return None
    files = (folder / f"{key}{suffix}" for suffix in SUFFIXES)
    return next((file for file in files if os.path.isfile(file)), None)  # False of names that are too long


def _opened(file: Path | None) -> Any:
    from PIL import Image

    assert file is not None, "there is a picture"
    try:
        with Image.open(file) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"{file}: not a readable picture ({error}); replace it, or remove it") from error


def _blank() -> Any:
    from PIL import Image

    return Image.new("RGB", (32, 32))


def _tower(folder: Path) -> tuple[Any, Any]:
    """(What makes inputs of pictures, the model)."""
    missing = [name for name in ("PIL", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(
            f"vectors of images need {' and '.join(missing)}, which cannot be imported; install the extra "
            "with: pip install 'rayrec[image]'"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: is no folder with a config.json of transformers; nothing is downloaded")
    from transformers import AutoImageProcessor, AutoModel

    safely = {"local_files_only": True, "trust_remote_code": False}
    try:
        processor = AutoImageProcessor.from_pretrained(folder, **safely)
        model: Any = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32, **safely)
    except Exception as error:  # whatever the code of an architecture raises
        said = " ".join(str(error).split())[:300]
        raise InputError(f"{folder}: transformers cannot load a vision model from it ({said})") from error
    return processor, model.eval()


@torch.inference_mode()
def _features(processor: Any, model: Any, pictures: Sequence[Any]) -> np.ndarray:
    """[B, D] vectors of length 1."""
    inputs = processor(images=list(pictures), return_tensors="pt")
    if hasattr(model, "get_image_features"):
        found: Any = model.get_image_features(**inputs)
        features_BD: Tensor = found if isinstance(found, Tensor) else found.pooler_output
    else:
        hidden = model(**inputs).last_hidden_state
        # Of patches in a row, or of a grid behind channels.
        features_BD = hidden.mean(dim=1) if hidden.ndim == 3 else hidden.flatten(2).mean(dim=2)
    unit_BD: np.ndarray = torch.nn.functional.normalize(features_BD.float(), dim=1).numpy()
    return unit_BD
