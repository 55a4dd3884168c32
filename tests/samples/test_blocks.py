import numpy as np

from rayrec.samples.reading.blocks import Blocks


def test_memory_is_lent_again_once_nothing_refers_to_it():
    blocks = Blocks()
    buffer = blocks.lend(10_000)
    address = buffer.address
    part = np.frombuffer(buffer, np.int64, count=100)[10:20]

    part[:] = 7
    del buffer
    other = blocks.lend(10_000)
    assert other.address != address
    np.frombuffer(other, np.int64)[:] = 3
    assert part.tolist() == [7] * 10

    del part
    assert blocks.lend(10_000).address == address


def test_sizes_that_differ_a_little_share_memory():
    blocks = Blocks()
    address = blocks.lend(1_000_000).address

    assert blocks.lend(1_040_000).address == address
    assert blocks.lend(2_000_000).address != address
    for num_bytes in (0, 1, 4096, 4097, 10**6, 3 * 10**8 + 1):
        assert num_bytes <= blocks.lend(num_bytes).size <= max(8192, num_bytes * 9 // 8)


def test_lent_memory_outlives_the_lender():
    buffer = Blocks().lend(5000)
    array = np.frombuffer(buffer, np.uint8)
    array[:] = 1

    del buffer
    assert array.all()
