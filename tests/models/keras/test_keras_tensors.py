import torch

from rayrec.models.keras.runtime import load_tensorflow
from rayrec.models.keras.tensors import to_tensorflow, to_torch
from tests.models.keras.programs import needs_tensorflow

pytestmark = needs_tensorflow


def test_tensors_of_both_frameworks_lie_in_the_same_memory():
    tensorflow = load_tensorflow(1)
    ours = torch.arange(32.0)

    theirs = to_tensorflow(tensorflow, ours)
    ours[3] = 100.0

    assert theirs.numpy()[3] == 100.0
    assert to_torch(theirs).data_ptr() == ours.data_ptr()


def test_what_begins_where_tensorflow_cannot_read_is_copied():
    """It would end the process."""
    tensorflow = load_tensorflow(1)
    whole = torch.arange(40.0)

    for part in (whole[1:], whole[8:], whole.view(8, 5).T, whole.view(8, 5)[:, :1], whole[:0]):
        theirs = tensorflow.reduce_sum(to_tensorflow(tensorflow, part) + 1.0)

        assert float(theirs) == float((part + 1.0).sum())


def test_tensorflow_does_not_write_into_what_it_is_lent():
    tensorflow = load_tensorflow(1)
    ours = torch.arange(1024.0)
    before = ours.clone()

    @tensorflow.function(input_signature=[tensorflow.TensorSpec((None,), "float32")])
    def overwriting(x):
        return tensorflow.exp(-(x * 2.0 + 1.0))

    lent = to_tensorflow(tensorflow, ours)
    overwriting(lent)

    assert torch.equal(ours, before)
