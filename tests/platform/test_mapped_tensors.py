"""Files of arrays that the safetensors library reads, and that processes map."""

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rayrec.platform.mapped_tensors import mapped_tensors, write_tensors

ARRAYS = {
    "a": np.arange(7, dtype=np.int16),
    "b": np.arange(6, dtype=np.float64).reshape(2, 3),
    "none": np.empty((0, 4), dtype=np.int32),
    "flags": np.array([True, False]),
}


def test_the_library_reads_what_is_written_and_the_other_way_round(tmp_path):
    write_tensors(tmp_path / "ours", ARRAYS, {"version": "v"})
    save_file(ARRAYS, tmp_path / "theirs", {"version": "v"})

    for arrays in (
        load_file(tmp_path / "ours"),
        mapped_tensors(tmp_path / "ours")[1],
        mapped_tensors(tmp_path / "theirs")[1],
    ):
        assert arrays.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
            assert arrays[name].tolist() == array.tolist()
    assert mapped_tensors(tmp_path / "ours")[0] == {"version": "v"}


def test_what_is_written_to_a_mapped_array_stays_in_the_process(tmp_path):
    write_tensors(tmp_path / "file", ARRAYS)
    _, arrays = mapped_tensors(tmp_path / "file")
    arrays["a"][:] = 9

    assert mapped_tensors(tmp_path / "file")[1]["a"].tolist() == ARRAYS["a"].tolist()


def test_a_file_that_was_cut_off_is_refused(tmp_path):
    write_tensors(tmp_path / "file", ARRAYS)
    content = (tmp_path / "file").read_bytes()
    (tmp_path / "short").write_bytes(content[:-4])
    with pytest.raises(SafetensorError):
        mapped_tensors(tmp_path / "short")
